//! A dry run predicts a step of any model: what every rank holds, computes and communicates, call by call.

use crate::{noise, tower};
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::dry_run::{Prediction, costs, predict};
use meshwork_engine::offload::{Folder, Offload, Traffic};
use meshwork_engine::{
    ModelPlan, Numerics, OPTIMIZER, Plan, Recompute, ScheduleSpec, TrainError, Trainer, Zero, ZeroStage,
};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_models::layers::Norm;
use meshwork_models::resnet::ResNetConfig;
use meshwork_nn::{Batch, Model};
use meshwork_optim::{Adafactor, Adam8bit, AdamW, Lamb, Muon, Rule, Sgd};
use meshwork_tensor::Category;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

/// Holds a step of every rank against its prediction: the first, or, where steps overlap, the first that is under way
/// with as many others as ever. Gives the names of the groups that communicated.
#[track_caller]
fn assert_as_predicted(
    model: &Arc<dyn Model>,
    plan: &Plan,
    batch: impl Fn(usize, Range<usize>) -> Batch + Sync,
) -> BTreeSet<String> {
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(model.clone(), plan, rank, Cpu::device())?;
        let model_bytes = trainer.device().meter().live_bytes();
        let (mut reports, mut before, mut moved) = (Vec::new(), 0, Traffic::default());
        for step in 0..=trainer.steps_ahead() {
            before = trainer.device().meter().total_flops();
            moved = trainer.offloaded();
            reports.extend(trainer.start_step(&batch(step, trainer.samples()), || false, |_| {})?);
        }
        let flops = trainer.device().meter().total_flops() - before;
        reports.extend(trainer.flush(|_| {})?);
        let (report, meter) = (reports.pop().unwrap(), trainer.device().meter());
        let measured = Prediction {
            parameters: trainer.local_elements(),
            model_bytes,
            memory: meter.peak(),
            flops,
            records: report.records.clone(),
            exact: None,
            offloaded: trainer.offloaded().since(moved),
        };
        Ok::<_, TrainError>((measured, report, trainer.steps_ahead()))
    });
    let ranks = ranks.unwrap_or_else(|error| panic!("{error}"));
    let predictions: Vec<_> = (0..ranks.len()).map(|rank| predict(model, plan, rank).unwrap()).collect();
    let groups: BTreeSet<_> =
        predictions.iter().flat_map(|rank| rank.records.iter().map(|call| call.group.clone())).collect();
    for (rank, ((measured, report, ahead), predicted)) in ranks.iter().zip(&predictions).enumerate() {
        for (call, (got, wanted)) in measured.records.iter().zip(&predicted.records).enumerate() {
            assert_eq!(got, wanted, "rank {rank}, call {call}");
        }
        assert_eq!(measured, predicted, "rank {rank}");
        let peaks: Vec<_> = predictions.iter().map(|predicted| predicted.memory).collect();
        assert_eq!(report.memory, peaks, "as reported on rank {rank}");
        assert_eq!(report.offload.is_some(), plan.offload.is_some());
        if let Some(offload) = report.offload.filter(|_| *ahead == 0) {
            let mean = |of: fn(&Prediction) -> u64| predictions.iter().map(of).sum::<u64>() as f64 / ranks.len() as f64;
            let predicted = [mean(|rank| rank.offloaded.read), mean(|rank| rank.offloaded.written)];
            assert_eq!([offload.read, offload.written], predicted, "as reported on rank {rank}");
            assert!(offload.waited > 0.0);
        }
        for group in &groups {
            let mean = predictions.iter().map(|predicted| predicted.bytes_on(group)).sum::<f64>() / ranks.len() as f64;
            assert_eq!(
                report.comm_bytes.get(&**group).copied().unwrap_or(0.0),
                mean,
                "{group}, as reported on rank {rank}"
            );
        }
    }
    groups
}

/// A bound that no gradient reaches.
const NEVER: f64 = 1e3;

fn named(schedule: &str) -> ScheduleSpec {
    ScheduleSpec::named(schedule).unwrap()
}

