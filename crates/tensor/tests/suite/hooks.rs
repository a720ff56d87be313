//! The hooks of the tape: saved tensors, deferred weight gradients, gradient ready, observer.
//!
//! More than 400 lines: all hooks are tested on one model, beside each other.

use crate::common::{POSITION, alone, ids, integers, to_f64, values};
use meshwork_core::{Buffer, Types};
use meshwork_cpu::Cpu;
use meshwork_tensor::tape::{
    GradShard, GradSink, Keep, Mode, Observer, Saved, SavedPolicy, SavedTensor, Seen, Weights,
};
use meshwork_tensor::{Declarations, Device, Init, ParamId, Params, Placement, Result, Role, Tape, Tensor, Var};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

const WIDTH: usize = 8;
const WORDS: usize = 6;

/// A small model with a tied table, used first and last, and a branch that leads nowhere.
struct Model {
    params: Arc<Params>,
    device: Arc<dyn Device>,
}

impl Model {
    fn new() -> Self {
        let mut all = Declarations::new();
        let mut declare = |name: &str, dims: &[usize]| {
            all.declare(name, dims, Placement::replicated(), Role::Weight, Init::Normal { std: 0.5 }).unwrap();
        };
        declare("table", &[WORDS, WIDTH]);
        declare("gamma", &[WIDTH]);
        declare("beta", &[WIDTH]);
        declare("up", &[2 * WIDTH, WIDTH]);
        declare("up_bias", &[2 * WIDTH]);
        declare("down", &[WIDTH, 2 * WIDTH]);
        declare("down_bias", &[WIDTH]);
        declare("nowhere", &[WIDTH, WIDTH]);
        let (rank, device) = (alone(), Cpu::device());
        let layout = [all.ids().collect()];
        let params = Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &layout, 3).unwrap();
        Self { params: Arc::new(params), device }
    }

    fn name(&self, id: ParamId) -> String {
        self.params.declarations().spec(id).name.clone()
    }

    /// (tape, the input from a previous stage, the loss). Other values are dropped, so that only saved tensors stay
    /// alive.
    fn forward(&self, policy: Rc<dyn SavedPolicy>) -> (Tape, Var, Var) {
        let params = Arc::clone(&self.params);
        let tape = Tape::with_policy(alone(), params, Arc::clone(&self.device), Mode::Train, POSITION, policy);
        let input = self.input(&tape);
        let loss = self.loss(&tape, &input).unwrap();
        (tape, input, loss)
    }

    /// The activation of a previous stage.
    fn input(&self, tape: &Tape) -> Var {
        let stage_input: Vec<f32> = values("input", 4 * WIDTH).iter().map(|&value| value as f32).collect();
        tape.input(Tensor::from_slice(&self.device, &stage_input, [1, 4, WIDTH]).unwrap(), Types::NONE)
    }

    fn loss(&self, tape: &Tape, input: &Var) -> Result<Var> {
        let param = |name: &str| tape.param(self.params.declarations().find(name).unwrap());
        let words = ids(tape, &[1, 5, 1, 0], &[1, 4], Types::NONE);
        let x = words.embedding(&param("table")?)?.add(input)?.dropout(0.25, "embedding")?;
        let normed = x.layer_norm(&param("gamma")?, &param("beta")?, 1e-5)?;
        let inner = normed.linear_gelu(&param("up")?, &param("up_bias")?, 1)?.gelu()?;
        let x = inner.linear(&param("down")?, 1)?.bias_residual(&param("down_bias")?, &x)?;
        x.linear(&param("nowhere")?, 1)?;
        let targets = ids(tape, &[5, 1, -1, 2], &[1, 4], Types::NONE);
        x.linear(&param("table")?, 1)?.cross_entropy(&targets)
    }

    fn seed(&self) -> Tensor {
        Tensor::from_slice(&self.device, &[0.5f64], [1]).unwrap()
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Event {
    GradShard(String),
    Ready(String),
}

impl Event {
    fn name(&self) -> &str {
        match self {
            Event::GradShard(name) | Event::Ready(name) => name,
        }
    }
}

/// Sums gradients by name and records the events; `at_share` observes each share.
struct Recorder<'a> {
    model: &'a Model,
    events: Vec<Event>,
    grads: BTreeMap<String, Vec<f64>>,
    at_share: Box<dyn FnMut() + 'a>,
}

impl<'a> Recorder<'a> {
    fn new(model: &'a Model) -> Self {
        Self { model, events: Vec::new(), grads: BTreeMap::new(), at_share: Box::new(|| {}) }
    }

    fn ready_names(&self) -> Vec<&str> {
        self.events.iter().filter(|event| matches!(event, Event::Ready(_))).map(Event::name).collect()
    }

