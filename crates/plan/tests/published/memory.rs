//! The memory of the system `meshwork` is what `--steps 0` predicts, to the byte; and `--plan-memory`.

use meshwork_plan::search::{assigned, search};
use meshwork_plan::table::configured;
use meshwork_plan::{Cluster, Counter, Job, System, memory::report};
use meshwork_train::config::{Config, RecomputeWord, Recomputed};
use meshwork_train::plan::{memory, peak_bytes, predict};
use meshwork_train::plan_memory::candidates;

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

/// Of a long step the planner runs a few micro-batches, where that is enough: whatever the schedule, what ranks share
/// out and compute again, and whether a step's memory depends on the number of its micro-batches.
#[test]
fn a_few_micro_batches_hold_what_all_of_them_do() {
    // With pp and chunks. In 1F1B of one rank a third micro-batch repeats nothing yet: sums of ZeRO are on their way.
    let schedules: [(&str, usize, usize); 9] = [
        ("gpipe", 2, 1),
        ("1f1b", 1, 1),
        ("1f1b", 4, 1),
        ("interleaved_1f1b", 2, 2),
        ("breadth_first", 2, 2),
        ("zb_h1", 4, 1),
        ("zb_h2", 2, 1),
        ("zb_v", 4, 2),
        ("dualpipe_v", 4, 2),
    ];
    let more: [&[&str]; 8] = [
        &[],
        &["training.dtype=bf16", "memory.recompute=full", "parallelism.zero_stage=1"],
        &["training.dtype=bf16", "memory.recompute=selective", "parallelism.zero_stage=2", "memory.loss_chunk=8"],
        &["memory.recompute=none", "parallelism.zero_stage=3", "memory.sequence_block=8"],
        &["training.numerics=canonical"],
        &["moe.num_experts=4", "moe.router=bias"],
        &["memory.offload=optimizer", "memory.offload_dir=."],
        &["memory.offload=all", "memory.offload_dir=."],
    ];
    let sizes = "training.global_batch_size=64 training.micro_batch_size=1 training.steps=0 parallelism.dp=2 \
                 model.num_layers=8 model.hidden_size=32 model.vocab_size=64 model.seq_len=16";
    for (schedule, pp, chunks) in schedules {
        for keys in more {
            let own = format!(
                "{sizes} parallelism.pp={pp} pipeline.schedule={schedule} pipeline.virtual_stages={chunks} {}",
                keys.join(" ")
            );
            let config = configured(&own.split_whitespace().map(|text| assigned(text).unwrap()).collect()).unwrap();
            for rank in (0..pp).map(|stage| 2 * stage) {
                let all = predict(&config, rank).unwrap().peak_bytes();
                assert_eq!(peak_bytes(&config, rank).unwrap(), all, "rank {rank} of {own}");
            }
        }
    }
}

/// What a search estimates of a plan is near its dry run: activations of all chunks of a rank count, and what a
/// deferred weight gradient needs that forward did not keep. Where nothing is computed again it needs gradients of
/// outputs too, which are not counted.
#[test]
fn estimates_of_schedules_with_chunks_are_near_a_dry_run() {
    let (system, cluster) = (System::known("meshwork").unwrap(), Cluster::known("dgx-h100").unwrap());
    let sizes = "parallelism.tp=1 parallelism.cp=1 training.micro_batch_size=1 memory.loss_chunk=0 \
                 memory.sequence_block=0 memory.offload=none model.num_layers=16 model.hidden_size=64 \
                 model.vocab_size=64 model.seq_len=256";
    for (schedule, pp, chunks, recompute) in [
        ("1f1b", 2, 1, "none"),
        ("interleaved_1f1b", 2, 2, "none"),
        ("interleaved_1f1b", 2, 8, "none"),
        ("interleaved_1f1b", 4, 4, "full"),
        ("breadth_first", 2, 4, "none"),
        ("zb_h1", 4, 1, "none"),
        ("zb_h1", 4, 1, "full"),
        ("zb_h2", 4, 1, "full"),
        ("zb_h1", 4, 1, "stage"),
        ("zb_v", 4, 2, "none"),
        ("zb_v", 4, 2, "full"),
        ("dualpipe_v", 4, 2, "selective"),
    ] {
        let own = format!(
            "{sizes} parallelism.pp={pp} pipeline.schedule={schedule} pipeline.virtual_stages={chunks} \
             memory.recompute={recompute}"
        );
        let keys = own.split_whitespace().map(|text| assigned(text).unwrap()).collect();
        let cluster = cluster.of_cards(pp).unwrap();
        let found = search(&keys, 32, &system, &cluster, 1, &mut Counter::default(), &mut |_, _, _| {}).unwrap();
        let (estimate, dry) = (found.points[0][1], found.best[0].step.memory);
        let near = (0.7..1.05).contains(&(estimate / dry));
        assert!(near, "{schedule} of {pp} ranks, {chunks} chunks, recompute={recompute}: {estimate} is not near {dry}");
    }
}

fn limited(limit: u64, rest: &str) -> Config {
    Config::from_toml(&format!("[memory]\nlimit_bytes = {limit}\n[training]\nglobal_batch_size = 8\n{rest}")).unwrap()
}

