//! One stage on one rank: its forward and backward passes, one tape per micro-batch in flight.

use super::watch::Watched;
use super::{At, Gradients, Learner, TrainError, Watch};
use meshwork_core::{Axis, Rank, SpmdError, Ty, Types};
use meshwork_models::{Boundary, Stage};
use meshwork_tensor::tape::{Mode, Position, SavedPolicy, Weights};
use meshwork_tensor::{Device, Params, Tape, Tensor, Var};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// A hidden state, or its gradient, between two stages.
#[derive(Clone, Debug)]
pub struct Message {
    /// The value on this rank.
    pub tensor: Tensor,
    /// Its types.
    pub types: Types,
}

/// What a pass over the batch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Loss and gradients.
    Train,
    /// The loss alone.
    Evaluate,
    /// Logits.
    Sample,
}

/// What every stage of a rank needs in one pass over the batch.
#[derive(Clone, Debug)]
pub struct Pass {
    /// Where this runs.
    pub rank: Arc<Rank>,
    /// Who computes.
    pub device: Arc<dyn Device>,
    /// What the pass is for.
    pub purpose: Purpose,
    /// Position of this rank's first sample, with seed and step.
    pub position: Position,
    /// Token ids of this rank's samples, row-major.
    pub inputs: Vec<i32>,
    /// Targets of the same; negative ones masked.
    pub targets: Vec<i32>,
    /// Sequences per micro-batch.
    pub micro_batch: usize,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Per micro-batch: the gradient of its summed loss, 1 / N for N unmasked tokens in all that an update adds up.
    pub seeds: Vec<f64>,
    /// Number of its first micro-batch; not 0 within a stream, where all of them are counted from its start.
    pub first_micro: usize,
    /// How far that count is ahead of the schedule's.
    pub ahead: usize,
    /// How saved tensors wait for the backward pass.
    pub policy: Rc<dyn SavedPolicy>,
    /// Who looks on while this trains.
    pub watch: Option<Arc<dyn Watch>>,
}

/// Per sample, by its number in the batch: the loss summed over its tokens.
pub type Losses = Vec<(usize, f64)>;

/// A stage with its passes in flight.
#[derive(Debug)]
pub struct Chunk {
    number: usize,
    stages: usize,
    stage: Box<dyn Stage>,
    flights: BTreeMap<usize, Flight>,
    /// Tapes whose gradients of weights are still to be computed.
    deferred: BTreeMap<usize, Tape>,
    /// Losses since they were last taken, with their types.
    losses: Option<(Losses, Types)>,
    /// Logits of the last sampling pass.
    logits: Option<Tensor>,
}

#[derive(Debug)]
struct Flight {
    tape: Tape,
    input: Var,
    output: Var,
    /// Gradient of the summed loss.
    seed: f64,
}

impl Chunk {
    /// Stage `number` of `stages`.
    pub fn new(number: usize, stages: usize, stage: Box<dyn Stage>) -> Self {
        Self { number, stages, stage, flights: BTreeMap::new(), deferred: BTreeMap::new(), losses: None, logits: None }
    }

    /// The stage.
    pub fn stage(&self) -> &dyn Stage {
        &*self.stage
    }

    /// Whether this is the first stage.
    pub fn is_first(&self) -> bool {
        self.number == 0
    }

    /// Whether this is the last stage.
    pub fn is_last(&self) -> bool {
        self.number + 1 == self.stages
    }

    /// The losses of all samples since the last call, and their types; nothing where this is not the last stage.
    pub fn take_losses(&mut self) -> Option<(Losses, Types)> {
        self.losses.take()
    }

    /// The whole logits of a sampling pass; nothing where this is not the last stage.
    pub fn take_logits(&mut self) -> Option<Tensor> {
        self.logits.take()
    }

    /// Forgets passes in flight, after a failure.
    pub fn clear(&mut self) {
        self.flights.clear();
        self.deferred.clear();
        self.losses = None;
    }

