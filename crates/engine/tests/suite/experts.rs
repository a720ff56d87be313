//! Language models with experts, through the engine: the bits of one rank on every mesh and schedule, biases and
//! metrics included.
//!
//! More than 400 lines: one program, because each costs a link.

use crate::runs::{Vectors, on_ranks, vectors};
use meshwork_compress::Feedback;
use meshwork_context_parallel::{ContextParallel, Method};
use meshwork_core::Rank;
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{
    AtCuts, Compress, LossScale, MixedPrecision, Numerics, Plan, Recompute, ScheduleSpec, StateKey, StateSource,
    StepReport, TrainError, Trainer, Verify, WholeState, dry_run,
};
use meshwork_models::experts::ExpertsConfig;
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language;
use meshwork_models::llama::{Llama, LlamaConfig, PRESETS};
use meshwork_moe::balance::imbalance;
use meshwork_moe::{ExpertGroups, MoeConfig, Overflow, RouterKind};
use meshwork_nn::{Batch, Model};
use meshwork_optim::{Decay, LrSchedule, Sgd};
use meshwork_tensor::Shape;
use meshwork_tensor::op::Order;
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::tape::HalfType;
use meshwork_testkit::Sampled;
use meshwork_testkit::opaque::{self, Opaque};
use std::ops::Range;
use std::sync::Arc;

const SEQ: usize = 12;
const BATCH: usize = 8;
const STEPS: usize = 3;

/// Experts of this many inner features in every layer, whole on each rank of tp, and none that are shared.
pub fn in_every_layer(moe: MoeConfig, expert_hidden_size: usize) -> ExpertsConfig {
    ExpertsConfig {
        moe,
        every_n_layers: 1,
        first_dense_layers: 0,
        num_shared_experts: 0,
        expert_hidden_size,
        over_tp: false,
    }
}

fn gpt2(router: RouterKind) -> Gpt2 {
    gpt2_with(router, 0.1)
}

fn gpt2_with(router: RouterKind, dropout: f32) -> Gpt2 {
    let top_k = if router == RouterKind::Switch { 1 } else { 2 };
    let moe = MoeConfig {
        num_experts: 4,
        top_k,
        router,
        capacity_factor: 1.5,
        overflow: if router == RouterKind::Gshard { Overflow::Reroute } else { Overflow::Drop },
        aux_loss_coeff: 0.02,
        z_loss_coeff: 0.001,
        jitter: 0.05,
        ..MoeConfig::default()
    };
    let experts = ExpertsConfig { every_n_layers: 2, over_tp: true, ..in_every_layer(moe, 32) };
    let config = Gpt2Config {
        vocab_size: 40,
        num_layers: 4,
        hidden_size: 16,
        num_heads: 4,
        ffn_hidden_size: 32,
        seq_len: SEQ,
        dropout,
        ..Gpt2Config::default()
    };
    Gpt2::new(config).with_experts(Some(experts))
}

/// DeepSeek's way: sigmoids and a bias in groups, and a shared expert; in every layer.
fn llama() -> Llama {
    let moe = MoeConfig {
        num_experts: 8,
        top_k: 3,
        router: RouterKind::Bias,
        groups: ExpertGroups { groups: 4, top_groups: 2, best: 2 },
        aux_loss_coeff: 1e-3,
        bias_update_rate: 0.01,
        routed_scaling: 2.5,
        ..MoeConfig::default()
    };
    let experts = ExpertsConfig { num_shared_experts: 1, over_tp: true, ..in_every_layer(moe, 16) };
    let config = LlamaConfig {
        vocab_size: 40,
        num_layers: 2,
        hidden_size: 16,
        num_heads: 4,
        num_kv_heads: 2,
        ffn_hidden_size: 32,
        seq_len: SEQ,
        ..PRESETS[0].1
    };
    Llama::new(config).with_experts(Some(experts))
}

fn batch(step: usize, samples: Range<usize>) -> Batch {
    let tokens: Vec<i32> = samples
        .flat_map(|sample| (0..=SEQ).map(move |at| ((at * at + 7 * sample + 3 * step * at) % 40) as i32))
        .collect();
    let part = |from: usize| tokens.chunks(SEQ + 1).flat_map(|sample| sample[from..from + SEQ].to_vec()).collect();
    language::batch(part(0), part(1), SEQ).unwrap()
}

