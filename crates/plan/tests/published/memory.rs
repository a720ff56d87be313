//! The memory of the system `meshwork` is what `--steps 0` predicts, to the byte.

use meshwork_plan::search::assigned;
use meshwork_plan::table::configured;
use meshwork_plan::{Cluster, Counter, Job, System};
use meshwork_train::plan::memory;

/// Degrees of dp, tp, pp and cp, and keys that change what a rank holds.
type Case = ([i64; 4], &'static [(&'static str, &'static str)]);

#[test]
fn the_planner_and_a_dry_run_of_all_ranks_agree_to_the_byte() {
    let (system, cluster) = (System::known("meshwork").unwrap(), Cluster::known("dgx-h100").unwrap());
    // 257 tokens of a vocabulary are no multiple of tp.
    let meshes: [Case; 10] = [
        // The last stage is the fullest: it has the logits of many tokens.
        ([1, 1, 2, 1], &[("model.vocab_size", "8192")]),
        ([1, 1, 1, 1], &[]),
        ([4, 1, 1, 1], &[("parallelism.zero_stage", "3")]),
        ([2, 2, 1, 1], &[("parallelism.sequence_parallel", "true"), ("parallelism.zero_stage", "1")]),
        ([1, 2, 2, 1], &[("training.dtype", "bf16")]),
        ([1, 1, 4, 1], &[("pipeline.schedule", "zb_h2")]),
        ([1, 1, 2, 1], &[("pipeline.schedule", "zb_v"), ("memory.recompute", "full")]),
        ([2, 1, 2, 1], &[("pipeline.schedule", "interleaved_1f1b"), ("parallelism.zero_stage", "2")]),
        ([1, 1, 1, 2], &[("memory.recompute", "selective")]),
        ([2, 1, 1, 2], &[("parallelism.ep", "2"), ("moe.num_experts", "4")]),
    ];
    for ([dp, tp, pp, cp], more) in meshes {
        let mut keys = [
            ("parallelism.dp", dp),
            ("parallelism.tp", tp),
            ("parallelism.pp", pp),
            ("parallelism.cp", cp),
            ("training.global_batch_size", 8 * dp),
            ("training.micro_batch_size", 1),
            ("training.steps", 0),
            ("model.vocab_size", 257),
            ("model.seq_len", 32),
        ]
        .map(|(key, value)| (key.to_owned(), toml::Value::Integer(value)))
        .into_iter()
        .collect::<std::collections::BTreeMap<_, _>>();
        keys.extend(more.iter().map(|(key, value)| assigned(&format!("{key}={value}")).unwrap()));
        let config = configured(&keys).unwrap();
        let most = memory(&config).unwrap().iter().map(|of_rank| of_rank.total()).max().unwrap();
        let step = Job::new(config, &mut Counter::default()).unwrap().predict(&system, &cluster).unwrap();
        assert_eq!(step.memory, most as f64, "dp={dp}, tp={tp}, pp={pp}, cp={cp}, {more:?}");
    }
}
