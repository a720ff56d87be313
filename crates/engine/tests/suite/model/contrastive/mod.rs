//! A model whose loss compares each sample with those of all data-parallel ranks: a contrastive loss (CLIP, Radford et
//! al., arXiv:2103.00020).

use meshwork_core::{Axis, DType, Mesh, World};
use meshwork_cpu::Cpu;
use meshwork_engine::{Numerics, Plan, TrainError, Trainer, Verify, WholeState, Zero, ZeroStage};
use meshwork_nn::{Activation, Batch, Field, Model, Stage, StageSpec, sample_types};
use meshwork_optim::{Decay, LrSchedule, Sgd};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Shape, Tape, Tensor, Var, random};
use std::ops::Range;
use std::sync::Arc;

const FIELDS: [(&str, usize); 2] = [("images", 5), ("texts", 3)];
const SHARED: usize = 4;
const BATCH: usize = 8;
const STEPS: usize = 3;

/// What differs between programs.
#[derive(Clone, Copy, Debug)]
struct Clip {
    /// Whether every rank computes the rows of all samples, and not those of its own alone.
    all_rows: bool,
    /// Whether a scale of each feature is trained that the logits are computed with.
    scales: bool,
    /// Whether the losses of all samples are cut again; else each rank would report those of others.
    splits: bool,
}

#[derive(Debug)]
struct Towers {
    weights: [ParamId; 2],
    scale: Option<ParamId>,
    clip: Clip,
}

impl Model for Clip {
    fn num_layers(&self) -> usize {
        1
    }

    fn fields(&self) -> Vec<Field> {
        FIELDS.map(|(name, width)| Field::new(name, DType::F32, [width])).to_vec()
    }

    fn stage(&self, params: &mut Declarations, _: &Mesh, _: &StageSpec) -> Result<Box<dyn Stage>> {
        let whole = Placement::replicated;
        let mut tower = |(name, width): (&str, usize)| {
            params.declare(name, &[SHARED, width], whole(), Role::Weight, Init::Normal { std: 0.7 })
        };
        let weights = [tower(FIELDS[0])?, tower(FIELDS[1])?];
        let scale = self.scales.then(|| params.declare("scale", &[SHARED], whole(), Role::Norm, Init::Ones));
        Ok(Box::new(Towers { weights, scale: scale.transpose()?, clip: *self }))
    }

    fn activation(&self, mesh: &Mesh, _: usize, batch: &Batch) -> Result<Activation> {
        let shape = Shape::new(&[batch.samples(), 2 * SHARED]);
        Ok(Activation { dtype: DType::F32, shape, types: sample_types(mesh) })
    }
}

impl Stage for Towers {
    fn forward(&self, tape: &Tape, batch: &Batch, _: Option<&Var>) -> Result<Var> {
        let embedded = |i: usize| batch.var(tape, FIELDS[i].0)?.linear(&tape.param(self.weights[i])?, 1);
        embedded(0)?.concat(&embedded(1)?, 1)
    }

    fn loss(&self, tape: &Tape, _: &Batch, output: &Var) -> Result<Var> {
        let mut own = [output.narrow(1, 0..SHARED)?, output.narrow(1, SHARED..2 * SHARED)?];
        let held = own[0].shape()[0];
        let mut first = tape.rank().mesh().data_rank(tape.rank().coords()) * held;
        let all = match self.clip.all_rows {
            false => [own[0].all_gather(Axis::DATA, 0)?, own[1].all_gather(Axis::DATA, 0)?],
            true => {
                own = [own[0].all_gather_invariant(Axis::DATA, 0)?, own[1].all_gather_invariant(Axis::DATA, 0)?];
                first = 0;
                own.clone()
            }
        };
        let targets: Vec<i32> = (first..first + own[0].shape()[0]).map(|sample| sample as i32).collect();
        let targets = tape.constant(Tensor::from_slice(tape.device(), &targets, [targets.len()])?, own[0].types());
        let found = |this: usize, other: usize| -> Result<Var> {
            let scaled = match self.scale {
                Some(scale) => own[this].mul(&tape.param(scale)?)?,
                None => own[this].clone(),
            };
            let logits = scaled.linear(&all[other], 1)?; // [b, B]
            logits.cross_entropy(&targets)
        };
        let loss = found(0, 1)?.add(&found(1, 0)?)?.scale(0.5)?;
        if self.clip.all_rows && self.clip.splits { loss.split(Axis::DATA, 0) } else { Ok(loss) }
    }
}