fn train(
    model: &Arc<dyn Model>,
    mesh: &str,
    schedule: &str,
    micros: usize,
    numerics: Numerics,
    recompute: Recompute,
) -> (Vec<StepReport>, Vectors) {
    let plan = Plan {
        mesh: mesh.parse().unwrap(),
        schedule: ScheduleSpec::named(schedule).unwrap(),
        global_batch_size: BATCH,
        num_microbatches: Some(micros),
        numerics,
        recompute,
        ..Plan::default()
    };
    let (mut reports, state) = on_ranks(model, &plan, false, |trainer| {
        (0..STEPS).map(|step| trainer.step(&batch(step, trainer.samples()))).collect::<Result<Vec<_>, _>>()
    });
    (reports.swap_remove(0), vectors(&state))
}

const MESHES: [(&str, &str, usize, Recompute); 8] = [
    ("dp=2", "1f1b", 1, Recompute::None),
    ("dp=2,ep=2", "1f1b", 1, Recompute::Full),
    ("dp=4,ep=4", "1f1b", 2, Recompute::Selective),
    ("dp=4,ep=2", "1f1b", 2, Recompute::Sqrt),
    ("tp=2,dp=2,ep=2", "1f1b", 2, Recompute::None),
    ("pp=2", "zb_h1", 4, Recompute::Full),
    ("tp=2,dp=2,ep=2,pp=2", "1f1b", 2, Recompute::Stage),
    ("dp=4,ep=2,pp=2", "zb_h1", 2, Recompute::Selective),
];

fn bits(state: &Vectors) -> Vec<(&StateKey, Vec<u32>)> {
    state.iter().map(|(key, values)| (key, values.iter().map(|x| x.to_bits()).collect())).collect()
}

#[test]
fn every_mesh_has_the_bits_of_one_rank() {
    let numerics = Numerics::Canonical { blocks: 8 };
    let models: [(&str, Arc<dyn Model>); 4] = [
        ("switch", Arc::new(gpt2(RouterKind::Switch))),
        // 8 reduction blocks of 12 tokens, the first token of each and then the second.
        ("gshard, in blocks", Arc::new(gpt2(RouterKind::Gshard).sequence_block(8))),
        ("bias, in blocks", Arc::new(llama().sequence_block(8))),
        ("bias, sequence parallel", Arc::new(llama().sequence_parallel(true))),
    ];
    for (turn, (name, model)) in models.iter().enumerate() {
        let (reports, state) = train(model, "dp=1", "1f1b", 1, numerics, Recompute::None);
        assert!(reports[STEPS - 1].loss.is_finite());
        for (mesh, schedule, micros, recompute) in MESHES.into_iter().sampled_in_turn(2, turn) {
            let what = format!("{name}: {mesh} {schedule} {micros} {recompute:?}");
            let (found, after) = train(model, mesh, schedule, micros, numerics, recompute);
            for (found, wanted) in found.iter().zip(&reports) {
                assert_eq!((found.loss, found.grad_norm), (wanted.loss, wanted.grad_norm), "{what}");
                assert_eq!(found.statistics, wanted.statistics, "{what}");
                for ((name, found), (_, wanted)) in found.metrics.iter().zip(&wanted.metrics) {
                    // Those of several stages are added in the order of the ranks.
                    assert!((found - wanted).abs() <= 1e-12 * wanted.abs(), "{what}: {name}");
                }
            }
            for (found, wanted) in bits(&after).iter().zip(bits(&state)) {
                assert_eq!(*found, wanted, "{what}");
            }
            assert_eq!(after.len(), state.len());
        }
    }
}

/// Sequences that cp cuts: the experts lie on ranks of dp, of cp or of both, or are whole on each rank.
const CUT: [(&str, &str, usize, Recompute); 9] = [
    ("cp=2", "1f1b", 1, Recompute::None),
    ("cp=2,ep=2", "1f1b", 2, Recompute::Full),
    ("dp=2,cp=2,ep=2", "1f1b", 1, Recompute::Selective),
    ("dp=2,cp=2,ep=4", "1f1b", 2, Recompute::None),
    ("tp=2,cp=2,ep=2", "1f1b", 1, Recompute::Stage),
    ("dp=2,cp=4,ep=2", "1f1b", 1, Recompute::None),
    ("cp=4,ep=4", "1f1b", 1, Recompute::None),
    ("cp=4,ep=2", "1f1b", 2, Recompute::Full), // on pairs of cp
    ("pp=2,cp=2,ep=2", "zb_h1", 2, Recompute::None),
];