#[test]
fn a_tower_takes_what_was_predicted() {
    let canonical = Numerics::Canonical { blocks: 8 };
    for (mesh, groups) in
        [("dp=2", &["dp", "world"][..]), ("pp=2", &["pp", "world"]), ("dp=2,tp=2,pp=2", &["dp", "pp", "tp", "world"])]
    {
        for (schedule, recompute, numerics) in [
            ("1f1b", Recompute::None, Numerics::Fast),
            ("gpipe", Recompute::Stage, Numerics::Fast),
            ("zb_h1", Recompute::Selective, canonical),
            ("zb_h2", Recompute::None, Numerics::Fast),
            ("1f1b", Recompute::Full, Numerics::Fast),
            ("zb_h1", Recompute::Sqrt, canonical),
        ] {
            for optimizer in [Rule::from(Sgd::default()), AdamW::default().into()] {
                let schedule = named(schedule);
                let plan = Plan { schedule, recompute, numerics, optimizer, max_norm: NEVER, ..tower::plan(mesh) };
                let found = assert_as_predicted(&tower::tower(4), &plan, tower::batch);
                assert_eq!(found.into_iter().collect::<Vec<_>>(), groups, "{mesh}");
            }
        }
    }
}

/// Where steps overlap, a prediction is of steps that do: from the second on, whether updates are rolled back or not.
/// One step alone holds no more, and where ranks wait for the norm before they update, it holds the same.
#[test]
fn zero_bubble_schedules_hold_what_was_predicted_from_the_second_step_on() {
    for mesh in ["pp=2", "dp=2,pp=2", "dp=2,tp=2,pp=2"] {
        for (schedule, overlaps) in [("zb_h1", false), ("zb_h2", true), ("zb_v", true), ("dualpipe_v", true)] {
            for max_norm in [NEVER, 1e-3] {
                let plan = Plan {
                    schedule: named(schedule),
                    optimizer: AdamW::default().into(),
                    max_norm,
                    num_microbatches: Some(4),
                    ..tower::plan(mesh)
                };
                let model = tower::tower(8);
                let peaks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                    let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
                    let mut peaks = Vec::new();
                    for step in 0..3 {
                        trainer.start_step(&tower::batch(step, trainer.samples()), || false, |_| {})?;
                        peaks.push(trainer.device().meter().peak());
                    }
                    trainer.flush(|_| {})?;
                    Ok::<_, TrainError>((trainer.steps_ahead() > 0, peaks))
                });
                for (rank, (ahead, peaks)) in peaks.unwrap().into_iter().enumerate() {
                    let what = format!("{schedule} on {mesh}, clipped at {max_norm}: rank {rank}");
                    let predicted = predict(&model, &plan, rank).unwrap().memory;
                    assert_eq!(ahead, overlaps, "{what}");
                    assert_eq!(peaks[1..], [predicted; 2], "{what}");
                    assert!(peaks[0] == predicted || overlaps && peaks[0].total() < predicted.total(), "{what}");
                }
            }
        }
    }
}

#[test]
fn what_ranks_share_out_takes_what_was_predicted() {
    for stage in &ZeroStage::ALL[1..] {
        for (mesh, schedule, recompute, numerics) in [
            ("dp=4", "gpipe", Recompute::Full, Numerics::Fast),
            ("dp=4,pp=2", "zb_v", Recompute::Layers(2), Numerics::Fast),
            ("dp=2,tp=2,pp=2", "interleaved_1f1b", Recompute::None, Numerics::Fast),
            ("dp=2,pp=2", "1f1b", Recompute::Sqrt, Numerics::Canonical { blocks: 8 }),
        ] {
            let plan = Plan {
                schedule: named(schedule),
                recompute,
                numerics,
                zero: Zero { stage: *stage, group: None },
                max_norm: NEVER,
                global_batch_size: 16,
                num_microbatches: Some(4),
                ..tower::plan(mesh)
            };
            assert_as_predicted(&tower::tower(8), &plan, tower::batch);
        }
    }
}

