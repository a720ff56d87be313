//! GPT-2 and Llama whose sequences cp cuts, by each method: against the same models on one rank.
//!
//! More than 400 lines: every claim is one table of cases of the same model.

use super::plan;
use crate::runs::{Vectors, on_ranks, vectors};
use meshwork_context_parallel::{Balance, ByDocument, ContextParallel, Method};
use meshwork_core::{Axis, Mesh, World};
use meshwork_cpu::Cpu;
use meshwork_engine::{
    LossScale, MixedPrecision, Numerics, Plan, Recompute, ScheduleSpec, StepReport, TrainError, Trainer, Zero,
    ZeroStage, dry_run,
};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language::{self, Boundary, POSITIONS};
use meshwork_models::llama::{LLAMA, Llama, LlamaConfig};
use meshwork_nn::{Batch, Model};
use meshwork_optim::{Rule, Sgd};
use meshwork_tensor::Category;
use meshwork_tensor::op::{Order, Rotary};
use meshwork_tensor::tape::HalfType;
use meshwork_testkit::Sampled;
use std::sync::Arc;

const VOCAB: usize = 30;

/// The sizes of a model, and how its documents and its loss are computed.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Heads of keys and values of a Llama; 0: a GPT-2.
    kv_heads: usize,
    seq: usize,
    dropout: f32,
    boundary: Boundary,
    cut_over_tp: bool,
    loss_chunk: usize,
    sequence_block: usize,
    tied: bool,
    window: Option<usize>,
}

const PLAIN: Case = Case {
    kv_heads: 0,
    seq: 16,
    dropout: 0.0,
    boundary: Boundary::Ignored,
    cut_over_tp: false,
    loss_chunk: 0,
    sequence_block: 0,
    tied: true,
    window: None,
};

impl Case {
    fn model(self, context: Option<ContextParallel>) -> Arc<dyn Model> {
        let Self {
            kv_heads,
            seq: seq_len,
            dropout,
            boundary,
            cut_over_tp: cut,
            loss_chunk,
            sequence_block,
            tied,
            window,
        } = self;
        let (num_heads, hidden_size, ffn_hidden_size) = (4, 16, 32);
        if kv_heads == 0 {
            let config = Gpt2Config {
                sliding_window: window,
                vocab_size: VOCAB,
                num_layers: 2,
                hidden_size,
                num_heads,
                ffn_hidden_size,
                seq_len,
                tie_embeddings: tied,
                dropout,
                ..Gpt2Config::default()
            };
            let gpt2 = Gpt2::new(config).sequence_parallel(cut).documents(boundary).loss_chunk(loss_chunk);
            return Arc::new(gpt2.sequence_block(sequence_block).context_parallel(context));
        }
        let config = LlamaConfig {
            sliding_window: window,
            vocab_size: VOCAB,
            num_layers: 2,
            hidden_size,
            num_heads,
            num_kv_heads: kv_heads,
            ffn_hidden_size,
            seq_len,
            rotary: Some(Rotary::new(20.0)),
            norm_eps: 1e-5,
            tie_embeddings: false,
            ..LLAMA
        };
        let llama = Llama::new(config).sequence_parallel(cut).documents(boundary).loss_chunk(loss_chunk);
        Arc::new(llama.sequence_block(sequence_block).context_parallel(context))
    }

    /// Other tokens for each sample; some targets masked; documents of several lengths.
    fn batch(self, samples: usize) -> Batch {
        let seq = self.seq;
        let ids = |times: usize| (0..samples * seq).map(move |at| ((at * times + at / 7) % VOCAB) as i32);
        let targets = ids(11).map(|id| if id == 3 { -1 } else { id }).collect();
        let batch = language::batch(ids(5).collect(), targets, seq).unwrap();
        if self.boundary == Boundary::Ignored {
            return batch;
        }
        let documents = |sample: usize| {
            let starts = [0, 3 + sample % 4, 8 + sample % 3];
            (0..seq).map(move |at| (at - starts.into_iter().rev().find(|&start| start <= at).unwrap()) as i32)
        };
        batch.with(POSITIONS, [seq], (0..samples).flat_map(documents).collect::<Vec<_>>()).unwrap()
    }

