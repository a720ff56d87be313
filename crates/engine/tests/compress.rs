//! Compressed communication between stages: what arrives is what the equations say, on any mesh, and takes the bytes that were
//! predicted.
//!
//! More than 400 lines: one program, because each costs a link, and one test per promise of `docs/compression.md`.

mod lossy;
#[allow(dead_code, reason = "another test uses all of it")]
mod tower;

use lossy::Lossy;
use meshwork_compress::{Feedback, Partial, Reduction, Scheme, Shape as Matrix, wire_bytes};
use meshwork_core::comm::thread;
use meshwork_core::{DType, OpKind, Rank, Record};
use meshwork_engine::dry_run::predict;
use meshwork_engine::{
    Compress, Decoder, Numerics, Plan, PlanError, ScheduleSpec, StateKey, StepReport, TrainError, Trainer, WholeState,
    Zero, ZeroStage,
};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_nn::{Batch, Model};
use meshwork_tensor::ParamSpec;
use meshwork_tensor::cpu::Cpu;
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::random;
use meshwork_testkit::opaque::{self, Opaque};
use std::ops::Range;
use std::sync::Arc;
use tower::{BATCH, batch, plan, tower};

const STEPS: usize = 3;

fn scheme(text: &str) -> Scheme {
    text.parse().unwrap()
}

/// Compression of activations and of their gradients.
fn cuts(activations: &str, gradients: &str, feedback: &str) -> Compress {
    Compress {
        activations: scheme(activations),
        activation_gradients: scheme(gradients),
        feedback: feedback.parse().unwrap(),
        ..Compress::default()
    }
}

type Run = (Vec<StepReport>, WholeState);

/// Reports of this many steps of every rank, and the state behind them.
fn run_on(
    model: &Arc<dyn Model>,
    plan: &Plan,
    opaque: bool,
    batch: impl Fn(usize, Range<usize>) -> Batch + Sync,
) -> Result<(Vec<Vec<StepReport>>, WholeState), TrainError> {
    let ranks = thread::run_mesh(&plan.mesh, |rank| {
        let (rank, device) = match opaque {
            false => (rank, Cpu::device()),
            true => {
                let world = opaque::communicator(Arc::clone(rank.world().communicator()));
                (Arc::new(Rank::new(rank.mesh(), world)?), Opaque::device(Cpu::device()))
            }
        };
        let mut trainer = Trainer::new(model.clone(), plan, rank, device)?;
        let mut reports = Vec::new();
        for step in 0..STEPS {
            reports.extend(trainer.start_step(&batch(step, trainer.samples()), || false, |_| {})?);
        }
        reports.extend(trainer.flush(|_| {})?);
        Ok::<_, TrainError>((reports, trainer.state()?))
    });
    let (reports, states): (_, Vec<_>) = ranks.unwrap_or_else(|error| panic!("{error}")).into_iter().unzip();
    Ok((reports, WholeState::merge(&states)?))
}

fn run(model: &Arc<dyn Model>, plan: &Plan) -> Run {
    let (mut reports, state) = run_on(model, plan, false, batch).unwrap();
    (reports.swap_remove(0), state)
}

fn weights(state: &WholeState) -> Vec<(&StateKey, &[f32])> {
    state.keys().filter(|key| key.state.is_none()).map(|key| (key, state.vector(key).unwrap())).collect()
}

/// The losses and weights of two runs have the same bits.
#[track_caller]
fn assert_same(what: &str, (reports, state): &Run, (wanted_reports, wanted): &Run) {
    let losses = |reports: &[StepReport]| reports.iter().map(|report| report.loss).collect::<Vec<_>>();
    assert_eq!(losses(reports), losses(wanted_reports), "{what}");
    assert!(weights(state) == weights(wanted), "{what}: weights");
}

fn named(schedule: &str) -> ScheduleSpec {
    ScheduleSpec::named(schedule).unwrap()
}