/// What rules that read whole parameters keep, measure and bring together.
#[test]
fn rules_that_read_whole_parameters_take_what_was_predicted() {
    let sizes =
        Gpt2Config { vocab_size: 61, hidden_size: 32, ffn_hidden_size: 64, seq_len: 8, ..Gpt2Config::default() };
    let model: Arc<dyn Model> = Arc::new(Gpt2::new(sizes));
    let dir = tempfile::tempdir().unwrap();
    let offload = Offload {
        optimizer: true,
        gradients: true,
        activations: true,
        samples: true,
        to: Some(Arc::new(Folder(dir.path().to_owned()))),
    };
    for optimizer in [
        Lamb::default().into(),
        Adafactor::default().into(),
        Rule::with_muon(Muon::default(), AdamW::default()),
        Rule::with_adam8bit(Adam8bit::default()),
    ] {
        for (mesh, schedule, stage, numerics) in [
            ("dp=2,tp=2,pp=2", "1f1b", 2, Numerics::Fast),
            ("dp=2,pp=2", "zb_v", 1, Numerics::Canonical { blocks: 8 }),
            ("dp=4", "gpipe", 3, Numerics::Fast),
        ] {
            let plan = Plan {
                schedule: named(schedule),
                numerics,
                zero: Zero { stage: ZeroStage::ALL[stage], group: None },
                optimizer: optimizer.clone(),
                max_norm: NEVER,
                global_batch_size: 16,
                num_microbatches: Some(4),
                ..tower::plan(mesh)
            };
            let tokens =
                |samples: Range<usize>| samples.flat_map(|sample| vec![sample as i32; sizes.seq_len]).collect();
            for plan in [Plan { offload: Some(offload.clone()), ..plan.clone() }, plan] {
                let found = assert_as_predicted(&model, &plan, |_, samples| {
                    language::batch(tokens(samples.clone()), tokens(samples), sizes.seq_len).unwrap()
                });
                assert!(found.contains(OPTIMIZER), "{mesh}: {optimizer:?}");
            }
        }
    }
}

#[test]
fn a_network_with_batch_norms_takes_what_was_predicted() {
    let network = ResNetConfig { groups: vec![(4, 2), (8, 2)], norm: Norm::Batch, ..ResNetConfig::digits() }.network();
    let network: Arc<dyn Model> = Arc::new(network);
    for mesh in ["dp=2", "pp=2", "dp=2,pp=2"] {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Stage, Recompute::Full, Recompute::Sqrt] {
            let mesh = mesh.parse().unwrap();
            let plan = Plan { mesh, recompute, global_batch_size: noise::BATCH, ..tower::plan("dp=1") };
            assert_as_predicted(&network, &plan, noise::images);
        }
    }
}

/// What goes to files and comes back, and what is in memory meanwhile.
#[test]
fn what_is_offloaded_takes_what_was_predicted() {
    let dir = tempfile::tempdir().unwrap();
    let offload = Offload {
        optimizer: true,
        gradients: true,
        activations: true,
        samples: true,
        to: Some(Arc::new(Folder(dir.path().to_owned()))),
    };
    for (mesh, schedule, stage, recompute, optimizer) in [
        ("dp=1", "gpipe", 0, Recompute::None, Rule::from(AdamW::default())),
        ("dp=2,pp=2", "zb_h2", 1, Recompute::Selective, AdamW::default().into()),
        ("dp=2,tp=2,pp=2", "1f1b", 3, Recompute::Full, Sgd { momentum: 0.9, weight_decay: 0.0 }.into()),
        ("dp=2,pp=2", "interleaved_1f1b", 2, Recompute::Layers(1), Lamb::default().into()),
        ("dp=1", "1f1b", 0, Recompute::Stage, AdamW::default().into()),
    ] {
        let plan = Plan {
            schedule: named(schedule),
            zero: Zero { stage: ZeroStage::ALL[stage], group: None },
            optimizer,
            recompute,
            offload: Some(offload.clone()),
            max_norm: NEVER,
            global_batch_size: 16,
            num_microbatches: Some(4),
            ..tower::plan(mesh)
        };
        assert_as_predicted(&tower::tower(8), &plan, tower::batch);
        let held = Plan { offload: None, ..plan.clone() };
        for rank in 0..plan.mesh.world_size() {
            let [with, without] = [&plan, &held].map(|plan| predict(&tower::tower(8), plan, rank).unwrap());
            let states = |prediction: &Prediction| prediction.memory.bytes_of(Category::Optimizer);
            assert!(with.memory.total() < without.memory.total(), "{mesh}, rank {rank}");
            assert!(4 * states(&with) < states(&without), "{mesh}, rank {rank}: {with:?} {without:?}");
        }
    }
}

