//! Mixed precision: a run moves between types, meshes and stages of ZeRO; networks and experts train in 16 bits; what
//! does not go with it is refused.

use super::{batch, go_on, go_on_with, model, noise, on, tower};
use crate::experts::in_every_layer;
use meshwork_compress::{Feedback, Scheme};
use meshwork_core::{Mesh, World};
use meshwork_engine::dry_run::predict;
use meshwork_engine::{
    Compress, LossScale, MixedPrecision, Numerics, Plan, Recompute, ScheduleSpec, StateKey, StepReport, TrainError,
    Trainer, WholeState, Zero, ZeroStage,
};
use meshwork_models::experts::ExpertsConfig;
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::layers::Norm;
use meshwork_models::resnet::ResNetConfig;
use meshwork_moe::{MoeConfig, RouterKind};
use meshwork_nn::Model;
use meshwork_optim::{Adafactor, AdamW, Lamb, Rule, Sgd};
use meshwork_tensor::tape::HalfType;
use meshwork_testkit::Sampled;
use std::sync::Arc;

/// What stores in this type; f16 with a dynamic scale.
fn stored(dtype: HalfType) -> MixedPrecision {
    let loss_scale = match dtype {
        HalfType::Bf16 => LossScale::Fixed(1.0),
        HalfType::F16 => LossScale::Dynamic { initial: 1024.0, growth_interval: 2 },
    };
    MixedPrecision { dtype, reduce_in_half: false, loss_scale }
}

fn mixed(mesh: &str, dtype: HalfType) -> Plan {
    Plan { mixed: Some(stored(dtype)), ..on(mesh, Numerics::Fast) }
}

fn weights(state: &WholeState) -> Vec<(StateKey, Vec<f32>)> {
    let of = |key: &StateKey| (key.clone(), state.vector(key).unwrap().to_vec());
    state.keys().filter(|key| key.state.is_none()).map(of).collect()
}

/// The weights of the state are those in f32, whoever holds which slice of them.
#[test]
fn a_run_moves_between_types_meshes_and_stages() {
    let shared = |mesh: &str, stage| Plan { zero: Zero { stage, group: None }, ..mixed(mesh, HalfType::F16) };
    let chain = [
        mixed("dp=2,tp=2,pp=2", HalfType::Bf16),
        on("tp=4", Numerics::Fast),
        shared("dp=4", ZeroStage::Weights),
        shared("dp=2,pp=2", ZeroStage::States),
        mixed("dp=1", HalfType::F16),
    ];
    let (alone, _) = go_on(&on("dp=1", Numerics::Fast), None, 0..10);
    let mut state: Option<WholeState> = None;
    for (part, plan) in chain.iter().enumerate() {
        let first = 2 * part as u64;
        let (_, same) = match &state {
            Some(before) => go_on(plan, Some(before), first..first),
            None => go_on(plan, None, 0..0),
        };
        if let Some(before) = &state {
            assert_eq!(weights(&same), weights(before), "{}: weights on arrival", plan.mesh);
        }
        let (reports, next) = go_on(plan, state.as_ref(), first..first + 2);
        for (report, wanted) in reports.iter().zip(&alone[first as usize..]) {
            let off = (report.loss - wanted.loss).abs() / wanted.loss;
            assert!(off < 5e-3, "{}: step {} has loss {}, in f32 {}", plan.mesh, report.step, report.loss, wanted.loss);
        }
        state = Some(next);
    }
    // The scale was doubled behind two steps without overflow, and went along with the count of them.
    let scale = StateKey { parameter: "loss_scale".to_owned(), state: Some("dynamic".to_owned()) };
    assert_eq!(state.unwrap().vector(&scale).unwrap(), [4096.0, 2.0]);
}

