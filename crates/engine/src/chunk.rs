//! One stage on one rank: its forward and backward passes, one tape per micro-batch in flight.

use crate::gathers::Gathers;
use crate::pass::{MicroBatch, Pass, Purpose};
use crate::statistics::Noted;
use crate::trace::Walk;
use crate::watch::Watched;
use crate::weights::WeightStore;
use crate::{At, PlanError, Recompute, TrainError};
use meshwork_core::{SpmdError, Ty, Types};
use meshwork_nn::{Activation, Stage};
use meshwork_tensor::tape::{Decisions, Mode, Normaliser, Notes, PerSample, Seed, Weights};
use meshwork_tensor::{Category, Params, Tape, Tensor, Var};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

/// An activation, or its gradient, between two stages.
#[derive(Clone, Debug)]
pub struct Message {
    /// The value on this rank.
    pub tensor: Tensor,
    /// Its types.
    pub types: Types,
}

/// A stage with its passes in flight.
#[derive(Debug)]
pub struct Chunk {
    number: usize,
    stages: usize,
    stage: Box<dyn Stage>,
    /// Brings weights together that this rank has slices of.
    gathers: Option<Arc<Gathers>>,
    flights: BTreeMap<usize, Flight>,
    /// Tapes whose gradients of weights are still to be computed.
    deferred: BTreeMap<usize, Tape>,
    /// Notes of statistics since they were last taken.
    noted: Noted,
    /// Output of the last prediction.
    prediction: Option<Tensor>,
}

/// A micro-batch that waits for its backward.
#[derive(Debug)]
struct Flight {
    of: MicroBatch,
    kept: Kept,
}

#[derive(Debug)]
enum Kept {
    /// Everything that backward needs.
    Tape(Box<Forwarded>),
    /// Only what the forward was made of: a second one recomputes the rest.
    Origin(Box<Origin>),
}

/// What a second forward needs to give the bits of the first.
#[derive(Debug)]
struct Origin {
    input: Option<Message>,
    params: Arc<Params>,
    decisions: Decisions,
}

/// One forward.
#[derive(Debug)]
struct Forwarded {
    tape: Tape,
    input: Option<Var>,
    output: Var,
    notes: Notes,
}

impl Chunk {
    /// Stage `number` of `stages`.
    pub fn new(number: usize, stages: usize, stage: Box<dyn Stage>, gathers: Option<Arc<Gathers>>) -> Self {
        Self {
            number,
            stages,
            stage,
            gathers,
            flights: BTreeMap::new(),
            deferred: BTreeMap::new(),
            noted: Noted::default(),
            prediction: None,
        }
    }

    /// Whether this is the last stage.
    pub fn is_last(&self) -> bool {
        self.number + 1 == self.stages
    }

    /// The notes of statistics since the last call.
    pub fn take_noted(&mut self) -> Noted {
        std::mem::take(&mut self.noted)
    }

    /// The output of a prediction; `None` if this is not the last stage.
    pub fn take_prediction(&mut self) -> Option<Tensor> {
        self.prediction.take()
    }

    /// Forgets passes in flight, after a failure.
    pub fn clear(&mut self) {
        self.flights.clear();
        self.deferred.clear();
        self.noted = Noted::default();
    }

    /// Runs the forward of one micro-batch, on the last stage up to the loss. Running it again, with the decisions of the first time,
    /// gives the same bits.
    fn run(
        &self,
        pass: &Pass,
        of: &MicroBatch,
        params: Arc<Params>,
        input: Option<Message>,
        repeated: Option<Decisions>,
    ) -> Result<Forwarded, TrainError> {
        let mode = if pass.purpose == Purpose::Train { Mode::Train } else { Mode::Evaluate };
        let (rank, device) = (pass.rank.clone(), pass.device.clone());
        let tape = Tape::with_policy(rank, params, device, mode, of.position, pass.recompute.policy());
        if mode == Mode::Train && (pass.watch.is_some() || pass.claims.is_some()) {
            let at = At { stage: self.number, micro: of.micro, recomputed: repeated.is_some() };
            let (watch, claims, rank) = (pass.watch.clone(), pass.claims.clone(), pass.rank.clone());
            tape.observe(Rc::new(Watched { watch, claims, rank, at }));
        }
        if let Some(decisions) = repeated {
            tape.repeat(decisions);
        }
        let input = input.map(|message| tape.input(message.tensor, message.types));
        if input.is_none() && self.number > 0 {
            return Err(self.out_of_turn(of.micro, "no activation arrived"));
        }
        let mut output = self.stage.forward(&tape, &of.samples, input.as_ref())?;
        if self.is_last() && pass.purpose != Purpose::Predict {
            output = self.stage.loss(&tape, &of.samples, &output)?;
        }
        let notes = tape.take_notes();
        Ok(Forwarded { tape, input, output, notes })
    }