/// Between steps a rank holds 4 bytes of each parameter, 4 of its gradient and 8 of AdamW's states, as far as its stage
/// of ZeRO leaves them.
#[test]
fn memory_is_counted_by_what_it_is_for() {
    for (stage, parts) in ZeroStage::ALL.iter().zip([[1, 1, 1], [1, 4, 4], [1, 4, 4], [4, 4, 4]]) {
        let zero = Zero { stage: *stage, group: None };
        let plan = Plan { zero, optimizer: AdamW::default().into(), ..tower::plan("dp=4") };
        let held = World::threads(&plan.mesh)
            .run_mesh(&plan.mesh, |rank| {
                let mut trainer = Trainer::new(tower::tower(4), &plan, rank, Cpu::device())?;
                trainer.step(&tower::batch(0, trainer.samples()))?;
                let (live, peak) = (trainer.device().meter().live(), trainer.device().meter().peak());
                Ok::<_, TrainError>((live, peak))
            })
            .unwrap();
        // A frozen parameter has weights alone, which are shared out as those of others are.
        let parameters = ModelPlan::new(tower::tower(4), &plan).unwrap().parameters().unwrap();
        let count = |frozen| {
            let of = parameters.iter().filter(|spec| spec.group.frozen == frozen);
            of.map(|spec| spec.global_elements() as u64).sum::<u64>()
        };
        for (live, peak) in held {
            let kept =
                [(Category::Parameters, 4, count(true)), (Category::Gradients, 4, 0), (Category::Optimizer, 8, 0)];
            for ((category, bytes, frozen), parts) in kept.into_iter().zip(parts) {
                let (least, found) = (bytes * (count(false) / parts + frozen / parts), live.bytes_of(category));
                // Slices are padded to equal lengths, by less than one element a rank and bucket.
                assert!(
                    (least..=least + 1024).contains(&found),
                    "stage {stage:?}: {found} bytes of {category:?}, {least}"
                );
            }
            assert_eq!(live.bytes_of(Category::Activations), 0, "stage {stage:?}: nothing is kept between steps");
            assert!(peak.bytes_of(Category::Activations) > 0 && peak.total() >= live.total(), "stage {stage:?}");
        }
    }
}

/// With the predicted bytes as its limit a rank trains; with one byte less the run ends on every rank, and the cause
/// says what holds the memory.
#[test]
fn a_limit_is_held_to_the_byte_and_ends_every_rank() {
    let (model, plan) = (tower::tower(4), Plan { max_norm: NEVER, ..tower::plan("dp=2,pp=2") });
    let peaks: Vec<u64> = (0..4).map(|rank| predict(&model, &plan, rank).unwrap().peak_bytes()).collect();
    let train = |less: u64| {
        World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let (device, number) = (Cpu::device(), rank.world_rank());
            device.meter().set_limit(Some(peaks[number] - if number == 1 { less } else { 0 }));
            let mut trainer = Trainer::new(model.clone(), &plan, rank, device)?;
            trainer.step(&tower::batch(0, trainer.samples()))
        })
    };
    assert_eq!(train(0).unwrap().len(), 4);
    let error = train(1).unwrap_err().to_string();
    for word in ["rank 1", "would exceed the limit of", "it holds parameters", "gradients", "activations"] {
        assert!(error.contains(word), "{word} in {error}");
    }
}

/// Parts are measured on one rank, which has no groups to share out in. (The profile of layers and `partition = "cost"`
/// of a run with `zero_group` were refused.)
#[test]
fn the_costs_of_parts_do_not_depend_on_what_ranks_share_out() {
    let (model, plan) = (tower::tower(4), tower::plan("dp=4"));
    let zero = Zero { stage: ZeroStage::Weights, group: Some(2) };
    let wanted = costs(&model, &plan).unwrap();
    assert_eq!(wanted.len(), 6);
    assert_eq!(costs(&model, &Plan { zero, ..plan }).unwrap(), wanted);
}
