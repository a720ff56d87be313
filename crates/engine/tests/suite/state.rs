//! The state of a run by global name, slice and shape: a run moves to another mesh in the middle of training, and
//! continues with the same numbers.
//!
//! More than 400 lines: each way to hold a state, as one short case, beside the run that all are compared with.

mod finite;
mod frozen;
mod mixed;
mod offload;
mod rules;

use crate::runs::on_ranks;
use crate::{noise, tower};
use meshwork_core::{Axis, DType, Mesh, OpKind, World};
use meshwork_cpu::Cpu;
use meshwork_data_parallel::GatherEvent;
use meshwork_engine::{
    Numerics, Plan, ScheduleSpec, StateKey, StepReport, TrainError, Trainer, WholeState, Zero, ZeroStage, state_layout,
};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_models::layers::Norm;
use meshwork_models::llama::{Llama, LlamaConfig, PRESETS};
use meshwork_models::resnet::ResNetConfig;
use meshwork_nn::{Batch, Model};
use meshwork_optim::{Adafactor, AdamW, Decay, LrSchedule, Rule, Sgd};
use meshwork_tensor::random;
use meshwork_testkit::parity::assert_close;
use std::ops::Range;
use std::sync::Arc;

const SEQ: usize = 16;
const VOCAB: usize = 61;

/// Sizes of the GPT-2s of these tests.
fn small_gpt2() -> Gpt2Config {
    Gpt2Config { vocab_size: VOCAB, hidden_size: 32, ffn_hidden_size: 64, seq_len: SEQ, ..Gpt2Config::default() }
}

/// Sizes of the Llamas of these tests.
fn small_llama() -> LlamaConfig {
    LlamaConfig { vocab_size: VOCAB, hidden_size: 32, ffn_hidden_size: 64, seq_len: SEQ, ..PRESETS[0].1 }
}

fn model() -> Arc<dyn Model> {
    let config = Gpt2Config { dropout: 0.1, ..small_gpt2() };
    Arc::new(Gpt2::new(config))
}

/// A Llama with fewer heads of keys and values than there are ranks in `tp=4`.
fn llama() -> Arc<dyn Model> {
    Arc::new(Llama::new(small_llama()))
}

/// Random tokens, different in each step.
fn batch(step: u64, samples: Range<usize>) -> Batch {
    let key = random::key(5, "tokens");
    let token = |sample: usize, at: usize| {
        (random::uniform(key, (step * 16 + sample as u64) * 100 + at as u64) * VOCAB as f32) as i32
    };
    let row =
        |shift: usize| samples.clone().flat_map(|sample| (0..SEQ).map(move |at| token(sample, at + shift))).collect();
    language::batch(row(0), row(1), SEQ).unwrap()
}

/// Trains steps `steps` on a mesh, from a state if there is one: the reports of one rank, and the whole state
/// afterwards.
fn go_on(plan: &Plan, from: Option<&WholeState>, steps: Range<u64>) -> (Vec<StepReport>, WholeState) {
    go_on_with(&model(), batch, plan, from, steps)
}

fn go_on_with(
    model: &Arc<dyn Model>,
    batch: impl Fn(u64, Range<usize>) -> Batch + Sync,
    plan: &Plan,
    from: Option<&WholeState>,
    steps: Range<u64>,
) -> (Vec<StepReport>, WholeState) {
    let (mut reports, state) = on_ranks(model, plan, false, |trainer| {
        from.map(|state| trainer.load_state(state)).transpose()?;
        assert_eq!(trainer.steps_done(), steps.start);
        steps.clone().map(|step| trainer.step(&batch(step, trainer.samples()))).collect::<Result<Vec<_>, _>>()
    });
    (reports.swap_remove(0), state)
}

fn on(mesh: &str, numerics: Numerics) -> Plan {
    Plan { mesh: mesh.parse().unwrap(), numerics, ..Plan::default() }
}

const CHAIN: [&str; 5] = ["dp=2,tp=2,pp=2", "tp=4", "dp=1", "pp=4", "dp=4"];

