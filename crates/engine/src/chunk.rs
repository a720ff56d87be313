//! One stage on one rank: its forward and backward passes, one tape per micro-batch in flight.

use crate::compress::codec::Codec;
use crate::gathers::Gathers;
use crate::message::{Message, Site, outgoing};
use crate::offload::saved::{Shelf, Shelved, Shelving};
use crate::pass::{MicroBatch, Pass, Purpose};
use crate::prelude::*;
use crate::segment::{Checkpoint, Forwarded, Kept, SavedSegment, Segment, Start};
use crate::statistics::Noted;
use crate::walk::Walk;
use crate::weights::WeightStore;
use meshwork_tensor::Tape;
use meshwork_tensor::tape::{Normaliser, PerSample, SavedPolicy, Seed, Weights};

/// The surroundings of the stages of a rank in one pass.
pub struct Workspace<'a> {
    pub pass: &'a Pass,
    /// Weights, and the buffers of their gradients.
    pub weights: &'a RefCell<WeightStore>,
    /// All-gathers weights that ZeRO-3 shards.
    pub gathers: Option<&'a Gathers>,
    /// Takes what backward needs out of memory until then.
    pub shelf: Option<&'a Rc<Shelf>>,
    pub codec: &'a RefCell<Codec>,
    pub schedule: &'a Schedule,
    pub live: &'a LiveActivations,
    /// The version of the weights, as a number of updates, that each (stage, micro-batch as the schedule counts them)
    /// reads; `None` for the newest.
    pub versions: &'a dyn Fn(usize, usize) -> Option<u64>,
}

/// Counts the live activations of a rank. An activation lives from its forward until its backward ends, gradients of
/// weights included.
#[derive(Debug, Default)]
pub struct LiveActivations {
    pub now: Cell<usize>,
    /// The largest number alive at once so far, in units of one micro-batch through one stage.
    pub most: Cell<usize>,
}

impl LiveActivations {
    pub fn acquire(&self) {
        self.now.update(|now| now + 1);
        self.most.update(|most| most.max(self.now.get()));
    }

    pub fn release(&self) {
        self.now.update(|now| now.saturating_sub(1));
    }
}

/// A stage with its passes in flight.
#[derive(Debug)]
pub struct Chunk {
    pub number: usize,
    stages: usize,
    segments: Vec<Segment>,
    flights: BTreeMap<usize, Flight>,
    /// Tapes whose gradients of weights are still to be computed, by the place of their segment, the last one first.
    deferred: BTreeMap<usize, Vec<(usize, Tape, Shelved)>>,
    /// Notes of statistics since they were last taken.
    pub noted: Noted,
    /// Output of the last prediction.
    pub prediction: Option<Tensor>,
}

/// A micro-batch that waits for its backward.
#[derive(Debug)]
struct Flight {
    of: MicroBatch,
    /// What each segment keeps for backward.
    kept: Vec<Kept>,
}

impl Chunk {
    pub fn new(number: usize, stages: usize, segments: Vec<Segment>) -> Self {
        let (flights, deferred, noted) = Default::default();
        Self { number, stages, segments, flights, deferred, noted, prediction: None }
    }

    /// Forgets passes in flight, after a failure.
    pub fn clear(&mut self) {
        self.flights.clear();
        self.deferred.clear();
        self.noted = Noted::default();
    }