fn cut(order: Order, multiple: usize) -> Option<ContextParallel> {
    Some(ContextParallel::new(Method::AllGather, order, multiple))
}

#[test]
fn experts_of_cut_sequences_have_the_bits_of_one_rank() {
    let numerics = Numerics::Canonical { blocks: 4 };
    let plain = || cut(Order::default(), 1);
    let models: [(&str, Arc<dyn Model>); 3] = [
        ("switch, in blocks", Arc::new(gpt2(RouterKind::Switch).context_parallel(plain()).sequence_block(4))),
        ("gshard", Arc::new(gpt2(RouterKind::Gshard).context_parallel(plain()))),
        (
            "bias, sequence parallel, in blocks",
            Arc::new(llama().sequence_parallel(true).context_parallel(plain()).sequence_block(11)),
        ),
    ];
    for (turn, (name, model)) in models.iter().enumerate() {
        let (reports, state) = train(model, "dp=1", "1f1b", 1, numerics, Recompute::None);
        for (mesh, schedule, micros, recompute) in CUT.into_iter().sampled_in_turn(2, turn) {
            let what = format!("{name}: {mesh} {schedule} {micros} {recompute:?}");
            let (found, after) = train(model, mesh, schedule, micros, numerics, recompute);
            for (found, wanted) in found.iter().zip(&reports) {
                assert_eq!((found.loss, found.grad_norm), (wanted.loss, wanted.grad_norm), "{what}");
                assert_eq!(found.statistics, wanted.statistics, "{what}");
            }
            assert_eq!(bits(&after), bits(&state), "{what}");
        }
    }
}

/// Other orders of the tokens, and sequences that the ranks do not divide: 12 tokens over 4 ranks in 8 chunks.
#[test]
fn experts_of_cut_sequences_have_the_numbers_of_one_rank() {
    let models = |context: Option<ContextParallel>, block| -> [(&str, Arc<dyn Model>); 3] {
        let gpt2 = |router| gpt2_with(router, 0.0).context_parallel(context.clone());
        [
            ("switch", Arc::new(gpt2(RouterKind::Switch))),
            ("gshard, in blocks", Arc::new(gpt2(RouterKind::Gshard).sequence_block(block))),
            ("bias, in blocks", Arc::new(llama().context_parallel(context.clone()).sequence_block(block))),
        ]
    };
    // Gradient descent with rate 1: weights are gradients.
    let descend = |mesh: &str, micros| Plan {
        optimizer: Sgd { momentum: 0.0, weight_decay: 0.0 }.into(),
        lr: LrSchedule { base: 1.0, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 },
        max_norm: 0.0,
        num_microbatches: Some(micros),
        ..plan(mesh, Compress::default())
    };
    let run = |model: &Arc<dyn Model>, plan: Plan| train_plan(model, &plan, AtCuts::AsTrained);
    let one = models(None, 0).map(|(_, model)| run(&model, descend("dp=1", 1)));
    for (turn, (mesh, schedule, micros, recompute)) in CUT.into_iter().enumerate() {
        for order in [Order::default(), Order::zigzag(4)].into_iter().sampled_in_turn(2, turn) {
            for ((name, model), (before, reports, state)) in models(cut(order.clone(), 4), 4).iter().zip(&one) {
                let schedule = ScheduleSpec::named(schedule).unwrap();
                let what = format!("{name}: {mesh} {micros} {recompute:?} {order:?}");
                let found = run(model, Plan { schedule, recompute, ..descend(mesh, micros) });
                assert!((found.0 / before - 1.0).abs() < 1e-6, "{what}: validation {} and {before}", found.0);
                for (found, wanted) in found.1[0].iter().zip(&reports[0]) {
                    let near =
                        |what: &str, a: f64, b: f64| assert!((a - b).abs() <= 1e-5 * b.abs(), "{what}: {a} and {b}");
                    near(&format!("{what}: loss"), found.loss, wanted.loss);
                    near(&format!("{what}: norm"), found.grad_norm, wanted.grad_norm);
                    assert_eq!(found.statistics, wanted.statistics, "{what}");
                    for ((name, found), (_, wanted)) in found.metrics.iter().zip(&wanted.metrics) {
                        near(&format!("{what}: {name}"), *found, *wanted);
                    }
                }
                for ((key, found), wanted) in found.2.iter().zip(state.values()) {
                    let furthest = found.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(furthest < 2e-5, "{what}: {key:?}: {furthest}");
                }
            }
        }
    }
}