#[test]
fn a_run_moves_from_mesh_to_mesh_and_its_losses_go_on() {
    let (alone, _) = go_on(&on("dp=1", Numerics::Fast), None, 0..10);
    let mut state: Option<WholeState> = None;
    for (part, mesh) in CHAIN.into_iter().enumerate() {
        let first = 2 * part as u64;
        let (reports, next) = go_on(&on(mesh, Numerics::Fast), state.as_ref(), first..first + 2);
        for (report, wanted) in reports.iter().zip(&alone[first as usize..]) {
            assert_eq!((report.step, report.lr), (wanted.step, wanted.lr));
            let off = (report.loss - wanted.loss).abs() / wanted.loss;
            assert!(off < 1e-5, "{mesh}: step {} has loss {}, uninterrupted {}", report.step, report.loss, wanted.loss);
        }
        state = Some(next);
    }
}

#[test]
fn in_canonical_numerics_the_chain_has_the_bits_of_the_uninterrupted_run() {
    let canonical = Numerics::Canonical { blocks: 8 };
    for model in [model(), llama()] {
        let (alone, wanted) = go_on_with(&model, batch, &on("dp=1", canonical), None, 0..10);
        let mut state: Option<WholeState> = None;
        for (part, mesh) in CHAIN.into_iter().enumerate() {
            let first = 2 * part as u64;
            let (reports, next) = go_on_with(&model, batch, &on(mesh, canonical), state.as_ref(), first..first + 2);
            for (report, wanted) in reports.iter().zip(&alone[first as usize..]) {
                let numbers = |report: &StepReport| (report.loss, report.grad_norm);
                assert_eq!(numbers(report), numbers(wanted), "{model:?} on {mesh}, step {}", report.step);
            }
            state = Some(next);
        }
        assert!(state.unwrap() == wanted, "{model:?}");
    }
}

/// The stages that are compared, each with the whole of dp.
fn stages() -> impl Iterator<Item = Zero> {
    ZeroStage::ALL.into_iter().skip(1).map(|stage| Zero { stage, group: None })
}

/// With one micro-batch no sum changes its order: ranks that share out states, gradients and weights make the steps of
/// ranks that hold them whole, bit by bit. With several, stages from 2 add up slices of micro-batches where ranks added
/// up their own first.
#[test]
fn ranks_that_share_out_have_the_bits_of_those_that_hold_all() {
    for (mesh, schedule, micros) in [
        ("dp=4", "gpipe", 1),
        ("dp=3", "1f1b", 1),
        ("dp=2,tp=2", "1f1b", 1),
        ("dp=2,pp=2", "gpipe", 1),
        ("dp=2,tp=2,pp=2", "1f1b", 4),
        ("dp=2,pp=2", "zb_v", 4),
        ("dp=2,pp=2", "zb_h2", 4),
        ("dp=2,pp=2", "interleaved_1f1b", 4),
    ] {
        let plan = Plan {
            schedule: ScheduleSpec::named(schedule).unwrap(),
            num_microbatches: Some(micros),
            global_batch_size: if mesh == "dp=3" { 12 } else { 16 },
            ..on(mesh, Numerics::Fast)
        };
        let (reports, wanted) = go_on(&plan, None, 0..3);
        for zero in stages() {
            let (got, state) = go_on(&Plan { zero, ..plan.clone() }, None, 0..3);
            let exact = micros == 1 || zero.stage == ZeroStage::States;
            for (got, wanted) in got.iter().zip(&reports) {
                let off = (got.loss - wanted.loss).abs() / wanted.loss + (got.grad_norm / wanted.grad_norm - 1.0).abs();
                assert!(off < 2e-5, "{mesh} {schedule} {zero:?}: step {}: {} {}", got.step, got.loss, wanted.loss);
                assert!(!exact || got.loss == wanted.loss, "{mesh} {schedule} {zero:?}: step {}", got.step);
                // The norm is summed by buckets, in f64; those of the later stages are smaller.
                let off = (got.grad_norm / wanted.grad_norm - 1.0).abs();
                let same = if zero.stage == ZeroStage::States { 0.0 } else { 1e-15 };
                assert!(!exact || off <= same, "{mesh} {schedule} {zero:?}: step {}: {off}", got.step);
            }
            assert!(!exact || state == wanted, "{mesh} {schedule} {zero:?}: other weights or states");
        }
    }
}

