//! Direct preference optimisation: as in PyTorch with `peft`, and with one rank's bits on every mesh.
//! `crates/train/tests/fixtures/make_dpo_fixture.py` says what was recorded.
//!
//! More than 400 lines: all that pairs promise, on one small model.

use crate::sft::{Folder, events, examples, losses, numbers};
use meshwork_engine::{Plan, ScheduleSpec, dry_run};
use meshwork_models::language;
use meshwork_pipeline::Generator;
use meshwork_testkit::opaque::{self, Opaque};
use meshwork_train::config::Args;
use meshwork_train::{Devices, RankDevice, load, train, train_in};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// A small model with new adapters that learns from pairs, of which each row has one to three.
pub const PAIRS: &str = "training.objective=dpo lora.rank=2 dpo.beta=0.5 model.seq_len=64";

/// Pairs of answers of 2 to 14 bytes.
pub fn pairs(count: u64) -> Vec<Value> {
    let mut all = examples(2 * count).into_iter();
    let mut next = || all.next().unwrap();
    let pair = |(one, other): (Value, Value)| json!({"prompt": one["prompt"], "chosen": one["completion"], "rejected": other["completion"]});
    (0..count).map(|_| pair((next(), next()))).collect()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/dpo").join(name)
}

fn recorded() -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture("training.json")).unwrap()).unwrap()
}

/// Goes on from the adapter of the fixture; the adapter at the end goes to `out`. Returns the events.
fn from_fixture(out: &Path, more: &str) -> Vec<Value> {
    let metrics = out.with_extension("jsonl");
    let base = format!(
        "training.objective=dpo model.init_from={} lora.init_from={} data.path={} data.tokenizer=bytes data.shuffle=false dpo.beta=0.3 \
         dpo.label_smoothing=0.1 optimizer.lr=0.005 optimizer.beta2=0.95 optimizer.weight_decay=0.1 training.max_norm=0 \
         training.global_batch_size=2 training.steps=20 metrics.sample_tokens=0 lora.export=adapter checkpoint.export={} \
         parallelism.context_parallel_method=all_gather",
        fixture("model").display(),
        fixture("adapter").display(),
        fixture("pairs.jsonl").display(),
        out.display()
    );
    let words = base.split_whitespace().chain(more.split_whitespace()).map(|word| format!("--set={word}"));
    let (config, data) = load(&Args::parse(words)).unwrap_or_else(|error| panic!("{more}: {error}"));
    train(&config, &data, Some(&metrics), &AtomicBool::new(false)).unwrap_or_else(|error| panic!("{more}: {error}"));
    events(&metrics)
}

/// The tensors of an adapter's folder.
fn adapter(folder: &Path) -> BTreeMap<String, Vec<f32>> {
    crate::lora::tensors(&folder.join("adapter_model.safetensors"))
}

fn steps(events: &[Value]) -> impl Iterator<Item = &Value> {
    events.iter().filter(|event| event["event"] == "step")
}

/// 20 steps of AdamW: losses, rewards and the adapter at the end. PyTorch computes each answer by itself, and rows have
/// different numbers of pairs.
#[test]
fn pairs_are_learnt_as_in_pytorch() {
    let recorded = recorded();
    let of =
        |name: &str| recorded[name].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect::<Vec<_>>();
    for mesh in [
        "",
        "parallelism.dp=2 parallelism.tp=2",
        "parallelism.tp=2 parallelism.pp=2 parallelism.sequence_parallel=true training.micro_batch_size=1",
        "parallelism.cp=2 memory.recompute=full",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("adapter");
        let events = from_fixture(&out, mesh);
        let of_step = |name: &str| steps(&events).map(|step| step["dpo"][name].as_f64().unwrap()).collect::<Vec<_>>();
        for (step, (got, wanted)) in losses(&events).into_iter().zip(of("losses")).enumerate() {
            let off = (got - wanted).abs() / wanted;
            assert!(off <= 1e-6, "{mesh}: loss of step {step} is {got}, in PyTorch {wanted}: {off:e} off");
        }
        for name in ["chosen", "rejected", "accuracy"] {
            let near = |(a, b): (f64, f64)| (a - b).abs() < 1e-5;
            assert!(of_step(name).into_iter().zip(of(name)).all(near), "{mesh}: {name} {:?}", of_step(name));
        }
        assert_eq!(losses(&events).len(), 20);
        let end: BTreeMap<String, Vec<f64>> = serde_json::from_value(recorded["end"].clone()).unwrap();
        let (got, wanted) = (adapter(&out), end);
        assert!(got.keys().eq(wanted.keys()), "{:?}", got.keys());
        for (tensor, wanted) in wanted {
            let off = got[&tensor].iter().zip(wanted).map(|(got, wanted)| (f64::from(*got) - wanted).abs());
            let off = off.fold(0.0, f64::max);
            assert!(off <= 2e-5, "{mesh}: {tensor} is {off:e} off");
        }
    }
}