/// Dispatch over ep cuts the samples of a block into two chunks, and backward visits the second chunk first. With
/// gradients in 16 bits, the sum of the second chunk overwrote the sum of the first.
#[test]
fn blocks_keep_the_gradients_of_all_chunks_of_ep() {
    let mixed = Some(MixedPrecision { dtype: HalfType::Bf16, reduce_in_half: true, loss_scale: LossScale::Fixed(1.0) });
    for mesh in ["dp=2,ep=2", "dp=2,cp=2,ep=4"] {
        let weights = |block, rate| {
            let context = cut(Order::default(), 1).filter(|_| mesh.contains("cp"));
            let model: Arc<dyn Model> =
                Arc::new(gpt2(RouterKind::Switch).context_parallel(context).sequence_block(block));
            let lr = LrSchedule { base: rate, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 };
            let (optimizer, max_norm) = (Sgd { momentum: 0.0, weight_decay: 0.0 }.into(), 0.0);
            let plan =
                Plan { optimizer, lr, max_norm, mixed, num_microbatches: Some(1), ..plan(mesh, Compress::default()) };
            train_plan(&model, &plan, AtCuts::AsTrained).2
        };
        let (before, whole, in_blocks) = (weights(0, 0.0), weights(0, 1e-3), weights(4, 1e-3));
        let mut compared = 0;
        for (key, start) in before.iter().filter(|(key, _)| format!("{key:?}").contains("experts")) {
            let far = |from: &[f32], to: &[f32]| {
                from.iter().zip(to).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
            };
            let (off, update) = (far(&in_blocks[key], &whole[key]), far(&whole[key], start));
            assert!(update > 0.0 && off < 0.05 * update, "{mesh}, {key:?}: {off:.1e} of {update:.1e}");
            compared += 1;
        }
        assert_eq!(compared, 8, "{mesh}");
    }
}

/// Routers whose weights are zero: each token has the same scores, and chooses the first experts.
struct Tied(WholeState);

impl StateSource for Tied {
    fn step(&self) -> u64 {
        self.0.step()
    }

    fn updates(&self) -> u64 {
        self.0.updates()
    }

    fn dims(&self, key: &StateKey) -> Option<Vec<usize>> {
        self.0.dims(key)
    }

    fn read(&self, key: &StateKey, dims: Shape, slice: &LocalSlice) -> Result<Vec<f32>, TrainError> {
        let values = self.0.read(key, dims, slice)?;
        Ok(if format!("{key:?}").contains("router") { vec![0.0; values.len()] } else { values })
    }
}

/// A rank that has all experts takes what is predicted, whatever tokens choose: all rows at once, or those of some
/// tokens at a time. Of several ranks, the one that all tokens choose takes what is predicted for that load.
#[test]
fn memory_of_experts_is_predicted_to_the_byte() {
    let moe = MoeConfig { num_experts: 4, top_k: 2, router: RouterKind::TopK, ..MoeConfig::default() };
    let config = ExpertsConfig { every_n_layers: 2, num_shared_experts: 1, over_tp: true, ..in_every_layer(moe, 32) };
    let gpt2 = Gpt2::new(*gpt2(RouterKind::TopK).config()).with_experts(Some(config));
    let model: Arc<dyn Model> = Arc::new(gpt2.clone());
    let state = Tied(on_ranks(&model, &plan("dp=1", Compress::default()), false, |_| Ok(())).1);
    for (mesh, block, tied) in [
        ("dp=1", 0, false),
        ("dp=1", 5, false),
        ("dp=1", 5, true),
        ("dp=2,ep=2", 0, true),
        ("dp=2,ep=2", 5, true),
        ("dp=4,ep=4", 3, true),
    ] {
        let model: Arc<dyn Model> = Arc::new(gpt2.clone().sequence_block(block));
        // Weights stay as they are.
        let lr = LrSchedule { base: 0.0, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 };
        let plan = Plan { lr, ..plan(mesh, Compress::default()) };
        let (even, most) = (dry_run::predict(&model, &plan, 0).unwrap(), dry_run::crowded(&model, &plan, 0).unwrap());
        let measured = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
            if tied {
                trainer.load_state(&state)?;
            }
            trainer.step(&batch(0, trainer.samples()))
        });
        let measured = measured.unwrap()[0].memory[0];
        assert_eq!(measured, most, "{mesh}, {block}, {tied}");
        assert_eq!(most == even.memory, !mesh.contains("ep"), "{mesh}, {block}");
    }
}

