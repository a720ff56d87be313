//! Documents that follow each other in a sequence, through the engine: the loss and the gradients of the documents run
//! each alone, and in canonical numerics the bits of one rank on every mesh.

use crate::runs::{Vectors, on_ranks, vectors};
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{Numerics, Plan, Recompute, ScheduleSpec, StateKey, StepReport, Trainer};
use meshwork_models::gpt2::{Gpt2, Gpt2Config};
use meshwork_models::language::{self, Boundary};
use meshwork_models::llama::{Llama, LlamaConfig, PRESETS};
use meshwork_nn::{Batch, Model};
use meshwork_optim::{Decay, LrSchedule, Rule, Sgd};
use meshwork_tensor::Precision;
use std::sync::Arc;

const VOCAB: usize = 29;
const SEQ: usize = 16;
/// Tokens of the documents of each sequence.
const DOCUMENTS: [&[usize]; 4] = [&[5, 1, 7, 3], &[16], &[2, 14], &[9, 7]];

fn gpt2(dropout: f32) -> Gpt2 {
    Gpt2::new(Gpt2Config {
        vocab_size: VOCAB,
        num_layers: 2,
        hidden_size: 16,
        num_heads: 4,
        ffn_hidden_size: 32,
        seq_len: SEQ,
        dropout,
        ..Gpt2Config::default()
    })
}

fn llama() -> Llama {
    Llama::new(LlamaConfig {
        vocab_size: VOCAB,
        num_layers: 2,
        hidden_size: 16,
        num_heads: 4,
        num_kv_heads: 2,
        ffn_hidden_size: 32,
        seq_len: SEQ,
        ..PRESETS[0].1
    })
}

/// Token and target `at` of all documents in a row.
fn ids(at: usize) -> (i32, i32) {
    ((at * at % 31 % VOCAB) as i32, if at % 5 == 3 { -1 } else { (at * 7 % VOCAB) as i32 })
}

/// Sequences of documents.
fn packed() -> Batch {
    let (tokens, targets) = (0..DOCUMENTS.len() * SEQ).map(ids).unzip();
    let positions: Vec<i32> = DOCUMENTS.concat().into_iter().flat_map(|len| 0..len as i32).collect();
    language::batch(tokens, targets, SEQ).unwrap().with(language::POSITIONS, [SEQ], positions).unwrap()
}

/// A sequence for each document, filled up with tokens that no token of the document sees, and whose targets are
/// masked.
fn alone() -> Batch {
    let (mut tokens, mut targets, mut first) = (Vec::new(), Vec::new(), 0);
    for len in DOCUMENTS.concat() {
        let (of, after): (Vec<_>, Vec<_>) = (first..first + len).map(ids).unzip();
        tokens.extend(of.into_iter().chain([7; SEQ]).take(SEQ));
        targets.extend(after.into_iter().chain([-1; SEQ]).take(SEQ));
        first += len;
    }
    language::batch(tokens, targets, SEQ).unwrap()
}

/// One step of gradient descent with rate 1: the weights differ from the first ones by the gradients.
fn train(model: &Arc<dyn Model>, plan: &Plan, batch: &Batch, opaque: bool) -> (StepReport, Vectors) {
    let (mut reports, state) = on_ranks(model, plan, opaque, |trainer| trainer.step(&batch.part(trainer.samples())?));
    (reports.swap_remove(0), vectors(&state))
}

fn plan(mesh: &str, samples: usize, numerics: Numerics) -> Plan {
    Plan {
        mesh: mesh.parse().unwrap(),
        global_batch_size: samples,
        optimizer: Rule::from(Sgd { momentum: 0.0, weight_decay: 0.0 }),
        lr: LrSchedule { base: 1.0, warmup_steps: 0, decay: Decay::None, decay_steps: 1, min_lr_factor: 0.0 },
        max_norm: 0.0,
        numerics,
        ..Plan::default()
    }
}