/// Each scheme and feedback, over three cuts, against one rank that computes the published equations: bit by bit.
#[test]
fn a_compressed_pipeline_is_its_serial_simulation() {
    let plain = run(&tower(4), &plan("pp=4"));
    for (forward, backward, feedback) in [
        ("quant:4", "quant:8", "none"),
        ("quant:2/stochastic", "quant:6/stochastic", "none"),
        ("topk:0.1", "topk:0.3", "none"),
        ("randk:0.25", "sign/row", "none"),
        ("fp8:e4m3", "none", "none"),
        ("none", "topk:0.2+quant:8", "none"),
        ("topk:0.1", "topk:0.2", "ef"),
        ("topk:0.1", "topk:0.2", "ef21"),
        ("topk:0.3", "quant:8", "ef21m:0.5"),
        ("topk:0.3/row", "topk:0.3/row", "ef"),
    ] {
        let compress = cuts(forward, backward, feedback);
        let what = format!("{forward} {backward} {feedback}");
        let on = |mesh: &str, compress| Plan { compress, num_microbatches: Some(4), ..plan(mesh) };
        let piped = run(&tower(4), &on("pp=4", compress));
        let schemes = [compress.activations, compress.activation_gradients];
        let lossy = Lossy::model(tower(4), &[1; 4], schemes, compress.feedback, Plan::default().seed);
        assert_same(&what, &piped, &run(&lossy, &on("dp=1", Compress::default())));
        assert_ne!(weights(&piped.1), weights(&plain.1), "{what}: nothing is lost");
    }
}

/// What is lost depends on neither tp, dp, the schedule nor the place of the stages: one micro-batch crosses the same cuts.
#[test]
fn every_mesh_and_schedule_loses_the_same() {
    for (compress, overlaps) in
        [(cuts("quant:8", "quant:8", "none"), true), (cuts("topk:0.3", "quant:8", "ef21"), false)]
    {
        let on = |mesh: &str, schedule: &str| Plan {
            compress,
            schedule: named(schedule),
            num_microbatches: Some(4),
            max_norm: 1e3,
            ..plan(mesh)
        };
        let wanted = run(&tower(4), &on("pp=4", "gpipe"));
        for schedule in ["1f1b", "zb_h1"].into_iter().filter(|&schedule| overlaps || schedule == "1f1b") {
            assert_same(schedule, &run(&tower(4), &on("pp=4", schedule)), &wanted);
        }
        // Two stages on each rank: no two neighbours on one.
        let interleaved = Plan { num_microbatches: Some(4), ..on("pp=2", "interleaved_1f1b") };
        assert_same("interleaved", &run(&tower(4), &interleaved), &wanted);
        let opaque = run_on(&tower(4), &on("pp=4", "1f1b"), true, batch).unwrap();
        assert_same("opaque", &(opaque.0[0].clone(), opaque.1), &wanted);
    }
    // Other meshes add up gradients in another order.
    let compress = cuts("quant:8", "quant:8", "none");
    let on = |mesh: &str, micros, scatter_gather| Plan {
        compress,
        scatter_gather,
        num_microbatches: Some(micros),
        ..plan(mesh)
    };
    let (wanted, _) = run(&tower(4), &on("pp=2", 4, true));
    for (mesh, micros, scatter) in
        [("tp=2,pp=2", 4, true), ("tp=2,pp=2", 4, false), ("dp=2,pp=2", 2, true), ("dp=2,tp=2,pp=2", 2, true)]
    {
        let (reports, _) = run(&tower(4), &on(mesh, micros, scatter));
        for (got, wanted) in reports.iter().zip(&wanted) {
            // A value near the middle of two codes may take the other: a step of quant:8 is 1/255 of the range.
            assert!((got.loss / wanted.loss - 1.0).abs() < 1e-4, "{mesh}: {} against {}", got.loss, wanted.loss);
        }
    }
}

fn gpt2() -> Arc<dyn Model> {
    let config =
        Gpt2Config { vocab_size: 61, hidden_size: 32, ffn_hidden_size: 64, seq_len: 16, ..Gpt2Config::default() };
    Arc::new(Gpt2::new(Gpt2Config { num_layers: 4, num_heads: 4, ..config }))
}