const MESHES: [&str; 10] = [
    "training.micro_batch_size=1",
    "parallelism.tp=2 memory.loss_chunk=5",
    "parallelism.dp=2 parallelism.zero_stage=3",
    "parallelism.dp=4",
    "parallelism.tp=2 parallelism.sequence_parallel=true",
    "parallelism.pp=2 training.micro_batch_size=1",
    "parallelism.cp=2",
    "parallelism.tp=2 parallelism.pp=2 parallelism.dp=2",
    "memory.recompute=full parallelism.pp=2 pipeline.schedule=gpipe training.micro_batch_size=2",
    "parallelism.pp=2 pipeline.schedule=zb_h2 training.micro_batch_size=1",
];

/// Losses, norms and the rewards of each step, bit by bit.
#[test]
fn pairs_have_one_ranks_bits_on_every_mesh() {
    let folder = Folder::new(&pairs(40));
    for kind in ["gpt2", "llama"] {
        let base = format!("{PAIRS} model.kind={kind} training.numerics=canonical");
        let of = |more: &str| {
            let events = folder.run(&format!("{base} {more}"));
            let rewards: Vec<Value> = steps(&events).map(|step| step["dpo"].clone()).collect();
            (numbers(&events), rewards)
        };
        let alone = of("");
        assert_eq!(alone.0.len(), 4);
        assert!(alone.0[0].0 != alone.0[3].0, "it learns: {alone:?}");
        for more in MESHES {
            assert_eq!(of(more), alone, "{kind}: {more}");
        }
    }
}

/// Balance losses of routers are of rows, as without pairs. The reference has no adapters of experts either: where
/// there are no others, it would have the rewards 0.
#[test]
fn pairs_with_experts_have_one_ranks_bits() {
    let folder = Folder::new(&pairs(40));
    for targets in ["all-linear", "w1,w2,w3", "w2"] {
        let experts = format!("model.kind=llama moe.num_experts=4 lora.targets={targets}");
        let base = format!("{PAIRS} training.numerics=canonical {experts}");
        let of = |more: &str| {
            let events = folder.run(&format!("{base} {more}"));
            (numbers(&events), steps(&events).last().unwrap()["dpo"].clone())
        };
        let alone = of("");
        assert!(alone.0[0].0 != alone.0[3].0, "it learns: {alone:?}");
        assert!(["chosen", "rejected", "margin"].iter().all(|name| alone.1[name] != 0.0), "{targets}: {}", alone.1);
        for more in ["parallelism.dp=2 parallelism.ep=2", "parallelism.pp=2 training.micro_batch_size=1"] {
            assert_eq!(of(more), alone, "{targets}: {more}");
        }
    }
}

/// A small step of SGD lowers the loss of the same pairs by the rate times the square of the gradient's norm. AdamW,
/// with which PyTorch was recorded, takes the same steps whatever factor gradients have.
#[test]
fn gradients_have_the_scale_of_the_loss() {
    // Two pairs of 16 tokens a row, and all rows in a step.
    let pair = |chosen: &str| json!({"prompt": "what", "chosen": chosen, "rejected": "that"});
    let all: Vec<Value> = ["this", "some", "more", "less", "here", "none", "much", "many"].map(pair).into();
    let folder = Folder::new(&all);
    for mesh in ["", "parallelism.dp=2 parallelism.tp=2"] {
        for (beta, rate) in [(0.1, 1e-2), (2.0, 1e-4)] {
            let sgd = format!("optimizer.name=sgd optimizer.lr={rate} optimizer.momentum=0 optimizer.weight_decay=0");
            let more = format!("model.seq_len=32 training.steps=2 training.max_norm=0 dpo.beta={beta} {mesh}");
            let events = folder.run(&format!("{PAIRS} {sgd} {more}"));
            let [(before, norm), (after, _)] = numbers(&events)[..] else { panic!("two steps") };
            let (lower, predicted) = (before - after, rate * norm * norm);
            let off = (lower / predicted - 1.0).abs();
            assert!(off < 0.02, "{mesh}, beta {beta}: {lower:e} lower, and {predicted:e} by the gradient");
        }
    }
}