    /// `number` is that of the micro-batch in the stream.
    fn forward(
        &mut self,
        pass: &Pass,
        number: usize,
        params: Arc<Params>,
        input: Option<Message>,
    ) -> Result<Option<Message>, TrainError> {
        let micro = number - pass.first_micro;
        let first_sample = pass.position.first_sample + (micro * pass.micro_batch) as u64;
        let position = Position { first_sample, ..pass.position };
        let mode = if pass.purpose == Purpose::Train { Mode::Train } else { Mode::Evaluate };
        let (rank, device) = (pass.rank.clone(), pass.device.clone());
        let tape = Tape::with_policy(rank, params, device, mode, position, pass.policy.clone());
        if let (Some(watch), Mode::Train) = (&pass.watch, mode) {
            let at = At { stage: self.number, micro };
            tape.observe(Rc::new(Watched { watch: watch.clone(), at }));
        }
        let input = match input {
            Some(message) => tape.input(message.tensor, message.types),
            None if self.is_first() => tape.constant(pass.tokens(&pass.inputs, micro)?, token_types(&pass.rank)),
            None => return Err(self.out_of_turn(micro, "no hidden state arrived")),
        };
        let mut output = self.stage.forward(&tape, &input)?;
        let mut message = None;
        if !self.is_last() {
            message = Some(outgoing(self.number, &output, self.stage.boundary(pass.micro_batch, pass.seq_len))?);
        } else if pass.purpose == Purpose::Sample {
            self.logits = Some(self.stage.gather_logits(&output)?.into_tensor());
        } else {
            let targets = tape.constant(pass.tokens(&pass.targets, micro)?, token_types(&pass.rank));
            output = self.stage.loss(&output, &targets)?;
            let (losses, types) = self.losses.get_or_insert((Losses::new(), output.types()));
            debug_assert_eq!(*types, output.types());
            losses.extend((first_sample as usize..).zip(output.tensor().to_vec::<f64>()?));
        }
        if pass.purpose == Purpose::Train {
            self.flights.insert(number, Flight { tape, input, output, seed: pass.seeds[micro] });
        }
        Ok(message)
    }

    /// Computes the gradient of the input and, unless they are deferred, those of the weights.
    fn backward(
        &mut self,
        micro: usize,
        grad: Option<Message>,
        weights: Weights,
        gradients: &mut Gradients,
    ) -> Result<Option<Message>, TrainError> {
        let Some(Flight { tape, input, output, seed }) = self.flights.remove(&micro) else {
            return Err(self.out_of_turn(micro, "backward before forward"));
        };
        gradients.of_stage(self.number);
        match grad {
            Some(message) => tape.backward(&output, message.tensor, weights, gradients)?,
            None if self.is_last() => tape.backward_from_loss(&output, seed, weights, gradients)?,
            None => return Err(self.out_of_turn(micro, "no gradient arrived")),
        }
        let message = match self.is_first() {
            true => None,
            false => {
                let tensor = tape
                    .take_grad(&input)
                    .ok_or_else(|| self.out_of_turn(micro, "the hidden state has no gradient"))?;
                Some(Message { tensor, types: input.types().dual() })
            }
        };
        if weights == Weights::Deferred {
            self.deferred.insert(micro, tape);
        }
        Ok(message)
    }

    fn weight_gradients(&mut self, micro: usize, gradients: &mut Gradients) -> Result<(), TrainError> {
        let Some(tape) = self.deferred.remove(&micro) else {
            return Err(self.out_of_turn(micro, "gradients of weights before that of the input"));
        };
        gradients.of_stage(self.number);
        Ok(tape.weight_gradients(gradients)?)
    }

    fn out_of_turn(&self, micro: usize, problem: &'static str) -> TrainError {
        TrainError::Stage { stage: self.number, micro, problem }
    }
}

/// A stage's output as a message, refused if it is not what the next stage expects.
fn outgoing(stage: usize, output: &Var, expected: Boundary) -> Result<Message, TrainError> {
    for (axis, ty) in output.types().iter() {
        let wanted = expected.types.get(axis);
        if wanted != Some(ty) {
            return Err(SpmdError {
                op: format!("send from stage {stage} to {}", stage + 1),
                axis,
                problem: format!(
                    "the hidden state is {ty} and the next stage expects {}",
                    wanted.map_or("nothing there".to_owned(), |ty| ty.to_string())
                ),
                fix: match ty {
                    Ty::Partial => format!("all_reduce it over {axis} first"),
                    _ => "bring it to the type of the boundary first".to_owned(),
                },
            }
            .into());
        }
    }
    Ok(Message { tensor: output.tensor().clone(), types: output.types() })
}

/// Token ids: a slice of the batch on dp, the same on every other rank.
pub fn token_types(rank: &Rank) -> Types {
    rank.mesh()
        .value_axes()
        .fold(Types::NONE, |types, axis| types.with(axis, if axis == Axis::Dp { Ty::Shard(0) } else { Ty::Invariant }))
}

impl Pass {
    fn tokens(&self, all: &[i32], micro: usize) -> Result<Tensor, TrainError> {
        let count = self.micro_batch * self.seq_len;
        let values = &all[micro * count..(micro + 1) * count];
        Ok(Tensor::from_slice(&self.device, values, [self.micro_batch, self.seq_len])?)
    }
}

/// How many activations live on a rank: each from its forward until its backward is over, gradients of weights included.
#[derive(Debug, Default)]
pub struct Live {
    now: Cell<usize>,
    most: Cell<usize>,
}