    /// Steps of gradient descent with rate 1: what all ranks report, and the weights.
    fn train(self, context: Option<ContextParallel>, plan: &Plan, behind: bool) -> (Vec<StepReport>, Vectors) {
        let (mut reports, state) = on_ranks(&self.model(context), plan, behind, |trainer| {
            let batch = self.batch(plan.global_batch_size).part(trainer.samples())?;
            (0..2).map(|_| trainer.step(&batch)).collect::<Result<Vec<_>, _>>()
        });
        (reports.swap_remove(0), vectors(&state))
    }
}

/// Numbers that differ by rounding alone.
fn assert_close(
    what: &str,
    (found, weights): &(Vec<StepReport>, Vectors),
    (want, of_one): &(Vec<StepReport>, Vectors),
) {
    for (found, want) in found.iter().zip(want) {
        let near = |a: f64, b: f64| (a - b).abs() <= 2e-6 * b.abs();
        assert!(near(found.loss, want.loss), "{what}: loss {} and {}", found.loss, want.loss);
        let (a, b) = (found.grad_norm, want.grad_norm);
        assert!((a - b).abs() <= 1e-5 * b, "{what}: norm {a} and {b}");
    }
    for (key, want) in of_one {
        let pairs = weights[key].iter().zip(want).map(|(a, b)| f64::from((a - b).abs()));
        let furthest = pairs.fold(0.0, f64::max);
        assert!(furthest <= 1e-5, "{what}, {key:?}: {furthest:e}");
    }
}

const METHODS: [Method; 4] = [Method::AllGather, Method::AllToAll, Method::Ring, Method::Hybrid { ring_degree: 2 }];

/// Canonical numerics: the bits of the model on one rank, by each method.
#[test]
fn a_language_model_over_cp_has_the_bits_of_one_rank() {
    let numerics = Numerics::Canonical { blocks: 4 };
    let cases = [
        Case { dropout: 0.2, tied: false, sequence_block: 11, ..PLAIN }, // 2 tokens of each of 4 reduction blocks
        Case { loss_chunk: 3, ..PLAIN },                                 // a tied table
        Case { kv_heads: 2, loss_chunk: 2, sequence_block: 1, ..PLAIN },
        Case { kv_heads: 1, boundary: Boundary::Attention, window: Some(5), ..PLAIN },
    ];
    for (turn, case) in cases.into_iter().enumerate() {
        let context = |method| Some(ContextParallel::new(method, Order::default(), 1));
        let one = case.train(context(Method::AllGather), &plan("cp=1", numerics), false);
        let ways = METHODS.into_iter().flat_map(|method| {
            [
                ("cp=2", false, 1, ZeroStage::Off, Recompute::None, false),
                ("tp=2,cp=2", false, 2, ZeroStage::Off, Recompute::Selective, false),
                ("tp=2,cp=2", true, 1, ZeroStage::Off, Recompute::None, true),
                ("dp=2,cp=2", false, 1, ZeroStage::Gradients, Recompute::Full, false),
                ("cp=4", false, 4, ZeroStage::Off, Recompute::None, false),
                ("pp=2,cp=2", false, 2, ZeroStage::Off, Recompute::None, false),
            ]
            .map(|way| (method, way))
        });
        for (method, way) in ways.sampled_in_turn(4, turn) {
            let (mesh, cut_over_tp, micros, stage, recompute, behind) = way;
            let case = Case { cut_over_tp, ..case };
            let zero = Zero { stage, group: None };
            let plan = Plan { num_microbatches: Some(micros), zero, recompute, ..plan(mesh, numerics) };
            let found = case.train(context(method), &plan, behind);
            for (found, want) in found.0.iter().zip(&one.0) {
                let what = format!("{case:?} on {mesh} by {method}");
                assert_eq!((found.loss, found.grad_norm), (want.loss, want.grad_norm), "{what}");
            }
            assert!(found.1 == one.1, "{case:?} on {mesh} by {method}: other weights");
        }
    }
}