/// A step of SGD with rate 1 changes each factor by its gradient.
#[test]
fn every_gradient_is_that_of_one_rank() {
    let of = |more: &str| {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("adapter");
        let sgd = "optimizer.name=sgd optimizer.lr=1 optimizer.weight_decay=0 training.steps=1";
        let events = from_fixture(&out, &format!("{sgd} training.global_batch_size=4 {more}"));
        (numbers(&events)[0], adapter(&out))
    };
    for (numerics, most) in [("fast", 1e-5), ("canonical", 0.0)] {
        let numerics = format!("training.numerics={numerics}");
        let (alone, weights) = of(&numerics);
        for more in MESHES {
            let (got, of_mesh) = of(&format!("{numerics} {more}"));
            let near = (got.0 - alone.0).abs() <= most && (got.1 - alone.1).abs() <= most * alone.1;
            assert!(near, "{numerics} {more}: {got:?}, {alone:?}");
            for (name, weights) in &weights {
                let off = of_mesh[name].iter().zip(weights).map(|(got, wanted)| (got - wanted).abs());
                let off = off.fold(0.0, f32::max);
                assert!(f64::from(off) <= most, "{numerics} {more}: {name} is {off:e} off");
            }
        }
    }
}

/// A new adapter changes nothing, so that both answers have the frozen model's probabilities: the reward is 0 and the
/// loss ln 2, in front of the first step and whatever lies beside a pair.
#[test]
fn a_new_adapter_has_the_rewards_zero_and_the_loss_ln_2() {
    // Two pairs of 16 tokens a row, so that the mean of their losses is exact.
    let pair = |chosen: &str| json!({"prompt": "what", "chosen": chosen, "rejected": "that"});
    let folder = Folder::new(&["this", "some"].repeat(10).into_iter().map(pair).collect::<Vec<_>>());
    for more in ["", "parallelism.pp=2 compress.activations=bf16"] {
        let more = format!("{PAIRS} model.seq_len=32 training.steps=1 {more}");
        let first = steps(&folder.run(&more)).next().unwrap().clone();
        assert_eq!(first["loss"].as_f64().unwrap(), std::f64::consts::LN_2, "{more}");
        assert_eq!(first["dpo"], json!({"chosen": 0.0, "rejected": 0.0, "margin": 0.0, "accuracy": 0.0}));
    }
}

/// Each answer is a document behind its own prompt; only the answers are targets, and each target says of which.
#[test]
fn a_row_has_the_answers_of_pairs() {
    let pair = [
        json!({"prompt": "ab", "chosen": "cd", "rejected": "e"}),
        json!({"prompt": "f", "chosen": "g", "rejected": "hij"}),
    ];
    let (config, data) = Folder::new(&pair).load(&format!("{PAIRS} model.seq_len=16 training.global_batch_size=1"));
    let batch = data.batch(0, 1, 0..1).unwrap();
    let field = |name: &str| batch.values::<i32>(name).unwrap();
    assert_eq!(field(language::TOKENS), b"abcdabefgfhij\0\0\0".map(i32::from));
    assert_eq!(field(language::POSITIONS), [0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2]);
    let targets = b"\0cd\0\0e\0g\0hij\0\0\0\0".map(|id| if id == 0 { -1 } else { i32::from(id) });
    assert_eq!(field(language::TARGETS), targets);
    assert_eq!(field(language::ANSWERS), [-1, 0, 0, -1, -1, 1, -1, 2, -1, 3, 3, 3, -1, -1, -1, -1]);
    assert_eq!(config.model().loss_terms(&batch, 0..1).unwrap(), 2);
}

/// The smallest pairs that there are: each answer one token behind one of a prompt.
#[test]
fn a_row_has_room_for_all_pairs_that_fit() {
    let smallest = vec![json!({"prompt": "a", "chosen": "b", "rejected": "c"}); 6];
    let folder = Folder::new(&smallest);
    let full = format!("{PAIRS} model.seq_len=9 training.global_batch_size=1 training.steps=1");
    let (config, data) = folder.load(&full);
    let batch = data.batch(0, 1, 0..1).unwrap();
    assert_eq!(config.model().loss_terms(&batch, 0..1).unwrap(), 2);
    let answers = language::answers(9).ids.unwrap();
    let most = batch.values::<i32>(language::ANSWERS).unwrap().iter().max().unwrap();
    assert_eq!((answers.start, answers.end), (-1, most + 1));
    assert_eq!(losses(&folder.run(&full)), [std::f64::consts::LN_2]);
}

