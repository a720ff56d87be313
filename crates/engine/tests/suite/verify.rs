//! Programs that once gave wrong numbers without a word, because ranks disagreed about what each believed to be the
//! same: found when a trainer is made (plan, model), in every step (batch, number of steps), in the first (samples) or
//! in a verified one (values, weights). Beside each the corrected program.
//!
//! More than 400 lines: each wrong program stands beside the right one.

use meshwork_core::World;
use meshwork_core::rules::{self, Operand};
use meshwork_core::{Axis, DType, Mesh, Rank, SpmdError, Ty, Types};
use meshwork_core::{RankEnd, RunError};
use meshwork_cpu::Cpu;
use meshwork_engine::{
    Decoder, Numerics, Plan, Samples, StateKey, TrainError, TrainState, Trainer, Verify, WholeState, Zero, ZeroStage,
};
use meshwork_nn::{Activation, Batch, Field, Model, Stage, StageSpec};
use meshwork_optim::{LrSchedule, Sgd};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::tape::{Backward, Forward, Op};
use meshwork_tensor::{Declarations, Init, ParamId, ParamSpec, Placement, Result, Role, Tape, Tensor, Var};
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
fn refusals(result: std::result::Result<Vec<()>, RunError>) -> Vec<String> {
    let Err(error) = result else { return Vec::new() };
    let own = |end: &Option<RankEnd>| match end {
        Some(RankEnd::Error(error)) => Some(error.to_string()).filter(|text| !text.contains("stopped")),
        _ => None,
    };
    error.ends.iter().filter_map(own).collect()
}

/// Trains some steps with a twist, `before` changing what a rank does in each of them.
fn run(plan: &Plan, twist: Twist, steps: u64, before: impl Fn(&mut Trainer, &Rank, u64) -> f32 + Sync) -> Vec<String> {
    let model: Arc<dyn Model> = Arc::new(Line(twist));
    refusals(World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
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
    Types::new(&[(Axis::Ep, Ty::Shard(0)), (Axis::Dp, Ty::Shard(0)), (Axis::Tp, on_tp), (Axis::Cp, Ty::Invariant)])
}

fn right(_: &Tape, y: &Var) -> Result<Var> {
    Ok(y.clone())
}

#[test]
fn another_batch_on_one_rank_is_refused_at_the_first_step() {
    for mesh in ["tp=2", "dp=2,tp=2", "dp=2,pp=1,tp=2"] {
        // Whether values are verified or not: batches are compared in every step.
        let plan = plan(mesh, Verify::Off);
        let swapped = run(&plan, right, 3, |_, rank, step| if step == 2 && rank.world_rank() == 1 { 2.0 } else { 1.0 });
        assert_eq!(swapped.len(), plan.mesh.world_size(), "every rank has the error");
        for told in &swapped {
            assert!(
                told.starts_with(
                    "step 2: the samples of a dp rank, and the count of their terms, should be the same on each of its ranks, and rank 0 has \
                     those of hash "
                ) && told.ends_with("; give each rank the Trainer::samples() of one global batch"),
                "{told}"
            );
        }
        assert!(run(&plan, right, 3, |_, _, _| 1.0).is_empty());
    }
}

/// Every dp rank used to step on the samples of the first, also with `Verify::Every(1)`: the loss was off by up to 33%.
#[test]
fn the_same_samples_on_two_dp_ranks_are_refused() {
    let trained = |plan: &Plan, batch_of: fn(&Trainer, u64) -> Batch| {
        let model: Arc<dyn Model> = Arc::new(Line(right));
        refusals(World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model.clone(), plan, rank.clone(), Cpu::device())?;
            for step in 1..=4 {
                trainer.step(&batch_of(&trainer, step))?;
            }
            Ok::<(), TrainError>(())
        }))
    };
    let first = |trainer: &Trainer, _: u64| batch(0..trainer.samples().len(), 1.0);
    // In an order of its own on each rank.
    let shuffled = |trainer: &Trainer, _: u64| {
        let held = trainer.samples().len();
        let order = (0..held).map(|at| (at + trainer.samples().start / held) % held);
        let picked: Vec<Batch> = order.map(|sample| batch(sample..sample + 1, 1.0)).collect();
        let values =
            |name| picked.iter().flat_map(|one| one.values::<f32>(name).unwrap().to_vec()).collect::<Vec<f32>>();
        Batch::new(held).with("x", [WIDTH], values("x")).unwrap().with("y", [WIDTH], values("y")).unwrap()
    };
    let later = |trainer: &Trainer, step: u64| match step {
        3 => batch(0..trainer.samples().len(), 1.0),
        _ => batch(trainer.samples(), 1.0),
    };
    let own = |trainer: &Trainer, _: u64| batch(trainer.samples(), 1.0);
    let told = |step: u64, ranks: &str| {
        format!(
            "step {step}: the samples of a step should differ over dp, and those of ranks {ranks} are the same; give each data-parallel rank its \
             Trainer::samples() of the global batch; if samples repeat on purpose, set Plan::samples to Samples::MayRepeat"
        )
    };
    for (mesh, ranks) in [("dp=2", "0, 1"), ("dp=4", "0-3"), ("dp=2,tp=2", "0, 2"), ("dp=4,ep=2", "0-3")] {
        for verify in [Verify::Off, Verify::FirstStep, Verify::Every(1)] {
            let plan = plan(mesh, verify);
            let expected = vec![told(1, ranks); plan.mesh.world_size()];
            assert_eq!(trained(&plan, first), expected, "{mesh} {verify:?}");
            assert_eq!(trained(&plan, shuffled), expected, "{mesh} {verify:?}, in another order on each rank");
            assert!(trained(&plan, own).is_empty(), "{mesh} {verify:?}");
            let found = trained(&plan, later);
            match verify {
                Verify::Every(_) => assert_eq!(found, vec![told(3, ranks); plan.mesh.world_size()], "{mesh}"),
                _ => assert!(found.is_empty(), "step 3 is not verified"),
            }
            assert!(trained(&Plan { samples: Samples::MayRepeat, ..plan }, first).is_empty(), "on purpose");
        }
    }
}