/// Canonical numerics have one rank's bits at every stage, and a run goes from any to any: the state is named by
/// slices.
#[test]
fn in_canonical_numerics_stages_have_the_bits_of_one_rank_and_a_run_moves_between_them() {
    let canonical = Numerics::Canonical { blocks: 8 };
    let (alone, wanted) = go_on(&on("dp=1", canonical), None, 0..8);
    let mut state: Option<WholeState> = None;
    let chain = [("dp=4", 3), ("tp=2", 0), ("dp=2,tp=2,pp=2", 2), ("dp=2,pp=2", 1)];
    for (part, (mesh, stage)) in chain.into_iter().enumerate() {
        let first = 2 * part as u64;
        let zero = Zero { stage: ZeroStage::ALL[stage], group: None };
        let (reports, next) = go_on(&Plan { zero, ..on(mesh, canonical) }, state.as_ref(), first..first + 2);
        for (report, wanted) in reports.iter().zip(&alone[first as usize..]) {
            assert_eq!((report.loss, report.grad_norm), (wanted.loss, wanted.grad_norm), "{mesh}, stage {stage}");
        }
        state = Some(next);
    }
    assert!(state.unwrap() == wanted);
}

/// Elements that a rank sends and receives over dp in a step, in units of the parameters: an all-reduce counts twice.
#[test]
fn a_step_communicates_what_the_formulae_say() {
    for (micros, mesh) in [(1, "dp=4"), (4, "dp=4"), (4, "dp=2,pp=2")] {
        for (stage, most) in ZeroStage::ALL.into_iter().zip([2, 2, micros + 1, 3 * micros]) {
            let zero = Zero { stage, group: None };
            let schedule = ScheduleSpec::named("gpipe").unwrap();
            let plan = Plan { zero, schedule, num_microbatches: Some(micros), ..on(mesh, Numerics::Fast) };
            let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let mut trainer = Trainer::new(llama(), &plan, rank, Cpu::device())?;
                let report = trainer.step(&batch(0, trainer.samples()))?;
                Ok::<_, TrainError>((report, trainer.local_elements(), trainer.gather_events()))
            });
            for (report, parameters, events) in ranks.unwrap() {
                let on_dp = |op| {
                    let of = report.records.iter().filter(move |record| record.group == "dp" && record.op == op);
                    of.filter(|record| record.dtype == DType::F32).map(|record| record.elements).sum::<usize>()
                };
                let [reduced, scattered, gathered] =
                    [OpKind::AllReduce, OpKind::ReduceScatter, OpKind::AllGather].map(on_dp);
                let all = (2 * reduced + scattered + gathered) as f64 / parameters as f64;
                let what = format!("{mesh}, {micros} micro-batches, {stage:?}: {all} of {most}");
                // Slices are of one length: a bucket may be padded by an element for each rank.
                assert!(all < most as f64 * 1.01 && all > (most as f64 - 0.5).min(2.0 * micros as f64), "{what}");
                if stage < ZeroStage::Weights {
                    assert!(all > most as f64 * 0.999, "{what}");
                    continue;
                }
                assert_eq!(gathered.min(scattered), scattered, "{what}: gradients of each micro-batch once");
                // Each gather but the first of a walk is started while the weights before it are used.
                let (mut ahead, mut last) = (0, None);
                for (_, event) in &events {
                    match *event {
                        GatherEvent::Used(used) => last = Some(used),
                        GatherEvent::Started(started) => ahead += usize::from(last != Some(started)),
                    }
                }
                let started = events.iter().filter(|(_, event)| matches!(event, GatherEvent::Started(_))).count();
                let walks = 2 * micros;
                assert_eq!(ahead, started - walks, "{what}: {started} gathers in {walks} walks");
            }
        }
    }
}