/// A rank holds the rows of the experts of a few tokens at a time.
#[test]
fn experts_of_some_tokens_at_a_time_take_less_memory() {
    for (mesh, shared) in [("dp=1", true), ("dp=2,ep=2", true), ("dp=2,ep=2", false)] {
        let of = |block| -> Arc<dyn Model> {
            match shared {
                true => Arc::new(llama().sequence_block(block)),
                false => Arc::new(gpt2(RouterKind::Gshard).sequence_block(block)),
            }
        };
        let plan = plan(mesh, Compress::default());
        let peak = |block| dry_run::predict(&of(block), &plan, 0).unwrap().memory.total();
        assert!(peak(2) < peak(6) && peak(6) < peak(0), "{mesh}: {}, {} and {}", peak(2), peak(6), peak(0));
    }
}

/// Experts that are whole on every rank of tp sum their inner features as cut ones do, and so does the norm of their
/// gradients.
#[test]
fn cut_and_whole_experts_have_the_same_bits() {
    let model = |over_tp| -> Arc<dyn Model> {
        let config = *gpt2(RouterKind::Gshard).config();
        let moe = MoeConfig { num_experts: 4, router: RouterKind::Gshard, jitter: 0.05, ..MoeConfig::default() };
        let experts = ExpertsConfig { every_n_layers: 2, num_shared_experts: 1, over_tp, ..in_every_layer(moe, 16) };
        Arc::new(Gpt2::new(config).with_experts(Some(experts)))
    };
    let numerics = Numerics::Canonical { blocks: 4 };
    let (reports, state) = train(&model(false), "dp=1", "1f1b", 1, numerics, Recompute::None);
    for (mesh, schedule, over_tp) in [
        ("tp=2", "1f1b", false),
        ("tp=2", "1f1b", true),
        ("tp=2,pp=2", "zb_v", true),
        ("tp=4,dp=2,ep=2", "1f1b", false),
        ("tp=4,dp=2,ep=2", "1f1b", true),
    ] {
        let (found, after) = train(&model(over_tp), mesh, schedule, 4, numerics, Recompute::None);
        let numbers = |reports: &[StepReport]| {
            reports.iter().map(|report| [report.loss, report.grad_norm].map(f64::to_bits)).collect::<Vec<_>>()
        };
        assert_eq!(numbers(&found), numbers(&reports), "{mesh} {schedule} {over_tp}");
        assert_eq!(bits(&after), bits(&state), "{mesh} {schedule} {over_tp}");
    }
}

/// A stage whose activations are recomputed runs forward twice, and its router decides once: in each of 3 steps, on
/// each of 4 ranks, for each of 2 micro-batches (with GShard once more, for the first choices that its loss counts).
#[test]
fn a_router_decides_once_where_activations_are_recomputed() {
    let models: [(Arc<dyn Model>, usize); 2] = [(Arc::new(llama()), 1), (Arc::new(gpt2(RouterKind::Gshard)), 2)];
    for (model, of_layer) in models {
        let run = |recompute| {
            let plan = Plan {
                mesh: "dp=2,ep=2,pp=2".parse().unwrap(),
                schedule: ScheduleSpec::named("1f1b").unwrap(),
                global_batch_size: BATCH,
                num_microbatches: Some(2),
                recompute,
                verify: Verify::Off, // whose passes decide as well
                ..Plan::default()
            };
            let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let world = opaque::communicator(Arc::clone(rank.world().communicator()));
                let device = Arc::new(Opaque::new(Cpu::device()));
                let rank = Arc::new(Rank::new(&plan.mesh, world)?);
                let mut trainer = Trainer::new(model.clone(), &plan, rank, device.clone())?;
                let step = |step| Ok(trainer.step(&batch(step, trainer.samples()))?.loss);
                let losses = (0..STEPS).map(step).collect::<Result<Vec<f64>, TrainError>>()?;
                Ok::<_, TrainError>((device.selections(), losses, trainer.state()?))
            });
            let ranks = ranks.unwrap_or_else(|error| panic!("{recompute:?}: {error}"));
            let states: Vec<_> = ranks.iter().map(|(.., state)| state.clone()).collect();
            let whole = WholeState::merge(&states).unwrap();
            (ranks.iter().map(|(decisions, ..)| decisions).sum::<usize>(), ranks[0].1.clone(), vectors(&whole))
        };
        let (decisions, losses, state) = run(Recompute::Stage);
        let (kept_decisions, kept_losses, kept_state) = run(Recompute::None);
        assert_eq!(decisions, 2 * 2 * STEPS * 2 * of_layer);
        assert_eq!(kept_decisions, decisions);
        assert_eq!(losses, kept_losses);
        assert_eq!(bits(&state), bits(&kept_state));
    }
}