/// The error used to say that "a plan, a model or a number of steps" differs, of whatever it was.
#[test]
fn what_differs_between_the_plans_of_two_ranks_is_named() {
    let model: Arc<dyn Model> = Arc::new(Line(right));
    let base = || plan("dp=2", Verify::Off);
    let trained = |other: &Plan| {
        let plans = [base(), other.clone()];
        refusals(World::threads(&plans[0].mesh).run_mesh(&plans[0].mesh, |rank| {
            Trainer::new(model.clone(), &plans[rank.world_rank()], rank.clone(), Cpu::device()).map(drop)
        }))
    };
    let lr = |base: f64| LrSchedule { base, ..Plan::default().lr };
    for (other, told) in [
        (
            Plan { seed: 99, ..base() },
            "the seed (Plan::seed) should be the same on all ranks, and rank 0 has 1234, rank 1 has 99; give every rank \
            the same Plan: initial weights and dropout follow from the seed and the place in the whole model and batch, so no rank needs a seed of \
            its own",
        ),
        (
            Plan { lr: lr(0.5), ..base() },
            "the learning rate (Plan::lr) should be the same on all ranks, and rank 0 has LrSchedule { base: 0.0003",
        ),
        (
            Plan { max_norm: 2.0, ..base() },
            "the norm at which gradients are clipped (Plan::max_norm) should be the same on all ranks, and rank 0 \
            has 1.0, rank 1 has 2.0; give every rank the same Plan",
        ),
        (
            Plan { mesh: "tp=2".parse().unwrap(), ..base() },
            "the mesh (Plan::mesh) should be the same on all ranks, and rank 0 has tp=1,dp=2,pp=1, \
            rank 1 has tp=2,dp=1,pp=1",
        ),
        (
            Plan { global_batch_size: 16, ..base() },
            "(Plan::global_batch_size) should be the same on all ranks, and rank 0 has 8, rank 1 has 16",
        ),
        (
            Plan { num_microbatches: Some(2), ..base() },
            "(Plan::num_microbatches) should be the same on all ranks, and rank 0 has Some(1), rank 1 \
            has Some(2)",
        ),
        (
            Plan { verify: Verify::Every(1), ..base() },
            "(Plan::verify) should be the same on all ranks, and rank 0 has Off, rank 1 has Every(1)",
        ),
        (
            Plan { optimizer: Sgd { momentum: 0.9, weight_decay: 0.0 }.into(), ..base() },
            "the update rule (Plan::optimizer) should be",
        ),
    ] {
        let found = trained(&other);
        assert_eq!(found.len(), 2, "every rank has the error: {found:?}");
        assert!(found.iter().all(|found| found.contains(told)) && found[0] == found[1], "{found:?} should say {told}");
    }
    assert!(trained(&base()).is_empty());
}