/// What is left of the model between two steps, in bytes of f32: 4 for a weight, 4 for a gradient, 8 for the states of
/// AdamW.
#[test]
fn a_rank_holds_what_the_formulae_say() {
    let ranks = 4;
    for stage in ZeroStage::ALL {
        let plan = Plan { zero: Zero { stage, group: None }, ..on("dp=4", Numerics::Fast) };
        let held = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(llama(), &plan, rank, Cpu::device())?;
            let before = trainer.device().meter().live_bytes();
            trainer.step(&batch(0, trainer.samples()))?;
            let meter = trainer.device().meter();
            Ok::<_, TrainError>((before, meter.live_bytes(), trainer.local_elements()))
        });
        for (before, after, parameters) in held.unwrap() {
            let of = |cut: bool, bytes: usize| if cut { bytes as f64 / ranks as f64 } else { bytes as f64 };
            let weights = of(stage >= ZeroStage::Weights, 4);
            let gradients = of(stage >= ZeroStage::States, 4); // once they are reduced
            let states = of(stage >= ZeroStage::States, 8);
            let close = |bytes: u64, wanted: f64| {
                let got = bytes as f64 / parameters as f64;
                assert!(got >= wanted && got < wanted * 1.02, "{stage:?}: {got} bytes a parameter, {wanted} wanted");
            };
            close(before, weights + states + if stage == ZeroStage::Off { gradients } else { 0.0 });
            close(after, weights + gradients + states);
        }
    }
}

/// Groups of ranks each have everything, and share it out within: the numbers are the same, and so are the bits where
/// groups are subtrees of the sum over ranks.
#[test]
fn groups_share_out_within_and_agree() {
    for (mesh, group) in [("dp=4", 2), ("dp=4,pp=2", 2), ("dp=4", 1), ("dp=6", 3)] {
        let batch = if mesh == "dp=6" { 12 } else { 16 };
        let plan = Plan { num_microbatches: Some(1), global_batch_size: batch, ..on(mesh, Numerics::Fast) };
        let (reports, wanted) = go_on(&plan, None, 0..2);
        for stage in ZeroStage::ALL.into_iter().skip(1) {
            let zero = Zero { stage, group: Some(group) };
            let (got, state) = go_on(&Plan { zero, ..plan.clone() }, None, 0..2);
            let off = (got[1].loss - reports[1].loss).abs() / reports[1].loss;
            assert!(off < 1e-5, "{mesh} {zero:?}: {} {}", got[1].loss, reports[1].loss);
            assert!(group == 3 || state == wanted, "{mesh} {zero:?}: other bits");
            let bytes = |group| got[0].comm_bytes[group];
            assert_eq!(bytes("zero") > 0.0, group > 1, "{mesh} {zero:?}");
            assert_eq!(bytes("zero_replicas") > 0.0, group > 1, "{mesh} {zero:?}");
        }
    }
}

/// What the layout says a rank holds is what it holds, slice by slice.
#[test]
fn the_layout_of_a_state_names_the_slices_that_ranks_hold() {
    for (zero, optimizer) in
        stages().flat_map(|zero| [AdamW::default().into(), Rule::from(Adafactor::default())].map(|rule| (zero, rule)))
    {
        let factored = optimizer.name() == "adafactor";
        let plan = Plan { zero, optimizer, ..on("dp=3,pp=2", Numerics::Fast) };
        let plan = Plan { global_batch_size: 12, ..plan };
        let layout = state_layout(&model(), &plan).unwrap();
        let states = World::threads(&plan.mesh)
            .run_mesh(&plan.mesh, |rank| Trainer::new(model(), &plan, rank, Cpu::device())?.state());
        let mut elements = [0, 0];
        for (rank, state) in states.unwrap().iter().enumerate() {
            let told: Vec<_> = layout.iter().filter(|of| of.rank == rank).map(|of| (&of.key, &of.slice)).collect();
            let held: Vec<_> = state.pieces.iter().map(|held| (&held.key, &held.piece.slice)).collect();
            assert_eq!(told, held, "{zero:?}, rank {rank}");
            for of in &state.pieces {
                elements[usize::from(of.key.state.is_some())] += of.piece.slice.elements();
            }
        }
        if factored {
            assert!(elements[1] * 2 < elements[0], "rows and columns of matrices");
            continue;
        }
        let copies = if zero.stage == ZeroStage::Weights { 1 } else { 3 };
        assert_eq!(
            elements[0] * 2,
            elements[1] * copies,
            "two states for each weight, of which there are {copies} copies"
        );
    }
}