/// A dry run, which receives nothing, knows the samples of the other ranks, whatever the number of micro-batches.
#[test]
fn a_dry_run_has_the_samples_of_all_ranks() {
    let model: Arc<dyn Model> = Arc::new(gpt2(RouterKind::Switch));
    let of = |mesh: &str| -> Arc<dyn Model> {
        match mesh.contains("cp") {
            true => Arc::new(gpt2(RouterKind::Switch).context_parallel(cut(Order::default(), 1))),
            false => model.clone(),
        }
    };
    let meshes = [
        ("dp=2,ep=2", 2),
        ("dp=4,ep=4", 2),
        ("dp=4,ep=2", 1),
        ("dp=2,ep=2,pp=2", 4),
        ("dp=2,cp=2,ep=4", 2),
        ("dp=2,cp=2,ep=2", 1),
    ];
    for (mesh, micros) in meshes {
        let model = of(mesh);
        let plan = Plan {
            mesh: mesh.parse().unwrap(),
            global_batch_size: BATCH,
            num_microbatches: Some(micros),
            numerics: Numerics::Canonical { blocks: 8 },
            ..Plan::default()
        };
        for rank in 0..plan.mesh.world_size() {
            let predicted = dry_run::predict(&model, &plan, rank);
            assert!(predicted.is_ok(), "{mesh}, {micros} micro-batches, rank {rank}: {predicted:?}");
        }
    }
}

/// A step leaves the choices of its whole batch, which move the bias.
#[test]
fn the_load_and_the_bias_are_those_of_the_whole_batch() {
    let model: Arc<dyn Model> = Arc::new(llama());
    for (mesh, schedule) in [
        ("dp=1", "1f1b"),
        ("dp=2", "1f1b"),
        ("tp=2,dp=2,ep=2", "1f1b"),
        ("pp=2,tp=2", "1f1b"),
        ("pp=2,dp=2,ep=2", "zb_h1"),
    ] {
        let (reports, state) = train(&model, mesh, schedule, 4, Numerics::Fast, Recompute::None);
        assert_eq!(reports[0].statistics.len(), 2, "{mesh} {schedule}: one of each layer");
        let of = |name: &str| state.iter().find(|(key, _)| key.parameter == name).unwrap().1;
        for layer in 0..2 {
            let tokens = of(&format!("layers.{layer}.mlp.router.tokens"));
            assert_eq!(tokens.iter().sum::<f32>() as usize, 3 * SEQ * BATCH, "{mesh}: three experts of each token");
            let reported = &reports[STEPS - 1].statistics[layer];
            assert_eq!(
                (reported.name, &*reported.buffer),
                ("moe_tokens", &*format!("layers.{layer}.mlp.router.tokens"))
            );
            assert!(reported.sums.iter().eq(tokens.iter().map(|&x| f64::from(x)).collect::<Vec<_>>().iter()), "{mesh}");
            assert!(imbalance(&tokens.iter().map(|&x| f64::from(x)).collect::<Vec<_>>()) >= 1.0);
            let bias = of(&format!("layers.{layer}.mlp.router.bias"));
            assert!(bias.iter().any(|&b| b > 0.0) && bias.iter().any(|&b| b < 0.0), "{mesh}: {bias:?}");
            assert!(bias.iter().all(|&b| b.abs() <= 0.01 * STEPS as f32 + 1e-6));
        }
        let metric = |name: &str| reports[0].metrics.iter().find(|(metric, _)| *metric == name).unwrap().1;
        assert!(metric("moe_aux_loss") >= 1.9, "two layers, each at least about 1");
        assert!((metric("moe_router_entropy") - 8_f64.ln()).abs() < 0.1, "a new router is indifferent");
        assert_eq!(metric("moe_dropped"), 0.0);
    }
}

