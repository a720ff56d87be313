//! Segments: the parts of a stage that go forward and backward one after another, each on a tape of its own. A segment
//! that is recomputed keeps only its input, and runs forward again before its backward (Chen et al. 2016,
//! arXiv:1604.06174). A model may be cut between any two layers, so a segment is a stage by itself: a [`Stage`] of the
//! model. No model says anything about recomputation.

use crate::message::Message;
use crate::offload::saved::Shelved;
use crate::pass::{MicroBatch, Pass, Purpose};
use crate::prelude::*;
use crate::watch::Watched;
use crate::{At, Recompute};
use meshwork_nn::{Stage, StageSpec};
use meshwork_tensor::Tape;
use meshwork_tensor::tape::{Decisions, Mode, Notes, Saved, SavedPolicy};

/// A part of a stage as data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentSpec {
    /// The part of the model.
    pub part: StageSpec,
    /// Whether it keeps only its input for backward.
    pub recomputed: bool,
    /// The [cut](crate::ModelPlan::boundaries) behind it, if there is one.
    pub cut: Option<usize>,
}

/// A part of a stage, with the parameters that it declared.
#[derive(Debug)]
pub struct Segment {
    /// Its number among the segments of all stages.
    pub number: usize,
    /// The stage that it is part of.
    pub of_stage: usize,
    /// The segment as data.
    pub spec: SegmentSpec,
    /// The part of the model.
    pub stage: Box<dyn Stage>,
}

impl Recompute {
    /// The segments of a stage, or of the part of a stage between two cuts.
    ///
    /// An embedding and a head are kept: they are no layers. Where single layers or groups of them are recomputed, each
    /// has a segment.
    ///
    /// Where kept tensors leave memory (`apart`), each layer that is kept has a segment too: its tensors leave while
    /// the next layer runs.
    pub fn segments(self, stage: &StageSpec, apart: bool) -> Vec<SegmentSpec> {
        let whole = |recomputed| vec![SegmentSpec { part: stage.clone(), recomputed, cut: None }];
        let layers = stage.layers.len();
        // The sizes of the segments that are recomputed, from the first layer on.
        let sizes = match self {
            Self::None | Self::Selective if apart => Vec::new(),
            Self::None | Self::Selective => return whole(false),
            Self::Stage => return whole(true),
            Self::Full => vec![1; layers],
            Self::Layers(most) => vec![1; most.min(layers)],
            Self::Sqrt => {
                let parts = (1..=layers).find(|parts| parts * parts >= layers).unwrap_or(0);
                (0..parts).map(|part| layers / parts + usize::from(part < layers % parts)).collect()
            }
        };
        let (start, end) = (stage.layers.start, stage.layers.end);
        let kept =
            |layers, first, last| SegmentSpec { part: StageSpec { layers, first, last }, recomputed: false, cut: None };
        let mut segments = Vec::new();
        if stage.first {
            segments.push(kept(start..start, true, false));
        }
        let mut at = start;
        for size in sizes {
            let part = StageSpec { layers: at..at + size, first: false, last: false };
            segments.push(SegmentSpec { part, recomputed: true, cut: None });
            at += size;
        }
        while apart && at < end {
            segments.push(kept(at..at + 1, false, false));
            at += 1;
        }
        if at < end || stage.last || segments.is_empty() {
            segments.push(kept(at..end, false, stage.last));
        }
        segments
    }
}

/// The input of a forward.
#[derive(Clone, Debug)]
pub struct Start {
    /// The output of the segment before; `None` for the first segment of the model.
    pub input: Option<Message>,
    pub takes_gradient: bool,
    pub params: Arc<Params>,
    /// Operations of the stage before this segment.
    pub applied: usize,
}

/// A segment that waits for its backward.
#[derive(Debug)]
pub struct Kept {
    pub saved: SavedSegment,
    /// The saved tensors that may have left memory.
    pub shelved: Shelved,
}

/// See [`Kept`].
#[derive(Debug)]
pub enum SavedSegment {
    /// Everything that backward needs.
    Tape(Box<Forwarded>),
    /// Only the input: a second forward, which takes the decisions of the first, recomputes the rest.
    Checkpoint(Box<Checkpoint>),
}

/// The input of a forward that will run a second time (activation checkpointing).
#[derive(Debug)]
pub struct Checkpoint {
    /// Everything but the input.
    start: Start,
    input: Option<(Saved, Types)>,
    /// The decisions of the first forward.
    pub decisions: Decisions,
}

impl Checkpoint {
    /// Keeps the input of a forward as `policy` keeps tensors.
    pub fn new(mut start: Start, policy: &dyn SavedPolicy) -> Result<Self> {
        let save = |Message { tensor, types }| Ok::<_, TrainError>((policy.save("a segment", tensor)?, types));
        let input = start.input.take().map(save).transpose()?;
        Ok(Self { start, input, decisions: Decisions::default() })
    }

    /// The weights that the forward read.
    pub fn params(&self) -> &Arc<Params> {
        &self.start.params
    }

    /// The input of the second forward, with the decisions of the first.
    pub fn restart(self) -> Result<(Start, Decisions)> {
        let restore = |(saved, types): (Saved, Types)| Ok::<_, TrainError>(Message { tensor: saved.restore()?, types });
        let input = self.input.map(restore).transpose()?;
        Ok((Start { input, ..self.start }, self.decisions))
    }
}

