//! One stage in one pass over a mini-batch: a tape per micro-batch in flight, or its input alone.

use crate::classify::Images;
use crate::engine::{Message, TrainError};
use meshwork_core::{Axis, Buffer, Rank, Ty, Types};
use meshwork_models::network::{Averages, Module};
use meshwork_tensor::tape::{GradSink, Mode, Place, Position, Selective, Share, Weights};
use meshwork_tensor::{Device, Error, ParamId, Params, Result, Tape, Tensor, Var};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// What all stages of a rank share in one pass.
pub(super) struct Pass<'a> {
    pub(super) rank: &'a Arc<Rank>,
    pub(super) device: &'a Arc<dyn Device>,
    pub(super) params: Arc<Params>,
    pub(super) mode: Mode,
    /// Where this rank's images begin in the mini-batch.
    pub(super) position: Position,
    /// This rank's images.
    pub(super) images: Images,
    /// Images of a micro-batch.
    pub(super) micro_batch: usize,
    /// Gradient of the loss of each image.
    pub(super) seed: f64,
    pub(super) recompute: bool,
    pub(super) averages: &'a RefCell<Averages>,
    pub(super) gradients: &'a RefCell<Gradients>,
}

/// What became of an image: its loss, and whether its class got the largest logit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Verdict {
    pub(super) loss: f64,
    pub(super) right: bool,
}

/// A stage's layers, with what waits for its backward and what the last stage has found.
#[derive(Debug)]
pub(super) struct Chunk {
    number: usize,
    stages: usize,
    modules: Vec<Box<dyn Module>>,
    flights: BTreeMap<usize, Flight>,
    /// Tapes whose gradients of weights are still to be computed.
    deferred: BTreeMap<usize, Tape>,
    /// By number within the mini-batch.
    pub(super) verdicts: BTreeMap<usize, Verdict>,
}

#[derive(Debug)]
enum Flight {
    /// Everything that backward needs.
    Whole(Box<Run>),
    /// The input, of which forward makes the rest again.
    Input(Option<Message>),
}

/// One forward.
#[derive(Debug)]
struct Run {
    tape: Tape,
    input: Var,
    output: Var,
    /// What the last stage found.
    verdicts: Vec<Verdict>,
}

impl Chunk {
    pub(super) fn new(number: usize, stages: usize, modules: Vec<Box<dyn Module>>) -> Self {
        Self { number, stages, modules, flights: BTreeMap::new(), deferred: BTreeMap::new(), verdicts: BTreeMap::new() }
    }

    /// Forgets passes in flight, after a failure.
    pub(super) fn clear(&mut self) {
        self.flights.clear();
        self.deferred.clear();
        self.verdicts.clear();
    }

    fn is_last(&self) -> bool {
        self.number + 1 == self.stages
    }

    /// The forward of one micro-batch: the same bits each time it runs.
    fn run(&self, pass: &Pass<'_>, micro: usize, input: Option<Message>) -> std::result::Result<Run, TrainError> {
        let first = micro * pass.micro_batch;
        let position = Position { first_sample: pass.position.first_sample + first as u64, ..pass.position };
        let (rank, params, device) = (pass.rank.clone(), pass.params.clone(), pass.device.clone());
        let tape = Tape::with_policy(rank, params, device, pass.mode, position, Rc::new(Selective));
        let input = match input {
            Some(message) => tape.input(message.tensor, message.types),
            None if self.number == 0 => tape.constant(pass.pixels(first)?, sample_types(pass.rank)),
            None => return Err(self.out_of_turn(micro, "no activation arrived")),
        };
        let mut output = input.clone();
        for module in &self.modules {
            output = module.forward(&tape, &output, &mut pass.averages.borrow_mut())?;
        }
        let mut verdicts = Vec::new();
        if self.is_last() {
            let labels = &pass.images.labels()[first..first + pass.micro_batch];
            let right = right(output.tensor(), labels)?;
            let targets = Tensor::from_slice(pass.device, labels, [labels.len()])?;
            output = output.cross_entropy(&tape.constant(targets, sample_types(pass.rank)))?;
            let losses = output.tensor().to_vec::<f64>()?;
            verdicts = losses.into_iter().zip(right).map(|(loss, right)| Verdict { loss, right }).collect();
        }
        Ok(Run { tape, input, output, verdicts })
    }

    fn out_of_turn(&self, micro: usize, problem: &'static str) -> TrainError {
        TrainError::Stage { stage: self.number, micro, problem }
    }
}

impl Pass<'_> {
    fn pixels(&self, first: usize) -> Result<Tensor> {
        let sample = self.images.sample();
        let n = sample.count();
        let pixels = &self.images.pixels()[first * n..(first + self.micro_batch) * n];
        Tensor::from_slice(self.device, pixels, &[&[self.micro_batch], &sample[..]].concat()[..])
    }
}

/// Samples: a slice of the mini-batch on dp, the same on every other rank.
pub(super) fn sample_types(rank: &Rank) -> Types {
    let ty = |axis| if axis == Axis::Dp { Ty::Shard(0) } else { Ty::Invariant };
    rank.mesh().value_axes().fold(Types::NONE, |types, axis| types.with(axis, ty(axis)))
}

/// Whether each label has the largest of its logits; of equal ones the first counts.
fn right(logits: &Tensor, labels: &[i32]) -> Result<Vec<bool>> {
    let (values, classes) = (logits.to_vec::<f32>()?, logits.count() / labels.len());
    let largest = |row: &[f32]| (1..row.len()).fold(0, |best, at| if row[at] > row[best] { at } else { best });
    Ok(values.chunks(classes).zip(labels).map(|(row, &label)| largest(row) as i32 == label).collect())
}

