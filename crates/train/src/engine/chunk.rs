//! One stage on one rank: its forward and backward passes, one tape per micro-batch in flight.

use super::watch::Watched;
use super::{At, Gradients, TrainError, Watch};
use meshwork_core::{Axis, Rank, SpmdError, Ty, Types};
use meshwork_models::{Boundary, Stage};
use meshwork_tensor::tape::{Mode, Position, Weights};
use meshwork_tensor::{Device, Params, Tape, Tensor, Var};
use std::cell::RefCell;
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
    /// The weights.
    pub params: Arc<Params>,
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
    /// Gradient of the summed loss: 1 / N for N unmasked tokens in the whole step.
    pub seed: f64,
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
}

impl Chunk {
    /// Stage `number` of `stages`.
    pub fn new(number: usize, stages: usize, stage: Box<dyn Stage>) -> Self {
        Self { number, stages, stage, flights: BTreeMap::new(), losses: None, logits: None }
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
        self.losses = None;
    }

    fn forward(&mut self, pass: &Pass, micro: usize, input: Option<Message>) -> Result<Option<Message>, TrainError> {
        let first_sample = pass.position.first_sample + (micro * pass.micro_batch) as u64;
        let position = Position { first_sample, ..pass.position };
        let mode = if pass.purpose == Purpose::Train { Mode::Train } else { Mode::Evaluate };
        let tape = Tape::new(pass.rank.clone(), pass.params.clone(), pass.device.clone(), mode, position);
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
            self.flights.insert(micro, Flight { tape, input, output });
        }
        Ok(message)
    }

    fn backward(
        &mut self,
        pass: &Pass,
        micro: usize,
        grad: Option<Message>,
        gradients: &mut Gradients,
    ) -> Result<Option<Message>, TrainError> {
        let Some(Flight { tape, input, output }) = self.flights.remove(&micro) else {
            return Err(self.out_of_turn(micro, "backward before forward"));
        };
        gradients.of_stage(self.number);
        match grad {
            Some(message) => tape.backward(&output, message.tensor, Weights::Now, gradients)?,
            None if self.is_last() => tape.backward_from_loss(&output, pass.seed, Weights::Now, gradients)?,
            None => return Err(self.out_of_turn(micro, "no gradient arrived")),
        }
        if self.is_first() {
            return Ok(None);
        }
        let tensor =
            tape.take_grad(&input).ok_or_else(|| self.out_of_turn(micro, "the hidden state has no gradient"))?;
        Ok(Some(Message { tensor, types: input.types().dual() }))
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

/// A chunk in one pass, as the pipeline's interpreter sees it.
#[derive(Debug)]
pub struct Running<'a> {
    /// The chunk.
    pub chunk: &'a mut Chunk,
    /// The pass.
    pub pass: &'a Pass,
    /// Where gradients go.
    pub gradients: &'a RefCell<Gradients>,
}

impl meshwork_pipeline::Stage for Running<'_> {
    type Message = Message;
    type Error = TrainError;

    fn forward(&mut self, micro: usize, input: Option<Message>) -> Result<Option<Message>, TrainError> {
        self.chunk.forward(self.pass, micro, input)
    }

    fn backward(&mut self, micro: usize, grad: Option<Message>) -> Result<Option<Message>, TrainError> {
        self.chunk.backward(self.pass, micro, grad, &mut self.gradients.borrow_mut())
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