fn tokens(step: usize, samples: Range<usize>) -> Batch {
    let token = |sample: usize, at: usize| {
        (random::uniform(random::key(5, "tokens"), ((step * 16 + sample) * 100 + at) as u64) * 61.0) as i32
    };
    let row = |by: usize| samples.clone().flat_map(|sample| (0..16).map(move |at| token(sample, at + by))).collect();
    language::batch(row(0), row(1), 16).unwrap()
}

/// Calls, bytes and memory of every rank are predicted, and a cut takes what the wire format says.
#[test]
fn bytes_and_memory_are_as_predicted() {
    let compress = cuts("topk:0.1", "quant:4", "ef21");
    let plain = cuts("quant:8", "topk:0.3", "none");
    for (mesh, schedule, compress) in [
        ("pp=4", "1f1b", compress),
        ("tp=2,pp=2", "gpipe", compress),
        ("dp=2,tp=2,pp=2", "interleaved_1f1b", compress),
        ("pp=2", "zb_h2", plain),
        ("pp=2", "zb_v", plain),
    ] {
        let plan = Plan {
            mesh: mesh.parse().unwrap(),
            schedule: named(schedule),
            global_batch_size: 16,
            num_microbatches: Some(4),
            max_norm: 1e3,
            compress,
            ..Plan::default()
        };
        let (reports, _) = run_on(&gpt2(), &plan, false, tokens).unwrap();
        for (rank, reports) in reports.iter().enumerate() {
            let (report, predicted) = (&reports[STEPS - 1], predict(&gpt2(), &plan, rank).unwrap());
            let what = format!("{mesh} {schedule}, rank {rank}");
            assert_eq!(report.records, predicted.records, "{what}");
            assert_eq!(report.memory[rank], predicted.memory, "{what}");
        }
    }
    let plan = Plan { mesh: "tp=2,pp=2".parse().unwrap(), num_microbatches: Some(4), compress, ..Plan::default() };
    let records = predict(&gpt2(), &plan, 0).unwrap().records;
    let value = Matrix::matrix(4, 16 * 32).unwrap();
    let bytes = wire_bytes(&compress.activations, value).unwrap().next_multiple_of(2);
    let sent: Vec<&Record> = records.iter().filter(|record| record.op == OpKind::Send).collect();
    assert_eq!(sent.len(), 4, "{records:?}");
    assert!(sent.iter().all(|record| (record.dtype, record.elements) == (DType::U8, bytes / 2)), "{sent:?}");
}

/// Each message is compressed from its step on.
#[test]
fn compression_starts_at_its_step() {
    let on = |compress| Plan { compress, num_microbatches: Some(4), ..plan("pp=2") };
    let compress = cuts("quant:2", "quant:2", "none");
    let losses = |compress| run(&tower(4), &on(compress)).0.iter().map(|report| report.loss).collect::<Vec<_>>();
    let (plain, at_once) = (losses(Compress::default()), losses(compress));
    let later = losses(Compress { start_step: 3, ..compress });
    assert_eq!(later[..2], plain[..2]);
    assert!(later[2] != plain[2] && at_once[0] != plain[0]);
}

