//! Programs that once gave wrong numbers without a word, because ranks disagreed about what each believed to be the same: found by
//! hash, in every step (batch, plan, number of steps) or in a verified one (values, weights). Beside each the corrected program.

use meshwork_core::comm::thread::{self, WorldError};
use meshwork_core::rules::{self, Operand};
use meshwork_core::{Axis, DType, Mesh, Rank, SpmdError, Ty, Types};
use meshwork_engine::{Plan, StateKey, TrainError, Trainer, Verify, WholeState};
use meshwork_nn::{Activation, Batch, Field, Model, Stage, StageSpec};
use meshwork_optim::Sgd;
use meshwork_tensor::cpu::Cpu;
use meshwork_tensor::tape::{Backward, Forward, Op};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Tensor, Var};
use std::sync::Arc;

const WIDTH: usize = 4;
const BATCH: usize = 8;

/// What a program makes of `x · wᵀ [samples, WIDTH]`, which is `Invariant` on tp.
type Twist = fn(&Tape, &Var) -> Result<Var>;

/// Linear regression with a twist.
struct Line(Twist);

impl std::fmt::Debug for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Line")
    }
}

struct Part(Twist, ParamId);

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Part")
    }
}

impl Model for Line {
    fn num_layers(&self) -> usize {
        1
    }

    fn fields(&self) -> Vec<Field> {
        ["x", "y"].map(|name| Field::new(name, DType::F32, [WIDTH])).to_vec()
    }

    fn stage(&self, params: &mut Declarations, _: &Mesh, _: &StageSpec) -> Result<Box<dyn Stage>> {
        let init = Init::Normal { std: 0.5 };
        let w = params.declare("w", &[WIDTH, WIDTH], Placement::replicated(), Role::Weight, init)?;
        Ok(Box::new(Part(self.0, w)))
    }

    fn activation(&self, _: &Mesh, _: usize, _: &Batch) -> Result<Activation> {
        unreachable!("one stage")
    }
}

impl Stage for Part {
    fn forward(&self, tape: &Tape, batch: &Batch, _: Option<&Var>) -> Result<Var> {
        (self.0)(tape, &batch.var(tape, "x")?.linear(&tape.param(self.1)?, 1)?)
    }

    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        output.mean_squared_error(&batch.var(tape, "y")?)
    }
}

fn batch(samples: std::ops::Range<usize>, scale: f32) -> Batch {
    let values = |salt: usize| -> Vec<f32> {
        samples
            .clone()
            .flat_map(|s| (0..WIDTH).map(move |i| scale * ((s * 7 + i * 3 + salt) % 11) as f32 / 8.0))
            .collect()
    };
    let batch = Batch::new(samples.len()).with("x", [WIDTH], values(0)).unwrap();
    batch.with("y", [WIDTH], values(5)).unwrap()
}

fn plan(mesh: &str, verify: Verify) -> Plan {
    Plan {
        mesh: mesh.parse().unwrap(),
        global_batch_size: BATCH,
        num_microbatches: Some(1),
        optimizer: Sgd { momentum: 0.5, weight_decay: 0.0 }.into(),
        verify,
        ..Plan::default()
    }
}

/// The errors of the ranks that found something, in the order of ranks; none if the run ended well.
fn refusals(result: std::result::Result<Vec<()>, WorldError<TrainError>>) -> Vec<String> {
    let Err(error) = result else { return Vec::new() };
    let own = |end: &Option<thread::RankEnd<TrainError>>| match end {
        Some(thread::RankEnd::Error(error)) => Some(error.to_string()).filter(|text| !text.contains("stopped")),
        _ => None,
    };
    error.ends.iter().filter_map(own).collect()
}

/// Trains some steps with a twist, `before` changing what a rank does in each of them.
fn run(plan: &Plan, twist: Twist, steps: u64, before: impl Fn(&mut Trainer, &Rank, u64) -> f32 + Sync) -> Vec<String> {
    let model: Arc<dyn Model> = Arc::new(Line(twist));
    refusals(thread::run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), plan, rank.clone(), Cpu::device())?;
        for step in 1..=steps {
            let scale = before(&mut trainer, &rank, step);
            trainer.step(&batch(trainer.samples(), scale))?;
        }
        Ok::<(), TrainError>(())
    }))
}

/// A value that differs over tp.
fn own(tape: &Tape, shape: &[usize]) -> Tensor {
    let count = shape.iter().product();
    let value = 0.25 * tape.rank().coords().get(Axis::Tp) as f32;
    Tensor::from_slice(tape.device(), &vec![value; count], shape).unwrap()
}