/// Fast numerics: other orders of the tokens, and sequences that the ranks do not divide.
#[test]
fn a_language_model_over_cp_has_the_gradients_of_one_rank() {
    let numerics = Numerics::Fast;
    let cases = [
        PLAIN,
        Case { seq: 13, loss_chunk: 3, sequence_block: 3, ..PLAIN },
        Case { kv_heads: 2, seq: 13, boundary: Boundary::Attention, ..PLAIN },
        Case { kv_heads: 1, boundary: Boundary::Positions, sequence_block: 1, ..PLAIN },
        Case { boundary: Boundary::Attention, ..PLAIN },
        Case { window: Some(3), ..PLAIN },
        Case { kv_heads: 2, seq: 13, boundary: Boundary::Positions, window: Some(6), ..PLAIN },
    ];
    for (turn, case) in cases.into_iter().enumerate() {
        let one = Case { sequence_block: 0, ..case }.train(None, &plan("tp=1", numerics), false);
        for (at, method) in METHODS.into_iter().enumerate() {
            let ways = [
                ("cp=2", false, Order::zigzag(2), false),
                ("cp=4", false, Order::zigzag(4), true),
                ("tp=2,cp=2", true, Order::zigzag(2), false),
                ("dp=2,pp=2,cp=2", false, Order::default(), false),
                ("tp=2,cp=2", false, Order::new(vec![2, 0, 3, 1]).unwrap(), false),
            ];
            for (mesh, cut_over_tp, order, behind) in ways.into_iter().sampled_in_turn(3, turn + at) {
                let mesh_of: Mesh = mesh.parse().unwrap();
                let multiple = mesh_of.degree(Axis::Cp) * if cut_over_tp { mesh_of.degree(Axis::Tp) } else { 1 };
                let what = format!("{case:?} on {mesh} by {method} in {order:?}");
                let context = ContextParallel::new(method, order, multiple);
                // Documents choose an order for each micro-batch.
                let ranks = mesh_of.degree(Axis::Cp);
                let balanced = || context.clone().balanced(Arc::new(ByDocument { chunks_of_rank: 2 }), ranks);
                let by_document = (case.boundary == Boundary::Attention).then(balanced);
                for context in [Some(context.clone()), by_document].into_iter().flatten() {
                    let found = Case { cut_over_tp, ..case }.train(Some(context), &plan(mesh, numerics), behind);
                    assert_close(&what, &found, &one);
                }
            }
        }
    }
}

/// A balance of a user: chunks from the last to the first.
#[derive(Debug)]
struct Backwards;

impl Balance for Backwards {
    fn chunks(&self, ranks: usize) -> usize {
        2 * ranks
    }

    fn order(&self, _: &[u64], ranks: usize) -> meshwork_tensor::Result<Order> {
        Order::new((0..2 * ranks).rev().collect())
    }
}

/// Degrees that divide neither heads nor tokens, in zigzag order and in an order that a user's balance chooses.
#[test]
fn three_and_eight_ranks_have_the_gradients_of_one() {
    let numerics = Numerics::Fast;
    for case in [PLAIN, Case { kv_heads: 1, seq: 13, boundary: Boundary::Attention, ..PLAIN }] {
        let one = case.train(None, &plan("tp=1", numerics), false);
        for (cp, method) in [
            (3, Method::AllGather),
            (3, Method::Ring),
            (8, Method::AllGather),
            (8, Method::Ring),
            (8, Method::Hybrid { ring_degree: 2 }),
            (8, Method::Hybrid { ring_degree: 4 }),
        ] {
            let zigzag = ContextParallel::new(method, Order::zigzag(cp), cp);
            for context in [zigzag.clone(), zigzag.balanced(Arc::new(Backwards), cp)] {
                let what = format!("{case:?} on cp={cp}: {context:?}");
                let found = case.train(Some(context), &plan(&format!("cp={cp}"), numerics), cp == 3);
                assert_close(&what, &found, &one);
            }
        }
    }
}