    fn shares(&self) -> usize {
        self.events.len() - self.ready_names().len()
    }
}

impl GradSink for Recorder<'_> {
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()> {
        let name = self.model.name(share.id);
        assert!(!self.ready_names().contains(&name.as_str()), "{name} got a share after it was ready");
        let sum = self.grads.entry(name.clone()).or_insert_with(|| vec![0.0; grad.count()]);
        sum.iter_mut().zip(to_f64(&grad)).for_each(|(sum, share)| *sum += share);
        self.events.push(Event::GradShard(name));
        (self.at_share)();
        Ok(())
    }

    fn ready(&mut self, id: ParamId) -> Result<()> {
        self.events.push(Event::Ready(self.model.name(id)));
        Ok(())
    }
}

/// (loss, gradient of the input, gradients of the parameters).
type Results = (f64, Vec<f64>, BTreeMap<String, Vec<f64>>);

fn train(model: &Model, policy: Rc<dyn SavedPolicy>) -> Results {
    let (tape, input, loss) = model.forward(policy);
    let mut sink = Recorder::new(model);
    tape.backward(&loss, model.seed(), Weights::Now, &mut sink).unwrap();
    (loss.item().unwrap(), to_f64(&tape.take_grad(&input).unwrap()), sink.grads)
}

/// Moves saved tensors to its own memory, as runs of equal bytes (length, byte), and counts its bytes.
#[derive(Debug, Default)]
struct Elsewhere {
    held: Rc<Cell<usize>>,
    restored: Rc<Cell<usize>>,
}

#[derive(Debug)]
struct Away {
    runs: Vec<(u8, u8)>,
    /// A tensor of the same kind and device, without elements.
    like: Tensor,
    shape: meshwork_tensor::Shape,
    held: Rc<Cell<usize>>,
    restored: Rc<Cell<usize>>,
}

impl SavedPolicy for Elsewhere {
    fn save(&self, op: &'static str, tensor: Tensor) -> Result<Saved> {
        assert!(!op.is_empty());
        let mut runs: Vec<(u8, u8)> = Vec::new();
        for &byte in tensor.buffer().as_bytes()? {
            match runs.last_mut() {
                Some((length, last)) if *last == byte && *length < u8::MAX => *length += 1,
                _ => runs.push((1, byte)),
            }
        }
        self.held.set(self.held.get() + 2 * runs.len());
        let like = Tensor::zeros(tensor.device(), tensor.dtype(), [0])?;
        let (held, restored) = (Rc::clone(&self.held), Rc::clone(&self.restored));
        Ok(Saved::Packed(Box::new(Away { runs, like, shape: tensor.shape(), held, restored })))
    }
}

impl SavedTensor for Away {
    fn restore(&self) -> Result<Tensor> {
        self.restored.set(self.restored.get() + 1);
        let mut host = Buffer::zeros(self.like.dtype(), self.shape.count());
        let bytes = self.runs.iter().flat_map(|&(length, byte)| std::iter::repeat_n(byte, length.into()));
        host.as_bytes_mut()?.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte);
        Tensor::from_buffer(self.like.device(), self.like.device().upload(&host)?, self.shape)
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        self.held.set(self.held.get() - 2 * self.runs.len());
    }
}

#[test]
fn a_policy_that_packs_saved_tensors_away_changes_no_bit() {
    let model = Model::new();
    let policy = Elsewhere::default();
    let restored = Rc::clone(&policy.restored);
    assert_eq!(train(&model, Rc::new(policy)), train(&model, Rc::new(Keep)));
    assert!(restored.get() > 10, "the policy was asked");
}

#[test]
fn what_a_policy_holds_is_let_go_as_backward_proceeds() {
    let model = Model::new();
    let policy = Elsewhere::default();
    let held = Rc::clone(&policy.held);
    let (tape, _input, loss) = model.forward(Rc::new(policy));
    let (start, mut last) = (held.get(), held.get());
    assert!(start > 0);
    let mut falls = 0;
    let mut sink = Recorder::new(&model);
    sink.at_share = Box::new(|| {
        assert!(held.get() <= last, "backward saves nothing new");
        falls += usize::from(held.get() < last);
        last = held.get();
    });
    tape.backward(&loss, model.seed(), Weights::Now, &mut sink).unwrap();
    drop(sink);
    assert!(falls >= 5, "a little at each operation, not all at the end: {falls} times");
    assert_eq!(held.get(), 0, "of {start} bytes, while the tape is still there");
    drop(tape);
}