#[test]
fn a_run_goes_on_in_the_middle_of_its_pairs() {
    let folder = Folder::new(&pairs(40));
    let common =
        format!("{PAIRS} training.numerics=canonical validation.every=2 lr_scheduler.decay_steps=9 checkpoint.every=2");
    let whole = folder.run(&format!("{common} training.steps=8"));
    let saved = format!("{common} checkpoint.dir={}", folder.path("checkpoints").display());
    let mut parts = numbers(&folder.run(&format!("{saved} training.steps=3")));
    parts.extend(numbers(&folder.run(&format!("{saved} training.steps=8 checkpoint.resume=true parallelism.dp=2"))));
    assert_eq!(parts, numbers(&whole));
    let validation = whole.iter().rfind(|event| event["event"] == "validation").unwrap();
    let of = |name: &str| validation["dpo"][name].as_f64().unwrap();
    assert!((of("chosen") - of("rejected") - of("margin")).abs() < 1e-12 && of("margin") != 0.0, "{validation}");
}

/// A run that goes on after each step on another mesh, from each of these to each: a circuit through all of their
/// pairs.
#[test]
fn a_run_of_pairs_goes_on_from_every_mesh_on_every_other() {
    let meshes = [
        "parallelism.tp=2 parallelism.sequence_parallel=true",
        "parallelism.pp=2 training.micro_batch_size=1",
        "parallelism.cp=2",
        "parallelism.dp=2 parallelism.zero_stage=3",
        "parallelism.dp=4 parallelism.zero_stage=2 memory.recompute=full",
    ];
    let pairs_of = |first: usize| (first + 1..meshes.len()).flat_map(move |second| [first, second]);
    let circuit: Vec<usize> = (0..meshes.len()).flat_map(pairs_of).chain([0]).collect();
    assert_eq!(circuit.len(), meshes.len() * (meshes.len() - 1) + 1);
    for base in ["model.kind=gpt2", "model.kind=llama lora.quantization=nf4 lora.block_size=8"] {
        let folder = Folder::new(&pairs(40));
        let common = format!("{PAIRS} {base} training.numerics=canonical lr_scheduler.decay_steps=30");
        let of_steps = |more: &str| -> Vec<Value> {
            let values = folder.run(&format!("{common} {more}")).into_iter().filter(|event| event["event"] == "step");
            values.map(|step| json!([step["loss"], step["grad_norm"], step["dpo"]])).collect()
        };
        let whole = of_steps(&format!("training.steps={}", circuit.len()));
        let saved = format!("checkpoint.dir={} checkpoint.resume=true", folder.path("checkpoints").display());
        for (step, mesh) in circuit.iter().map(|&mesh| meshes[mesh]).enumerate() {
            let got = of_steps(&format!("{saved} training.steps={} {mesh}", step + 1));
            assert_eq!(got, whole[step..=step], "{base}: step {step} on {mesh}");
        }
    }
}

#[test]
fn memory_and_communication_are_as_predicted() {
    let folder = Folder::new(&pairs(40));
    for more in [
        "",
        "parallelism.dp=2 parallelism.tp=2 parallelism.zero_stage=3",
        "parallelism.cp=2",
        "parallelism.pp=2 training.micro_batch_size=1",
    ] {
        let more = format!("{PAIRS} {more}");
        let (config, _) = folder.load(&more);
        let events = folder.run(&more);
        assert_eq!(events[0]["memory_predicted"], events.last().unwrap()["memory_measured"], "{more}");
        let (model, plan) = (config.model(), config.plan().unwrap());
        let world = plan.mesh.world_size();
        let ranks: Vec<_> = (0..world).map(|rank| dry_run::predict(&model, &plan, rank).unwrap()).collect();
        let step = steps(&events).nth(1).unwrap();
        for (group, bytes) in step["comm_bytes"].as_object().unwrap() {
            let mean = ranks.iter().map(|rank| rank.bytes_on(group)).sum::<f64>() / world as f64;
            assert_eq!(bytes.as_u64().unwrap(), mean.round() as u64, "{more}: {group}");
        }
    }
}

#[test]
fn a_device_whose_memory_the_host_cannot_read_has_the_cpus_bits() {
    let folder = Folder::new(&pairs(40));
    for more in [
        "training.numerics=canonical",
        "parallelism.dp=2 parallelism.tp=2",
        "training.dtype=bf16 training.matmul_dtype=f32 parallelism.pp=2",
    ] {
        let more = format!("{PAIRS} {more}");
        let (config, data) = folder.load(&more);
        let devices = Devices::own(|world| {
            let device = Opaque::device(meshwork_cpu::Cpu::device());
            Ok(RankDevice { device, world: opaque::communicator(world) })
        });
        let metrics = folder.path("opaque.jsonl");
        let run = train_in(&config.world(), &devices, &config, &data, Some(&metrics), &AtomicBool::new(false));
        run.unwrap_or_else(|error| panic!("{more}: {error}"));
        assert_eq!(numbers(&events(&metrics)), numbers(&folder.run(&more)), "{more}");
    }
}