/// Evaluation and predictions go through the same cuts.
#[test]
fn inference_is_compressed_as_training_is() {
    let evaluate = |mesh: &str, compress| {
        let plan = Plan { compress, num_microbatches: Some(4), ..plan(mesh) };
        let ranks = thread::run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(tower(4), &plan, rank, Cpu::device())?;
            let found = trainer.evaluate([batch(0, trainer.samples())])?;
            Ok::<_, TrainError>((found.loss, trainer.predict(&batch(0, 0..1), 0, 4)?))
        });
        ranks.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
    };
    let compress = cuts("quant:4", "quant:8", "ef");
    let (plain, lost) = (evaluate("pp=2", Compress::default()), evaluate("pp=2", compress));
    assert_eq!(evaluate("dp=1", compress), evaluate("dp=1", Compress::default()), "one rank has no cuts");
    assert_eq!(evaluate("dp=1", compress), plain);
    assert!(lost.0 != plain.0 && lost.1 != plain.1, "{lost:?}");
    let off = (lost.0 / plain.0 - 1.0).abs();
    assert!(off < 0.1, "{off}");
    let decode = |compress| {
        let plan = Plan { mesh: "pp=2".parse().unwrap(), compress, ..Plan::default() };
        let ranks = thread::run_mesh(&plan.mesh, |rank| {
            let from =
                Trainer::new(gpt2(), &Plan::default(), Arc::new(Rank::recording(&"dp=1".parse()?, 0)?), Cpu::device())?;
            let read = |spec: &ParamSpec, _: &LocalSlice| {
                let params = from.params();
                params.read(params.declarations().find(&spec.name).unwrap())
            };
            let mut decoder = Decoder::new(gpt2(), &plan, rank, Cpu::device(), 16, read)?;
            let ids = |at: usize| language::batch(vec![at as i32], vec![0], 1).unwrap();
            (0..3).map(|at| decoder.next(&ids(at), 1, 61)).collect::<Result<Vec<_>, _>>()
        });
        ranks.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
    };
    let (plain, lost) = (decode(Compress::default()), decode(cuts("quant:4", "none", "none")));
    assert!(plain.iter().zip(&lost).all(|(plain, lost)| plain != lost && lost.iter().all(|x| x.is_finite())));
}

/// A state of feedback is saved by sample: stopped and resumed, a run has the bits of one that was not, and on another mesh it goes on
/// with what was lost.
#[test]
fn a_resumed_run_goes_on_with_what_was_lost() {
    let on = |mesh: &str, micros, compress| Plan { compress, num_microbatches: Some(micros), ..plan(mesh) };
    let go_on = |plan: &Plan, from: Option<&WholeState>, steps: Range<usize>| -> (Vec<f64>, WholeState) {
        let ranks = thread::run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(tower(4), plan, rank, Cpu::device())?;
            from.map(|state| trainer.load_state(state)).transpose()?;
            let step = |step| Ok(trainer.step(&batch(step, trainer.samples()))?.loss);
            let losses = steps.clone().map(step).collect::<Result<Vec<_>, TrainError>>()?;
            Ok::<_, TrainError>((losses, trainer.state()?))
        });
        let (mut losses, states): (Vec<_>, Vec<_>) =
            ranks.unwrap_or_else(|error| panic!("{error}")).into_iter().unzip();
        (losses.swap_remove(0), WholeState::merge(&states).unwrap())
    };
    for (feedback, states) in
        [("ef", &["residual"][..]), ("ef21", &["estimate"]), ("ef21m:0.5", &["estimate", "momentum"])]
    {
        let plan = on("dp=2,pp=2", 2, cuts("topk:0.1", "topk:0.2", feedback));
        let (losses, wanted) = go_on(&plan, None, 0..4);
        let (_, halfway) = go_on(&plan, None, 0..2);
        let (resumed, state) = go_on(&plan, Some(&halfway), 2..4);
        assert_eq!(resumed, losses[2..], "{feedback}");
        assert!(state == wanted, "{feedback}: the state behind it");
        let of_cuts: Vec<String> =
            state.keys().filter(|key| key.parameter.starts_with("cut.")).map(|key| key.to_string()).collect();
        let named = |value: &str| states.iter().map(|state| format!("cut.2.{value} ({state})")).collect::<Vec<_>>();
        assert_eq!(of_cuts, [named("activation"), named("gradient")].concat());

        // One rank of dp with twice as many micro-batches of the same samples has the same cuts.
        let (moved, _) = go_on(&on("pp=2", 4, plan.compress), Some(&halfway), 2..4);
        let forgotten =
            Plan { compress: Compress { start_step: 1, ..cuts("topk:0.1", "topk:0.2", "none") }, ..plan.clone() };
        let (forgotten, _) = go_on(&forgotten, Some(&halfway), 2..4);
        for (step, (got, wanted)) in moved.iter().zip(&losses[2..]).enumerate() {
            let off = |loss: &f64| (loss / wanted - 1.0).abs();
            assert!(off(got) < 1e-3, "{feedback}: step {step} has loss {got}, uninterrupted {wanted}");
        }
        assert!((forgotten[1] / losses[3] - 1.0).abs() > 1e-3, "{feedback}: nothing was brought back");
        // Other cuts start from zeros, and none needs no state.
        go_on(&on("pp=4", 4, plan.compress), Some(&halfway), 2..3);
        go_on(&on("dp=2", 2, plan.compress), Some(&halfway), 2..3);
    }
}