/// Largest differences of losses and gradients: a few times what two orders of f32 sums differ by in numbers of this
/// size; of rounded operands in bf16, more.
#[test]
fn packed_documents_have_the_loss_and_the_gradients_that_they_have_alone() {
    for (precision, bound) in [(Precision::F32, 1e-6), (Precision::Bf16, 1e-3)] {
        let models: [[Arc<dyn Model>; 2]; 2] = [
            [Arc::new(gpt2(0.0)), Arc::new(gpt2(0.0).documents(Boundary::Attention))],
            [Arc::new(llama()), Arc::new(llama().documents(Boundary::Attention))],
        ];
        for [plain, apart] in models {
            let of = |samples| Plan { precision, ..plan("dp=1", samples, Numerics::Fast) };
            let (want, weights) = train(&plain, &of(9), &alone(), false);
            let (found, found_weights) = train(&apart, &of(4), &packed(), false);
            assert!((found.loss - want.loss).abs() <= bound, "{} and {} alone", found.loss, want.loss);
            let apart = furthest(&found_weights, &weights);
            // Documents that see each other have other gradients.
            let joined = furthest(&train(&plain, &of(4), &packed(), false).1, &weights);
            assert!(apart <= bound && joined > 10.0 * bound, "{precision:?}: {apart:e} apart, joined {joined:e}");
        }
    }
}

/// The largest difference of two weights.
fn furthest(a: &Vectors, b: &Vectors) -> f64 {
    let of = |(key, a): (&StateKey, &Vec<f32>)| {
        a.iter().zip(&b[key]).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max)
    };
    a.iter().map(of).fold(0.0, f64::max)
}

#[test]
fn every_mesh_has_the_bits_of_one_rank() {
    let numerics = Numerics::Canonical { blocks: 4 };
    for boundary in [Boundary::Positions, Boundary::Attention] {
        let cut = |cut: bool| -> [Arc<dyn Model>; 2] {
            [
                Arc::new(gpt2(0.2).documents(boundary).sequence_parallel(cut)),
                Arc::new(llama().documents(boundary).sequence_parallel(cut)),
            ]
        };
        for (whole, parallel) in cut(false).into_iter().zip(cut(true)) {
            let (want, weights) = train(&whole, &plan("dp=1", 4, numerics), &packed(), false);
            for (mesh, schedule, micros, recompute, model, opaque) in [
                ("dp=2", "1f1b", 2, Recompute::None, &whole, false),
                ("tp=2", "1f1b", 1, Recompute::Selective, &whole, false),
                ("tp=2", "1f1b", 4, Recompute::None, &parallel, false),
                ("tp=4", "1f1b", 1, Recompute::Selective, &parallel, false),
                ("pp=2", "zb_h1", 4, Recompute::None, &whole, false),
                ("tp=2,pp=2", "gpipe", 2, Recompute::Stage, &parallel, true),
                ("dp=2,tp=2,pp=2", "1f1b", 2, Recompute::None, &parallel, false),
            ] {
                let schedule = ScheduleSpec::named(schedule).unwrap();
                let plan = Plan { schedule, num_microbatches: Some(micros), recompute, ..plan(mesh, 4, numerics) };
                let (found, found_weights) = train(model, &plan, &packed(), opaque);
                assert_eq!((found.loss, found.grad_norm), (want.loss, want.grad_norm), "{mesh}, {boundary:?}");
                assert!(found_weights == weights, "{mesh}, {boundary:?}");
            }
        }
    }
}

#[test]
fn positions_that_no_document_has_are_refused() {
    let model: Arc<dyn Model> = Arc::new(llama().documents(Boundary::Attention));
    for (place, position, says) in [
        (
            3,
            9,
            "token 3 of sample 1 is at position 9 of its document: 0 begins a document, each other position is one more",
        ),
        (0, 16, "positions has the id 16 at place 0 of sample 1: the model takes ids from 0 to 15"),
    ] {
        let mut positions = packed().values::<i32>(language::POSITIONS).unwrap().to_vec();
        positions[SEQ + place] = position;
        let (tokens, targets) = (0..DOCUMENTS.len() * SEQ).map(ids).unzip();
        let batch = language::batch(tokens, targets, SEQ).unwrap().with(language::POSITIONS, [SEQ], positions).unwrap();
        let plan = plan("dp=1", 4, Numerics::Fast);
        let refused = World::threads(&plan.mesh)
            .run_mesh(&plan.mesh, |rank| Trainer::new(model.clone(), &plan, rank, Cpu::device())?.step(&batch));
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
    }
}