/// A chunk in a pass, as the pipeline's interpreter sees it.
pub(super) struct Running<'a> {
    pub(super) chunk: &'a mut Chunk,
    pub(super) pass: &'a Pass<'a>,
}

impl meshwork_pipeline::StageRunner for Running<'_> {
    type Message = Message;
    type Error = TrainError;

    fn forward(&mut self, micro: usize, input: Option<Message>) -> std::result::Result<Option<Message>, TrainError> {
        let Self { chunk, pass } = self;
        let kept = input.clone().filter(|_| pass.recompute);
        let run = chunk.run(pass, micro, input)?;
        let first = pass.position.first_sample as usize + micro * pass.micro_batch;
        chunk.verdicts.extend((first..).zip(run.verdicts.iter().copied()));
        let message = Message { tensor: run.output.tensor().clone(), types: run.output.types() };
        if pass.mode == Mode::Train {
            let flight = if pass.recompute { Flight::Input(kept) } else { Flight::Whole(Box::new(run)) };
            chunk.flights.insert(micro, flight);
        }
        Ok(Some(message).filter(|_| !chunk.is_last()))
    }

    fn backward_input(
        &mut self,
        micro: usize,
        grad: Option<Message>,
    ) -> std::result::Result<Option<Message>, TrainError> {
        self.walk(micro, grad, Weights::Deferred)
    }

    fn backward_weights(&mut self, micro: usize) -> std::result::Result<(), TrainError> {
        let Some(tape) = self.chunk.deferred.remove(&micro) else {
            return Err(self.chunk.out_of_turn(micro, "gradients of weights before that of the input"));
        };
        Ok(tape.weight_gradients(&mut *self.pass.gradients.borrow_mut())?)
    }

    /// In one walk over the tape, so that what serves both gradients is read once.
    fn backward(&mut self, micro: usize, grad: Option<Message>) -> std::result::Result<Option<Message>, TrainError> {
        self.walk(micro, grad, Weights::Now)
    }

    fn update(&mut self, micro: usize) -> std::result::Result<(), TrainError> {
        Err(self.chunk.out_of_turn(micro, "an update within a step: only synchronous schedules train classifiers"))
    }
}

impl Running<'_> {
    /// Walks the tape of a micro-batch backwards.
    fn walk(
        &mut self,
        micro: usize,
        grad: Option<Message>,
        weights: Weights,
    ) -> std::result::Result<Option<Message>, TrainError> {
        let Self { chunk, pass } = self;
        let Run { tape, input, output, .. } = match chunk.flights.remove(&micro) {
            Some(Flight::Whole(run)) => *run,
            Some(Flight::Input(input)) => chunk.run(pass, micro, input)?,
            None => return Err(chunk.out_of_turn(micro, "backward before forward")),
        };
        let gradients = &mut *pass.gradients.borrow_mut();
        match grad {
            Some(message) => tape.backward(&output, message.tensor, weights, gradients)?,
            None if chunk.is_last() => tape.backward_from_loss(&output, pass.seed, weights, gradients)?,
            None => return Err(chunk.out_of_turn(micro, "no gradient arrived")),
        }
        let message = match chunk.number {
            0 => None,
            _ => {
                let tensor = tape.take_grad(&input);
                let tensor = tensor.ok_or_else(|| chunk.out_of_turn(micro, "the input has no gradient"))?;
                Some(Message { tensor, types: input.types().dual() })
            }
        };
        if weights == Weights::Deferred {
            chunk.deferred.insert(micro, tape);
        }
        Ok(message)
    }
}

/// The gradients of a rank's parameters, one after another in one buffer that lies as the weights do: each micro-batch adds its
/// share.
#[derive(Debug)]
pub(super) struct Gradients {
    pub(super) all: Buffer,
    places: Vec<Range<usize>>,
    /// Per parameter: whether it has no share yet, and the buffer holds the last step's.
    empty: Vec<bool>,
    device: Arc<dyn Device>,
}

impl Gradients {
    pub(super) fn new(params: &Params, device: &Arc<dyn Device>) -> Result<Self> {
        let places: Vec<_> = params.declarations().ids().map(|id| params.place(id).1).collect();
        let all = device.zeros(meshwork_core::DType::F32, places.iter().map(Range::len).sum())?;
        Ok(Self { all, empty: vec![true; places.len()], places, device: Arc::clone(device) })
    }

    /// Forgets every gradient before a step.
    pub(super) fn begin(&mut self) {
        self.empty.fill(true);
    }

    /// Zero where no micro-batch had a share.
    pub(super) fn finish(&mut self) -> Result<()> {
        let empty = self.places.iter().zip(&self.empty).filter(|(_, empty)| **empty);
        empty.into_iter().try_for_each(|(place, _)| self.device.optim()?.zero(&mut self.all, place.clone()))
    }
}

impl GradSink for Gradients {
    fn accumulate(&mut self, share: &Share, grad: Tensor) -> Result<()> {
        let device = Arc::clone(&self.device);
        let Some(Place { buffer, start, first }) = self.place(share)? else { return Ok(()) };
        if first {
            device.optim()?.zero(buffer, start..start + grad.count())?;
        }
        device.pointwise()?.add_assign(buffer, start, grad.buffer())
    }

    fn place(&mut self, share: &Share) -> Result<Option<Place<'_>>> {
        let at = share.id.index();
        let (Some(place), Some(empty)) = (self.places.get(at), self.empty.get_mut(at)) else {
            return Err(Error::Backward(format!("a gradient of parameter {at}, of which this stage has none")));
        };
        Ok(Some(Place { start: place.start, first: std::mem::replace(empty, false), buffer: &mut self.all }))
    }

    fn ready(&mut self, _id: ParamId) -> Result<()> {
        Ok(())
    }
}
