//! The step of asynchronous schedules: weights change while the schedule runs, and the pipeline is not drained between steps
//! (PipeDream: Narayanan et al. 2019; PipeDream-2BW: Narayanan et al. 2021).
//!
//! A rank's part of step t ends with its last forward of that step's batch: backwards and updates of the youngest micro-batches,
//! of which the first rank has the most in flight, fall into its part of step t+1. So a step's loss is complete at its end, but its
//! last updates only at the end of the next one, and it is reported one step later still, when no rank has to wait to hear of it.
//!
//! ```text
//! schedule of two steps:  │ F F F F B F B F │ B F B F B F B F │ B B B      (first rank, m = 4)
//!                         └ the first step ─┴ every later one ┴ drain
//! ```

use super::settle::Unsettled;
use super::{Mode, StepReport, Trainer};
use crate::data::Batch;
use crate::engine::{Pass, Purpose, TrainError};
use meshwork_pipeline::{Event, Lowered};
use std::ops::Range;

/// Steps that are begun when the first of them becomes certain.
pub(super) const LAG: usize = 2;

/// An asynchronous schedule, as one pp rank sees it.
#[derive(Debug)]
pub(super) struct Stream {
    /// One step, drained, and two.
    first: Lowered,
    steady: Lowered,
    /// Actions of the first step, and of the second in the schedule of two.
    ends: [usize; 2],
    micros: usize,
    /// Steps begun since the pipeline was empty.
    begun: usize,
    /// Updates before that.
    updates_before: u64,
}

impl Stream {
    /// The stream of a schedule, given as one step of it and as two.
    pub(super) fn new(first: Lowered, steady: Lowered, pp_rank: usize) -> Self {
        let micros = first.schedule().micros;
        let ends = [steady.after_forwards(pp_rank, micros), steady.after_forwards(pp_rank, 2 * micros)];
        Self { first, steady, ends, micros, begun: 0, updates_before: 0 }
    }

    /// The schedule of the step begun last.
    pub(super) fn schedule(&self) -> &Lowered {
        if self.begun <= 1 { &self.first } else { &self.steady }
    }

    /// Messages that must be able to be on their way to one pp rank.
    pub(super) fn in_flight(&self) -> usize {
        self.steady.report().in_flight
    }

    /// Updates in a step of so many micro-batches.
    pub(super) fn updates(&self, micros: usize) -> usize {
        self.first.updates().clamp(1, micros)
    }

    /// The newest versions of the weights among which is what any forward of the rank reads.
    pub(super) fn versions_kept(&self, pp_rank: usize) -> usize {
        1 + self.steady.versions_behind(pp_rank)
    }

    /// The number of the first micro-batch of the step begun last, and how far that count is ahead of the schedule's.
    fn micros_before(&self) -> (usize, usize) {
        (self.begun.saturating_sub(1) * self.micros, self.begun.saturating_sub(2) * self.micros)
    }

    /// The version that a micro-batch of the schedule reads at a stage.
    pub(super) fn version(&self, stage: usize, micro: usize) -> u64 {
        let ahead = self.begun.saturating_sub(2) * self.updates(self.micros);
        self.updates_before + (ahead + self.schedule().version(stage, micro)) as u64
    }

    /// The actions of the step begun last, and those that are left if no step follows.
    fn actions(&self) -> (Range<usize>, Range<usize>) {
        let [first, second] = self.ends;
        if self.begun <= 1 { (0..first, first..usize::MAX) } else { (first..second, second..usize::MAX) }
    }
}

impl Trainer {
    fn stream(&mut self) -> &mut Stream {
        match &mut self.mode {
            Mode::Stream(stream) => stream,
            Mode::Flush(_) => unreachable!("called for asynchronous schedules only"),
        }
    }

    pub(super) fn advance_stream(
        &mut self,
        batch: &Batch,
        tokens: &[i64],
        stop: &impl Fn() -> bool,
        observe: &mut impl FnMut(Event),
    ) -> Result<Vec<StepReport>, TrainError> {
        let updates = self.learner.get_mut().updates();
        let stream = self.stream();
        stream.begun += 1;
        let begins = stream.begun == 1;
        if begins {
            stream.updates_before = updates;
            self.learner.get_mut().gradients.begin();
        }
        let stream = self.stream();
        let ((first_micro, ahead), (actions, _)) = (stream.micros_before(), stream.actions());
        let pass = Pass { first_micro, ahead, ..self.training_pass(batch, tokens) };
        self.walk(&pass, actions, observe)?;
        self.steps_begun += 1;
        let (step, losses) = (self.steps_begun, self.losses());
        let tokens = tokens.iter().sum();
        let records = self.rank.log().drain();
        self.unsettled.push_back(Unsettled { step, tokens, losses, records, sums: None, tally: None });
        self.start_settling(step - 1, stop)?;
        self.finish_settling((step + 1).saturating_sub(LAG as u64))
    }

    /// Runs what is left of the steps begun, and makes them certain.
    pub(super) fn drain_stream(&mut self, observe: &mut impl FnMut(Event)) -> Result<Vec<StepReport>, TrainError> {
        let stream = self.stream();
        if stream.begun == 0 {
            return Ok(Vec::new());
        }
        let ((first_micro, ahead), (_, rest)) = (stream.micros_before(), stream.actions());
        let none = Batch { inputs: Vec::new(), targets: Vec::new(), rows: 0, seq_len: self.seq_len };
        let last = self.steps_begun;
        let mut pass = Pass { first_micro, ahead, ..self.pass(Purpose::Train, &none) };
        pass.position.step = last - 1;
        self.walk(&pass, rest, observe)?;
        self.transport.flush()?;
        self.stream().begun = 0;
        self.rank.log().drain();
        self.start_settling(last, &|| false)?;
        self.finish_settling(last + 1)
    }

    /// Starts the sums of the steps up to and with `last`, of which every update has been made on this rank.
    fn start_settling(&mut self, last: u64, stop: &impl Fn() -> bool) -> Result<(), TrainError> {
        let mut unsettled = std::mem::take(&mut self.unsettled);
        for step in unsettled.iter_mut().filter(|step| step.step <= last && step.sums.is_none()) {
            let norms = self.learner.get_mut().take_norms(step.step);
            step.sums = Some(self.start_sums(std::mem::take(&mut step.losses), norms)?);
            step.tally = Some(self.start_tally(&step.records, stop())?);
        }
        self.unsettled = unsettled;
        Ok(())
    }

    /// Waits for the sums of the steps before `end`.
    fn finish_settling(&mut self, end: u64) -> Result<Vec<StepReport>, TrainError> {
        let mut reports = Vec::new();
        while self.unsettled.front().is_some_and(|step| step.step < end)
            && let Some(Unsettled { step, tokens, records, sums: Some(sums), tally: Some(tally), .. }) =
                self.unsettled.pop_front()
        {
            let measured = sums.measure(tokens)?.finite(step)?;
            reports.push(self.report(step, measured, tally, records)?);
        }
        Ok(reports)
    }
}