/// A row for each kind of rank, the settings of the least memory, and the fastest that fit: their bytes are those of a
/// dry run, and below the limit.
#[test]
fn plan_memory_has_a_row_for_each_kind_of_rank_and_the_cheapest_settings() {
    let mesh = "[parallelism]\ndp = 2\npp = 2\n[model]\nnum_layers = 2";
    let all = candidates(&limited(0, mesh));
    let text = report(&limited(all[0].most.total() - 1, mesh)).unwrap();
    for word in [
        "parameters",
        "optimizer",
        "0-1",
        "2-3",
        "cheapest settings below",
        "least memory: --set ",
        "Times are those of the planner, for cores",
    ] {
        assert!(text.contains(word), "{word} in {text}");
    }
    // Recomputation takes time that ZeRO does not take, and a disk takes more than both.
    let named = text.lines().skip_while(|line| !line.starts_with("cheapest"));
    let named: String = named.take_while(|line| !line.starts_with("least")).collect::<Vec<_>>().join(" ");
    assert!(named.contains("zero_stage=") && !named.contains("offload") && !named.contains("recompute"), "{named}");
}

/// A limit that only the logits of a few tokens fit has them in both places.
#[test]
fn plan_memory_proposes_the_logits_of_a_few_tokens() {
    let small = "steps = 1\n[model]\nvocab_size = 4096\nnum_layers = 1\nhidden_size = 16\nnum_heads = 2\nseq_len = 32";
    let all = candidates(&limited(0, small));
    let with_all_logits = all.iter().filter(|candidate| candidate.config.memory.loss_chunk == 0);
    let limit = with_all_logits.map(|candidate| candidate.most.total()).min().unwrap() - 1;
    let text = report(&limited(limit, small)).unwrap();
    assert_eq!(text.matches("--set memory.loss_chunk=8").count(), 2, "{text}");
}

/// More of a card's links and bandwidth is another machine, and its times are told as such.
#[test]
fn plan_memory_has_the_times_of_the_card_that_is_named() {
    let mut config = limited(0, "[parallelism]\ndp = 2\n[model]\nnum_layers = 2");
    config.device = meshwork_train::config::Device::parse("cuda:h200").unwrap();
    // Nothing is left to recompute, which leaves a fifth of the settings.
    config.memory.recompute = Recomputed::Word(RecomputeWord::Stage);
    let text = report(&config).unwrap();
    assert!(text.contains("Times are those of the planner, for NVIDIA H200 SXM 141 GB"), "{text}");
}

/// Ranks of ep share the sums and ZeRO's parts of dense parameters, and those of experts only with ranks that have the
/// same ones: states and bytes of gradients are those of a dry run.
#[test]
fn estimates_of_experts_agree_with_a_dry_run_to_the_byte() {
    const LAYERS: i64 = 3;
    const EXPERTS: i64 = 4;
    // A router's balance of experts is no parameter that is trained: the dry run has its weights alone.
    let untrained = (LAYERS * EXPERTS) as f64;
    let cluster = Cluster::known("cores").unwrap();
    for ([dp, ep, tp, cp], stage) in [
        ([4, 2, 1, 1], 0),
        ([4, 2, 1, 1], 1),
        ([4, 2, 1, 1], 2),
        ([8, 2, 1, 1], 3),
        ([4, 2, 2, 1], 1),
        ([2, 2, 1, 2], 1),
    ] {
        let mut keys: std::collections::BTreeMap<String, toml::Value> = [
            ("parallelism.dp", dp),
            ("parallelism.ep", ep),
            ("parallelism.tp", tp),
            ("parallelism.cp", cp),
            ("parallelism.zero_stage", stage),
            ("moe.num_experts", EXPERTS),
            ("training.global_batch_size", 8),
            ("training.steps", 0),
            ("model.num_layers", LAYERS),
            ("model.vocab_size", 256),
            ("model.seq_len", 64),
        ]
        .map(|(key, value)| (key.to_owned(), toml::Value::Integer(value)))
        .into();
        keys.insert("training.micro_batch_size".into(), 1.into());
        let case = format!("dp={dp}, ep={ep}, tp={tp}, cp={cp}, stage {stage}");
        let config = configured(&keys).unwrap();
        let dry = predict(&config, 0).unwrap();
        let job = Job::new(config, &mut Counter::default()).unwrap();
        let mut system = System::known("meshwork-cpu").unwrap();
        let ranks = (dp * cp) as f64;
        let share = |from: i64| if stage < from { 1.0 } else { ranks };
        let mut more = 4.0 / share(3) + 8.0 / share(1) - 4.0;
        // With ZeRO gradients are buffers that a dry run does not count among what a rank always holds.
        if stage > 0 {
            system.held.gradient = 0.0;
        } else {
            more += 4.0;
        }
        let states = job.state_bytes(&system, &cluster);
        assert!(
            (states - untrained * more - dry.model_bytes as f64).abs() < 0.5,
            "{case}: {states} {}",
            dry.model_bytes
        );
        if stage < 2 {
            let of_layers = ["ep", "tp", "cp"]; // gradients are summed by others, in pieces of many elements
            let sums = dry.records.iter().filter(|sum| sum.elements > 64 && !of_layers.contains(&&*sum.group));
            let (sent, own) = (sums.map(|sum| sum.bytes()).sum::<f64>(), job.gradient_bytes(&system, &cluster));
            assert!((own - 8.0 * untrained * (ranks - 1.0) / ranks - sent).abs() < 0.5, "{case}: {own} {sent}");
        }
    }
}