/// The model of a user's own, and its state: weights, frozen ones, states of both optimizers, the buffers of
/// statistics, counters.
#[test]
fn a_tower_moves_from_mesh_to_mesh() {
    let (model, batch) = (tower::tower(4), |step, samples| tower::batch(step as usize, samples));
    let decay = LrSchedule { base: 0.005, decay: Decay::Cosine, decay_steps: 6, ..tower::plan("dp=1").lr };
    let on = |mesh, numerics, optimizer: &Rule| Plan {
        numerics,
        optimizer: optimizer.clone(),
        lr: decay,
        max_norm: 1.0,
        ..tower::plan(mesh)
    };
    let numbers = |reports: &[StepReport]| -> Vec<_> {
        reports
            .iter()
            .map(|report| (report.step, report.lr, report.loss, report.grad_norm, report.metrics[1]))
            .collect()
    };
    for optimizer in [Rule::from(Sgd { momentum: 0.9, weight_decay: 0.0 }), AdamW::default().into()] {
        for numerics in [Numerics::Canonical { blocks: 8 }, Numerics::Fast] {
            let (alone, wanted) = go_on_with(&model, batch, &on("dp=1", numerics, &optimizer), None, 0..6);
            assert!(wanted.keys().any(|key| key.parameter == "block.0.rate"), "statistics are state");
            let (mut state, mut reports) = (None, Vec::new());
            for (mesh, steps) in [("dp=2,pp=2", 0..2), ("dp=1", 2..4), ("pp=2", 4..6)] {
                let (found, next) = go_on_with(&model, batch, &on(mesh, numerics, &optimizer), state.as_ref(), steps);
                reports.extend(found);
                state = Some(next);
            }
            let state = state.unwrap();
            if numerics == Numerics::Fast {
                let losses = |reports: &[StepReport]| reports.iter().map(|report| report.loss).collect::<Vec<_>>();
                assert_close(&format!("losses, {optimizer:?}"), &losses(&reports), &losses(&alone), 0.0);
                assert_near(&state, &wanted);
            } else {
                assert_eq!(numbers(&reports), numbers(&alone), "{optimizer:?}");
                assert!(state == wanted, "{optimizer:?}");
            }
        }
    }
}

/// The running mean and variance of batch norms too. Cutting a network into stages changes no bit, and sharing out its
/// micro-batches over dp the order of sums alone.
#[test]
fn a_network_with_batch_norms_moves_from_mesh_to_mesh() {
    let network = ResNetConfig { groups: vec![(4, 2), (8, 2)], norm: Norm::Batch, ..ResNetConfig::digits() }.network();
    let (model, images): (Arc<dyn Model>, _) =
        (Arc::new(network), |step, samples| noise::images(step as usize, samples));
    let on = |mesh: &str| {
        let mesh: Mesh = mesh.parse().unwrap();
        let micros = 4 / mesh.degree(Axis::Dp); // the same ones on every mesh
        let optimizer = Sgd { momentum: 0.9, weight_decay: 5e-4 }.into();
        Plan { mesh, optimizer, global_batch_size: noise::BATCH, num_microbatches: Some(micros), ..tower::plan("dp=1") }
    };
    let losses = |reports: &[StepReport]| reports.iter().map(|report| report.loss).collect::<Vec<_>>();
    let (alone, wanted) = go_on_with(&model, images, &on("dp=1"), None, 0..6);
    assert!(wanted.keys().any(|key| key.parameter.ends_with("running_var")), "statistics are state");
    for (first, same_bits) in [("pp=2", true), ("dp=2,pp=2", false)] {
        let (mut state, mut reports) = (None, Vec::new());
        for (mesh, steps) in [(first, 0..2), ("dp=1", 2..4), ("pp=2", 4..6)] {
            let (found, next) = go_on_with(&model, images, &on(mesh), state.as_ref(), steps);
            reports.extend(found);
            state = Some(next);
        }
        let state = state.unwrap();
        if same_bits {
            assert_eq!(losses(&reports), losses(&alone), "{first}");
            assert!(state == wanted, "{first}");
        } else {
            assert_close("losses", &losses(&reports), &losses(&alone), 0.0);
            assert_near(&state, &wanted);
        }
    }
}