/// With `dp=6,ep=3` the three ranks that share experts hold 12 of the 24 samples. Canonical numerics sum the gradient
/// of an expert over whole subtrees of the balanced tree over samples, and 12 samples are none, so the plan is refused.
#[test]
fn ranks_that_share_experts_hold_a_subtree_of_the_samples() {
    let model: Arc<dyn Model> = Arc::new(gpt2(RouterKind::Switch));
    let plan = Plan {
        mesh: "dp=6,ep=3".parse().unwrap(),
        global_batch_size: 24,
        num_microbatches: Some(1),
        numerics: Numerics::Canonical { blocks: 8 },
        ..Plan::default()
    };
    let rank = Arc::new(Rank::recording(&plan.mesh, 0).unwrap());
    let refused = Trainer::new(model, &plan, rank, Cpu::device()).err().expect("refused").to_string();
    assert!(
        refused.contains("sum 24 samples in a balanced tree. With dp / ep = 2 it is cut into 2 equal parts"),
        "{refused}"
    );
}

/// What ranks exchange with experts, compressed.
fn compressed(dispatch: &str, gradients: &str) -> Compress {
    let of = |text: &str| text.parse().unwrap();
    Compress { dispatch: of(dispatch), dispatch_gradients: of(gradients), ..Compress::default() }
}

/// Losses before and behind three steps, the reports and the state, of a plan on every rank.
fn train_plan(model: &Arc<dyn Model>, plan: &Plan, cuts: AtCuts) -> (f64, Vec<Vec<StepReport>>, Vectors) {
    let (ranks, state) = on_ranks(model, plan, false, |trainer| {
        let before = trainer.evaluate_at(cuts, [batch(9, trainer.samples())])?.loss;
        let step = |step| trainer.step(&batch(step, trainer.samples()));
        Ok((before, (0..STEPS).map(step).collect::<Result<Vec<_>, _>>()?))
    });
    let (before, reports): (Vec<_>, _) = ranks.into_iter().unzip();
    (before[0], reports, vectors(&state))
}

fn plan(mesh: &str, compress: Compress) -> Plan {
    Plan {
        mesh: mesh.parse().unwrap(),
        global_batch_size: BATCH,
        num_microbatches: Some(2),
        compress,
        ..Plan::default()
    }
}

fn losses(reports: &[Vec<StepReport>]) -> Vec<f64> {
    reports[0].iter().map(|report| report.loss).collect()
}

/// Eight bits of tokens and gradients train as all do, on every mesh; a forward that is recomputed sends what the first
/// one sent, also where it rounds at random.
#[test]
fn compressed_tokens_train_as_exact_ones_do() {
    let model: Arc<dyn Model> = Arc::new(llama());
    for mesh in ["dp=2,ep=2", "dp=4,ep=4", "tp=2,dp=2,ep=2", "dp=4,ep=2,pp=2"] {
        let (_, exact, exact_state) = train_plan(&model, &plan(mesh, Compress::default()), AtCuts::AsTrained);
        for (dispatch, gradients) in [("quant:8", "quant:8"), ("fp8:e4m3", "none"), ("none", "quant:6/stochastic")] {
            let (what, lossy) = (format!("{mesh} {dispatch} {gradients}"), plan(mesh, compressed(dispatch, gradients)));
            let (_, reports, state) = train_plan(&model, &lossy, AtCuts::AsTrained);
            assert_ne!(bits(&state), bits(&exact_state), "{what}: nothing is lost");
            for (got, wanted) in losses(&reports).iter().zip(losses(&exact)) {
                assert!((got / wanted - 1.0).abs() < 2e-3, "{what}: loss {got}, uncompressed {wanted}");
            }
            let sent = |reports: &[Vec<StepReport>]| reports[0][0].comm_bytes["ep"];
            assert!(sent(&reports) < 0.8 * sent(&exact), "{what}: {} of {} bytes", sent(&reports), sent(&exact));
        }
        let lossy = plan(mesh, compressed("quant:4/stochastic", "quant:6/stochastic"));
        let (_, once, state) = train_plan(&model, &lossy, AtCuts::AsTrained);
        let again = Plan { recompute: Recompute::Full, ..lossy };
        let (_, twice, recomputed) = train_plan(&model, &again, AtCuts::AsTrained);
        assert_eq!(losses(&once), losses(&twice), "{mesh}: recomputed");
        assert_eq!(bits(&state), bits(&recomputed), "{mesh}: recomputed");
    }
}

