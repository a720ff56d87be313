//! What a model may ask of the engine besides its loss: auxiliary losses, reported metrics, parameter groups, frozen
//! parameters and statistics. They hold on every mesh and schedule, and a model that contradicts itself is refused.

mod contrastive;

use crate::runs::{Vectors, on_ranks, overlapped, vectors};
use crate::tower;
use meshwork_core::{Mesh, Rank, World};
use meshwork_cpu::Cpu;
use meshwork_engine::{Numerics, Plan, Recompute, ScheduleSpec, StepReport, Trainer, WholeState};
use meshwork_nn::Model;
use meshwork_tensor::Precision;
use meshwork_tensor::Role;
use meshwork_testkit::parity::assert_close;
use std::sync::Arc;
use tower::{BATCH, Mistake, PENALTY, RATE, SLOW, Tower, batch, plan, tower};

const STEPS: usize = 3;

/// Reports of some steps, which overlap where the schedule lets them, and the state behind them.
fn train(model: &Arc<dyn Model>, plan: &Plan, opaque: bool) -> (Vec<StepReport>, Vectors) {
    let (mut reports, state) = on_ranks(model, plan, opaque, |trainer| overlapped(trainer, 0..STEPS, batch));
    assert!(reports.iter().all(|reports| reports.len() == STEPS));
    (reports.swap_remove(0), vectors(&state))
}

fn alone(model: &Arc<dyn Model>) -> Trainer {
    let plan = plan("dp=1");
    Trainer::new(model.clone(), &plan, Arc::new(Rank::recording(&plan.mesh, 0).unwrap()), Cpu::device()).unwrap()
}

/// The gradient is that of the loss plus the auxiliary loss: moving along the gradient of each weight changes their sum
/// accordingly.
#[test]
fn gradients_are_those_of_the_loss_and_the_auxiliary_losses() {
    let model = tower(2);
    let mut trained = alone(&model);
    let mut other = alone(&model);
    let before = WholeState::merge(&[trained.state().unwrap()]).unwrap();
    trained.step(&batch(0, 0..BATCH)).unwrap();
    let names: Vec<_> = trained.params().declarations().ids().collect();
    let mut checked = 0;
    for id in names {
        let (spec, gradient) = (trained.params().declarations().spec(id).clone(), trained.gradient(id).unwrap());
        let name = spec.name;
        if spec.group.frozen {
            assert!(gradient.is_empty(), "a frozen weight has no gradient");
            continue;
        }
        let key = before.keys().find(|key| key.parameter == name).unwrap();
        let weights = before.vector(key).unwrap();
        let square: f64 = gradient.iter().map(|&g| f64::from(g).powi(2)).sum();
        let step = 1e-2 / square.sqrt();
        let mut objective = |by: f64| {
            let moved: Vec<f32> =
                weights.iter().zip(&gradient).map(|(&w, &g)| w + (by * f64::from(g)) as f32).collect();
            other.load_parameter(&name, &moved).unwrap();
            let found = other.evaluate([batch(0, 0..BATCH)]).unwrap();
            found.loss + PENALTY * found.metrics.iter().find(|(metric, _)| *metric == "penalty").unwrap().1
        };
        let slope = (objective(step) - objective(-step)) / (2.0 * step);
        objective(0.0);
        assert!((slope / square - 1.0).abs() < 1e-2, "{name}: {slope} against {square}");
        checked += 1;
    }
    assert_eq!(checked, 5);
}

/// SGD moves each weight by its group's rate; a frozen one stays.
#[test]
fn each_group_has_its_learning_rate_and_a_frozen_weight_stays() {
    let mut trainer = alone(&tower(2));
    let values = |trainer: &Trainer| {
        let params = trainer.params();
        params.declarations().ids().map(|id| params.read(id).unwrap()).collect::<Vec<_>>()
    };
    let before = values(&trainer);
    trainer.step(&batch(0, 0..BATCH)).unwrap();
    let after = values(&trainer);
    let ids: Vec<_> = trainer.params().declarations().ids().collect();
    for (at, id) in ids.into_iter().enumerate() {
        let spec = trainer.params().declarations().spec(id).clone();
        let gradient = trainer.gradient(id).unwrap();
        if spec.role == Role::Buffer {
            assert_ne!(before[at], after[at], "{}: the step moves its average", spec.name);
            continue;
        }
        if spec.group.frozen {
            assert_eq!(before[at], after[at], "{}", spec.name);
            continue;
        }
        let rate = if spec.name.ends_with("down") { RATE * SLOW } else { RATE };
        let wanted: Vec<f32> = before[at].iter().zip(&gradient).map(|(w, g)| w - rate as f32 * g).collect();
        assert_close(&spec.name, &after[at], &wanted, 0.0);
        assert_ne!(before[at], after[at], "{}", spec.name);
    }
}