#[test]
fn packed_tensors_leave_the_device() {
    let live_after_forward = |policy: Rc<dyn SavedPolicy>| {
        let model = Model::new();
        let kept = model.forward(policy);
        let live = model.device.meter().live_bytes();
        drop(kept);
        live
    };
    assert!(live_after_forward(Rc::new(Elsewhere::default())) < live_after_forward(Rc::new(Keep)));
}

#[test]
fn kept_tensors_are_freed_by_backward_too() {
    let model = Model::new();
    let before = model.device.meter().live_bytes();
    let (tape, input, loss) = model.forward(Rc::new(Keep));
    let held = [input.tensor().buffer().bytes(), loss.tensor().buffer().bytes()];
    let mut sink = Recorder::new(&model);
    tape.backward(&loss, model.seed(), Weights::Now, &mut sink).unwrap();
    drop(tape.take_grad(&input));
    let left = model.device.meter().live_bytes() - before;
    assert_eq!(left, held.iter().sum::<usize>() as u64, "only the values that the caller holds");
}

#[test]
fn deferred_weight_gradients_equal_immediate_ones_bit_for_bit() {
    let model = Model::new();
    let (now_loss, now_input, now_params) = train(&model, Rc::new(Keep));
    for policy in [Rc::new(Keep) as Rc<dyn SavedPolicy>, Rc::new(Elsewhere::default())] {
        let (tape, input, loss) = model.forward(policy);
        let mut sink = Recorder::new(&model);
        tape.backward(&loss, model.seed(), Weights::Deferred, &mut sink).unwrap();
        assert_eq!(sink.shares(), 0, "no parameter has a gradient yet");
        assert_eq!(sink.ready_names(), ["nowhere"], "nothing more will come for it");
        assert_eq!(to_f64(&tape.take_grad(&input).unwrap()), now_input, "what flows on is there already");
        tape.weight_gradients(&mut sink).unwrap();
        assert_eq!((loss.item().unwrap(), &sink.grads), (now_loss, &now_params));
        assert_eq!(sink.ready_names(), READY);
        let events = sink.events.len();
        tape.weight_gradients(&mut sink).unwrap();
        assert_eq!(sink.events.len(), events, "a second call has nothing left to do");
    }
}

/// Reverse order of execution; the tied table when its first use, the embedding, has added its share.
const READY: [&str; 8] = ["nowhere", "down_bias", "down", "up", "up_bias", "gamma", "beta", "table"];

#[test]
fn a_gradient_is_ready_once_after_its_last_share() {
    let model = Model::new();
    let (tape, _input, loss) = model.forward(Rc::new(Keep));
    let mut sink = Recorder::new(&model);
    tape.backward(&loss, model.seed(), Weights::Now, &mut sink).unwrap();
    assert_eq!(sink.ready_names(), READY);
    let shares = |name: &str| sink.events.iter().filter(|event| **event == Event::GradShard(name.to_owned())).count();
    assert_eq!(READY.map(shares), [0, 1, 1, 1, 1, 1, 1, 2], "the table is used twice, the branch to nowhere never");
}

#[test]
fn a_tape_is_walked_once_and_the_seed_has_the_shape_of_the_output() {
    let model = Model::new();
    let (tape, input, loss) = model.forward(Rc::new(Keep));
    let mut sink = Recorder::new(&model);
    tape.backward(&loss, model.seed(), Weights::Now, &mut sink).unwrap();
    let again = tape.backward(&loss, model.seed(), Weights::Now, &mut sink).unwrap_err();
    assert_eq!(again.to_string(), "backward: this tape has already been walked");
    assert!(tape.take_grad(&input).is_some() && tape.take_grad(&input).is_none(), "a gradient is taken once");

    let (tape, _input, loss) = model.forward(Rc::new(Keep));
    let seed = Tensor::from_slice(&model.device, &integers("seed", 2), [2]).unwrap();
    let error = tape.backward(&loss, seed, Weights::Now, &mut sink).unwrap_err().to_string();
    assert!(error.contains("has its shape") && error.contains("[2]"), "{error}");
}

