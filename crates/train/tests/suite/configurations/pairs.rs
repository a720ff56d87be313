//! Every pair of values of what saves memory, of schedules, meshes, types and optimizers, in a few dozen
//! configurations: each pair is in one of them at least, which trains as one rank does. All of them if `MESHWORK_SWEEP`
//! is `all`, as in `.ci/nightly`, else every third one.

use meshwork_testkit::Sampled;
use std::collections::BTreeSet;

use meshwork_testkit::Rng;
use meshwork_train::config::Args;
use meshwork_train::load;

use crate::configurations::draw::{Case, folder};
use crate::configurations::steps::{self, Same};

/// What has values: each has a name and the keys that it sets.
type Factor = (&'static str, &'static [(&'static str, Keys)]);
type Keys = &'static [(&'static str, &'static str)];

#[rustfmt::skip] // A table: one value, one line.
const FACTORS: [Factor; 14] = [
    ("objective", &[("text", &[]), ("answers", &[("training.objective", "sft")])]),
    ("zero", &[
        ("0", &[]),
        ("1", &[("parallelism.zero_stage", "1")]),
        ("2", &[("parallelism.zero_stage", "2")]),
        ("3", &[("parallelism.zero_stage", "3")]),
        ("3 in twos", &[("parallelism.zero_stage", "3"), ("parallelism.zero_group", "2")]),
    ]),
    ("schedule", &[
        ("gpipe", &[("pipeline.schedule", "gpipe")]),
        ("1f1b", &[("pipeline.schedule", "1f1b")]),
        ("interleaved", &[("pipeline.schedule", "interleaved_1f1b"), ("pipeline.virtual_stages", "2")]),
        ("zb_h1", &[("pipeline.schedule", "zb_h1")]),
        ("zb_h2", &[("pipeline.schedule", "zb_h2")]),
        ("zb_v", &[("pipeline.schedule", "zb_v")]),
        ("dualpipe_v", &[("pipeline.schedule", "dualpipe_v")]),
    ]),
    ("tp", &[
        ("1", &[]),
        ("2", &[("parallelism.tp", "2")]),
        ("2, sequence", &[("parallelism.tp", "2"), ("parallelism.sequence_parallel", "true")]),
    ]),
    ("cp", &[
        ("1", &[]),
        ("2", &[("parallelism.cp", "2")]),
        ("2 by heads", &[("parallelism.cp", "2"), ("parallelism.context_parallel_method", "all_to_all")]),
    ]),
    ("experts", &[
        ("none", &[]),
        ("ep=1", &[("moe.num_experts", "4")]),
        ("ep=2", &[("moe.num_experts", "4"), ("parallelism.ep", "2")]),
    ]),
    ("recompute", &[
        ("none", &[]),
        ("selective", &[("memory.recompute", "selective")]),
        ("full", &[("memory.recompute", "full")]),
        ("sqrt", &[("memory.recompute", "sqrt")]),
        ("stage", &[("memory.recompute", "stage")]),
    ]),
    ("offload", &[
        ("none", &[]),
        ("optimizer", &[("memory.offload", "optimizer")]),
        ("activations", &[("memory.offload", "activations")]),
        ("all", &[("memory.offload", "all")]),
    ]),
    ("numbers", &[
        ("f32", &[]),
        ("f32, canonical", &[CANONICAL]),
        ("products in bf16", &[("training.matmul_dtype", "bf16")]),
        ("products in bf16, canonical", &[("training.matmul_dtype", "bf16"), CANONICAL]),
        ("products in tf32", &[("training.matmul_dtype", "tf32")]),
        ("products in tf32, canonical", &[("training.matmul_dtype", "tf32"), CANONICAL]),
        ("bf16", &[("training.dtype", "bf16")]),
        ("bf16, canonical", &[("training.dtype", "bf16"), CANONICAL]),
        ("bf16, reduced in it", &[("training.dtype", "bf16"), ("training.reduce_dtype", "bf16")]),
        ("f16", &[("training.dtype", "f16")]),
        ("f16, canonical", &[("training.dtype", "f16"), CANONICAL]),
    ]),
    ("kept", &[
        ("f32", &[]),
        ("bf16", &[("memory.saved_dtype", "bf16")]),
        ("f16", &[("memory.saved_dtype", "f16")]),
    ]),
    ("tokens at a time", &[
        ("all", &[]),
        ("logits of three", &[("memory.loss_chunk", "3")]),
        ("logits and inner features of three", &[("memory.loss_chunk", "3"), ("memory.sequence_block", "3")]),
    ]),
    ("adapters", &[
        ("none", &[]),
        ("of all", &[("model.kind", "llama"), ("lora.rank", "2")]),
        ("of a quantised base", &[
            ("model.kind", "llama"),
            ("lora.rank", "2"),
            ("lora.quantization", "nf4"),
            ("lora.block_size", "8"),
            ("lora.double_quantization", "true"),
        ]),
        ("of some", &[("model.kind", "llama"), ("lora.rank", "3"), ("lora.targets", "v_proj,o_proj")]),
        ("that learn preferences", &[("model.kind", "llama"), ("lora.rank", "2"), ("training.objective", "dpo")]),
    ]),
    ("encoded", &[("dense", &[]), ("sparse", &[("memory.saved_encoding", "sparse")])]),
    ("optimizer", &[
        ("adamw", &[("optimizer.name", "adamw")]),
        ("sgd", &[("optimizer.name", "sgd")]),
        ("lamb", &[("optimizer.name", "lamb")]),
        ("adafactor", &[("optimizer.name", "adafactor")]),
        ("adam8bit", &[("optimizer.name", "adam8bit"), ("optimizer.block_size", "64")]),
        ("muon", &[("optimizer.name", "muon")]),
    ]),
];

/// Values that are refused together: in canonical numerics adapters of networks need the tokens of
/// whole sequences.
const REFUSED: [&[(&str, &[&str])]; 1] = [&[
    ("tp", &["2, sequence"]),
    (
        "numbers",
        &[
            "f32, canonical",
            "products in bf16, canonical",
            "products in tf32, canonical",
            "bf16, canonical",
            "f16, canonical",
        ],
    ),
    ("tokens at a time", &["logits and inner features of three"]),
    ("adapters", &["of all", "of a quantised base", "that learn preferences"]),
]];

const CANONICAL: (&str, &str) = ("training.numerics", "canonical");

/// What all have in common.
const COMMON: Keys = &[
    ("parallelism.dp", "2"),
    ("parallelism.pp", "2"),
    ("pipeline.num_microbatches", "4"),
    ("training.global_batch_size", "16"),
    ("training.steps", "2"),
    ("model.num_layers", "4"),
    ("model.hidden_size", "16"),
    ("model.num_heads", "4"),
    ("model.seq_len", "8"),
    ("model.vocab_size", "256"),
];

/// A value of each factor, by number.
type Choice = [usize; FACTORS.len()];
/// A value of one factor, and one of a later factor.
type Pair = [(usize, usize); 2];

fn pairs(choice: &Choice) -> impl Iterator<Item = Pair> + '_ {
    let of = |factor: usize| (factor, choice[factor]);
    (0..FACTORS.len()).flat_map(move |first| (first + 1..FACTORS.len()).map(move |second| [of(first), of(second)]))
}

fn is_refused(choice: &Choice) -> bool {
    let value = |of: &str| {
        let chosen = FACTORS.iter().zip(choice).find(|((name, _), _)| *name == of);
        chosen.map(|((_, values), &at)| values[at].0).unwrap_or_else(|| panic!("no factor {of}"))
    };
    REFUSED.iter().any(|all| all.iter().all(|(of, values)| values.contains(&value(of))))
}

/// Choices that have every pair: each is the one of some drawn ones that has the most new pairs. One pair that is new
/// is given, so that each of them brings the end nearer.
fn covering() -> Vec<Choice> {
    let values = FACTORS.map(|(_, values)| values.len());
    let mut missing: BTreeSet<Pair> = BTreeSet::new();
    for first in 0..values.len() {
        for second in first + 1..values.len() {
            missing
                .extend((0..values[first]).flat_map(|a| (0..values[second]).map(move |b| [(first, a), (second, b)])));
        }
    }
    let mut rng = Rng::new(1);
    let mut found = Vec::new();
    while let Some(&pair) = missing.first() {
        let draw = |_| {
            let mut choice = values.map(|count| rng.below(count));
            pair.into_iter().for_each(|(factor, value)| choice[factor] = value);
            choice
        };
        let drawn: Vec<Choice> = (0..200).map(draw).filter(|choice| !is_refused(choice)).collect();
        let new = |choice: &&Choice| pairs(choice).filter(|pair| missing.contains(pair)).count();
        let best = *drawn.iter().max_by_key(new).expect("some were drawn");
        pairs(&best).for_each(|pair| _ = missing.remove(&pair));
        found.push(best);
    }
    found
}

#[test]
fn every_pair_of_ways_to_save_memory_trains_as_one_rank_does() {
    let mut failures = Vec::new();
    let choices = covering();
    for choice in choices.iter().sampled(10) {
        let chosen = || FACTORS.iter().zip(choice).map(|((name, values), &at)| (name, &values[at]));
        let name = chosen().map(|(factor, (value, _))| format!("{factor} {value}")).collect::<Vec<_>>().join(", ");
        let keys = COMMON.iter().chain(chosen().flat_map(|(_, (_, keys))| keys.iter()));
        let mut case = Case { masked: true, ..Case::default() };
        case.keys.extend(keys.map(|&(key, value)| (key.to_owned(), value.to_owned())));
        let file = |name: &str| folder().join(name).display().to_string();
        case.keys.insert("memory.offload_dir".to_owned(), file(""));
        let examples = match case.get("training.objective") {
            Some("dpo") => Some("pairs.jsonl"),
            Some(_) => Some("examples.jsonl"),
            None => None,
        };
        case.keys.extend(examples.map(|name| ("data.path".to_owned(), file(name))));
        let ended = match load(&Args::parse(case.flags())) {
            Ok((config, data)) => steps::run(&case, &config, data),
            Err(error) => Err(error.to_string()),
        };
        failures.extend(ended.err().map(|why| format!("{name}: {why}\n  {case}")));
    }
    println!("{} configurations have every pair", choices.len());
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// Of values that are compressed one rank's numbers are no measure: those of all tokens at once are.
#[test]
fn compressed_values_of_some_tokens_at_a_time_train_as_those_of_all() {
    let of = |keys: Keys, block: &'static str| {
        let mut case = Case { masked: true, ..Case::default() };
        let all = COMMON.iter().chain(keys).copied().chain([("memory.sequence_block", block)]);
        case.keys.extend(all.map(|(key, value)| (key.to_owned(), value.to_owned())));
        let (config, data) = load(&Args::parse(case.flags())).unwrap();
        steps::train(&case, &config, data).unwrap_or_else(|why| panic!("{case}: {why}"))
    };
    for keys in [
        &[("compress.gradients", "quant:8"), ("memory.recompute", "full")][..],
        &[("compress.activations", "quant:8"), ("compress.activation_gradients", "topk:0.5")],
        &[("compress.weights", "quant:8"), ("parallelism.zero_stage", "3"), ("moe.num_experts", "4")],
        &[("compress.dispatch", "quant:8"), ("moe.num_experts", "4"), ("parallelism.ep", "2")],
    ] {
        let compared = steps::compare(&of(keys, "3"), &of(keys, "0"), &Same::Numbers, true);
        compared.unwrap_or_else(|why| panic!("{keys:?}: {why}"));
    }
}