fn types(on_tp: Ty) -> Types {
    Types::of(&[(Axis::Ep, Ty::Shard(0)), (Axis::Dp, Ty::Shard(0)), (Axis::Tp, on_tp), (Axis::Cp, Ty::Invariant)])
}

fn right(_: &Tape, y: &Var) -> Result<Var> {
    Ok(y.clone())
}

#[test]
fn another_batch_on_one_rank_is_refused_at_the_first_step() {
    for mesh in ["tp=2", "dp=2,tp=2"] {
        // Whether values are verified or not: batches are compared in every step.
        let plan = plan(mesh, Verify::Off);
        let swapped = run(&plan, right, 3, |_, rank, step| if step == 2 && rank.world_rank() == 1 { 2.0 } else { 1.0 });
        assert!(
            swapped.contains(
                &"step 2: rank 0 has a batch, or a count of its terms, that differs from rank 1's; both are of one dp rank and train on the same samples: \
                  give each the Trainer::samples() of one global batch"
                    .to_owned()
            ),
            "{swapped:?}"
        );
        assert!(run(&plan, right, 3, |_, _, _| 1.0).is_empty());
    }
}

#[test]
fn another_plan_on_one_rank_is_refused_at_the_first_step() {
    let plans = [plan("dp=2", Verify::Off), Plan { seed: 99, ..plan("dp=2", Verify::Off) }];
    let model: Arc<dyn Model> = Arc::new(Line(right));
    let trained = |plan_of: fn(usize) -> usize| {
        refusals(thread::run_mesh(&plans[0].mesh, |rank| {
            let plan = &plans[plan_of(rank.world_rank())];
            let mut trainer = Trainer::new(model.clone(), plan, rank.clone(), Cpu::device())?;
            trainer.step(&batch(trainer.samples(), 1.0)).map(drop)
        }))
    };
    let refused = trained(|rank| rank);
    assert!(
        refused.contains(
            &"step 1: rank 1 has a plan, a model or a number of steps that differs from rank 0's; make every rank's Trainer of the \
              same model and plan, and call step() as often on each"
                .to_owned()
        ),
        "{refused:?}"
    );
    assert!(trained(|_| 1).is_empty());
}

#[test]
fn weights_that_have_drifted_apart_are_named() {
    let drift = |part: Option<&'static str>| {
        move |trainer: &mut Trainer, rank: &Rank, step: u64| {
            if step == 3 && rank.world_rank() == 2 {
                let mut state = trainer.state().unwrap();
                let key = StateKey { parameter: "w".to_owned(), state: part.map(str::to_owned) };
                let held = state.pieces.iter_mut().find(|held| held.key == key).unwrap();
                held.piece.values[5] += 1e-7;
                trainer.load_state(&WholeState::merge(&[state]).unwrap()).unwrap();
            }
            1.0
        }
    };
    for (part, named) in [(None, "weights"), (Some("momentum_buffer"), "optimizer states")] {
        let found = run(&plan("dp=2,tp=2", Verify::Every(1)), right, 4, drift(part));
        assert!(!found.is_empty(), "{named}");
        for error in found {
            assert!(
                error.starts_with(&format!("step 3: the {named} of w should be the same over "))
                    && error.contains("ranks 2, 3 have different bits")
                    && error.ends_with(
                        "load the same weights and states on every rank, and let only the trainer change them"
                    ),
                "{error}"
            );
        }
        assert!(!run(&plan("dp=2,tp=2", Verify::Every(2)), right, 3, drift(part)).is_empty(), "step 3 is verified");
        let of_four = run(&plan("dp=4", Verify::Every(1)), right, 4, drift(part));
        let one = format!(
            "step 3: the {named} of w should be the same over dp, and the bits of rank 2 differ from those of the others;"
        );
        assert!(of_four.iter().all(|error| error.starts_with(&one)) && !of_four.is_empty(), "{of_four:?}");
        assert!(run(&plan("dp=2,tp=2", Verify::FirstStep), right, 3, drift(part)).is_empty(), "only the first step is");
    }
}