/// In canonical numerics shares of sums have f32, and each sum is rounded once: the bits of one rank in 16 bits, on
/// every mesh. The state of f16 has the loss scale, which overflows at first.
#[test]
fn canonical_numerics_have_the_bits_of_one_rank() {
    let config = Gpt2Config {
        vocab_size: super::VOCAB,
        seq_len: super::SEQ,
        hidden_size: 32,
        dropout: 0.1,
        ..Gpt2Config::default()
    };
    // Of a token that several experts of a rank have read, the rank sends the sum of the gradients.
    let moe =
        MoeConfig { num_experts: 8, top_k: 4, router: RouterKind::TopK, aux_loss_coeff: 0.02, ..MoeConfig::default() };
    let experts = ExpertsConfig { every_n_layers: 2, num_shared_experts: 1, over_tp: true, ..in_every_layer(moe, 32) };
    let models: [(&str, Arc<dyn Model>); 4] = [
        ("gpt2", model()),
        ("gpt2, sequence parallel", Arc::new(Gpt2::new(config).sequence_parallel(true))),
        ("llama", super::llama()),
        ("experts", Arc::new(Gpt2::new(config).with_experts(Some(experts)))),
    ];
    let loss_scale = LossScale::Dynamic { initial: 2_f64.powi(24), growth_interval: 1 };
    for (turn, (what, model)) in models.iter().enumerate() {
        for (half, dtype) in [HalfType::Bf16, HalfType::F16].into_iter().enumerate() {
            let mixed = match dtype {
                HalfType::F16 => MixedPrecision { loss_scale, ..stored(dtype) },
                HalfType::Bf16 => stored(dtype),
            };
            let of = |mesh: &str, plan: Plan| {
                let mesh: Mesh = mesh.parse().unwrap();
                let numerics = Numerics::Canonical { blocks: 8 };
                let (reports, state) =
                    go_on_with(model, batch, &Plan { mesh, numerics, mixed: Some(mixed), ..plan }, None, 0..4);
                let numbers = |report: &StepReport| (report.loss, report.grad_norm.to_bits(), report.skipped);
                (reports.iter().map(numbers).collect::<Vec<_>>(), state)
            };
            let alone = of("dp=1", Plan::default());
            assert_eq!(alone.0.iter().any(|(.., skipped)| *skipped), dtype == HalfType::F16, "{what}, {:?}", alone.0);
            // zb_h2 and zb_v begin a step before the last one is certain.
            let [zb, h2, v] = ["zb_h1", "zb_h2", "zb_v"].map(|name| ScheduleSpec::named(name).unwrap());
            let sliced = |stage| Zero { stage, group: None };
            for (mesh, plan) in [
                ("pp=2", Plan { schedule: h2, num_microbatches: Some(4), ..Plan::default() }),
                ("tp=4", Plan::default()),
                ("dp=2,tp=2", Plan { zero: sliced(ZeroStage::Weights), ..Plan::default() }),
                ("dp=2,tp=2,pp=2", Plan { schedule: zb, num_microbatches: Some(4), ..Plan::default() }),
                (
                    "tp=2,pp=2",
                    Plan { schedule: v, num_microbatches: Some(4), recompute: Recompute::Full, ..Plan::default() },
                ),
                (
                    "dp=4",
                    Plan {
                        num_microbatches: Some(2),
                        recompute: Recompute::Selective,
                        zero: sliced(ZeroStage::Gradients),
                        ..Plan::default()
                    },
                ),
            ]
            .into_iter()
            .sampled_in_turn(2, turn + half)
            {
                let got = of(mesh, plan);
                assert_eq!(got.0, alone.0, "{what}, {dtype:?} on {mesh}");
                assert!(got.1 == alone.1, "{what}, {dtype:?} on {mesh}: state");
            }
            if *what == "experts" {
                let got = of("dp=2,ep=2,tp=2", Plan::default());
                assert_eq!(got.0, alone.0, "{what}, {dtype:?} over ep");
                assert!(got.1 == alone.1, "{what}, {dtype:?} over ep: state");
            }
        }
    }
}

/// A recomputed GELU or SwiGLU is computed from the stored product; forward must not have computed it from the product
/// before it was rounded.
#[test]
fn recomputed_activations_are_bitwise_identical() {
    for model in [model(), super::llama()] {
        let of =
            |recompute| go_on_with(&model, batch, &Plan { recompute, ..mixed("pp=2", HalfType::Bf16) }, None, 0..3).1;
        let kept = of(Recompute::None);
        for recompute in [Recompute::Selective, Recompute::Full, Recompute::Stage] {
            assert!(of(recompute) == kept, "{model:?}, {recompute:?}");
        }
    }
}