/// The gradient norm, which clipping scales by, leaves frozen weights out: it is that of the gradients that exist.
#[test]
fn frozen_weights_have_no_part_in_the_norm() {
    let mut trainer = alone(&tower(2));
    let report = trainer.step(&batch(0, 0..BATCH)).unwrap();
    let ids: Vec<_> = trainer.params().declarations().ids().collect();
    let squares = ids.iter().flat_map(|&id| trainer.gradient(id).unwrap()).map(|g| f64::from(g).powi(2)).sum::<f64>();
    assert!((report.grad_norm / squares.sqrt() - 1.0).abs() < 1e-6, "{} against {}", report.grad_norm, squares.sqrt());
}

/// The norm that gradients are clipped to.
const CLIP: f64 = 16.0;

/// Every axis, every kind of schedule, re-materialisation and the opaque device: in canonical numerics the bits of one
/// rank, in the loss, the norm, the metric of one stage and the weights. The report adds up the auxiliary losses of all
/// stages in the order of the ranks: nothing is trained from that sum, and its last bit may differ.
#[test]
fn every_mesh_gives_the_bits_of_one_rank() {
    let model = tower(4);
    let canonical = |mesh: &str| Plan { numerics: Numerics::Canonical { blocks: 8 }, max_norm: CLIP, ..plan(mesh) };
    let (reports, state) = train(&model, &canonical("dp=1"), false);
    let numbers = |reports: &[StepReport]| -> Vec<_> {
        reports.iter().map(|report| (report.loss, report.grad_norm, report.metrics[1])).collect()
    };
    let norms: Vec<f64> = reports.iter().map(|report| report.grad_norm).collect();
    let clipped = norms.iter().filter(|&&norm| norm > CLIP).count();
    assert!(clipped > 0 && clipped < STEPS, "one step is rolled back where steps overlap, another is not: {norms:?}");
    let penalties = |reports: &[StepReport]| reports.iter().map(|report| report.metrics[0].1).collect::<Vec<f64>>();
    assert!(
        reports.iter().all(|report| report.metrics.len() == 2 && report.metrics.iter().all(|(_, mean)| *mean > 0.0))
    );
    let (named, stage) = (|name: &str| ScheduleSpec::named(name).unwrap(), Recompute::Stage);
    for (mesh, schedule, recompute, opaque) in [
        ("dp=2", "1f1b", Recompute::None, false),
        ("tp=2", "gpipe", stage, false),
        ("pp=2", "1f1b", stage, true),
        ("pp=4", "gpipe", Recompute::Selective, false),
        ("pp=2", "zb_v", Recompute::None, false),
        ("dp=2,pp=2", "interleaved_1f1b", Recompute::None, false),
        ("dp=2,tp=2,pp=2", "zb_h1", Recompute::None, true),
        ("tp=2,pp=2", "zb_h2", Recompute::None, false),
    ] {
        let plan = Plan { schedule: named(schedule), recompute, ..canonical(mesh) };
        let (found, weights) = train(&model, &plan, opaque);
        assert_eq!(numbers(&found), numbers(&reports), "{mesh} {schedule}");
        for (found, wanted) in penalties(&found).iter().zip(penalties(&reports)) {
            assert!((found / wanted - 1.0).abs() < 1e-15, "{mesh} {schedule}: {found} against {wanted}");
        }
        assert!(weights == state, "{mesh} {schedule}: weights, states and buffers");
    }
}

/// Fast numerics: one mesh against another, by rounding alone.
#[test]
fn fast_numerics_differ_by_rounding() {
    let model = tower(4);
    let (reports, state) = train(&model, &plan("dp=1"), false);
    for mesh in ["dp=4", "tp=4", "dp=2,tp=2,pp=2"] {
        let (found, weights) = train(&model, &plan(mesh), false);
        for (found, wanted) in found.iter().zip(&reports) {
            let of = |report: &StepReport| {
                [&[report.loss, report.grad_norm][..], &report.metrics.iter().map(|m| m.1).collect::<Vec<_>>()].concat()
            };
            assert_close(mesh, &of(found), &of(wanted), 0.0);
        }
        for (key, wanted) in &state {
            assert_close(&key.to_string(), &weights[key], wanted, 0.0);
        }
    }
}