fn batch(step: usize, samples: Range<usize>) -> Batch {
    FIELDS.into_iter().fold(Batch::new(samples.len()), |batch, (name, width)| {
        let mut values = vec![0f32; samples.len() * width];
        random::fill_uniform(random::key(7, name), ((step * BATCH + samples.start) * width) as u64, &mut values);
        batch.with(name, [width], values).unwrap()
    })
}

fn plan(mesh: &str, stage: ZeroStage, numerics: Numerics) -> Plan {
    Plan {
        mesh: mesh.parse().unwrap(),
        global_batch_size: BATCH,
        num_microbatches: Some(1),
        optimizer: Sgd::default().into(),
        lr: LrSchedule { base: 0.25, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 },
        max_norm: 0.0,
        zero: Zero { stage, group: None },
        verify: Verify::Every(1),
        numerics,
        ..Plan::default()
    }
}

/// Losses and norms of some steps, and the weights behind them.
fn train(clip: Clip, plan: &Plan) -> std::result::Result<Vec<f64>, String> {
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(Arc::new(clip), plan, rank, Cpu::device())?;
        let mut found = Vec::new();
        for step in 0..STEPS {
            let report = trainer.step(&batch(step, trainer.samples()))?;
            found.extend([report.loss, report.grad_norm]);
        }
        Ok::<_, TrainError>((found, trainer.state()?))
    });
    let (mut found, states): (Vec<_>, Vec<_>) = ranks.map_err(|error| error.to_string())?.into_iter().unzip();
    let whole = WholeState::merge(&states).unwrap();
    let weights = whole.keys().flat_map(|key| whole.vector(key).unwrap()).map(|&weight| f64::from(weight));
    let mut found: Vec<f64> = found.swap_remove(0);
    found.extend(weights);
    Ok(found)
}

const MESHES: [&str; 5] = ["dp=2", "dp=2,ep=2", "dp=4,ep=2", "dp=4", "tp=2,dp=2"];

#[test]
fn a_contrastive_model_trains_on_every_mesh_as_on_one_rank() {
    for all_rows in [false, true] {
        let clip = Clip { all_rows, scales: true, splits: true };
        let alone = train(clip, &plan("dp=1", ZeroStage::Off, Numerics::Fast)).unwrap();
        assert!(alone[0] != alone[2] && alone.len() == 2 * STEPS + 36, "{alone:?}");
        let stages = [ZeroStage::Off, ZeroStage::States, ZeroStage::Gradients, ZeroStage::Weights];
        let plain = MESHES.map(|mesh| (mesh, ZeroStage::Off));
        for (mesh, stage) in plain.into_iter().chain(stages.map(|stage| ("dp=2", stage))) {
            let found = train(clip, &plan(mesh, stage, Numerics::Fast)).unwrap();
            for (got, wanted) in found.iter().zip(&alone) {
                assert!(
                    (got - wanted).abs() < 1e-5 * wanted.abs().max(1.0),
                    "{clip:?} on {mesh}, {stage:?}: {got} and {wanted}"
                );
            }
        }
    }
}

#[test]
fn in_canonical_numerics_it_has_the_bits_of_one_rank_or_is_refused() {
    let on = |mesh, clip| train(clip, &plan(mesh, ZeroStage::Off, Numerics::Canonical { blocks: 4 }));
    let clip = Clip { all_rows: true, scales: false, splits: true };
    let alone = on("dp=1", clip).unwrap();
    for mesh in MESHES {
        assert_eq!(on(mesh, clip).unwrap(), alone, "{mesh}");
    }
    for (clip, says) in [
        (Clip { all_rows: false, ..clip }, "all_gather_invariant in place of all_gather"),
        (Clip { scales: true, ..clip }, "it on each rank's own samples, before all_gather_invariant"),
    ] {
        let refused = on("dp=2", clip).unwrap_err();
        assert!(refused.contains(says), "{clip:?}: {refused}");
    }
}

/// Each rank would report the losses of all samples in the place of its own.
#[test]
fn losses_of_the_samples_of_other_ranks_are_refused() {
    let clip = Clip { all_rows: true, scales: false, splits: false };
    let says = "loss: on axis dp, it is Invariant: a number for each sample of the batch lies on the rank that has the sample; \
                split(I→S) it over Axis::DATA along dim 0 first";
    for mesh in ["dp=1", "dp=2"] {
        let refused = train(clip, &plan(mesh, ZeroStage::Off, Numerics::Fast)).unwrap_err();
        assert!(refused.contains(says), "{mesh}: {refused}");
    }
}