/// Ranks that share out have the bits of those that hold all, as in f32.
#[test]
fn zero_has_the_bits_of_whole_ranks() {
    for rule in [Rule::from(AdamW::default()), Lamb::default().into(), Adafactor::default().into()] {
        let of = |stage| {
            let zero = Zero { stage, group: None };
            let schedule = ScheduleSpec::named("gpipe").unwrap();
            let plan = Plan {
                zero,
                schedule,
                num_microbatches: Some(1),
                optimizer: rule.clone(),
                ..mixed("dp=4", HalfType::F16)
            };
            go_on(&plan, None, 0..3).1
        };
        let (whole, stages) = (of(ZeroStage::Off), [ZeroStage::States, ZeroStage::Gradients, ZeroStage::Weights]);
        for stage in stages {
            assert!(of(stage) == whole, "{rule:?}, {stage:?}");
        }
    }
}

/// Batch norm has its running statistics in f32.
#[test]
fn a_network_of_images_learns() {
    let network = ResNetConfig { groups: vec![(4, 2), (8, 2)], norm: Norm::Batch, ..ResNetConfig::digits() }.network();
    let (model, images): (Arc<dyn Model>, _) =
        (Arc::new(network), |step, samples| noise::images(step as usize, samples));
    let losses = |mixed| {
        let mesh: Mesh = "dp=2,pp=2".parse().unwrap();
        let optimizer = Sgd { momentum: 0.9, weight_decay: 5e-4 }.into();
        let plan = Plan {
            mesh,
            optimizer,
            mixed,
            global_batch_size: noise::BATCH,
            num_microbatches: Some(2),
            ..tower::plan("dp=1")
        };
        let (reports, state) = go_on_with(&model, images, &plan, None, 0..6);
        (reports.iter().map(|report| report.loss).collect::<Vec<_>>(), state)
    };
    let (f32, _) = losses(None);
    for dtype in [HalfType::Bf16, HalfType::F16] {
        let (got, state) = losses(Some(stored(dtype)));
        for (got, wanted) in got.iter().zip(&f32) {
            assert!((got - wanted).abs() < 2e-2 * wanted, "{dtype:?}: {got:?}, in f32 {f32:?}");
        }
        assert!(state.keys().any(|key| key.parameter.ends_with("running_var")), "statistics are state");
    }
}

/// The scores of a router are computed in f32, from activations in 16 bits.
#[test]
fn experts_learn_on_every_mesh() {
    for router in [RouterKind::Switch, RouterKind::TopK, RouterKind::Bias] {
        let top_k = if router == RouterKind::Switch { 1 } else { 2 };
        let moe = MoeConfig { num_experts: 4, top_k, router, aux_loss_coeff: 0.02, ..MoeConfig::default() };
        let experts =
            ExpertsConfig { every_n_layers: 2, num_shared_experts: 1, over_tp: true, ..in_every_layer(moe, 32) };
        let config =
            Gpt2Config { vocab_size: super::VOCAB, seq_len: super::SEQ, hidden_size: 32, ..Gpt2Config::default() };
        let model: Arc<dyn Model> = Arc::new(Gpt2::new(config).with_experts(Some(experts)));
        let losses = |plan: &Plan| -> Vec<f64> {
            go_on_with(&model, batch, plan, None, 0..4).0.iter().map(|report: &StepReport| report.loss).collect()
        };
        let f32 = losses(&on("dp=1", Numerics::Fast));
        for mesh in ["dp=1", "dp=2,ep=2,tp=2", "dp=2,ep=2,pp=2"] {
            for (got, wanted) in losses(&mixed(mesh, HalfType::Bf16)).iter().zip(&f32) {
                assert!((got - wanted).abs() < 1e-2 * wanted, "{router:?} on {mesh}: {got}, in f32 {wanted}");
            }
        }
    }
}

