//! The work is really split: every rank holds, computes and communicates exactly what meta and record predict, call by
//! call, and what closed formulas give.

use crate::mesh::cases::{BATCH, Case, HIDDEN, PLAIN, SEQ, SGD};
use crate::mesh::world::{RankUsage, Stepped};
use meshwork_core::{Axis, Coords, Record};
use meshwork_engine::ModelPlan;
use meshwork_train::config::Config;
use meshwork_train::plan::predict;
use std::collections::BTreeMap;
use std::fmt::Display;

/// Compares every rank with its prediction.
#[track_caller]
pub fn assert_as_predicted(case: &Case, more: &str, got: &Stepped) {
    assert_run_as_predicted(case, &case.config(more), got);
}

/// The same of a configuration that is more than that of its case.
#[track_caller]
pub fn assert_run_as_predicted(case: &impl Display, config: &Config, got: &Stepped) {
    for (rank, (report, usage)) in got.reports.iter().zip(&got.usage).enumerate() {
        let predicted = predict(config, rank).unwrap_or_else(|error| panic!("{case}: predicting rank {rank}: {error}"));
        // If steps overlap, a single step has its peak before the next begins.
        let peak_bytes = if overlaps(config) { usage.peak_bytes } else { predicted.peak_bytes() };
        let wanted = RankUsage { parameters: predicted.parameters, flops: predicted.flops, peak_bytes };
        assert_eq!(*usage, wanted, "{case}: rank {rank} against its prediction");
        assert!(peak_bytes <= predicted.peak_bytes(), "{case}: rank {rank}");
        let both = report.records.iter().zip(&predicted.records).enumerate();
        for (call, (got, wanted)) in both {
            assert_eq!(got, wanted, "{case}: call {call} of rank {rank} against its prediction");
        }
        assert_eq!(report.records.len(), predicted.records.len(), "{case}: number of calls of rank {rank}");
        let peaks: Vec<u64> = got.usage.iter().map(|usage| usage.peak_bytes).collect();
        assert_eq!(report.peak_bytes(), peaks, "{case}: peaks of all ranks as reported on rank {rank}");
    }
}

fn overlaps(config: &Config) -> bool {
    config.pipeline.spec().is_ok_and(|spec| spec.overlaps_steps())
}

/// Compares every rank's log, and the sums over all ranks, with formulas.
#[track_caller]
pub fn assert_closed_forms(case: &Case, got: &Stepped, reference: &Stepped) {
    let config = case.config("");
    let plan = ModelPlan::new(config.model(), &config.plan().unwrap()).unwrap();
    let mesh = plan.mesh();
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    for (rank, report) in got.reports.iter().enumerate() {
        let bytes = |group: &str| report.records.iter().filter(|it| it.group == group).map(Record::bytes).sum::<f64>();
        for (group, wanted) in closed_bytes(case, mesh.coords(rank)) {
            let got = bytes(group);
            assert!((got - wanted).abs() < 0.5, "{case}: rank {rank} has {got} bytes on {group}, by formula {wanted}");
            *sums.entry(group).or_default() += got;
        }
    }
    for (group, sum) in sums {
        let (got, wanted) = (got.reports[0].comm_bytes[group], sum / mesh.world_size() as f64);
        assert!((got - wanted).abs() < 0.5, "{case}: the report has {got} bytes on {group}, the mean is {wanted}");
    }

    // Every element once: `assemble` has found each on some rank.
    let elements: usize = got.weights.values().map(Vec::len).sum();
    assert_eq!(elements, parameters(case), "{case}: elements of the model");
    let declared: usize = plan.parameters().unwrap().iter().map(|spec| spec.global_elements()).sum();
    assert_eq!(elements, declared, "{case}: elements that the model declares");

    // No product is done twice; only the head multiplies with its padding, forward and twice backward.
    let flops: u64 = got.usage.iter().map(|usage| usage.flops).sum();
    let padding = |tp: usize| {
        let padded = tp * rows(case.model.vocab, tp) - case.model.vocab;
        (3 * 2 * BATCH * SEQ * HIDDEN * padded) as u64
    };
    let alone = reference.usage[0].flops - padding(1);
    assert_eq!(flops - padding(case.tp), alone, "{case}: FLOPs of all ranks but those on padding");
}

/// Rows of a token table on a rank of tp: all of them are a multiple of 64, and those of each rank one of 8.
fn rows(vocab: usize, tp: usize) -> usize {
    vocab.next_multiple_of(64).div_ceil(tp).next_multiple_of(8)
}

/// Elements of the model.
fn parameters(case: &Case) -> usize {
    let (h, model) = (HIDDEN, case.model);
    let block = 12 * h * h + 13 * h; // qkv, out, up, down; their biases 9h, two norms 4h
    let tables = if model.tied { 1 } else { 2 };
    tables * model.vocab * h + SEQ * h + model.layers * block + 2 * h
}