#[test]
fn a_model_that_contradicts_itself_is_refused() {
    let refused = |mistake, mesh: &str| {
        let (model, plan): (Arc<dyn Model>, _) = (Arc::new(Tower { layers: 2, mistake }), plan(mesh));
        let error = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
            trainer.step(&batch(0, trainer.samples()))
        });
        error.map(drop).unwrap_err().to_string()
    };
    for (mistake, mesh, says) in [
        (
            Mistake::Unread,
            "dp=1",
            "parameter forgotten is declared and nothing reads it in training: freeze it, or leave it out",
        ),
        (
            Mistake::UndeclaredMetric,
            "dp=2",
            "stage 0 reports \"sizes\", which the model does not declare; it declares [\"penalty\", \"size\"]",
        ),
        (Mistake::ReplicateLoss, "tp=2", "the auxiliary loss is Replicate: each rank would add a gradient of its own"),
        (
            Mistake::ShapeOfMetric,
            "dp=1",
            "size is f32 of 2 dims: an auxiliary loss or metric is one f64 for each sample",
        ),
        (Mistake::Activation, "pp=2", "the activation is "),
        (
            Mistake::SharedMask,
            "dp=1",
            "two operations draw their randomness under the name \"mask\": their masks would be the same",
        ),
        // One block a stage: each tape draws the name once.
        (Mistake::SharedMask, "pp=2", "two operations draw their randomness under the name \"mask\""),
    ] {
        let error = refused(mistake, mesh);
        assert!(error.contains(says), "{mistake:?}: {error}");
    }
}

/// The reductions of gradients follow a pass before step 1. A model that reads a weight otherwise later would have its
/// gradient summed too little or too often.
#[test]
fn a_gradient_of_other_types_than_before_the_first_step_is_refused() {
    let run = |mistake, mesh: &str| {
        let model: Arc<dyn Model> = Arc::new(Tower { layers: 2, mistake });
        let plan = Plan { num_microbatches: Some(2), ..plan(mesh) };
        let ended = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            Trainer::new(model.clone(), &plan, rank, Cpu::device())?.step(&batch(0, 0..BATCH)).map(drop)
        });
        ended.map(drop).map_err(|error| error.to_string())
    };
    for mesh in ["tp=1,dp=1", "tp=2,dp=1"] {
        let error = run(Mistake::DependsOnSamples, mesh).unwrap_err();
        let says = "the gradient of head has the types ";
        assert!(error.contains(says) && error.contains("before the first step"), "{error}");
        assert_eq!(run(Mistake::None, mesh), Ok(()));
    }
}

#[test]
fn a_plan_that_does_not_fit_the_rank_or_the_device_is_refused() {
    let refused = |plan: &Plan, rank: Rank| {
        Trainer::new(tower(2), plan, Arc::new(rank), Cpu::device()).err().unwrap().to_string()
    };
    let two: Mesh = "dp=2".parse().unwrap();
    let error = refused(&plan("tp=2"), Rank::recording(&two, 0).unwrap());
    assert!(
        error.contains("the plan is for the mesh ") && error.contains("make the ranks from the plan's mesh"),
        "{error}"
    );
    // Six samples on each of two ranks are no whole subtree of twelve: the sum would have other bits.
    let canonical = Plan { numerics: Numerics::Canonical { blocks: 8 }, global_batch_size: 12, ..plan("dp=2") };
    let error = refused(&canonical, Rank::recording(&two, 0).unwrap());
    assert!(error.contains("use dp of 1, 3, 6, 12, or another global batch"), "{error}");
    for precision in [Precision::Bf16, Precision::Tf32] {
        let error = refused(&Plan { precision, ..plan("dp=1") }, Rank::alone().unwrap());
        let told = format!("the plan computes products in {precision:?}, and the device cpu in F32");
        assert!(error.contains(&told), "{error}");
    }
}

/// A request beyond the end of a row used to return numbers of the next row.
#[test]
fn a_prediction_ends_where_its_row_does() {
    let mut trainer = alone(&tower(2));
    let batch = batch(0, 0..BATCH);
    assert_eq!(trainer.predict(&batch, BATCH - 1, 4).unwrap().len(), 4);
    let error = trainer.predict(&batch, 0, 5).unwrap_err().to_string();
    assert_eq!(error, "predict: 5 numbers of a row that has 4 (shapes [[8, 4]])");
}

/// Each rank of dp passes its own samples, and gets the rows that one rank predicts for the whole batch.
#[test]
fn a_whole_batch_is_predicted_by_the_ranks_that_share_it() {
    let model = tower(2);
    let mut one = alone(&model);
    let whole = batch(0, 0..BATCH);
    let rows: Vec<f32> = (0..BATCH).flat_map(|row| one.predict(&whole, row, 4).unwrap()).collect();
    for mesh in ["dp=1", "dp=2", "dp=2,tp=2", "dp=2,pp=2", "dp=4"] {
        let plan = plan(mesh);
        let found = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
            let own = batch(0, trainer.samples());
            trainer.predict_all(&own)
        });
        for found in found.unwrap() {
            assert_eq!(found.shape, [BATCH, 4], "{mesh}");
            assert_close(mesh, &found.values, &rows, 0.0);
        }
    }
    let plan = plan("dp=2");
    let uneven = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let samples = 0..3 + rank.world_rank();
        Trainer::new(model.clone(), &plan, rank, Cpu::device())?.predict_all(&batch(0, samples))
    });
    let error = uneven.unwrap_err().to_string();
    assert!(error.contains("Trainer::predict_all") && error.contains("all_gather"), "{error}");
}