#[test]
fn what_differs_between_the_models_of_two_ranks_is_named() {
    /// A line of this width.
    #[derive(Debug)]
    struct Wide(usize, bool);
    impl Model for Wide {
        fn num_layers(&self) -> usize {
            1
        }
        fn fields(&self) -> Vec<Field> {
            Line(right).fields()
        }
        fn stage(&self, params: &mut Declarations, _: &Mesh, _: &StageSpec) -> Result<Box<dyn Stage>> {
            let init = Init::Normal { std: 0.5 };
            let w = params.declare("w", &[self.0, WIDTH], Placement::replicated(), Role::Weight, init)?;
            if self.1 {
                params.declare("b", &[self.0], Placement::replicated(), Role::Bias, Init::Zeros)?;
            }
            Ok(Box::new(Part(right, w)))
        }
        fn activation(&self, _: &Mesh, _: usize, _: &Batch) -> Result<Activation> {
            unreachable!("one stage")
        }
    }
    let plan = plan("dp=2", Verify::Off);
    let told = |models: [Wide; 2]| {
        let models = models.map(|model| Arc::new(model) as Arc<dyn Model>);
        let made = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            Trainer::new(models[rank.world_rank()].clone(), &plan, rank.clone(), Cpu::device()).map(drop)
        });
        refusals(made)
    };
    let shape = told([Wide(WIDTH, false), Wide(8, false)]);
    let wrong = "the shape of parameter w should be the same on all ranks, and rank 0 has [4, 4], rank 1 has [8, 4]; give every rank the same model";
    assert!(shape.len() == 2 && shape.iter().all(|told| told.starts_with(wrong)), "{shape:?}");
    let count = told([Wide(WIDTH, false), Wide(WIDTH, true)]);
    assert!(count.iter().all(|told| {
        told.starts_with("the number of parameters should be the same on all ranks, and rank 0 has 1, rank 1 has 2")
    }));
    assert!(count.len() == 2 && told([Wide(WIDTH, false), Wide(WIDTH, false)]).is_empty());
}

#[test]
fn another_number_of_steps_on_one_rank_is_named() {
    let plan = plan("dp=2", Verify::Off);
    let found = run(&plan, right, 2, |trainer, rank, step| {
        if step == 1 && rank.world_rank() == 1 {
            let state = TrainState { step: 7, ..trainer.state().unwrap() };
            trainer.load_state(&WholeState::merge(&[state]).unwrap()).unwrap();
        }
        1.0
    });
    let told = "the number of steps should be the same on all ranks, and rank 0 has 1, rank 1 has 8; call step() as often on every rank, and load \
                the same state on each";
    assert!(found.iter().all(|found| found.ends_with(told)) && found.len() == 2, "{found:?}");
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
                    && error.contains("have different bits")
                    && error.ends_with(
                        "load the same weights and states on every rank, and let nothing but the update of all ranks change them"
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
        let loaded = run(&plan("dp=2,tp=2", Verify::FirstStep), right, 3, drift(part));
        assert!(!loaded.is_empty(), "the step after a load is verified");
        assert!(
            loaded.iter().all(|error| error.starts_with(&format!("step 3: the {named} of w should"))),
            "{loaded:?}"
        );
        assert!(run(&plan("dp=2,tp=2", Verify::Off), right, 3, drift(part)).is_empty(), "unnoticed without");
    }
}

