//! A loss or metric of a sample that depends on the samples of its micro-batch is another one on every mesh. A trainer
//! that verifies holds one micro-batch against its samples one by one before its first step. Beside each wrong program
//! is the right one.

use meshwork_core::RankEnd;
use meshwork_core::{Axis, DType, Mesh, Ty, World};
use meshwork_cpu::Cpu;
use meshwork_engine::{LossScale, MixedPrecision, Numerics, Plan, ScheduleSpec, Trainer, Verify};
use meshwork_nn::{Activation, Batch, Field, Metric, Model, Per, Stage, StageSpec, sample_types};
use meshwork_optim::Sgd;
use meshwork_tensor::tape::HalfType;
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Shape, Tape, Tensor, Var};
use std::ops::Range;
use std::sync::Arc;

const WIDTH: usize = 4;
const BATCH: usize = 8;

/// What a program makes of the loss of each sample, `[samples]`, and of the output `[samples, WIDTH]`.
type Twist = fn(&Tape, &Var, &Var) -> Result<Var>;

/// Two linear layers with a twist of the loss.
struct Lines(Twist);

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Lines")
    }
}

struct Part(Twist, Vec<ParamId>);

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Part")
    }
}

impl Model for Lines {
    fn num_layers(&self) -> usize {
        2
    }

    fn fields(&self) -> Vec<Field> {
        ["x", "y"].map(|name| Field::new(name, DType::F32, [WIDTH])).to_vec()
    }

    fn stage(&self, params: &mut Declarations, _: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let mut declare = |layer| {
            let init = Init::Normal { std: 0.5 };
            params.declare(format!("{layer}.w"), &[WIDTH, WIDTH], Placement::replicated(), Role::Weight, init)
        };
        Ok(Box::new(Part(self.0, part.layers.clone().map(&mut declare).collect::<Result<_>>()?)))
    }

    fn activation(&self, mesh: &Mesh, _: usize, batch: &Batch) -> Result<Activation> {
        Ok(Activation { dtype: DType::F32, shape: Shape::new(&[batch.samples(), WIDTH]), types: sample_types(mesh) })
    }

    fn metrics(&self) -> Vec<Metric> {
        vec![Metric { name: "noted", per: Per::Sample }]
    }
}

impl Stage for Part {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        let x = match input {
            Some(x) => x.clone(),
            None => batch.var(tape, "x")?,
        };
        self.1.iter().try_fold(x, |x, &w| x.linear(&tape.param(w)?, 1))
    }

    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        (self.0)(tape, &output.mean_squared_error(&batch.var(tape, "y")?)?, output)
    }
}

fn batch(samples: Range<usize>) -> Batch {
    let values = |salt: usize| -> Vec<f32> {
        let of = |s: usize| (0..WIDTH).map(move |i| ((s * 7 + i * 3 + salt) % 11) as f32 / 8.0);
        samples.clone().flat_map(of).collect()
    };
    let batch = Batch::new(samples.len()).with("x", [WIDTH], values(0)).unwrap();
    batch.with("y", [WIDTH], values(5)).unwrap()
}

fn plan(mesh: &str, micros: usize) -> Plan {
    Plan {
        mesh: mesh.parse().unwrap(),
        global_batch_size: BATCH,
        num_microbatches: Some(micros),
        optimizer: Sgd { momentum: 0.5, weight_decay: 0.0 }.into(),
        ..Plan::default()
    }
}

/// The errors of all ranks in two steps; none if they end well.
fn refusals(plan: &Plan, twist: Twist) -> Vec<String> {
    let model: Arc<dyn Model> = Arc::new(Lines(twist));
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), plan, rank, Cpu::device())?;
        trainer.step(&batch(trainer.samples()))?;
        trainer.step(&batch(trainer.samples())).map(drop)
    });
    let Err(error) = ranks else { return Vec::new() };
    let told = |end: &Option<RankEnd>| match end {
        Some(RankEnd::Error(error)) => error.to_string(),
        other => format!("{other:?}"),
    };
    error.ends.iter().map(told).collect()
}

fn right(_: &Tape, loss: &Var, _: &Var) -> Result<Var> {
    Ok(loss.clone())
}

fn divided(_: &Tape, loss: &Var, _: &Var) -> Result<Var> {
    loss.scale(1.0 / loss.shape()[0] as f64)
}

fn auxiliary(tape: &Tape, loss: &Var, _: &Var) -> Result<Var> {
    tape.add_loss("noted", 0.1, &loss.scale(1.0 / loss.shape()[0] as f64)?)?;
    Ok(loss.clone())
}

fn auxiliary_right(tape: &Tape, loss: &Var, _: &Var) -> Result<Var> {
    tape.add_loss("noted", 0.1, loss)?;
    Ok(loss.clone())
}

/// The loss of each sample times the sum of the first numbers of all outputs of the micro-batch.
fn contrasted(tape: &Tape, loss: &Var, output: &Var) -> Result<Var> {
    let sum = |of: &Tensor| Ok::<_, meshwork_tensor::Error>(of.to_vec::<f32>()?.iter().step_by(WIDTH).sum::<f32>());
    let factor = match tape.device().has_values() {
        true => sum(output.tensor())?,
        false => 0.0,
    };
    loss.scale(f64::from(factor))
}