    /// `number` is the number of the micro-batch in an asynchronous run.
    fn forward(
        &mut self,
        pass: &Pass,
        number: usize,
        params: Arc<Params>,
        input: Option<Message>,
    ) -> Result<Option<Message>, TrainError> {
        let of = pass.micro(number - pass.first_micro)?;
        let gathers = self.gathers.clone();
        let _gathering = gathers.as_ref().map(|gathers| gathers.begin(self.number, &[Walk::Forward], &params));
        let kept_input = (pass.recompute == Recompute::Stage).then(|| (input.clone(), params.clone()));
        let run = self.run(pass, &of, params, input, None)?;
        let decisions = run.tape.take_decisions();
        let first_sample = of.position.first_sample;
        let mut message = None;
        if !self.is_last() {
            message = Some(outgoing(self.number, &run.output, &pass.activations[self.number])?);
        } else if pass.purpose == Purpose::Predict {
            let prediction = self.stage.predict(&run.output)?;
            prediction.require_unpadded("predict", "the prediction")?;
            self.prediction = Some(prediction.into_tensor());
        } else {
            pass.count(0, first_sample, &run.output)?;
        }
        // A prediction has samples of its own, which are those of no step.
        let measured = if pass.purpose == Purpose::Predict { &[][..] } else { &run.notes.per_sample };
        for PerSample { name, value, .. } in measured {
            let Some(metric) = pass.metrics.iter().position(|metric| metric.name == *name) else {
                let declared = pass.metrics.iter().map(|metric| metric.name).collect();
                return Err(PlanError::Metric { stage: self.number, name, declared }.into());
            };
            pass.count(1 + metric, first_sample, value)?;
        }
        self.noted.add(first_sample, &run.notes.statistics);
        if pass.purpose == Purpose::Train {
            let kept = match kept_input {
                Some((input, params)) => Kept::Origin(Box::new(Origin { input, params, decisions })),
                None => Kept::Tape(Box::new(run)),
            };
            self.flights.insert(number, Flight { of, kept });
        }
        Ok(message)
    }

    /// Computes the gradient of the input and, unless they are deferred, those of the weights.
    fn backward(
        &mut self,
        pass: &Pass,
        number: usize,
        grad: Option<Message>,
        weights: Weights,
        store: &RefCell<WeightStore>,
    ) -> Result<Option<Message>, TrainError> {
        let Some(Flight { of, kept }) = self.flights.remove(&number) else {
            return Err(self.out_of_turn(number, "backward before forward"));
        };
        let gathers = self.gathers.clone();
        let back = if weights == Weights::Now { Walk::Backward } else { Walk::Inputs };
        let (walks, params) = match &kept {
            Kept::Tape(forwarded) => (&[back][..], forwarded.tape.params()),
            Kept::Origin(origin) => (&[Walk::Forward, back][..], &origin.params),
        };
        let _gathering = gathers.as_ref().map(|gathers| gathers.begin(self.number, walks, params));
        let Forwarded { tape, input, output, notes } = match kept {
            Kept::Tape(forwarded) => *forwarded,
            Kept::Origin(origin) => {
                let Origin { input, params, decisions } = *origin;
                self.run(pass, &of, params, input, Some(decisions))?
            }
        };
        let mut roots = Vec::new();
        match (grad, of.seeds) {
            (Some(message), _) => roots.push((&output, Seed::typed(message.tensor, message.types))),
            (None, Some(seeds)) if self.is_last() => {
                roots.push((&output, tape.loss_seed(&output, Normaliser::Terms(seeds.terms))?))
            }
            _ => return Err(self.out_of_turn(number, "no gradient arrived")),
        }
        for PerSample { value, coefficient, .. } in &notes.per_sample {
            if let (Some(coefficient), Some(seeds)) = (coefficient, of.seeds) {
                roots.push((value, tape.loss_seed(value, Normaliser::Scale(coefficient * seeds.auxiliary))?));
            }
        }
        let gradients = &mut store.borrow_mut().gradients;
        gradients.of_stage(self.number);
        tape.backward_from(roots, weights, gradients)?;
        let message = match &input {
            None => None,
            Some(input) => {
                let tensor =
                    tape.take_grad(input).ok_or_else(|| self.out_of_turn(number, "the activation has no gradient"))?;
                Some(Message { tensor, types: input.types().dual() })
            }
        };
        if weights == Weights::Deferred {
            self.deferred.insert(number, tape);
        }
        Ok(message)
    }

    fn weight_gradients(&mut self, number: usize, store: &RefCell<WeightStore>) -> Result<(), TrainError> {
        let Some(tape) = self.deferred.remove(&number) else {
            return Err(self.out_of_turn(number, "gradients of weights before that of the input"));
        };
        let gathers = self.gathers.as_ref();
        let _gathering = gathers.map(|gathers| gathers.begin(self.number, &[Walk::Weights], tape.params()));
        let gradients = &mut store.borrow_mut().gradients;
        gradients.of_stage(self.number);
        Ok(tape.weight_gradients(gradients)?)
    }