/// Gradients, and the rest as it is.
fn gradients(scheme: &str, feedback: &str) -> Compress {
    Compress { gradients: self::scheme(scheme), feedback: feedback.parse().unwrap(), ..Compress::default() }
}

/// The sums of three steps of two ranks are those of `meshwork-compress` on the gradients of each rank alone, bit by bit.
#[test]
fn compressed_gradients_are_summed_as_published() {
    for (scheme, feedback) in [
        ("topk:0.1", "none"),
        ("topk:0.1", "ef"),
        ("topk:0.2+quant:8", "ef21"),
        ("topk:0.1", "ef21m:0.5"),
        ("quant:4/block64/stochastic", "none"),
        ("quant:4/block64", "ef"),
        ("quant:8", "ef21"),
        ("sign", "ef"),
        ("fp8:e5m2", "none"),
    ] {
        let (compress, ranks) = (gradients(scheme, feedback), 2);
        let what = format!("{scheme} {feedback}");
        let share = BATCH / ranks;
        let plan = Plan { compress, num_microbatches: Some(1), ..plan(&format!("dp={ranks}")) };
        let on_alone = Plan { global_batch_size: share, num_microbatches: Some(1), ..tower::plan("dp=1") };
        let sums = thread::run_mesh(&plan.mesh, |rank| {
            let (group, me) = (rank.data_group().clone(), rank.world_rank());
            let mut trainer = Trainer::new(tower(2), &plan, rank, Cpu::device())?;
            let mut reductions: Vec<Option<Reduction>> = Vec::new();
            for step in 0..STEPS {
                let samples = me * share..(me + 1) * share;
                let mut alone =
                    Trainer::new(tower(2), &on_alone, Arc::new(Rank::recording(&on_alone.mesh, 0)?), Cpu::device())?;
                let ids: Vec<_> = trainer.params().declarations().ids().collect();
                for &id in &ids {
                    let name = trainer.params().declarations().spec(id).name.clone();
                    alone.load_parameter(&name, &trainer.params().read(id)?)?;
                }
                alone.step(&batch(step, samples.clone()))?;
                trainer.step(&batch(step, samples))?;
                let own = |id| {
                    let name = &trainer.params().declarations().spec(id).name.clone();
                    let id = alone.params().declarations().find(name).unwrap();
                    alone.gradient(id).unwrap()
                };
                let trained: Vec<_> = ids.into_iter().filter(|&id| !own(id).is_empty()).collect();
                let place = |id| trainer.params().place(id);
                for flat in 0..=trained.iter().map(|&id| place(id).0).max().unwrap() {
                    let of_flat = || trained.iter().copied().filter(|&id| place(id).0 == flat);
                    let mut part = vec![0.0; of_flat().map(|id| place(id).1.end).max().unwrap()];
                    for id in of_flat() {
                        // A rank alone divides by its own samples: a power of two too much.
                        part[place(id).1].iter_mut().zip(own(id)).for_each(|(part, own)| *part = own / ranks as f32);
                    }
                    let first = of_flat().find(|&id| place(id).1.start == 0).unwrap();
                    let name = format!("gradient of {}", trainer.params().declarations().spec(first).name);
                    reductions.resize_with(reductions.len().max(flat + 1), || None);
                    let shape = Matrix::vector(part.len()).unwrap();
                    let reduction = reductions[flat].get_or_insert_with(|| {
                        let scheme = Box::new(compress.gradients);
                        Reduction::new(&name, scheme, compress.feedback, shape, [me, ranks], plan.seed).unwrap()
                    });
                    let sum = reduction.all_reduce(&group, step as u64, Partial(&part)).unwrap();
                    for id in of_flat() {
                        assert_eq!(trainer.gradient(id)?, sum[place(id).1], "{what}: step {step}");
                    }
                }
            }
            Ok::<_, TrainError>(())
        });
        sums.unwrap_or_else(|error| panic!("{what}: {error}"));
    }
}