/// One forward of a segment.
#[derive(Debug)]
pub struct Forwarded {
    pub tape: Tape,
    pub input: Option<Var>,
    /// The output; of the last segment of a model, the losses.
    pub output: Var,
    pub notes: Notes,
}

impl Segment {
    /// Runs the forward of one micro-batch, on the last segment of a model up to the loss, and keeps what backward
    /// needs as `policy` says. Running it again, with the decisions of the first time, gives the same bits.
    pub(crate) fn run(
        &self,
        pass: &Pass,
        of: &MicroBatch,
        start: Start,
        policy: Rc<dyn SavedPolicy>,
        repeated: Option<Decisions>,
    ) -> Result<Forwarded> {
        let mode = if pass.purpose == Purpose::Train { Mode::Train } else { Mode::Evaluate };
        let (rank, device) = (pass.rank.clone(), pass.device.clone());
        let tape = Tape::with_policy(rank, start.params, device, mode, of.position, policy);
        tape.count_from(start.applied);
        tape.compress_rows(of.rows);
        if mode == Mode::Train && (pass.watch.is_some() || pass.claims.is_some()) {
            let at = At { stage: self.of_stage, micro: of.micro, recomputed: repeated.is_some() };
            tape.observe(Rc::new(Watched { watch: pass.watch.clone(), claims: pass.claims.clone(), at }));
        }
        if let Some(decisions) = repeated {
            tape.repeat(decisions);
        }
        let input = start.input.map(|Message { tensor, types }| match start.takes_gradient {
            true => tape.input(tensor, types),
            false => tape.input_without_gradient(tensor, types),
        });
        if input.is_none() && !self.spec.part.first {
            let problem = "no activation arrived";
            return Err(TrainError::Stage { stage: self.of_stage, micro: of.micro, problem });
        }
        let run = || {
            let output = self.stage.forward(&tape, &of.samples, input.as_ref())?;
            match pass.purpose {
                Purpose::Train | Purpose::Evaluate if self.spec.part.last => {
                    self.stage.loss(&tape, &of.samples, &output)
                }
                Purpose::Reference if self.spec.part.last => self.stage.reference(&tape, &of.samples, &output),
                _ => Ok(output),
            }
        };
        let output = if pass.purpose == Purpose::Reference { tape.without_adapters(run) } else { run() }?;
        let notes = tape.take_notes();
        Ok(Forwarded { tape, input, output, notes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `e` for an embedding, `h` for a head, numbers of layers, in brackets what is recomputed.
    fn drawn(recompute: Recompute, layers: std::ops::Range<usize>, first: bool, last: bool) -> String {
        drawn_as(recompute, layers, first, last, false)
    }

    fn drawn_as(recompute: Recompute, layers: std::ops::Range<usize>, first: bool, last: bool, apart: bool) -> String {
        let segment = |SegmentSpec { part, recomputed, .. }: SegmentSpec| {
            let text = format!(
                "{}{}{}",
                if part.first { "e" } else { "" },
                part.layers.len(),
                if part.last { "h" } else { "" }
            );
            if recomputed { format!("[{text}]") } else { text }
        };
        let all = recompute.segments(&StageSpec { layers, first, last }, apart);
        all.into_iter().map(segment).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_stage_is_cut_into_what_is_kept_and_what_is_recomputed() {
        assert_eq!(drawn(Recompute::None, 0..5, true, true), "e5h");
        assert_eq!(drawn(Recompute::Selective, 0..5, true, false), "e5");
        assert_eq!(drawn(Recompute::Stage, 0..5, true, true), "[e5h]");
        assert_eq!(drawn(Recompute::Full, 0..3, true, true), "e0 [1] [1] [1] 0h");
        assert_eq!(drawn(Recompute::Full, 3..5, false, false), "[1] [1]");
        assert_eq!(drawn(Recompute::Full, 5..5, false, false), "0", "a stage without layers");
        assert_eq!(drawn(Recompute::Full, 5..5, false, true), "0h");
        assert_eq!(drawn(Recompute::Layers(2), 0..5, true, true), "e0 [1] [1] 3h");
        assert_eq!(drawn(Recompute::Layers(9), 5..7, false, false), "[1] [1]");
        assert_eq!(drawn(Recompute::Sqrt, 0..10, true, true), "e0 [3] [3] [2] [2] 0h");
        assert_eq!(drawn(Recompute::Sqrt, 0..9, false, false), "[3] [3] [3]");
        assert_eq!(drawn(Recompute::Sqrt, 0..1, false, false), "[1]");
    }

    #[test]
    fn what_is_kept_lies_apart_where_it_leaves_memory() {
        let apart = |recompute, layers, first, last| drawn_as(recompute, layers, first, last, true);
        assert_eq!(apart(Recompute::None, 0..3, true, true), "e0 1 1 1 0h");
        assert_eq!(apart(Recompute::Selective, 2..4, false, false), "1 1");
        assert_eq!(apart(Recompute::Layers(1), 0..3, false, true), "[1] 1 1 0h");
        assert_eq!(apart(Recompute::Full, 0..2, true, false), "e0 [1] [1]");
        assert_eq!(apart(Recompute::Stage, 0..2, true, true), "[e2h]");
        assert_eq!(apart(Recompute::None, 2..2, false, false), "0");
    }
}