#[test]
fn long_pairs_are_cut_or_left_out_together() {
    let long = [
        json!({"prompt": "why?", "chosen": "because ".repeat(10), "rejected": "no"}),
        json!({"prompt": "and?", "chosen": " so.", "rejected": " no."}),
        json!({"prompt": "q".repeat(40), "chosen": "never", "rejected": "reached"}),
        json!({"prompt": "p", "chosen": "a".repeat(40), "rejected": "a".repeat(50)}),
    ];
    let folder = Folder::new(&long);
    let row = format!("{PAIRS} model.seq_len=32 training.global_batch_size=1");
    let told = |more: &str| folder.load(&format!("{row} {more}")).1.notices().join("\n");
    let cut = told("");
    let wanted = "2 pairs of 38 tokens in 2 rows of 32, 59.4% full (one behind the other: 2 rows); \
                  3 of more than 32 tokens truncated; 2 without two different answers";
    assert!(cut.contains(wanted), "{cut}");
    let skipped = told("data.overlong=skip");
    let wanted = "1 pairs of 16 tokens in 1 rows of 32, 50.0% full (one behind the other: 1 rows); \
                  3 of more than 32 tokens left out";
    assert!(skipped.contains(wanted), "{skipped}");
}

#[test]
fn what_cannot_learn_from_pairs_is_refused() {
    let folder = Folder::new(&pairs(8));
    let refused = |folder: &Folder, more: &str| {
        load(&Args::parse(folder.settings(&format!("{PAIRS} {more}")))).map(drop).unwrap_err().to_string()
    };
    for (more, told) in [
        (
            "lora.rank=0",
            "training.objective = dpo: compares the model with its frozen weights, and without adapters nothing is frozen",
        ),
        (
            "data.documents=loss",
            "lets examples that share a sequence see each other, or learn across their boundary (training.objective = dpo)",
        ),
        ("dpo.label_smoothing=0.5", "dpo.label_smoothing = 0.5: takes more pairs to be the wrong way round than not"),
        ("dpo.beta=0", "dpo.beta = 0"),
        (
            "parallelism.pp=2 pipeline.schedule=pipedream training.max_norm=0",
            "pipeline.schedule = pipedream: never empties its pipeline, and each step of training.objective = dpo begins with a pass",
        ),
        ("model.seq_len=2", "has nothing to learn: 0 pairs"),
    ] {
        let refused = refused(&folder, more);
        assert!(refused.contains(told), "{more}: {refused}");
    }
    for (line, told) in [
        (
            json!({"prompt": "a", "chosen": "b"}),
            "line 2 is no example: it has no chosen and rejected answer to a prompt",
        ),
        (json!({"prompt": "a", "completion": "b"}), "line 2 is no example: it has no chosen and rejected answer"),
        (
            json!({"prompt": "a", "chosen": "b", "rejected": "b"}),
            "line 2 is no example: it has the same chosen and rejected answer",
        ),
    ] {
        let one = Folder::new(&[pairs(1).remove(0), line]);
        let refused = refused(&one, "");
        assert!(refused.contains(told), "{refused}");
        let (_, data) = one.load(&format!("{PAIRS} data.skip_bad_lines=true training.global_batch_size=1"));
        assert!(data.notices().iter().any(|told| told.contains("1 of 2 documents skipped")), "{:?}", data.notices());
    }
    let text = folder.path("plain.txt");
    std::fs::write(&text, "Some words.").unwrap();
    let refused = refused(&folder, &format!("data.path={}", text.display()));
    assert!(refused.contains("is text, and no examples"), "{refused}");
}

/// What the configuration refuses, a trainer refuses of a plan.
#[test]
fn a_trainer_refuses_what_pairs_do_not_go_with() {
    let (config, _) = Folder::new(&pairs(8)).load(&format!("{PAIRS} parallelism.pp=2 training.max_norm=0"));
    let schedule = ScheduleSpec::Named { generator: Generator::PipeDream, virtual_stages: None, vertical_sync: false };
    let plan = Plan { schedule, ..config.plan().unwrap() };
    let refused = dry_run::predict(&config.model(), &plan, 0).unwrap_err().to_string();
    assert!(refused.contains("a reference does not go with schedule pipedream"), "{refused}");
}