    /// Computes the output of a micro-batch. `number` counts from the beginning of an asynchronous run.
    pub fn forward(
        &mut self,
        on: &Workspace<'_>,
        number: usize,
        params: Arc<Params>,
        input: Option<Message>,
    ) -> Result<Option<Message>> {
        let pass = on.pass;
        let of = pass.micro(number - pass.first_micro)?;
        let walks: Vec<_> = self.segments.iter().map(|segment| (segment.number, Walk::Forward)).collect();
        let _gathering = on.gathers.map(|gathers| gathers.begin(&walks, &params));
        let mut start = Start { input, takes_gradient: true, params, applied: 0 };
        let (mut message, mut all) = (None, Vec::new());
        for (place, segment) in self.segments.iter().enumerate() {
            let plain = pass.recompute.policy();
            let shelving = on.shelf.filter(|_| pass.purpose == Purpose::Train).map(|shelf| {
                shelf.begin_forward()?;
                Ok::<_, TrainError>(Rc::new(Shelving::new(shelf, &*plain)))
            });
            let shelving = shelving.transpose()?;
            let policy = shelving.clone().map_or(plain.clone(), |shelving| shelving as Rc<dyn SavedPolicy>);
            let checkpoint = segment.spec.recomputed.then(|| Checkpoint::new(start.clone(), &*policy)).transpose()?;
            let of_tape = pass.encoded(if checkpoint.is_some() { plain } else { policy });
            let mut run = segment.run(pass, &of, start, of_tape, None)?;
            let (params, applied) = (run.tape.params().clone(), run.tape.applied());
            // A value that crosses a cut takes a gradient, as a value from another rank does.
            let takes_gradient = segment.spec.cut.is_some() || run.output.takes_gradient();
            start = Start { input: None, takes_gradient, params, applied };
            let decisions = run.tape.take_decisions();
            self.noted.add(of.position.first_sample, &run.notes.statistics);
            pass.count_metrics(self.number, of.position.first_sample, &run.notes)?;
            if place + 1 < self.segments.len() {
                run.output.require_unpadded("a cut between segments", "the activation")?;
                let (tensor, types) = (run.output.tensor().clone(), run.output.types());
                let message = Message { tensor, types };
                start.input = Some(match segment.spec.cut {
                    Some(cut) => {
                        let site = Site { cut, direction: Direction::Activation, micro: number - pass.ahead };
                        on.codec.borrow_mut().cross(site, message)?
                    }
                    None => message,
                });
            } else if self.number + 1 < self.stages {
                message = Some(outgoing(self.number, &run.output, &pass.activations[self.number])?);
            } else if pass.purpose == Purpose::Predict {
                let prediction = segment.stage.predict(&run.output)?;
                prediction.require_unpadded("predict", "the prediction")?;
                self.prediction = Some(prediction.into_tensor());
            } else {
                pass.count(0, of.position.first_sample, &run.output)?;
            }
            if pass.purpose == Purpose::Train {
                // Operations have saved what they need of the input; the next segment or stage has the output.
                run.input = run.input.map(Var::released);
                run.output = if segment.spec.part.last { run.output } else { run.output.released() };
                let saved = match checkpoint {
                    Some(mut checkpoint) => {
                        checkpoint.decisions = decisions;
                        SavedSegment::Checkpoint(Box::new(checkpoint))
                    }
                    None => SavedSegment::Tape(Box::new(run)),
                };
                all.push(Kept { saved, shelved: shelving.map_or(Shelved::default(), |shelving| shelving.take()) });
            }
        }
        if pass.purpose == Purpose::Train {
            self.flights.insert(number, Flight { of, kept: all });
        }
        Ok(message)
    }