/// On every mesh the replicas of a weight stay the same, padding stays zero, and half of the bits train as all do; calls, bytes and memory
/// are predicted; a device whose memory the host cannot read gives the same bits.
#[test]
fn compressed_gradients_train_on_every_mesh() {
    for (mesh, schedule, stage, feedback) in [
        ("dp=2", "1f1b", ZeroStage::Off, "none"),
        ("dp=3", "gpipe", ZeroStage::Off, "ef21"),
        ("dp=2,tp=2,pp=2", "1f1b", ZeroStage::Off, "ef"),
        ("dp=2,pp=2", "zb_h2", ZeroStage::Off, "ef"),
        ("dp=2", "1f1b", ZeroStage::States, "ef"),
        ("dp=2,tp=2", "1f1b", ZeroStage::Gradients, "none"),
        ("dp=2,pp=2", "interleaved_1f1b", ZeroStage::Gradients, "ef"),
        ("dp=3", "1f1b", ZeroStage::Weights, "ef"),
    ] {
        let what = format!("{mesh} {schedule} {stage:?} {feedback}");
        let on = |compress| Plan {
            mesh: mesh.parse().unwrap(),
            schedule: named(schedule),
            global_batch_size: 12,
            num_microbatches: Some(2),
            max_norm: 1e3,
            zero: Zero { stage, group: None },
            compress,
            ..Plan::default()
        };
        let (wanted, exact) = run_on(&gpt2(), &on(Compress::default()), false, tokens).unwrap();
        for scheme in ["quant:8/block256", "topk:0.5"] {
            let plan = on(gradients(scheme, feedback));
            let (reports, state) = run_on(&gpt2(), &plan, false, tokens).unwrap();
            for (rank, reports) in reports.iter().enumerate() {
                let (report, predicted) = (&reports[STEPS - 1], predict(&gpt2(), &plan, rank).unwrap());
                assert_eq!(report.records, predicted.records, "{what}, rank {rank}");
                assert_eq!(report.memory[rank], predicted.memory, "{what}, rank {rank}");
            }
            let (opaque, hidden) = run_on(&gpt2(), &plan, true, tokens).unwrap();
            assert!(hidden == state && opaque[0][STEPS - 1].loss == reports[0][STEPS - 1].loss, "{what}: opaque");
            assert_ne!(weights(&state), weights(&exact), "{what}: nothing is lost");
            let (got, wanted) = (reports[0][STEPS - 1].loss, wanted[0][STEPS - 1].loss);
            assert!((got / wanted - 1.0).abs() < 2e-3, "{what}: {scheme} has loss {got}, uncompressed {wanted}");
        }
    }
}