/// A bit of one weight flips on one rank, in a run that verifies nothing: the next comparison of replicas tells.
#[test]
fn a_flipped_bit_of_a_replica_is_found_with_rank_parameter_and_step() {
    let run = |mesh: &str, stage: ZeroStage, flips: bool| {
        let plan = Plan { zero: Zero { stage, group: None }, ..plan(mesh, Verify::Off) };
        let model: Arc<dyn Model> = Arc::new(Line(right));
        refusals(World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model.clone(), &plan, rank.clone(), Cpu::device())?;
            for _ in 1..=3 {
                trainer.step(&batch(trainer.samples(), 1.0))?;
                trainer.check_replicas()?;
            }
            if flips && rank.world_rank() == 2 {
                let mut state = trainer.state()?;
                let held = state.pieces.iter_mut().find(|held| held.key.state.is_none()).expect("weights");
                held.piece.values[0] = f32::from_bits(held.piece.values[0].to_bits() ^ 1);
                trainer.load_state(&WholeState::merge(&[state])?)?;
            }
            trainer.check_replicas()
        }))
    };
    for stage in [ZeroStage::Off, ZeroStage::States, ZeroStage::Gradients, ZeroStage::Weights] {
        for mesh in ["dp=4", "dp=2,tp=2"] {
            assert_eq!(run(mesh, stage, false), Vec::<String>::new(), "{mesh} {stage:?}: no false alarm");
        }
    }
    for (mesh, told) in
        [("dp=4", "the bits of rank 2 differ from those of the others"), ("dp=2,tp=2", "have different bits")]
    {
        let found = run(mesh, ZeroStage::Off, true);
        assert_eq!(found.len(), 4, "{mesh}: every rank has the error");
        for error in found {
            assert!(error.starts_with("step 3: the weights of w should be the same over "), "{mesh}: {error}");
            assert!(error.contains(told), "{mesh}: {error}");
        }
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
        "step 1: a constant of [8, 4] (stage 0, micro-batch 0) is Partial over tp, and it has the same bits on all of them; its sum \
         would count it once for each rank: type it Invariant, or give each rank its own part of the sum"
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
    assert!(verified(Verify::Off).is_empty());
    assert_eq!(verified(Verify::FirstStep), [0]);
    assert_eq!(verified(Verify::Every(3)), [0, 3, 6]);
    assert_eq!(verified(Verify::Every(0)), [0, 1, 2, 3, 4, 5, 6]);
}

/// Such a decoder used to mix the logits of two models.
#[test]
fn a_decoder_of_other_weights_or_another_plan_on_one_rank_is_refused() {
    let (base, model) = (plan("tp=2", Verify::FirstStep), Arc::new(Line(right)) as Arc<dyn Model>);
    let made = |plans: [&Plan; 2], capacities: [usize; 2], weights: [f32; 2]| {
        refusals(World::threads(&base.mesh).run_mesh(&base.mesh, |rank| {
            let me = rank.world_rank();
            let read = |_: &ParamSpec, slice: &LocalSlice| Ok::<_, TrainError>(vec![weights[me]; slice.stored.count()]);
            Decoder::new(model.clone(), plans[me], rank, Cpu::device(), capacities[me], read).map(drop)
        }))
    };
    let told = |found: Vec<String>, told: &str| {
        assert!(found.len() == 2 && found.iter().all(|found| found.starts_with(told)), "{found:?}");
    };
    let other = Plan { numerics: Numerics::Canonical { blocks: 2 }, ..base.clone() };
    told(
        made([&base; 2], [8, 8], [0.5, 0.25]),
        "the weights of w should be the same over tp, and ranks 0, 1 have different bits; load the same",
    );
    told(
        made([&base; 2], [8, 9], [0.5; 2]),
        "the number of tokens that a sequence may have should be the same on all ranks, and rank 0 has 8, rank 1 has 9",
    );
    told(
        made([&base, &other], [8, 8], [0.5; 2]),
        "the order of sums (Plan::numerics) should be the same on all ranks, and rank 0 has Fast, rank 1",
    );
    assert!(made([&base; 2], [8, 8], [0.5; 2]).is_empty());
}