fn contrasted_by_design(tape: &Tape, loss: &Var, output: &Var) -> Result<Var> {
    tape.mixes_samples();
    contrasted(tape, loss, output)
}

/// A weight for each sample of a micro-batch of `SAMPLES`.
fn weighted<const SAMPLES: usize>(tape: &Tape, loss: &Var, _: &Var) -> Result<Var> {
    let weights = Tensor::from_slice(tape.device(), &[0.5f64; SAMPLES], [loss.shape()[0]])?;
    loss.mul(&tape.constant(weights, loss.types()))
}

const MESHES: [&str; 6] = ["dp=1", "dp=2", "tp=2", "pp=2", "dp=2,tp=2", "dp=2,pp=2"];

#[test]
fn a_loss_divided_by_the_samples_of_its_micro_batch_is_refused_on_every_mesh_by_all_ranks() {
    for mesh in MESHES {
        let plan = plan(mesh, 2);
        let per = BATCH / 2 / plan.mesh.data_degree();
        // Over dp the factor shows without numbers: it is another one than that of one rank.
        let wrong = if plan.mesh.data_degree() == 1 { divided } else { contrasted };
        let told = refusals(&plan, wrong);
        assert_eq!(told.len(), plan.mesh.world_size(), "{mesh}");
        for told in &told {
            assert!(told.starts_with("step 1: the loss of sample 0 is "), "{told}");
            assert!(told.contains(&format!(" in a micro-batch of {per} samples, and it is ")), "{told}");
            assert!(
                told.ends_with("or say by Tape::mixes_samples that samples depend on each other by design"),
                "{told}"
            );
        }
        assert!(told.windows(2).all(|two| two[0] == two[1]), "{told:?}");
        assert_eq!(refusals(&plan, right), [""; 0], "{mesh}");
        assert_eq!(refusals(&Plan { verify: Verify::Off, ..plan }, wrong), [""; 0], "{mesh}: unnoticed without");
    }
    // With one sample each, nothing is divided.
    for (mesh, micros) in [("dp=1", 8), ("pp=2", 8)] {
        assert_eq!(refusals(&plan(mesh, micros), divided), [""; 0], "{mesh}");
    }
}

#[test]
fn it_is_refused_in_canonical_numerics_in_16_bits_and_by_every_kind_of_schedule() {
    let loss_scale = LossScale::Fixed(1024.0);
    let mixed = Some(MixedPrecision { dtype: HalfType::Bf16, reduce_in_half: false, loss_scale });
    let named = |name| ScheduleSpec::named(name).unwrap();
    for plan in [
        Plan { numerics: Numerics::Canonical { blocks: 8 }, ..plan("tp=2,pp=2", 2) },
        Plan { mixed, ..plan("pp=2", 2) },
        Plan { schedule: named("zb_h2"), ..plan("pp=2", 2) },
        Plan { schedule: named("pipedream"), max_norm: 0.0, ..plan("pp=2", 4) },
        Plan { schedule: named("zb_v"), partition: vec![1, 0, 0, 1], ..plan("pp=2", 2) },
    ] {
        assert_eq!(refusals(&plan, right), [""; 0], "{:?}", plan.schedule);
        assert!(refusals(&plan, divided)[0].starts_with("step 1: the loss of sample 0 is "), "{:?}", plan.schedule);
    }
}

#[test]
fn auxiliary_losses_are_held_too_and_what_mixes_samples_by_design_says_so() {
    let told = refusals(&plan("pp=2", 2), auxiliary);
    assert!(told[1].starts_with("step 1: \"noted\" of sample 0 is "), "{told:?}");
    assert_eq!(refusals(&plan("dp=2,pp=2", 2), auxiliary_right), [""; 0]);
    assert!(refusals(&plan("dp=2,pp=2", 2), contrasted)[0].starts_with("step 1: the loss of sample 0 is "));
    assert_eq!(refusals(&plan("dp=2,pp=2", 2), contrasted_by_design), [""; 0]);
    // Samples gathered over a data axis say so by themselves.
    fn gathered(tape: &Tape, loss: &Var, output: &Var) -> Result<Var> {
        assert!(output.types().get(Axis::Dp) == Some(Ty::Shard(0)));
        output.all_gather_invariant(Axis::Dp, 0)?;
        contrasted(tape, loss, output)
    }
    assert_eq!(refusals(&plan("dp=2", 2), gathered), [""; 0]);
}

/// A model that takes micro-batches of one size alone is right there, and cannot be compared with another size.
#[test]
fn a_model_of_one_size_of_micro_batch_is_not_refused() {
    for mesh in ["dp=2", "pp=2"] {
        let plan = plan(mesh, 2);
        let weights: Twist = if mesh == "dp=2" { weighted::<2> } else { weighted::<4> };
        assert_eq!(refusals(&plan, weights), [""; 0], "{mesh}");
    }
}