impl Live {
    fn born(&self) {
        self.now.update(|now| now + 1);
        self.most.update(|most| most.max(self.now.get()));
    }

    fn gone(&self) {
        self.now.update(|now| now.saturating_sub(1));
    }

    /// None lives, after a failure.
    pub fn clear(&self) {
        self.now.set(0);
    }

    /// The most that ever lived at once, in units of one micro-batch through one stage.
    pub fn most(&self) -> usize {
        self.most.get()
    }
}

/// A chunk in one pass, as the pipeline's interpreter sees it.
pub struct Running<'a> {
    /// The chunk.
    pub chunk: &'a mut Chunk,
    /// The pass.
    pub pass: &'a Pass,
    /// Weights, and where gradients go.
    pub learner: &'a RefCell<Learner>,
    /// Activations of this rank.
    pub live: &'a Live,
    /// Updates that the weights of each (stage, micro-batch as the schedule counts them) have seen; where there is none, the
    /// newest weights serve.
    pub versions: &'a dyn Fn(usize, usize) -> Option<u64>,
}

impl Running<'_> {
    fn backward(
        &mut self,
        micro: usize,
        grad: Option<Message>,
        weights: Weights,
    ) -> Result<Option<Message>, TrainError> {
        self.chunk.backward(micro + self.pass.ahead, grad, weights, &mut self.learner.borrow_mut().gradients)
    }
}

impl meshwork_pipeline::StageRunner for Running<'_> {
    type Message = Message;
    type Error = TrainError;

    fn forward(&mut self, micro: usize, input: Option<Message>) -> Result<Option<Message>, TrainError> {
        if self.pass.purpose == Purpose::Train {
            self.live.born();
        }
        let learner = self.learner.borrow();
        let params = match (self.versions)(self.chunk.number, micro) {
            None => learner.params(),
            Some(updates) => {
                let gone = "the version of the weights that it must read is gone";
                learner.version(updates).ok_or_else(|| self.chunk.out_of_turn(micro, gone))?
            }
        };
        self.chunk.forward(self.pass, micro + self.pass.ahead, params.clone(), input)
    }

    fn backward_input(&mut self, micro: usize, grad: Option<Message>) -> Result<Option<Message>, TrainError> {
        Self::backward(self, micro, grad, Weights::Deferred)
    }

    fn backward_weights(&mut self, micro: usize) -> Result<(), TrainError> {
        self.live.gone();
        self.chunk.weight_gradients(micro + self.pass.ahead, &mut self.learner.borrow_mut().gradients)
    }

    /// In one walk over the tape, so that what serves both gradients is read once.
    fn backward(&mut self, micro: usize, grad: Option<Message>) -> Result<Option<Message>, TrainError> {
        self.live.gone();
        Self::backward(self, micro, grad, Weights::Now)
    }

    fn update(&mut self, micro: usize) -> Result<(), TrainError> {
        // The pass begins at the first micro-batch of its step; an update may still belong to the step before.
        let pass = self.pass;
        let step = pass.position.step + u64::from(micro + pass.ahead >= pass.first_micro);
        self.learner.borrow_mut().update_within(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshwork_core::Mesh;
    use meshwork_tensor::meta::Meta;
    use meshwork_tensor::{Declarations, Shape};

    #[test]
    fn a_partial_hidden_state_is_not_sent_to_a_stage_that_expects_invariant() {
        for degree in [1, 2] {
            let mesh = Mesh::new([(Axis::Tp, degree)]).unwrap();
            let rank = Arc::new(Rank::recording(&mesh, 0).unwrap());
            let device = Meta::device();
            let declarations = Arc::new(Declarations::new());
            let params = Params::new(declarations, &mesh, rank.coords(), &device, &[], 0).unwrap();
            let tape = Tape::new(rank, Arc::new(params), device.clone(), Mode::Train, Position::default());
            let hidden = |ty: Ty| {
                let zeros = Tensor::zeros(&device, meshwork_core::DType::F32, [2, 3, 4]).unwrap();
                tape.input(zeros, Types::of(&[(Axis::Tp, ty)]))
            };
            let boundary = Boundary { shape: Shape::new(&[2, 3, 4]), types: Types::of(&[(Axis::Tp, Ty::Invariant)]) };
            let error = outgoing(0, &hidden(Ty::Partial), boundary).unwrap_err();
            assert_eq!(
                error.to_string(),
                "send from stage 0 to 1: on axis tp, the hidden state is Partial and the next stage expects Invariant; \
                 all_reduce it over tp first"
            );
            let summed = hidden(Ty::Partial).all_reduce(Axis::Tp).unwrap();
            outgoing(0, &summed, boundary).unwrap();
        }
    }
}