/// Dropout of probabilities counts queries and keys by their place in the whole sequence.
#[test]
fn dropout_over_cp_is_that_of_one_rank() {
    for kv_heads in [0, 2] {
        let case = Case { dropout: 0.3, kv_heads, sequence_block: 3, ..PLAIN };
        let one = Case { sequence_block: 0, ..case }.train(None, &plan("tp=1", Numerics::Fast), false);
        for (mesh, method) in
            ["cp=2", "cp=4", "tp=2,cp=2"].into_iter().flat_map(|mesh| METHODS.map(|method| (mesh, method)))
        {
            let found =
                case.train(Some(ContextParallel::new(method, Order::default(), 1)), &plan(mesh, Numerics::Fast), false);
            assert_close(&format!("{case:?} on {mesh} by {method}"), &found, &one);
        }
    }
}

/// ZeRO: the ranks of dp × cp, which hold the same weights, share them out.
#[test]
fn ranks_of_cp_share_out_what_they_hold_alike() {
    let context = || Some(ContextParallel::new(Method::AllGather, Order::zigzag(2), 2));
    let one = PLAIN.train(None, &plan("tp=1", Numerics::Fast), false);
    for mesh in ["cp=2", "dp=2,cp=2", "tp=2,cp=2", "pp=2,cp=2"] {
        for (stage, group) in
            ZeroStage::ALL.into_iter().map(|stage| (stage, None)).chain([(ZeroStage::Weights, Some(1))])
        {
            let plan = Plan { zero: Zero { stage, group }, ..plan(mesh, Numerics::Fast) };
            let found = PLAIN.train(context(), &plan, false);
            assert_close(&format!("{mesh}, {:?}", plan.zero), &found, &one);
        }
    }
    // What a rank keeps of the optimizer's states, of gradients and of weights.
    let kept = |mesh: &str, stage| {
        let optimizer = Rule::from(Sgd { momentum: 0.9, weight_decay: 0.0 });
        let plan = Plan { zero: Zero { stage, group: None }, optimizer, ..plan(mesh, Numerics::Fast) };
        let memory = dry_run::predict(&PLAIN.model(context()), &plan, 0).unwrap().memory;
        [Category::Optimizer, Category::Gradients, Category::Parameters].map(|of| memory.bytes_of(of))
    };
    let whole = kept("cp=4", ZeroStage::Off);
    for mesh in ["cp=4", "dp=2,cp=2"] {
        for (count, stage) in ZeroStage::ALL.into_iter().enumerate().skip(1) {
            let held = kept(mesh, stage);
            assert!(held[0] * 4 <= whole[0] + 4096, "{mesh}, {stage:?}: {held:?} of {whole:?}");
            assert!(count < 3 || held[2] < whole[2], "{mesh}, {stage:?}: {held:?} of {whole:?}");
        }
    }
}

/// The inner features of 2 of 16 tokens at a time, where layers are recomputed: what they take falls, and the weights
/// are those of all tokens at once, whatever the schedule does with their gradients.
#[test]
fn inner_features_of_some_tokens_at_a_time() {
    for (kv_heads, mesh, schedule) in [(0, "dp=1", "1f1b"), (2, "dp=1", "1f1b"), (2, "pp=2,tp=2", "zb_h1")] {
        let of = |sequence_block| Case { kv_heads, sequence_block, ..PLAIN };
        let schedule = ScheduleSpec::named(schedule).unwrap();
        let plan =
            Plan { recompute: Recompute::Full, num_microbatches: Some(2), schedule, ..plan(mesh, Numerics::Fast) };
        let whole = of(0).train(None, &plan, false);
        for block in [2, 5, 16] {
            assert_close(&format!("{kv_heads}, {mesh}, {block}"), &of(block).train(None, &plan, true), &whole);
        }
        let peak =
            |block| dry_run::predict(&of(block).model(None), &plan, 0).unwrap().memory.bytes_of(Category::Activations);
        assert!(peak(2) < peak(0), "{kv_heads}, {mesh}: {} and {}", peak(2), peak(0));
    }
}