/// Records the values that it sees, and replaces one of them.
#[derive(Debug, Default)]
struct Looker {
    seen: RefCell<Vec<String>>,
    replace: Option<(usize, Option<&'static str>)>,
    by: Vec<usize>,
}

impl Observer for Looker {
    fn see(&self, seen: &Seen<'_>) -> Result<Option<Tensor>> {
        let &Seen { op, number, operand, makers, params, inputs, tensor, position, .. } = seen;
        assert_eq!(position, POSITION);
        let line = match operand {
            None => {
                assert_eq!(makers.len(), inputs.len());
                let of: Vec<_> = makers.iter().map(|maker| maker.map_or("-".to_owned(), |by| by.to_string())).collect();
                format!("#{number} {op} of {} reads {}", of.join(" "), params.join(" "))
            }
            Some(operand) => format!("#{number} d{operand} of {:?}", makers[0]),
        };
        self.seen.borrow_mut().push(line.trim_end().trim_end_matches(" reads").to_owned());
        match self.replace == Some((number, operand)) {
            false => Ok(None),
            true if self.by.is_empty() => {
                let values: Vec<f32> = tensor.to_vec::<f32>()?.iter().map(|x| x + 1.0).collect();
                Tensor::from_slice(tensor.device(), &values, tensor.shape()).map(Some)
            }
            true => Tensor::zeros(tensor.device(), tensor.dtype(), &self.by[..]).map(Some),
        }
    }
}

/// The results of a pass over the model: loss, gradients, gradient of the input.
type Passed = (f64, BTreeMap<String, Vec<f64>>, Vec<f32>);

/// The values that the observer sees in a pass, and the results of the pass.
fn observed(model: &Model, looker: Looker) -> Result<(Vec<String>, Passed)> {
    let looker = Rc::new(looker);
    let tape = Tape::new(alone(), Arc::clone(&model.params), Arc::clone(&model.device), Mode::Train, POSITION);
    tape.observe(looker.clone());
    let input = model.input(&tape);
    let loss = model.loss(&tape, &input)?;
    let mut recorder = Recorder::new(model);
    tape.backward(&loss, model.seed(), Weights::Now, &mut recorder)?;
    let grad = tape.take_grad(&input).unwrap().to_vec::<f32>()?;
    let seen = looker.seen.borrow().clone();
    Ok((seen, (loss.tensor().to_vec::<f64>()?[0], recorder.grads, grad)))
}

#[test]
fn an_observer_sees_every_output_and_every_gradient_of_a_value() {
    let model = Model::new();
    let (seen, (loss, grads, dx)) = observed(&model, Looker::default()).unwrap();
    assert_eq!(
        seen,
        [
            "#0 embedding of - - reads table",
            "#1 add of 0 -",
            "#2 dropout of 1",
            "#3 layer_norm of 2 - - reads gamma beta",
            "#4 linear_bias_gelu of 3 - - reads up up_bias",
            "#5 gelu of 4",
            "#6 linear of 5 - reads down",
            "#7 bias_residual of 6 - 2 reads down_bias",
            "#8 linear of 7 - reads nowhere",
            "#9 linear of 7 - reads table",
            "#10 cross_entropy of 9 -",
            // Back: the branch that leads nowhere has no gradient, token ids and targets have none either.
            "#10 dlogits of Some(9)",
            "#9 dx of Some(7)",
            "#7 dx of Some(6)",
            "#7 dresidual of Some(2)",
            "#6 dx of Some(5)",
            "#5 dx of Some(4)",
            "#4 dx of Some(3)",
            "#3 dx of Some(2)",
            "#2 dx of Some(1)",
            "#1 dx of Some(0)",
            "#1 dy of None", // from another stage
        ]
    );
    // Observing changes no bit.
    let (tape, input, unseen) = model.forward(Rc::new(Keep));
    let mut recorder = Recorder::new(&model);
    assert_eq!(unseen.tensor().to_vec::<f64>().unwrap(), [loss]);
    tape.backward(&unseen, model.seed(), Weights::Now, &mut recorder).unwrap();
    assert_eq!(recorder.grads, grads);
    assert_eq!(tape.take_grad(&input).unwrap().to_vec::<f32>().unwrap(), dx);
}

#[test]
fn what_an_observer_puts_in_a_values_place_goes_on() {
    let model = Model::new();
    let with = |replace, by| observed(&model, Looker { replace, by, ..Looker::default() });
    let (_, (loss, grads, dx)) = with(None, vec![]).unwrap();
    let (_, (other_loss, other_grads, _)) = with(Some((5, None)), vec![]).unwrap();
    assert!(other_loss != loss && other_grads["up"] != grads["up"]);
    let (_, (same_loss, other_grads, other_dx)) = with(Some((3, Some("x"))), vec![]).unwrap();
    assert_eq!((same_loss, &other_grads["up"], &other_grads["gamma"]), (loss, &grads["up"], &grads["gamma"]));
    assert!(other_dx != dx && other_grads["table"] != grads["table"]);
    for place in [(3, None), (3, Some("x"))] {
        let error = with(Some(place), vec![WIDTH, 4]).unwrap_err().to_string();
        assert_eq!(
            error,
            "layer_norm: an observer gave f32 for f32: dtype and shape must be the same (shapes [[8, 4], [1, 4, 8]])"
        );
    }
}