    /// Computes the gradient of the input and, unless they are deferred, the gradients of the weights.
    pub fn backward(
        &mut self,
        on: &Workspace<'_>,
        number: usize,
        grad: Option<Message>,
        weights: Weights,
    ) -> Result<Option<Message>> {
        let pass = on.pass;
        let Some(Flight { of, mut kept }) = self.flights.remove(&number) else {
            return Err(self.out_of_turn(number, "backward before forward"));
        };
        let back = if weights == Weights::Now { Walk::Backward } else { Walk::Inputs };
        let (mut walks, mut params) = (Vec::new(), None);
        for (segment, kept) in self.segments.iter().zip(&kept).rev() {
            let (again, read) = match &kept.saved {
                SavedSegment::Tape(forwarded) => (None, forwarded.tape.params()),
                SavedSegment::Checkpoint(start) => (Some((segment.number, Walk::Forward)), start.params()),
            };
            params = Some(read.clone());
            walks.extend(again.into_iter().chain([(segment.number, back)]));
        }
        let _gathering = on.gathers.zip(params).map(|(gathers, params)| gathers.begin(&walks, &params));
        let mut grad = grad;
        if grad.is_none() && (self.number + 1 < self.stages || of.seeds.is_none()) {
            return Err(self.out_of_turn(number, "no gradient arrived"));
        }
        let mut deferred = Vec::new();
        for (place, segment) in self.segments.iter().enumerate().rev() {
            let Some(Kept { saved, shelved }) = kept.pop() else {
                return Err(self.out_of_turn(number, "a segment has kept nothing"));
            };
            if let Some(shelf) = on.shelf {
                shelf.begin_backward(&shelved, kept.last().map(|next| &next.shelved))?;
            }
            let Forwarded { tape, input, output, notes } = match saved {
                SavedSegment::Tape(forwarded) => *forwarded,
                SavedSegment::Checkpoint(checkpoint) => {
                    let (start, decisions) = checkpoint.restart()?;
                    segment.run(pass, &of, start, pass.encoded(pass.recompute.policy()), Some(decisions))?
                }
            };
            let mut roots = Vec::new();
            match (grad.take(), of.seeds) {
                (Some(message), _) => roots.push((&output, Seed::typed(message.tensor, message.types))),
                (None, Some(seeds)) if segment.spec.part.last => {
                    roots.push((&output, tape.loss_seed(&output, Normaliser::Scale(seeds.of_loss))?))
                }
                // Nothing that takes a gradient goes from here to the next segment.
                (None, _) => {}
            }
            for PerSample { value, coefficient, .. } in &notes.per_sample {
                if let (Some(coefficient), Some(seeds)) = (coefficient, of.seeds) {
                    roots.push((value, tape.loss_seed(value, Normaliser::Scale(coefficient * seeds.auxiliary))?));
                }
            }
            let gradients = &mut on.weights.borrow_mut().gradients;
            gradients.of_segment(segment.number);
            tape.backward_from(roots, weights, gradients)?;
            // A constant has no gradient: nothing before it takes one.
            if let Some(input) = input.as_ref().filter(|input| input.takes_gradient()) {
                let tensor =
                    tape.take_grad(input).ok_or_else(|| self.out_of_turn(number, "the activation has no gradient"))?;
                let message = Message { tensor, types: input.types().dual() };
                let cut = place.checked_sub(1).and_then(|before| self.segments[before].spec.cut);
                grad = Some(match cut {
                    Some(cut) => {
                        let site = Site { cut, direction: Direction::Gradient, micro: number - pass.ahead };
                        on.codec.borrow_mut().cross(site, message)?
                    }
                    None => message,
                });
            }
            if let Some(shelf) = on.shelf {
                shelf.end_backward(&shelved);
            }
            if weights == Weights::Deferred {
                deferred.push((place, tape, shelved));
            }
        }
        if weights == Weights::Deferred {
            self.deferred.insert(number, deferred);
        }
        Ok(grad)
    }

    /// Computes the gradients of weights that [`backward`](Self::backward) deferred.
    pub fn weight_gradients(&mut self, on: &Workspace<'_>, number: usize) -> Result<()> {
        let Some(tapes) = self.deferred.remove(&number) else {
            return Err(self.out_of_turn(number, "gradients of weights before that of the input"));
        };
        let walks: Vec<_> = tapes.iter().map(|(place, ..)| (self.segments[*place].number, Walk::Weights)).collect();
        let params = tapes.first().map(|(_, tape, _)| tape.params().clone());
        let _gathering = on.gathers.zip(params).map(|(gathers, params)| gathers.begin(&walks, &params));
        let mut tapes = tapes.into_iter().peekable();
        while let Some((place, tape, shelved)) = tapes.next() {
            if let Some(shelf) = on.shelf {
                shelf.begin_backward(&shelved, tapes.peek().map(|(.., next)| next))?;
            }
            let gradients = &mut on.weights.borrow_mut().gradients;
            gradients.of_segment(self.segments[place].number);
            tape.weight_gradients(gradients)?;
        }
        Ok(())
    }

    /// The error of an action that runs before an action whose result it needs.
    pub fn out_of_turn(&self, micro: usize, problem: &'static str) -> TrainError {
        TrainError::Stage { stage: self.number, micro, problem }
    }
}