/// What replicas have lost is saved, goes on bit by bit, and moves to another number of them with the same sum.
#[test]
fn residuals_of_gradients_move_to_another_dp_with_the_same_sum() {
    for (feedback, stage) in [("ef", ZeroStage::Off), ("ef21m:0.5", ZeroStage::Off), ("ef", ZeroStage::Gradients)] {
        let on = |mesh: &str| Plan {
            mesh: mesh.parse().unwrap(),
            global_batch_size: 16,
            num_microbatches: Some(2),
            zero: Zero { stage, group: None },
            compress: gradients("quant:4/block64", feedback),
            ..Plan::default()
        };
        let go_on = |plan: &Plan, from: Option<&WholeState>, steps: Range<usize>| -> (Vec<f64>, WholeState) {
            let ranks = thread::run_mesh(&plan.mesh, |rank| {
                let mut trainer = Trainer::new(gpt2(), plan, rank, Cpu::device())?;
                from.map(|state| trainer.load_state(state)).transpose()?;
                let step = |step| Ok(trainer.step(&tokens(step, trainer.samples()))?.loss);
                let losses = steps.clone().map(step).collect::<Result<Vec<_>, TrainError>>()?;
                Ok::<_, TrainError>((losses, trainer.state()?))
            });
            let (mut losses, states): (Vec<_>, Vec<_>) =
                ranks.unwrap_or_else(|error| panic!("{error}")).into_iter().unzip();
            (losses.swap_remove(0), WholeState::merge(&states).unwrap())
        };
        let plan = on("dp=4,tp=2");
        let (losses, wanted) = go_on(&plan, None, 0..4);
        let (_, halfway) = go_on(&plan, None, 0..2);
        let (resumed, state) = go_on(&plan, Some(&halfway), 2..4);
        assert!(resumed == losses[2..] && state == wanted, "{feedback}: {resumed:?} against {losses:?}");
        // As they are added up on the way: neighbours first.
        let sum = |state: &WholeState, key: &StateKey, replicas: usize| -> Vec<f32> {
            let shares = state.vector(key).unwrap();
            let mut sum: Vec<Vec<f32>> = shares.chunks_exact(shares.len() / replicas).map(<[f32]>::to_vec).collect();
            while sum.len() > 1 {
                let add = |pair: &[Vec<f32>]| pair[0].iter().zip(&pair[1]).map(|(a, b)| a + b).collect();
                sum = sum.chunks_exact(2).map(add).collect();
            }
            sum.remove(0)
        };
        let of_shares = ["gradient_residual", "gradient_estimate", "gradient_momentum"];
        let is_share = |key: &&StateKey| key.state.as_deref().is_some_and(|state| of_shares.contains(&state));
        let shares: Vec<&StateKey> = halfway.keys().filter(is_share).collect();
        assert!(shares.len() > 20, "{shares:?}");
        assert!(shares.iter().all(|key| sum(&halfway, key, 4).iter().any(|&x| x != 0.0)));
        for (mesh, replicas) in [("dp=2", 2), ("dp=2,pp=2", 2), ("dp=8", 8)] {
            let (_, moved) = go_on(&on(mesh), Some(&halfway), 2..2);
            // The table is tied: two stages have shares of its gradient.
            let of =
                |key: &StateKey| replicas * if mesh.ends_with("pp=2") && key.parameter == "wte.weight" { 2 } else { 1 };
            for key in &shares {
                assert_eq!(sum(&moved, key, of(key)), sum(&halfway, key, 4), "{feedback} on {mesh}: {key}");
            }
            go_on(&on(mesh), Some(&halfway), 2..3);
        }
    }
}

fn refused(plan: &Plan) -> String {
    match predict(&tower(4), plan, 0) {
        Err(TrainError::Plan(error)) if matches!(*error, PlanError::Compress { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let of = |compress| Plan { compress, num_microbatches: Some(4), ..plan("pp=2") };
    let quant = cuts("quant:8", "none", "none");
    let canonical = refused(&Plan { numerics: Numerics::Canonical { blocks: 8 }, ..of(quant) });
    assert!(canonical.starts_with("compression of activations by quant:8: canonical numerics promise"), "{canonical}");
    let nothing = refused(&of(cuts("none", "none", "ef")));
    assert!(nothing.starts_with("compression of nothing by ef: feedback brings back"), "{nothing}");
    let factors = refused(&of(cuts("none", "powersgd:2", "none")));
    assert!(factors.starts_with("compression of activation gradients by powersgd:2: the factors"), "{factors}");
    let amplified = refused(&of(cuts("randk:0.1/unbiased", "none", "ef")));
    assert!(amplified.contains("stage 0: ef with randk:0.1/unbiased: of 2x16 its error"), "{amplified}");
    let repeated = refused(&Plan { schedule: named("zb_h2"), ..of(Compress { feedback: Feedback::Ef, ..quant }) });
    assert!(repeated.contains("schedule zb_h2 begins steps that it may repeat"), "{repeated}");
    let slices = Plan { zero: Zero { stage: ZeroStage::States, group: None }, ..plan("dp=2") };
    let estimates = refused(&Plan { compress: gradients("topk:0.1", "ef21"), ..slices });
    assert!(estimates.contains("ranks that keep slices of a sum have no estimate of it"), "{estimates}");
    let buckets = refused(&Plan { compress: gradients("powersgd:2", "none"), ..plan("dp=2") });
    assert!(buckets.contains("gradients are summed in buckets, which are no matrices"), "{buckets}");
}