fn everywhere(scheme: &str) -> Compress {
    let scheme: Scheme = scheme.parse().unwrap();
    Compress { activations: scheme, activation_gradients: scheme, gradients: scheme, ..Compress::default() }
}

/// Messages of bf16 lose nothing of what is bf16, and sums are rounded once either way: the bits of a run without
/// compression.
#[test]
fn messages_of_bf16_lose_nothing_of_bf16() {
    for (mesh, schedule) in [("dp=2,pp=2", "1f1b"), ("dp=2,tp=2,pp=2", "zb_h1"), ("pp=4", "gpipe")] {
        let of = |compress| {
            let mixed = Some(MixedPrecision { reduce_in_half: true, ..stored(HalfType::Bf16) });
            let schedule = ScheduleSpec::named(schedule).unwrap();
            go_on(
                &Plan { mixed, compress, schedule, num_microbatches: Some(4), ..on(mesh, Numerics::Fast) },
                None,
                0..3,
            )
        };
        let ((plain, state), (sent, same)) = (of(Compress::default()), of(everywhere("bf16")));
        // The norm is added up in other parts, where gradients are compressed.
        let losses = |reports: &[StepReport]| reports.iter().map(|report| report.loss).collect::<Vec<_>>();
        assert_eq!(losses(&sent), losses(&plain), "{mesh}");
        assert!(same == state, "{mesh}");
    }
}

/// What is compressed has 16 bits, what is added up and kept has f32; calls, bytes and memory are those that were
/// predicted.
#[test]
fn compression_takes_and_gives_16_bits() {
    let quantised = |feedback| Compress { feedback, ..everywhere("quant:8") };
    let sparse = |feedback| Compress { feedback, ..everywhere("topk:0.5") };
    let factors = |feedback| Compress { gradients: "powersgd:4".parse().unwrap(), feedback, ..Compress::default() };
    let fixed = |dtype, reduce_in_half| {
        let loss_scale = LossScale::Fixed(if dtype == HalfType::F16 { 1024.0 } else { 1.0 });
        MixedPrecision { dtype, reduce_in_half, loss_scale }
    };
    for (mesh, compress, mixed, stage) in [
        ("dp=2,pp=2", quantised(Feedback::None), stored(HalfType::F16), ZeroStage::Off),
        ("dp=2,tp=2,pp=2", quantised(Feedback::Ef), fixed(HalfType::Bf16, true), ZeroStage::States),
        ("dp=4", sparse(Feedback::Ef21), fixed(HalfType::F16, true), ZeroStage::Off),
        ("dp=2,pp=2", sparse(Feedback::Ef), fixed(HalfType::Bf16, false), ZeroStage::Gradients),
        ("dp=2,pp=2", sparse(Feedback::Ef), fixed(HalfType::Bf16, true), ZeroStage::Gradients),
        ("dp=2,tp=2", factors(Feedback::Ef), fixed(HalfType::Bf16, true), ZeroStage::Off),
        ("dp=2", factors(Feedback::None), fixed(HalfType::Bf16, true), ZeroStage::Weights),
    ] {
        let plan = |mixed| {
            let zero = Zero { stage, group: None };
            Plan { mixed, compress, zero, num_microbatches: Some(2), ..on(mesh, Numerics::Fast) }
        };
        let what = format!("{mesh}, {compress:?}, {mixed:?}, {stage:?}");
        let ((reports, _), (wide, _)) = (go_on(&plan(Some(mixed)), None, 0..4), go_on(&plan(None), None, 0..4));
        for (report, wanted) in reports.iter().zip(&wide) {
            let off = (report.loss - wanted.loss).abs() / wanted.loss;
            assert!(off < 1e-2, "{what}: step {} has loss {}, in f32 {}", report.step, report.loss, wanted.loss);
        }
        let last = reports.last().unwrap();
        for (rank, memory) in last.memory.iter().enumerate() {
            let predicted = predict(&model(), &plan(Some(mixed)), rank).unwrap();
            assert_eq!(memory, &predicted.memory, "{what}, rank {rank}");
            if rank == 0 {
                assert_eq!(last.records, predicted.records, "{what}");
            }
        }
    }
}