#[track_caller]
fn assert_near(got: &WholeState, wanted: &WholeState) {
    assert!(got.keys().eq(wanted.keys()));
    for key in wanted.keys() {
        assert_close(&key.to_string(), got.vector(key).unwrap(), wanted.vector(key).unwrap(), 0.0);
    }
}

/// The same mesh, from a schedule whose steps overlap to one whose weights change while it runs: the bits are kept.
#[test]
fn the_same_mesh_goes_on_bit_by_bit_with_any_schedule() {
    for schedule in ["1f1b", "zb_h2", "zb_v"] {
        let schedule = ScheduleSpec::named(schedule).unwrap();
        let plan = Plan { schedule, num_microbatches: Some(8), ..on("dp=2,pp=2", Numerics::Fast) };
        let (alone, wanted) = go_on(&plan, None, 0..4);
        let (first, state) = go_on(&plan, None, 0..2);
        let (second, got) = go_on(&plan, Some(&state), 2..4);
        let losses = |reports: &[StepReport]| reports.iter().map(|report| report.loss).collect::<Vec<_>>();
        assert_eq!([losses(&first), losses(&second)].concat(), losses(&alone));
        assert!(got == wanted);
    }
}

/// A table of 100 words is stored in 104 rows in canonical numerics and in 128 in fast ones, over any number of ranks.
#[test]
fn a_state_has_the_words_of_a_table_and_not_its_padding() {
    let model: Arc<dyn Model> = Arc::new(Llama::new(LlamaConfig { vocab_size: 100, ..small_llama() }));
    let (_, state) = go_on_with(&model, batch, &on("dp=2,tp=2", Numerics::Canonical { blocks: 8 }), None, 0..2);
    for key in state.keys().filter(|key| ["embed_tokens.weight", "lm_head.weight"].contains(&&*key.parameter)) {
        assert_eq!(state.vector(key).map(<[f32]>::len), Some(100 * 32), "{key}");
    }
    for (mesh, stage) in [("dp=1", 0), ("tp=4", 0), ("dp=4", 3), ("dp=2,tp=2,pp=2", 1)] {
        let plan = Plan { zero: Zero { stage: ZeroStage::ALL[stage], group: None }, ..on(mesh, Numerics::Fast) };
        let (_, moved) = go_on_with(&model, batch, &plan, Some(&state), 2..2);
        assert!(moved == state, "{mesh}, stage {stage}");
    }
}

#[test]
fn state_that_does_not_fit_is_refused_by_name() {
    let (_, state) = go_on(&on("dp=1", Numerics::Fast), None, 0..1);
    let weights = |parameter: &str, state: Option<&str>| StateKey {
        parameter: parameter.to_owned(),
        state: state.map(str::to_owned),
    };
    assert_eq!(state.vector(&weights("wte.weight", Some("exp_avg"))).map(<[f32]>::len), Some(VOCAB * 32));
    let refused = |model: Gpt2Config| {
        let plan = on("dp=1", Numerics::Fast);
        let rank = Arc::new(meshwork_core::Rank::recording(&plan.mesh, 0).unwrap());
        let mut trainer = Trainer::new(Arc::new(Gpt2::new(model)), &plan, rank, Cpu::device()).unwrap();
        trainer.load_state(&state).unwrap_err().to_string()
    };
    let same = small_gpt2();
    let deeper = refused(Gpt2Config { num_layers: 5, ..same });
    assert!(deeper.contains("state of h.4.") && deeper.contains("the state has none of that name"), "{deeper}");
    let wider = refused(Gpt2Config { vocab_size: 64, ..same });
    assert_eq!(wider, "state of wte.weight: the state has [61, 32], the model [64, 32]");
}