/// Logical bytes of one rank's step, per group.
///
/// With H the bytes of the hidden states of all tokens of a dp rank, and a = 2(n-1)/n what a rank moves of a buffer
/// that n ranks all-reduce:
fn closed_bytes(case: &Case, coords: Coords) -> [(&'static str, f64); 5] {
    let &Case { model, dp, tp, pp, sequence_parallel, .. } = case;
    let moved = |ranks: usize| 2.0 * (ranks as f64 - 1.0) / ranks as f64;
    let h = HIDDEN;
    let config = case.config("");
    let placement = config.pipeline.build(pp).unwrap().placement;
    let stages = placement.len();
    let here = |stage: usize| placement[stage] == coords.get(Axis::Pp);
    let (first, last) = (here(0), here(stages - 1));
    let layers: usize = (0..stages).filter(|&stage| here(stage)).map(|stage| config.pipeline.partition[stage]).sum();
    let count = |holds: bool| usize::from(holds);
    let tokens = BATCH / dp * SEQ;
    let hidden = (4 * tokens * h) as f64;

    // pp: sends of activations to the next stage and of gradients to the one before, and as many receives, where that
    // is on another rank. A rank of tp sends its part: a slice where sequence parallel, else a part of what all of them
    // have.
    let crossings = (1..stages).filter(|&stage| placement[stage - 1] != placement[stage]);
    let messages = crossings.map(|stage| count(here(stage - 1)) + count(here(stage))).sum::<usize>() as f64;
    let sent = messages * hidden / tp as f64;

    // tp, per layer: one all-reduce behind attention and MLP, one of the gradient before each; one behind the token
    // table and one of the gradient before the head; per token its largest logit, and the pair (Σ exp, logit of the
    // target). Sequence parallel: each all-reduce is a reduce-scatter in one direction and an all-gather in the other,
    // the same bytes; and parameters that every rank applies to its own tokens have their gradients summed: per layer
    // two norms and two biases. Otherwise: the parts of each message that arrives are gathered.
    let whole = layers * 6 * h + count(first) * SEQ * h + count(last) * 2 * h;
    let blocks = (4 * layers + count(first) + count(last)) as f64 * hidden;
    let loss = (count(last) * 3 * 4 * tokens) as f64;
    let norms = (count(sequence_parallel) * 4 * whole) as f64;
    let gathered = if sequence_parallel { 0.0 } else { messages * hidden / 2.0 };

    // dp: every gradient that this rank holds, padding included, and the number of tokens (one i64).
    let table = rows(model.vocab, tp) * h;
    let tables = if model.tied { count(first || last) } else { count(first) + count(last) };
    let held = tables * table + whole + layers * (12 * h * h + 7 * h) / tp;
    let gradients = (4 * held + 8) as f64;

    // tied: the tied table, where its two ends are on different ranks. world: the loss of each sample, the squared
    // norm, and whether a rank has loaded something (f64).
    let ends = if model.tied && first != last { 2 } else { 1 };
    [
        ("tp", moved(tp) * (blocks + loss + norms + gathered)),
        ("dp", moved(dp) * gradients),
        ("pp", sent),
        ("tied", moved(ends) * (4 * table) as f64),
        ("world", moved(dp * tp * pp) * 8.0 * (BATCH as f64 + 2.0)),
    ]
}

/// The calls of one rank by hand: (group, op, elements, how often).
#[test]
fn two_ranks_of_tp_by_hand() {
    let calls = |sequence_parallel: bool| {
        let case = Case { tp: 2, sequence_parallel, ..Case::alone(&PLAIN) };
        let mut calls: BTreeMap<(String, String, usize), usize> = BTreeMap::new();
        for record in predict(&case.config(SGD), 0).unwrap().records {
            *calls.entry((record.group, record.op.to_string(), record.elements)).or_default() += 1;
        }
        calls
            .into_iter()
            .map(|((group, op, elements), times)| format!("{group} {op} {elements} x{times}"))
            .collect::<Vec<_>>()
    };
    // 16 sequences of 16 tokens with 32 features are 8192 elements. 18 = 4 layers · (2 forward + 2 backward),
    // embedding, head. 256 largest logits; 256 pairs of Σ exp and target logit. Loss, squared norm, and whether a rank
    // has loaded something.
    let plain = ["tp all_reduce 256 x1", "tp all_reduce 512 x1", "tp all_reduce 8192 x18", "world all_reduce 18 x1"];
    assert_eq!(calls(false), plain);
    // 1344 = 4 layers · 6 · 32 (two norms, two biases), 16 · 32 positions, 2 · 32 of the last norm.
    let sequence_parallel = [
        "tp all_gather 8192 x18",
        "tp all_reduce 256 x1",
        "tp all_reduce 512 x1",
        "tp all_reduce 1344 x1",
        "tp reduce_scatter 8192 x18",
        "world all_reduce 18 x1",
    ];
    assert_eq!(calls(true), sequence_parallel);
}

/// Messages used to keep their memory until the end of the step, so that the peak of 1F1B grew with the number of
/// micro-batches, which 1F1B should prevent.
#[test]
fn the_peak_of_1f1b_does_not_grow_with_the_number_of_micro_batches() {
    let peaks = |micros: usize| -> Vec<u64> {
        let text = format!(
            "[model]\nhidden_size = 32\nseq_len = 32\n[parallelism]\npp = 4\n[training]\nglobal_batch_size = {micros}\n\
             [pipeline]\nnum_microbatches = {micros}"
        );
        let config = Config::from_toml(&text).unwrap();
        (0..4).map(|rank| predict(&config, rank).unwrap().peak_bytes()).collect()
    };
    // Except for the loss of each sample, an f64 that stays on the device until the step is over.
    let losses = |micros: u64| 8 * micros;
    let without =
        |micros: usize| peaks(micros).into_iter().map(|peak| peak - losses(micros as u64)).collect::<Vec<_>>();
    assert_eq!(without(16), without(256));
}
