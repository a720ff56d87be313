//! Fine-tuning on examples: packed into rows, learnt by their answers alone, with one rank's bits on every mesh.
//!
//! More than 400 lines: all that examples promise, on one small model that the tests of pairs use too.

use meshwork_core::World;
use meshwork_engine::dry_run;
use meshwork_models::language;
use meshwork_testkit::opaque::{self, Opaque};
use meshwork_train::config::{Args, Config};
use meshwork_train::{Data, Devices, RankDevice, load, train, train_in};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

/// Tokens of a row.
const ROW: usize = 32;

/// Examples of prompts and answers of 2 to 14 bytes each, so that rows, micro-batches and ranks have different numbers
/// of answers.
pub fn examples(count: u64) -> Vec<Value> {
    let mut rng = meshwork_testkit::Rng::new(11);
    let mut text = || {
        let len = 2 + rng.below(13);
        (0..len).map(|_| char::from(b'a' + rng.below(26) as u8)).collect::<String>()
    };
    (0..count).map(|_| json!({"prompt": text(), "completion": text()})).collect()
}

/// A folder with a file of examples.
pub struct Folder {
    folder: TempDir,
}

impl Folder {
    pub fn new(examples: &[Value]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let lines: String = examples.iter().map(|example| format!("{example}\n")).collect();
        fs::write(folder.path().join("examples.jsonl"), lines).expect("a file");
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A small model that is fine-tuned on the examples.
    pub fn settings(&self, more: &str) -> Vec<String> {
        let small = "training.objective=sft training.steps=4 training.global_batch_size=4 model.vocab_size=256 model.num_layers=2 \
                     model.hidden_size=16 model.num_heads=4 model.ffn_hidden_size=32 model.tie_embeddings=false optimizer.lr=0.01 \
                     metrics.sample_tokens=0 parallelism.context_parallel_method=all_gather";
        let data = format!("model.seq_len={ROW} data.path={}", self.path("examples.jsonl").display());
        let words: Vec<&str> = small.split_whitespace().chain(data.split_whitespace()).collect();
        words.into_iter().chain(more.split_whitespace()).map(|setting| format!("--set={setting}")).collect()
    }

    pub fn load(&self, more: &str) -> (Config, Data) {
        load(&Args::parse(self.settings(more))).unwrap_or_else(|error| panic!("{more}: {error}"))
    }

    /// The events of a run.
    pub fn run(&self, more: &str) -> Vec<Value> {
        let (config, data) = self.load(more);
        let metrics = self.path("metrics.jsonl");
        _ = fs::remove_file(&metrics);
        train(&config, &data, Some(&metrics), &AtomicBool::new(false))
            .unwrap_or_else(|error| panic!("{more}: {error}"));
        events(&metrics)
    }
}

pub fn events(metrics: &Path) -> Vec<Value> {
    let text = fs::read_to_string(metrics).expect("metrics");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// The loss and the norm of each step.
pub fn numbers(events: &[Value]) -> Vec<(f64, f64)> {
    let steps = events.iter().filter(|event| event["event"] == "step");
    steps.map(|step| (step["loss"].as_f64().unwrap(), step["grad_norm"].as_f64().unwrap())).collect()
}

pub fn losses(events: &[Value]) -> Vec<f64> {
    numbers(events).into_iter().map(|(loss, _)| loss).collect()
}

#[test]
fn packed_examples_have_one_ranks_bits_on_every_mesh() {
    let folder = Folder::new(&examples(60));
    for kind in ["gpt2", "llama"] {
        let base = format!("model.kind={kind} training.numerics=canonical");
        let of = |more: &str| numbers(&folder.run(&format!("{base} {more}")));
        let alone = of("");
        assert_eq!(alone.len(), 4);
        for more in [
            "training.micro_batch_size=1",
            "parallelism.dp=2",
            "parallelism.dp=4",
            "parallelism.tp=2",
            "parallelism.tp=2 parallelism.sequence_parallel=true",
            "parallelism.pp=2 training.micro_batch_size=1",
            "parallelism.cp=2",
            "parallelism.cp=4 parallelism.context_parallel_method=all_to_all",
            "parallelism.cp=2 parallelism.dp=2 training.micro_batch_size=1",
            "parallelism.tp=2 parallelism.pp=2 parallelism.dp=2",
            "parallelism.dp=2 parallelism.zero_stage=3",
            "memory.recompute=full parallelism.pp=2 pipeline.schedule=gpipe",
        ] {
            assert_eq!(of(more), alone, "{kind}: {more}");
        }
    }
}

#[test]
fn packed_examples_train_over_rings_as_on_one_rank() {
    let folder = Folder::new(&examples(60));
    let base = "model.kind=llama optimizer.name=sgd optimizer.lr=1 optimizer.weight_decay=0 training.max_norm=0";
    let alone = numbers(&folder.run(base));
    for more in [
        "parallelism.cp=2 parallelism.context_parallel_method=ring",
        "parallelism.cp=4 parallelism.context_parallel_method=hybrid",
        "parallelism.cp=2 parallelism.context_parallel_method=ring parallelism.context_parallel_order=by_document",
    ] {
        let got = numbers(&folder.run(&format!("{base} {more}")));
        let near = |(a, b): (&(f64, f64), &(f64, f64))| (a.0 - b.0).abs() < 1e-5 && (a.1 - b.1).abs() < 1e-4;
        assert!(got.iter().zip(&alone).all(near), "{more}: {got:?} and {alone:?}");
    }
}

/// Of rows whose numbers of answers differ: not a mean of means of micro-batches or ranks.
#[test]
fn the_loss_is_the_mean_over_the_answers_of_the_whole_batch() {
    let folder = Folder::new(&examples(60));
    let still = "optimizer.lr=0 data.shuffle=false";
    let (_, data) = folder.load(still);
    let rows = losses(&folder.run(&format!("{still} training.global_batch_size=1")));
    let answers = |row: usize| {
        let batch = data.batch(0, 4, row..row + 1).unwrap();
        batch.values::<i32>(language::TARGETS).unwrap().iter().filter(|&&target| target >= 0).count() as f64
    };
    let counts: Vec<f64> = (0..4).map(answers).collect();
    let mean = rows.iter().zip(&counts).map(|(loss, count)| loss * count).sum::<f64>() / counts.iter().sum::<f64>();
    let of_means = rows.iter().sum::<f64>() / 4.0;
    assert!((mean - of_means).abs() > 1e-5, "the two means must differ for this test to see anything: {counts:?}");
    for more in ["", "training.micro_batch_size=1", "parallelism.dp=4", "parallelism.dp=2 training.micro_batch_size=1"]
    {
        let first = losses(&folder.run(&format!("{still} {more}")))[0];
        assert!((first - mean).abs() < 1e-6, "{more}: {first} instead of {mean}, the mean of means is {of_means}");
    }
}

/// Positions start anew, and attention sees nothing of the neighbours.
#[test]
fn an_example_has_the_loss_in_a_row_that_it_has_alone() {
    let all = examples(6);
    let still = "optimizer.lr=0 data.shuffle=false training.global_batch_size=1 training.steps=1";
    let alone = |example: &Value| {
        let count = example["completion"].as_str().unwrap().len() as f64;
        (losses(&Folder::new(std::slice::from_ref(example)).run(still))[0] * count, count)
    };
    let (sum, count) = all.iter().map(alone).fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
    let folder = Folder::new(&all);
    let (_, data) = folder.load(still);
    let rows = data.training_samples();
    assert!(rows < 6, "some share a row: {rows}");
    let together = losses(&folder.run(&format!("{still} training.global_batch_size={rows}")))[0];
    assert!((together - sum / count).abs() < 1e-5, "{together} and {}", sum / count);
}

/// verl PR #6564: shifted labels took the last one of a sequence from the next sample.
#[test]
fn the_last_target_of_a_row_is_no_token_of_the_next() {
    // All of an example is its answer, and fills a row.
    let full: Vec<Value> = (0..4).map(|at| json!({"prompt": "", "completion": format!("{at}").repeat(ROW)})).collect();
    let (_, data) = Folder::new(&full).load("data.shuffle=false");
    let batch = data.batch(0, 4, 0..4).unwrap();
    let (tokens, targets) = (batch.values::<i32>(language::TOKENS), batch.values::<i32>(language::TARGETS));
    for (row, (tokens, targets)) in tokens.unwrap().chunks(ROW).zip(targets.unwrap().chunks(ROW)).enumerate() {
        let digit = i32::from(b'0') + row as i32;
        assert_eq!(tokens, [digit; ROW]);
        assert_eq!((&targets[..ROW - 1], targets[ROW - 1]), (&[digit; ROW - 1][..], -1), "row {row}");
    }
}

#[test]
fn positions_begin_anew_and_prompts_and_padding_are_no_targets() {
    let pair = [json!({"prompt": "ab", "completion": "cd"}), json!({"prompt": "efg", "completion": "h"})];
    let (_, data) = Folder::new(&pair).load("model.seq_len=10 data.shuffle=false training.global_batch_size=1");
    let batch = data.batch(0, 1, 0..1).unwrap();
    let ids = |text: &str| text.bytes().map(i32::from).collect::<Vec<_>>();
    assert_eq!(batch.values::<i32>(language::TOKENS).unwrap(), [ids("abcdefgh"), vec![0, 0]].concat());
    let [c, d, h] = [b'c', b'd', b'h'].map(i32::from);
    assert_eq!(batch.values::<i32>(language::TARGETS).unwrap(), [-1, c, d, -1, -1, -1, h, -1, -1, -1]);
    assert_eq!(batch.values::<i32>(language::POSITIONS).unwrap(), [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]);
}

#[test]
fn a_run_goes_on_in_the_middle_of_its_examples() {
    let folder = Folder::new(&examples(60));
    let steps = "validation.every=2 lr_scheduler.decay_steps=9 checkpoint.every=2";
    let whole = folder.run(&format!("{steps} training.steps=8"));
    let dir = folder.path("checkpoints");
    let saved = format!("{steps} checkpoint.dir={}", dir.display());
    let mut parts = numbers(&folder.run(&format!("{saved} training.steps=3")));
    parts.extend(numbers(&folder.run(&format!("{saved} training.steps=8 checkpoint.resume=true parallelism.dp=2"))));
    let near = |(a, b): (&(f64, f64), &(f64, f64))| (a.0 - b.0).abs() < 1e-5 && (a.1 - b.1).abs() < 1e-4;
    assert_eq!(parts.len(), 8);
    assert!(parts.iter().zip(&numbers(&whole)).all(near), "{parts:?}");
}

#[test]
fn memory_and_communication_are_as_predicted() {
    let folder = Folder::new(&examples(60));
    for more in
        ["", "parallelism.dp=2 parallelism.tp=2", "parallelism.cp=2", "parallelism.pp=2 training.micro_batch_size=1"]
    {
        let (config, _) = folder.load(more);
        let events = folder.run(more);
        let (start, end) = (&events[0], events.last().unwrap());
        assert_eq!(start["memory_predicted"], end["memory_measured"], "{more}");
        let (model, plan) = (config.model(), config.plan().unwrap());
        let world = plan.mesh.world_size();
        let ranks: Vec<_> = (0..world).map(|rank| dry_run::predict(&model, &plan, rank).unwrap()).collect();
        let step = events.iter().find(|event| event["step"] == 2).unwrap();
        for (group, bytes) in step["comm_bytes"].as_object().unwrap() {
            let mean = ranks.iter().map(|rank| rank.bytes_on(group)).sum::<f64>() / world as f64;
            assert_eq!(bytes.as_u64().unwrap(), mean.round() as u64, "{more}: {group}");
        }
    }
}

#[test]
fn a_device_whose_memory_the_host_cannot_read_has_the_cpus_bits() {
    let folder = Folder::new(&examples(60));
    for more in ["training.numerics=canonical", "parallelism.dp=2 parallelism.tp=2", "parallelism.cp=2"] {
        let (config, data) = folder.load(more);
        let devices = Devices::own(|world| {
            let device = Opaque::device(meshwork_cpu::Cpu::device());
            Ok(RankDevice { device, world: opaque::communicator(world) })
        });
        let metrics = folder.path("opaque.jsonl");
        let world: World = config.world();
        let run = train_in(&world, &devices, &config, &data, Some(&metrics), &AtomicBool::new(false));
        run.unwrap_or_else(|error| panic!("{more}: {error}"));
        assert_eq!(numbers(&events(&metrics)), numbers(&folder.run(more)), "{more}");
    }
}

#[test]
fn what_is_held_out_is_not_trained_on() {
    let folder = Folder::new(&examples(40));
    let (config, data) = folder.load("validation.every=1 validation.fraction=0.25 data.shuffle=false");
    assert!(data.notices().iter().any(|told| told.contains("30 examples of ") && told.contains("; 10 held out")));
    let tokens = |batch: meshwork_nn::Batch| batch.values::<i32>(language::TOKENS).unwrap().to_vec();
    let text = |ids: Vec<i32>| ids.into_iter().map(|id| id as u8 as char).collect::<String>();
    let trained = text(tokens(data.batch(0, data.training_samples(), 0..data.training_samples()).unwrap()));
    let held = data.validation_samples();
    let held = text(tokens(data.validation_batch(0, held, 0..held).unwrap()));
    for (at, example) in examples(40).iter().enumerate() {
        let whole = format!("{}{}", example["prompt"].as_str().unwrap(), example["completion"].as_str().unwrap());
        assert_eq!((trained.contains(&whole), held.contains(&whole)), (at < 30, at >= 30), "example {at}");
    }
    assert_eq!(config.training.steps, 4);
}

/// The loss of what is held out rises at once with this rate, so that the first validation stays the best.
#[test]
fn a_run_ends_early_and_goes_back_to_its_best_weights() {
    let folder = Folder::new(&examples(40));
    let dir = folder.path("checkpoints");
    let common = "validation.every=1 validation.fraction=0.25 optimizer.lr=0.3 lr_scheduler.decay_steps=50";
    let files = |out: &str| {
        let out = folder.path(out);
        (format!("checkpoint.export={}", out.display()), out.join("model.safetensors"))
    };
    let (export, model) = files("best");
    let more = format!(
        "{common} training.steps=50 training.patience=3 checkpoint.dir={} checkpoint.best=true checkpoint.keep=1 {export}",
        dir.display()
    );
    let (config, data) = folder.load(&more);
    let metrics = folder.path("early.jsonl");
    let outcome = train(&config, &data, Some(&metrics), &AtomicBool::new(false)).unwrap();
    let best = outcome.best.expect("a validation");
    assert_eq!((outcome.steps, best.since), (best.step + 3, 3), "{outcome:?}");
    assert!(best.step < 20, "{best:?}");
    let all = events(&metrics);
    let validations = all.iter().filter(|event| event["event"] == "validation");
    let validated: Vec<f64> = validations.map(|event| event["loss"].as_f64().unwrap()).collect();
    assert_eq!(validated.iter().copied().fold(f64::MAX, f64::min), best.loss);
    let mut kept: Vec<u64> = meshwork_checkpoint::steps(&dir).unwrap();
    kept.sort_unstable();
    assert_eq!(kept, [best.step, outcome.steps], "the best and the newest");
    // The exported model is that of a run that ends at the best step.
    let (export, wanted) = files("wanted");
    folder.run(&format!("{common} training.steps={} {export}", best.step));
    assert!(fs::read(model).unwrap() == fs::read(wanted).unwrap(), "the weights of step {}", best.step);
    // A run that goes on finds its patience gone.
    let again = train(
        &folder.load(&format!("{more} checkpoint.resume=true checkpoint.export_overwrite=true")).0,
        &data,
        None,
        &AtomicBool::new(false),
    );
    assert_eq!(again.unwrap().best, Some(best));
}

#[test]
fn bad_examples_are_named_by_their_line_and_left_out_if_asked() {
    let bad = |second: Value| {
        let lines = [json!({"prompt": "a", "completion": "b"}), second, json!({"prompt": "c", "completion": "d"})];
        Folder::new(&lines)
    };
    let refused = |folder: &Folder, more: &str| load(&Args::parse(folder.settings(more))).unwrap_err().to_string();
    let folder = bad(json!({"text": "a"}));
    let told = refused(&folder, "");
    assert!(told.contains("line 2 is no example: it has neither a list of messages"), "{told}");
    let (_, data) = folder.load("data.skip_bad_lines=true");
    assert!(data.notices().iter().any(|told| told.contains("1 of 3 documents skipped")), "{:?}", data.notices());
    // That there is no template is no fault of a line.
    for more in ["", "data.skip_bad_lines=true"] {
        let told = refused(&bad(json!({"messages": [{"role": "user", "content": "a"}]})), more);
        assert!(told.contains("examples.jsonl\": line 2 has messages, and there is no chat template: "), "{told}");
        #[cfg(feature = "tokenizers")]
        assert!(
            told.contains("the tokenizer is built in, and has none; name a file with one in data.chat_template"),
            "{told}"
        );
        #[cfg(not(feature = "tokenizers"))]
        assert!(told.contains("it needs the feature tokenizers, which this build lacks; build it with "), "{told}");
        assert!(told.contains(", or use texts: prompt and completion (docs/finetune.md)"), "{told}");
    }
    let told = refused(&folder, "data.documents=stream");
    assert!(told.contains("data.documents = \"stream\"") || told.contains("data.documents = stream"), "{told}");
}

#[test]
fn what_is_no_json_is_no_example() {
    let folder = Folder::new(&examples(3));
    for (name, bytes, told) in [
        ("plain.txt", &b"Some words."[..], "is text, and no examples"),
        ("ids.bin", &[1, 0, 2, 0], "is tokens, and no examples"),
    ] {
        fs::write(folder.path(name), bytes).unwrap();
        let settings = folder.settings(&format!("data.path={}", folder.path(name).display()));
        let refused = load(&Args::parse(settings)).unwrap_err().to_string();
        assert!(refused.contains(told), "{refused}");
    }
    let without = load(&Args::parse(["--set=training.objective=sft"])).unwrap_err().to_string();
    assert!(without.contains("there are no examples; set data.path"), "{without}");
}

#[test]
fn long_answers_are_cut_or_left_out_as_asked() {
    let long = [
        json!({"prompt": "why?", "completion": "because ".repeat(10)}),
        json!({"prompt": "and?", "completion": " so."}),
        json!({"prompt": "q".repeat(40), "completion": "never reached"}),
    ];
    let folder = Folder::new(&long);
    let told = |more: &str| folder.load(more).1.notices().join("\n");
    let cut = told("");
    assert!(cut.contains("2 examples of 40 tokens in 2 rows of 32"), "{cut}");
    assert!(
        cut.contains("2 of more than 32 tokens truncated; 1 without an answer in what is left of them left out"),
        "{cut}"
    );
    let unanswered = load(&Args::parse(folder.settings("model.seq_len=2"))).unwrap_err().to_string();
    assert!(unanswered.contains("has nothing to learn: 0 examples of 0 tokens in 0 rows of 2"), "{unanswered}");
    let skipped = told("data.overlong=skip");
    assert!(skipped.contains("1 examples of 8 tokens in 1 rows of 32"), "{skipped}");
    assert!(skipped.contains("2 of more than 32 tokens left out"), "{skipped}");
}

/// Messages through the chat template of a tokenizer's folder, and the template's own error with the line.
#[cfg(feature = "tokenizers")]
#[test]
fn messages_are_written_by_the_template_of_the_folder() {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
    let all: Value = serde_json::from_str(&fs::read_to_string(format!("{fixtures}/chat.json")).unwrap()).unwrap();
    let case = |what: &str, template: &str| {
        let cases = all["cases"].as_array().unwrap();
        cases.iter().find(|case| case["what"] == what && case["template"] == template).unwrap()["messages"].clone()
    };
    let template = "alternating";
    let lines = ["one turn", "two turns", "an unanswered user"].map(|what| json!({"messages": case(what, template)}));
    let folder = Folder::new(&lines);
    fs::copy(format!("{fixtures}/chat_tokenizer.json"), folder.path("tokenizer.json")).unwrap();
    let special = json!({"bos_token": "<|begin|>", "eos_token": "</s>"});
    fs::write(folder.path("tokenizer_config.json"), special.to_string()).unwrap();
    fs::write(folder.path("chat_template.jinja"), all["templates"][template].as_str().unwrap()).unwrap();
    let more = format!("model.vocab_size=400 model.seq_len=128 data.tokenizer={}", folder.folder.path().display());
    let refused = |more: &str| load(&Args::parse(folder.settings(more))).unwrap_err().to_string();
    let empty = refused(&format!("{more} data.chat_template="));
    assert!(empty.contains("data.chat_template = \"\": names no file; name a file with a chat template"), "{empty}");
    let refused = refused(&more);
    let told = "line 3 has messages, and the chat template fails: invalid operation: user and assistant must alternate";
    assert!(refused.contains(told), "{refused}");
    let (_, data) = folder.load(&format!("{more} data.skip_bad_lines=true training.global_batch_size=1"));
    let batch = data.batch(0, 1, 0..1).unwrap();
    let (tokens, targets) =
        (batch.values::<i32>(language::TOKENS).unwrap(), batch.values::<i32>(language::TARGETS).unwrap());
    let text = "<|begin|>[INST] What is 2 + 2? [/INST]It is 4.</s><|begin|>[INST]  Hello  there  [/INST]Hi! Ünïcödé 🦀 \
                too.</s>[INST] And\tnow?\n [/INST]Nothing new.</s>";
    assert!(data.decode(tokens).starts_with(text), "{}", data.decode(tokens));
    assert_eq!(data.decode(targets), "It is 4.</s>Hi! Ünïcödé 🦀 too.</s>Nothing new.</s>");
}