/// The same in canonical numerics, with dropout: one rank's bits, whatever cuts the batch, features or sequences, of
/// which 13 tokens are not the same number for each of 4 reduction blocks; and the masks of all tokens at once.
#[test]
fn inner_features_of_some_tokens_have_the_bits_of_one_rank() {
    let canonical = Numerics::Canonical { blocks: 4 };
    for case in [
        Case { dropout: 0.3, sequence_block: 4, ..PLAIN },
        Case { dropout: 0.3, sequence_block: 11, seq: 13, ..PLAIN },
        Case { kv_heads: 2, sequence_block: 8, seq: 18, ..PLAIN },
    ] {
        let one = case.train(None, &plan("dp=1", canonical), false);
        let whole = Case { sequence_block: 0, ..case };
        assert_close(&format!("{case:?}"), &one, &whole.train(None, &plan("dp=1", canonical), false));
        for (mesh, cut_over_tp, micros, stage, recompute) in [
            ("dp=1", false, 4, ZeroStage::Off, Recompute::Selective),
            ("dp=2", false, 1, ZeroStage::Weights, Recompute::Full),
            ("tp=2", false, 2, ZeroStage::Off, Recompute::None),
            ("tp=2", case.seq % 2 == 0, 1, ZeroStage::Off, Recompute::Full),
            ("dp=2,pp=2", false, 2, ZeroStage::Off, Recompute::Stage),
        ] {
            let zero = Zero { stage, group: None };
            let plan = Plan { num_microbatches: Some(micros), zero, recompute, ..plan(mesh, canonical) };
            let found = Case { cut_over_tp, ..case }.train(None, &plan, true);
            let what = format!("{case:?} on {mesh}, {cut_over_tp}");
            for (found, want) in found.0.iter().zip(&one.0) {
                assert_eq!((found.loss, found.grad_norm), (want.loss, want.grad_norm), "{what}");
            }
            assert!(found.1 == one.1, "{what}: other weights");
        }
    }
}

/// Gradients of 16 bits are sums over blocks too: they are added up in f32 and rounded once, as those of all tokens.
#[test]
fn gradients_of_sixteen_bits_are_rounded_once() {
    let of = |sequence_block| Case { kv_heads: 2, sequence_block, ..PLAIN };
    let (dtype, loss_scale) = (HalfType::Bf16, LossScale::Fixed(1.0));
    let mixed = Some(MixedPrecision { dtype, reduce_in_half: true, loss_scale });
    let plan = Plan { mixed, ..plan("dp=1", Numerics::Fast) };
    let [all, blocks] = [0, 1].map(|block| of(block).train(None, &plan, false).1);
    let networks = all.iter().filter(|(key, _)| format!("{key:?}").contains(".mlp."));
    let (mut count, mut other) = (0, 0);
    for (key, want) in networks {
        count += want.len();
        other += blocks[key].iter().zip(want).filter(|(a, b)| a != b).count();
    }
    // Those between two numbers of 16 bits may be rounded the other way.
    assert!(count > 1000 && other * 20 < count, "{other} of {count} weights differ");
}

/// A rank that has fewer tokens than a block computes what one rank computes, with the same types.
#[test]
fn a_block_between_the_part_of_a_rank_and_the_sequence() {
    let case = Case { sequence_block: 10, ..PLAIN };
    let one = case.train(None, &plan("tp=1", Numerics::Fast), false);
    let context = Some(ContextParallel::new(Method::Ring, Order::zigzag(2), 2));
    assert_close("cp=2", &case.train(context, &plan("cp=2", Numerics::Fast), false), &one);
}

/// A profile of layers runs on one rank, which has every axis that layers over cp use.
#[test]
fn the_layers_of_a_model_over_cp_run_on_one_rank() {
    for method in [Method::AllGather, Method::AllToAll, Method::Ring] {
        let model = PLAIN.model(Some(ContextParallel::new(method, Order::default(), 2)));
        let plan = dry_run::one_layer_a_stage(&*model, &plan("cp=2", Numerics::Fast), 2).unwrap();
        let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
            let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
            trainer.step(&PLAIN.batch(2).part(trainer.samples())?)
        });
        assert_eq!(ranks.unwrap().len(), 1, "{method}");
    }
}