/// Where the numbers of rows are known before (experts that choose, one on each rank), calls, bytes and memory of each
/// rank are as predicted.
#[test]
fn bytes_of_compressed_tokens_are_as_predicted() {
    let moe = MoeConfig { num_experts: 4, top_k: 2, router: RouterKind::ExpertChoice, ..MoeConfig::default() };
    let config = ExpertsConfig { every_n_layers: 2, over_tp: true, ..in_every_layer(moe, 32) };
    let model: Arc<dyn Model> = Arc::new(Gpt2::new(*gpt2(RouterKind::TopK).config()).with_experts(Some(config)));
    for (dispatch, gradients) in [("none", "none"), ("quant:8", "quant:4/block8"), ("topk:0.25", "bf16")] {
        let plan = plan("dp=4,ep=4", compressed(dispatch, gradients));
        let (_, reports, _) = train_plan(&model, &plan, AtCuts::AsTrained);
        for (rank, reports) in reports.iter().enumerate() {
            let (report, predicted) = (&reports[STEPS - 1], dry_run::predict(&model, &plan, rank).unwrap());
            assert_eq!(report.records, predicted.records, "{dispatch}, rank {rank}");
            assert_eq!(report.memory[rank], predicted.memory, "{dispatch}, rank {rank}");
        }
    }
}

/// Validation sends what training sends, or exact tokens; training compresses from its step on.
#[test]
fn validation_and_early_steps_may_send_exact_tokens() {
    let model: Arc<dyn Model> = Arc::new(llama());
    let run = |compress, cuts| {
        let (before, reports, _) = train_plan(&model, &plan("dp=2,ep=2", compress), cuts);
        (before, losses(&reports))
    };
    let quant = compressed("quant:3", "none");
    let (plain, lost) = (run(Compress::default(), AtCuts::AsTrained), run(quant, AtCuts::AsTrained));
    assert_eq!(run(quant, AtCuts::Exact), (plain.0, lost.1.clone()));
    assert!(plain.0 != lost.0 && plain.1[0] != lost.1[0], "{plain:?} {lost:?}");
    let late = run(Compress { start_step: 3, ..quant }, AtCuts::AsTrained);
    assert_eq!((late.0, &late.1[..2]), (plain.0, &plain.1[..2]));
    assert_ne!(late.1[2], plain.1[2]);
}

#[test]
fn tokens_that_cannot_be_compressed_are_refused() {
    let model: Arc<dyn Model> = Arc::new(llama());
    let refused = |plan: Plan| dry_run::predict(&model, &plan, 0).unwrap_err().to_string();
    let on = |dispatch, gradients| plan("dp=2,ep=2", compressed(dispatch, gradients));
    let canonical = refused(Plan { numerics: Numerics::Canonical { blocks: 8 }, ..on("quant:8", "none") });
    assert!(
        canonical.contains("of one rank, which has all experts and sends no tokens; use fast numerics"),
        "{canonical}"
    );
    let drawn = refused(on("none", "randk:0.5"));
    assert!(
        drawn.starts_with("compression of dispatch gradients by randk:0.5: it draws elements of all tokens"),
        "{drawn}"
    );
    let factors = refused(on("powersgd:2", "none"));
    assert!(factors.contains("the factors of a message start from those of the one before"), "{factors}");
    let apart = refused(on("quant:8/block7", "none"));
    assert!(apart.contains("quant:8/block7 does not compress each row of 16 elements by itself"), "{apart}");
    let feedback = refused(plan("dp=2,ep=2", Compress { feedback: Feedback::Ef, ..compressed("quant:8", "none") }));
    assert!(feedback.contains("nor do tokens of experts come again"), "{feedback}");
}