#[test]
fn what_does_not_go_with_it_is_refused() {
    let refused = |plan: Plan| {
        let made = World::threads(&plan.mesh)
            .run_mesh(&plan.mesh, |rank| Trainer::new(model(), &plan, rank, meshwork_cpu::Cpu::device()).map(drop));
        made.unwrap_err().to_string()
    };
    let f16 = |loss_scale| Some(MixedPrecision { loss_scale, ..stored(HalfType::F16) });
    let plan = |mixed| Plan { mixed, ..on("dp=2", Numerics::Fast) };
    let reduced_in_half = Some(MixedPrecision { reduce_in_half: true, ..stored(HalfType::Bf16) });
    let dynamic = |initial, growth_interval| f16(LossScale::Dynamic { initial, growth_interval });
    let compress = Compress { feedback: Feedback::Ef21, ..everywhere("topk:0.5") };
    let schedule = ScheduleSpec::named("pipedream_2bw").unwrap();
    let pipedream = Plan { schedule, max_norm: 0.0, mesh: "pp=2".parse().unwrap(), ..plan(dynamic(1024.0, 2)) };
    for (plan, why) in [
        (
            plan(f16(LossScale::Fixed(1.0))),
            "mixed precision in f16: without a loss scale, gradients below 6e-8 would be zeros",
        ),
        (plan(f16(LossScale::Fixed(-2.0))), "a loss scale of -2"),
        (plan(dynamic(1000.0, 2)), "a first loss scale of 1000: use a power of two"),
        (plan(dynamic(1024.0, 0)), "a growth interval of 0 steps"),
        (
            Plan { compress, ..mixed("dp=2", HalfType::F16) },
            "feedback Ef21 adds what a step lost, in that step's loss scale, to gradients in another",
        ),
        (
            Plan { numerics: Numerics::Canonical { blocks: 8 }, ..plan(reduced_in_half) },
            "canonical numerics add up gradients exactly, and in 16 bits each rank would round its share: reduce in f32",
        ),
        (pipedream, "a dynamic loss scale does not go with schedule pipedream_2bw"),
    ] {
        let error = refused(plan);
        assert!(error.contains(why), "{error}");
    }
}

/// PipeDream divides each update's gradients by a fixed scale.
#[test]
fn a_fixed_scale_goes_with_asynchronous_schedules() {
    let untied: Arc<dyn Model> = {
        let config = Gpt2Config {
            vocab_size: super::VOCAB,
            hidden_size: 32,
            seq_len: super::SEQ,
            tie_embeddings: false,
            ..Gpt2Config::default()
        };
        Arc::new(Gpt2::new(config))
    };
    let run = |mixed| {
        let schedule = ScheduleSpec::named("pipedream_2bw").unwrap();
        let plan = Plan { mixed, schedule, max_norm: 0.0, num_microbatches: Some(4), ..on("pp=2", Numerics::Fast) };
        let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(untied.clone(), &plan, rank, meshwork_cpu::Cpu::device())?;
            let mut reports = Vec::new();
            for step in 0..6 {
                reports.extend(trainer.start_step(&batch(step, trainer.samples()), || false, |_| {})?);
            }
            reports.extend(trainer.flush(|_| {})?);
            Ok::<_, TrainError>(reports.iter().map(|report| (report.loss, report.grad_norm)).collect::<Vec<_>>())
        });
        ranks.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
    };
    let f32 = run(None);
    let bf16 = |scale| Some(MixedPrecision { loss_scale: LossScale::Fixed(scale), ..stored(HalfType::Bf16) });
    assert_eq!(run(bf16(1.0)), run(bf16(256.0)), "a power of two changes no bit");
    let f16 = run(Some(MixedPrecision { loss_scale: LossScale::Fixed(256.0), ..stored(HalfType::F16) }));
    for (got, wanted) in f16.iter().zip(&f32) {
        assert!(
            (got.0 - wanted.0).abs() < 5e-3 * wanted.0 && (got.1 - wanted.1).abs() < 2e-2 * wanted.1,
            "{got:?} {wanted:?}"
        );
    }
}