#[test]
fn a_constant_that_differs_is_not_invariant() {
    fn wrong(tape: &Tape, y: &Var) -> Result<Var> {
        y.mul(&tape.constant(own(tape, &y.shape()), types(Ty::Invariant)))
    }
    fn corrected(tape: &Tape, y: &Var) -> Result<Var> {
        let half = Tensor::from_slice(tape.device(), &[0.5f32; BATCH * WIDTH], y.shape())?;
        y.mul(&tape.constant(half, types(Ty::Invariant)))
    }
    let found = run(&plan("tp=2", Verify::FirstStep), wrong, 1, |_, _, _| 1.0);
    assert_eq!(
        found[0],
        "step 1: a constant of [8, 4] (stage 0, micro-batch 0) is Invariant over tp, and ranks 0, 1 have \
         different bits; give every rank of the axis the same values, or type it Shard or Varying"
    );
    assert!(run(&plan("tp=2", Verify::FirstStep), corrected, 1, |_, _, _| 1.0).is_empty());
    assert!(run(&plan("tp=2", Verify::Off), wrong, 1, |_, _, _| 1.0).is_empty(), "unnoticed without");
}

#[test]
fn a_constant_that_is_the_same_on_all_ranks_is_no_partial_sum() {
    fn with(tape: &Tape, y: &Var, value: Tensor) -> Result<Var> {
        y.add(&tape.constant(value, types(Ty::Partial)).all_reduce(Axis::Tp)?)
    }
    fn wrong(tape: &Tape, y: &Var) -> Result<Var> {
        with(tape, y, Tensor::from_slice(tape.device(), &[0.5f32; BATCH * WIDTH], y.shape())?)
    }
    let found = run(&plan("tp=2", Verify::FirstStep), wrong, 1, |_, _, _| 1.0);
    assert_eq!(
        found[0],
        "step 1: a constant of [8, 4] (stage 0, micro-batch 0) is Partial over tp, and it has the same bits on all of them: its sum \
         would count it once for each rank; type it Invariant, or give each rank its own part of the sum"
    );
    for corrected in [(|tape, y| with(tape, y, own(tape, &y.shape()))) as Twist, |tape, y| {
        with(tape, y, Tensor::zeros(tape.device(), DType::F32, y.shape())?)
    }] {
        assert!(run(&plan("tp=2", Verify::FirstStep), corrected, 1, |_, _, _| 1.0).is_empty());
    }
}

/// `y = x` times a number in forward, and times another in backward.
#[derive(Debug)]
struct Times([fn(&Rank) -> f32; 2]);

impl Times {
    fn run(&self, at: usize, tape: &Tape, x: &Tensor) -> Result<Tensor> {
        let factor = self.0[at](tape.rank());
        let values: Vec<f32> = x.to_vec::<f32>()?.into_iter().map(|x| factor * x).collect();
        Tensor::from_slice(x.device(), &values, x.shape())
    }
}

impl Op for Times {
    fn name(&self) -> &'static str {
        "times"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["x"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::pointwise(self.name(), operands[0])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        self.run(0, cx.tape(), inputs[0])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.run(1, cx.tape(), &grad)?)])
    }
}

fn two(_: &Rank) -> f32 {
    2.0
}

fn by_rank(rank: &Rank) -> f32 {
    1.0 + rank.coords().get(Axis::Tp) as f32
}

#[test]
fn an_operation_that_lies_about_its_type_is_named() {
    let found =
        run(&plan("tp=2", Verify::FirstStep), |tape, y| tape.apply(Times([by_rank, two]), &[y]), 1, |_, _, _| 1.0);
    assert_eq!(
        found[0],
        "step 1: the output of times (operation 1 of stage 0, micro-batch 0) is Invariant over tp, and ranks 0, 1 have \
         different bits; correct the types that the operation infers, or give it inputs that are what their types say"
    );
    let right = |tape: &Tape, y: &Var| tape.apply(Times([two, two]), &[y]);
    assert!(run(&plan("tp=2", Verify::FirstStep), right, 1, |_, _, _| 1.0).is_empty());
}

#[test]
fn an_operation_whose_gradient_differs_between_ranks_is_named() {
    let found =
        run(&plan("tp=2", Verify::FirstStep), |tape, y| tape.apply(Times([two, by_rank]), &[y]), 1, |_, _, _| 1.0);
    assert_eq!(
        found[0],
        "step 1: the gradient that times gives of x (operation 1 of stage 0, micro-batch 0) is Invariant over tp, and ranks 0, 1 \
         have different bits; correct the operation's backward: each rank must give the same gradient, summed \
         over the axis if ranks hold parts"
    );
}

#[test]
fn steps_are_verified_as_the_plan_says() {
    let verified = |verify: Verify| (0..7).filter(|&step| verify.includes(step)).collect::<Vec<u64>>();
    assert_eq!(verified(Verify::Off), []);
    assert_eq!(verified(Verify::FirstStep), [0]);
    assert_eq!(verified(Verify::Every(3)), [0, 3, 6]);
    assert_eq!(verified(Verify::Every(0)), [0, 1, 2, 3, 4, 5, 6]);
}