    fn out_of_turn(&self, micro: usize, problem: &'static str) -> TrainError {
        TrainError::Stage { stage: self.number, micro, problem }
    }
}

/// A stage's output as a message, refused if it is not what the next stage expects.
pub(crate) fn outgoing(stage: usize, output: &Var, expected: &Activation) -> Result<Message, TrainError> {
    let op = || format!("send from stage {stage} to {}", stage + 1);
    for (axis, ty) in output.types().iter() {
        let wanted = expected.types.get(axis);
        if wanted != Some(ty) {
            return Err(SpmdError {
                op: op(),
                axis,
                problem: format!(
                    "the activation is {ty} and the next stage expects {}",
                    wanted.map_or("nothing there".to_owned(), |ty| ty.to_string())
                ),
                fix: match ty {
                    Ty::Partial => format!("all_reduce it over {axis} first"),
                    _ => "bring it to the type of the activation first".to_owned(),
                },
            }
            .into());
        }
    }
    output.require_unpadded("a cut between stages", "the activation")?;
    let tensor = output.tensor().clone();
    if (tensor.shape(), tensor.dtype()) != (expected.shape, expected.dtype) {
        return Err(TrainError::Activation {
            op: op(),
            given: format!("{} {:?}", tensor.dtype(), tensor.shape()),
            expected: format!("{} {:?}", expected.dtype, expected.shape),
        });
    }
    Ok(Message { tensor, types: output.types() })
}

/// Counts the live activations of a rank. An activation lives from its forward until its backward ends, gradients of
/// weights included.
#[derive(Debug, Default)]
pub struct LiveActivations {
    now: Cell<usize>,
    most: Cell<usize>,
}

impl LiveActivations {
    fn acquire(&self) {
        self.now.update(|now| now + 1);
        self.most.update(|most| most.max(self.now.get()));
    }

    fn release(&self) {
        self.now.update(|now| now.saturating_sub(1));
    }

    /// Sets the number of live activations to zero, after a failure.
    pub fn clear(&self) {
        self.now.set(0);
    }

    /// The largest number alive at once so far, in units of one micro-batch through one stage.
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
    /// Weights, and the buffers of their gradients.
    pub weights: &'a RefCell<WeightStore>,
    /// Counts the live activations of this rank.
    pub live: &'a LiveActivations,
    /// The version of the weights, as a number of updates, that each (stage, micro-batch as the schedule counts them)
    /// reads; `None` for the newest.
    pub versions: &'a dyn Fn(usize, usize) -> Option<u64>,
}

impl Running<'_> {
    fn walk_back(
        &mut self,
        micro: usize,
        grad: Option<Message>,
        weights: Weights,
    ) -> Result<Option<Message>, TrainError> {
        let _activations = self.pass.device.meter().enter(Category::Activations);
        self.chunk.backward(self.pass, micro + self.pass.ahead, grad, weights, self.weights)
    }
}

impl meshwork_pipeline::StageRunner for Running<'_> {
    type Message = Message;
    type Error = TrainError;

    fn forward(&mut self, micro: usize, input: Option<Message>) -> Result<Option<Message>, TrainError> {
        if self.pass.purpose == Purpose::Train {
            self.live.acquire();
        }
        let _activations = self.pass.device.meter().enter(Category::Activations);
        let store = self.weights.borrow();
        let params = match (self.versions)(self.chunk.number, micro) {
            None => store.params(),
            Some(updates) => {
                let gone = "the version of the weights that it must read is gone";
                store.version(updates).ok_or_else(|| self.chunk.out_of_turn(micro, gone))?
            }
        };
        self.chunk.forward(self.pass, micro + self.pass.ahead, params.clone(), input)
    }

    fn backward_input(&mut self, micro: usize, grad: Option<Message>) -> Result<Option<Message>, TrainError> {
        self.walk_back(micro, grad, Weights::Deferred)
    }

    fn backward_weights(&mut self, micro: usize) -> Result<(), TrainError> {
        self.live.release();
        let _activations = self.pass.device.meter().enter(Category::Activations);
        self.chunk.weight_gradients(micro + self.pass.ahead, self.weights)
    }

    /// Walks the tape once, so that values needed by both gradients are read once.
    fn backward(&mut self, micro: usize, grad: Option<Message>) -> Result<Option<Message>, TrainError> {
        self.live.release();
        self.walk_back(micro, grad, Weights::Now)
    }

    fn update(&mut self, micro: usize) -> Result<(), TrainError> {
        // The pass begins at the first micro-batch of its step; an update may still belong to the step before.
        let pass = self.pass;
        let step = pass.position.step + u64::from(micro + pass.ahead >= pass.first_micro);
        self.weights.borrow_mut().update_within(step)
    }
}