/// Memory, FLOPs and every communication of each rank.
#[test]
fn a_run_over_cp_does_what_a_dry_run_predicts() {
    for (mesh, method, cut_over_tp) in [
        ("cp=2", Method::AllGather, false),
        ("cp=2", Method::AllToAll, false),
        ("tp=2,cp=2", Method::AllGather, true),
        ("cp=4", Method::AllToAll, false), // with fewer heads of keys and values
        ("dp=2,cp=2", Method::AllToAll, false),
        ("cp=2", Method::Ring, false),
        ("cp=4", Method::Ring, false),
        ("tp=2,cp=2", Method::Ring, true),
        ("cp=4", Method::Hybrid { ring_degree: 2 }, false),
        ("dp=2,cp=2", Method::Hybrid { ring_degree: 2 }, false),
        ("pp=2,cp=2", Method::AllGather, false),
        ("dp=2,pp=2,cp=2", Method::AllGather, false), // gradients are summed over a group of two axes
    ] {
        for (kv_heads, numerics) in [(0, Numerics::Fast), (2, Numerics::Fast), (0, Numerics::Canonical { blocks: 4 })] {
            let canonical = numerics != Numerics::Fast;
            let window = (kv_heads > 0).then_some(5);
            let (sequence_block, dropout) = if canonical { (8, 0.2) } else { (3 * (kv_heads / 2), 0.0) };
            let case = Case { kv_heads, cut_over_tp, window, sequence_block, dropout, ..PLAIN };
            let zigzag = method != Method::AllToAll && !canonical;
            let order = if zigzag { Order::zigzag(2) } else { Order::default() };
            let (model, plan) = (case.model(Some(ContextParallel::new(method, order, 2))), plan(mesh, numerics));
            let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
                let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
                let batch = case.batch(plan.global_batch_size).part(trainer.samples())?;
                trainer.step(&batch)?;
                let before = trainer.device().meter().total_flops();
                let report = trainer.step(&batch)?;
                let meter = trainer.device().meter();
                Ok::<_, TrainError>((meter.peak(), meter.total_flops() - before, report))
            });
            let ranks = ranks.unwrap();
            let sent = |report: &StepReport| report.records.iter().map(|call| call.bytes()).sum::<f64>();
            let mean = ranks.iter().map(|(.., report)| sent(report)).sum::<f64>() / ranks.len() as f64;
            for (rank, (memory, flops, report)) in ranks.into_iter().enumerate() {
                let predicted = dry_run::predict(&model, &plan, rank).unwrap();
                let what = format!("rank {rank} of {mesh} by {method}, {kv_heads} kv heads, {numerics:?}");
                assert_eq!((memory, flops), (predicted.memory, predicted.flops), "{what}");
                let reported: f64 = report.comm_bytes.values().sum();
                assert!((reported - mean).abs() < 0.5, "{what}: {reported} of {mean} bytes in {:?}", report.comm_bytes);
                assert_eq!(report.records, predicted.records, "{what}");
            }
        }
    }
}

/// A window changes the numbers, and its operations are those of the pairs of tokens within it.
#[test]
fn a_window_hides_tokens_and_their_work() {
    let plan = plan("tp=1", Numerics::Fast);
    let of = |window| {
        let case = Case { kv_heads: 2, window, ..PLAIN };
        let flops = dry_run::predict(&case.model(None), &plan, 0).unwrap().flops;
        (case.train(None, &plan, false).0.iter().map(|report| report.loss).collect::<Vec<_>>(), flops)
    };
    let [(all, flops), (whole, whole_flops), (few, few_flops)] = [None, Some(16), Some(4)].map(of);
    assert_eq!((&all, flops), (&whole, whole_flops));
    assert_ne!(all, few);
    // Samples, layers, heads and features; forward and backward have 2 and 5 products of 2 operations a pair.
    let pairs = [16 * 17 / 2, 4 * 5 / 2 + 12 * 4];
    assert_eq!(flops - few_flops, (4 * 2 * 4 * 4 * 14 * (pairs[0] - pairs[1])) as u64);
}
