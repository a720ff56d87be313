//! Every key of the table has the effect that it states. For each key a run is saved, and resumed with another value of
//! it: what changes the model or the numbers must be refused until it is permitted, and then changes them; what changes
//! the order of sums alone keeps the bits of canonical numerics; what changes speed or output alone keeps all bits. And
//! a key that is given and changes nothing is told.
//!
//! A key that is missing from the table of values below fails here.
//!
//! More than 400 lines: the table of values.

use meshwork_testkit::Sampled;
use meshwork_train::config::keys::{self, Effect};
use meshwork_train::config::{Args, Config};
use meshwork_train::{load, train};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tempfile::TempDir;

/// A model that trains in milliseconds.
const SMALL: &str = "model.vocab_size=256 model.num_layers=2 model.hidden_size=16 model.num_heads=2 model.ffn_hidden_size=32 model.seq_len=8 \
                     training.global_batch_size=8 optimizer.lr=0.01 metrics.sample_tokens=0";
const LLAMA: &str = "model.kind=llama";
const SCALED: &str = "model.kind=llama model.rope_scaling_factor=2 model.rope_scaling_original_seq_len=4";
const MOE: &str = "moe.num_experts=4";
const STALE: &str = "parallelism.pp=2 pipeline.schedule=pipedream model.tie_embeddings=false training.max_norm=0 pipeline.num_microbatches=4";
const HALF: &str = "training.dtype=f16";
const CUT: &str = "parallelism.pp=2 compress.activations=topk:0.5";
const VALIDATES: &str = "validation.every=2";
const PAIRS: &str = "training.objective=dpo lora.rank=4 data.path={dir}/pairs.jsonl";

/// Of a key: with which other settings it is read, and the other value. `{dir}` is a folder of its own. Settings that
/// go with the value follow it.
#[rustfmt::skip] // A table.
const VALUES: &[(&str, &str, &str)] = &[
    ("model.preset", "", "small"),
    ("model.kind", "", "llama"),
    ("model.vocab_size", "", "300"),
    ("model.num_layers", "", "3"),
    ("model.hidden_size", "", "32"),
    ("model.num_heads", "", "4"),
    ("model.num_kv_heads", LLAMA, "1"),
    ("model.ffn_hidden_size", "", "64"),
    ("model.seq_len", "", "16"),
    ("model.sliding_window", "", "3"),
    ("model.tie_embeddings", "", "false"),
    ("model.dropout", "", "0.1"),
    ("model.norm_eps", LLAMA, "0.1"),
    ("model.rope_theta", LLAMA, "100"),
    ("model.rope_scaling_factor", SCALED, "4"),
    ("model.rope_scaling_low_freq_factor", SCALED, "0.5"),
    ("model.rope_scaling_high_freq_factor", SCALED, "1.5"),
    ("model.rope_scaling_original_seq_len", SCALED, "16"),
    ("model.freeze", "", "embedding"),
    ("lora.rank", "", "4"),
    ("lora.alpha", "lora.rank=4", "8"),
    ("lora.rslora", "lora.rank=4", "true"),
    ("lora.targets", "lora.rank=4", "c_attn"),
    ("lora.dropout", "lora.rank=4", "0.5"),
    ("lora.quantization", "lora.rank=4", "nf4"),
    ("lora.block_size", "lora.rank=4 lora.quantization=int8", "16"),
    ("lora.double_quantization", "lora.rank=4 lora.quantization=nf4", "true"),
    ("parallelism.dp", "", "2"),
    ("parallelism.tp", "", "2"),
    ("parallelism.pp", "", "2"),
    ("parallelism.ep", "moe.num_experts=4 parallelism.dp=2", "2"),
    ("parallelism.sequence_parallel", "parallelism.tp=2", "true"),
    ("parallelism.cp", "parallelism.context_parallel_method=all_gather model.tie_embeddings=false", "2"),
    ("parallelism.context_parallel_method", "parallelism.cp=2 model.tie_embeddings=false", "all_to_all"),
    (
        "parallelism.ring_degree",
        "parallelism.cp=4 parallelism.context_parallel_method=hybrid training.numerics=fast",
        "4",
    ),
    ("parallelism.context_parallel_order", "parallelism.cp=2 training.numerics=fast", "contiguous"),
    ("parallelism.zero_stage", "parallelism.dp=2", "3"),
    ("parallelism.zero_group", "parallelism.dp=4 parallelism.zero_stage=2", "2"),
    ("parallelism.elastic", "parallelism.dp=2", "dp"),
    ("parallelism.expert_tensor_parallel", "moe.num_experts=4 parallelism.tp=2", "2"),
    ("moe.num_experts", MOE, "2"),
    ("moe.top_k", MOE, "1"),
    ("moe.router", MOE, "gshard"),
    ("moe.capacity_factor", MOE, "0.5"),
    ("moe.overflow", "moe.num_experts=4 moe.capacity_factor=0.5", "reroute"),
    ("moe.aux_loss_coeff", MOE, "0.5"),
    ("moe.z_loss_coeff", MOE, "0.5"),
    ("moe.every_n_layers", MOE, "2"),
    ("moe.first_dense_layers", MOE, "1"),
    ("moe.num_shared_experts", MOE, "1"),
    ("moe.expert_hidden_size", MOE, "16"),
    ("moe.bias_update_rate", "moe.num_experts=4 moe.router=bias", "0.5"),
    ("moe.aux_loss_scope", MOE, "global_batch"),
    ("moe.jitter", MOE, "0.1"),
    ("moe.normalize_top_k", MOE, "false"),
    ("moe.num_groups", "moe.num_experts=4 moe.top_groups=1", "2"),
    ("moe.top_groups", "moe.num_experts=4 moe.num_groups=2", "1"),
    ("moe.routed_scaling", MOE, "2"),
    ("pipeline.schedule", "parallelism.pp=2", "gpipe"),
    ("pipeline.schedule_file", "parallelism.pp=2 pipeline.num_microbatches=4", "{dir}/own.schedule"),
    ("pipeline.virtual_stages", "parallelism.pp=2 model.num_layers=8 pipeline.schedule=interleaved_1f1b", "4"),
    ("pipeline.num_microbatches", "", "4"),
    ("pipeline.partition", "parallelism.pp=2", "[2,0]"),
    ("pipeline.replication", "parallelism.pp=3 model.num_layers=3 training.numerics=fast", "[2,1]"),
    ("pipeline.vertical_sync", STALE, "true"),
    ("pipeline.scatter_gather", "parallelism.pp=2 parallelism.tp=2", "false"),
    ("training.steps", "", "6"),
    ("training.global_batch_size", "", "16"),
    ("training.micro_batch_size", "", "2"),
    ("training.seed", "model.dropout=0.1", "9"),
    ("training.dtype", "", "bf16"),
    ("training.matmul_dtype", "", "tf32"),
    ("training.reduce_dtype", "training.dtype=bf16 parallelism.dp=2", "bf16"),
    ("training.loss_scale", HALF, "16"),
    ("training.loss_scale_initial", HALF, "1024"),
    ("training.loss_scale_growth_interval", HALF, "1"),
    ("training.max_norm", "", "0.01"),
    ("training.numerics", "", "canonical"),
    ("training.verify", "", "1"),
    ("training.objective", "data.path={dir}/examples.jsonl", "sft"),
    ("training.patience", VALIDATES, "9"),
    ("dpo.beta", PAIRS, "0.5"),
    ("dpo.label_smoothing", PAIRS, "0.2"),
    ("training.check_replicas_every", "parallelism.dp=2", "1"),
    ("training.replay_every", "parallelism.dp=2 training.numerics=canonical", "1"),
    ("training.replay_mesh", "parallelism.dp=2 training.numerics=canonical training.replay_every=1", "tp=2"),
    ("optimizer.name", "", "sgd"),
    ("optimizer.lr", "", "0.1"),
    ("optimizer.beta1", "", "0.5"),
    ("optimizer.beta2", "", "0.5"),
    ("optimizer.eps", "", "0.1"),
    ("optimizer.weight_decay", "", "0.5"),
    ("optimizer.momentum", "optimizer.name=sgd", "0.9"),
    ("optimizer.muon_momentum", "optimizer.name=muon", "0.5"),
    ("optimizer.relative_step", "optimizer.name=adafactor", "false"),
    ("optimizer.decay_rate", "optimizer.name=adafactor", "0.5"),
    ("optimizer.clip_threshold", "optimizer.name=adafactor", "0.01"),
    ("optimizer.block_size", "optimizer.name=adam8bit", "16"),
    ("lr_scheduler.warmup_steps", "", "10"),
    ("lr_scheduler.decay", "", "linear"),
    ("lr_scheduler.decay_steps", "lr_scheduler.decay=linear lr_scheduler.decay_steps=100", "10"),
    ("lr_scheduler.min_lr_factor", "lr_scheduler.decay=linear lr_scheduler.decay_steps=5", "0.5"),
    ("data.path", "", "{dir}/text.txt"),
    ("data.sources", "", "[\"{dir}/text.txt:1\", \"{dir}/other.txt:2\"]"),
    ("data.end_of_text", "", "7"),
    ("data.beginning_of_text", "", "7"),
    ("data.documents", "", "loss"),
    ("data.cache_dir", "", "{dir}/cache"),
    ("data.overlong", "training.objective=sft data.path={dir}/examples.jsonl", "skip"),
    ("data.shuffle", "", "false"),
    ("validation.every", "validation.every=1", "2"),
    ("validation.steps", VALIDATES, "2"),
    ("validation.fraction", VALIDATES, "0.5"),
    ("validation.compression", "validation.every=2 parallelism.pp=2 compress.activations=bf16", "off"),
    ("memory.recompute", "", "full"),
    ("memory.saved_dtype", "", "bf16"),
    ("memory.saved_encoding", "model.dropout=0.5", "sparse"),
    ("memory.loss_chunk", "training.numerics=fast", "4"),
    ("memory.sequence_block", "training.numerics=fast", "3"),
    ("memory.offload", "memory.offload_dir={dir}", "all"),
    ("memory.offload_dir", "memory.offload=all memory.offload_dir=.", "{dir}"),
    ("memory.limit_bytes", "", "1000000000"),
    ("checkpoint.every", "", "1"),
    ("checkpoint.peer_every", "parallelism.dp=2 parallelism.elastic=dp", "1"),
    ("checkpoint.keep", "", "3"),
    ("checkpoint.best", VALIDATES, "true"),
    ("checkpoint.permit", "", "model"),
    ("checkpoint.on_sigterm", "", "false"),
    ("checkpoint.export", "", "{dir}/export"),
    ("checkpoint.export_dtype", "checkpoint.export={dir}/exported checkpoint.export_overwrite=true", "bf16"),
    ("checkpoint.export_overwrite", "checkpoint.export={dir}/exported checkpoint.export_overwrite=true", "true"),
    ("metrics.profile", "metrics.trace={dir}/trace.json metrics.profile_steps=1", "true"),
    ("metrics.profile_steps", "metrics.trace={dir}/trace.json metrics.profile=true metrics.profile_steps=1", "2"),
    ("metrics.trace", "metrics.trace={dir}/trace.json metrics.profile=true metrics.profile_steps=1", "{dir}/other.json"),
    ("metrics.schedule", "parallelism.pp=2 metrics.trace={dir}/trace.json metrics.schedule={dir}/a.svg \
    metrics.profile=true metrics.profile_steps=1", "{dir}/b.svg"),
    ("metrics.layer_profile", "", "{dir}/layers.txt"),
    ("metrics.tensorboard", "", "{dir}/events"),
    ("metrics.sample_tokens", "", "4"),
    ("comm.timeout_seconds", "", "30"),
    ("comm.bandwidth", "", "1e9"),
    ("comm.kind", "", "threads"),
    ("comm.ranks_per_process", "", "2"),
    ("comm.reduction", "training.numerics=fast", "native"),
    ("comm.library", "", "libmpi.so.40"),
    ("comm.log_dir", "", "{dir}/logs"),
    ("compress.activations", "parallelism.pp=2", "sign"),
    ("compress.activation_gradients", "parallelism.pp=2", "sign"),
    ("compress.share_indices", "parallelism.pp=2 compress.activations=topk:0.5 compress.activation_gradients=topk:0.5", "true"),
    ("compress.virtual_cuts", "compress.activations=sign/row", "[1]"),
    ("compress.aqsgd", "parallelism.pp=2 compress.activations=quant:2 data.path={dir}/text.txt", "true"),
    ("compress.aqsgd_samples", "parallelism.pp=2 compress.activations=quant:2 compress.aqsgd=true", "7000"),
    ("compress.gradients", "parallelism.dp=2", "quant:2"),
    ("compress.weights", "parallelism.dp=2 parallelism.zero_stage=3", "bf16"),
    ("compress.dispatch", "moe.num_experts=4 parallelism.dp=2 parallelism.ep=2", "bf16"),
    ("compress.dispatch_gradients", "moe.num_experts=4 parallelism.dp=2 parallelism.ep=2", "bf16"),
    ("compress.feedback", CUT, "ef"),
    ("compress.rounding", "parallelism.pp=2 compress.activations=quant:2", "stochastic"),
    ("compress.start_step", CUT, "4"),
    ("numerics.reduction_blocks", "training.numerics=canonical", "4"),
];

/// Keys without a value above, and why.
const WITHOUT: &[(&str, &str)] = &[
    ("model.config", "a file, from which a run takes the layers of its model: huggingface.rs"),
    ("model.init_from", "a folder, from which the first part takes its weights: huggingface.rs"),
    ("lora.init_from", "a folder, from which the first part takes its adapters: lora.rs"),
    ("lora.export", "adapters alone belong to a folder of a model: lora.rs"),
    ("data.format", "how a file is read, which the hash of the data tells: data.rs"),
    ("data.text_key", "how a file is read, which the hash of the data tells: data.rs"),
    ("data.skip_bad_lines", "how a file is read, which the hash of the data tells: data.rs"),
    ("data.token_type", "how a file is read, which the hash of the data tells: data.rs"),
    ("data.tokenizer", "bytes are the tokenizer of every build"),
    ("data.chat_template", "bytes are: sft.rs, and the tests of examples"),
    ("data.date", "what a chat template tells: the tests of examples"),
    ("checkpoint.dir", "where the checkpoints are that the second part reads"),
    ("checkpoint.resume", "what the second part does"),
    ("cuda.graphs", "the CPU has none: emulated.rs"),
    ("cuda.tuning", "the CPU has none: emulated.rs"),
    ("cuda.launch_blocking", "the CPU has none: emulated.rs"),
];

/// Keys that change the numbers, but not those of the two steps after a resume.
const LATER: &[(&str, &str)] = &[
    ("training.loss_scale_initial", "the loss scale of the checkpoint goes on"),
    ("training.loss_scale_growth_interval", "a power of two changes no bit unless something overflows"),
    ("data.shuffle", "the epoch under way keeps its order"),
    ("data.documents", "a text of one document has its boundary before the first sample"),
    ("compress.aqsgd_samples", "the number of samples that can be kept"),
    ("moe.overflow", "tokens go to their next best expert only where one is full"),
    ("training.loss_scale", "a power of two changes no bit unless a number of f16 has too few of them"),
];

/// What a run computed: step, loss and norm, as bits.
type Numbers = Vec<(u64, f64, f64)>;

/// Trains with these settings. The numbers of its steps and the notices before it, or the error.
fn run(settings: &str, metrics: &Path) -> Result<(Numbers, Vec<String>), String> {
    let words = settings.split_whitespace().flat_map(|setting| ["--set", setting]);
    let (config, data) = load(&Args::parse(words)).map_err(|error| error.to_string())?;
    _ = fs::remove_file(metrics);
    train(&config, &data, Some(metrics), &AtomicBool::new(false)).map_err(|error| error.to_string())?;
    let text = fs::read_to_string(metrics).expect("metrics");
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let steps = events.filter(|event| event["event"] == "step");
    let numbers = |step: Value| {
        let number = |key: &str| step[key].as_f64().unwrap_or(f64::NAN);
        (step["step"].as_u64().unwrap_or(0), number("loss"), number("grad_norm"))
    };
    Ok((steps.map(numbers).collect(), config.notices))
}

struct Folder {
    folder: TempDir,
    count: AtomicUsize,
}

impl Folder {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, times) in [("text.txt", 40), ("other.txt", 60)] {
            fs::write(folder.path().join(name), format!("{name} has words, and more of them. ").repeat(times))
                .expect("a text");
        }
        let example = |at: usize| {
            let (prompt, completion) = (format!("{}?", at % 10), "I".repeat(1 + at % 9));
            serde_json::json!({"text": prompt, "prompt": prompt, "completion": completion}).to_string()
        };
        let lines = (0..200).map(example).collect::<Vec<_>>().join("\n");
        fs::write(folder.path().join("examples.jsonl"), lines).expect("examples");
        let pair = |at: usize| {
            let [prompt, chosen, rejected] = [at, at * 3 + 1, at * 5 + 2].map(|at| at % 97);
            serde_json::json!({"prompt": prompt.to_string(), "chosen": format!("a{chosen}"), "rejected": format!("b{rejected}")}).to_string()
        };
        fs::write(folder.path().join("pairs.jsonl"), (0..200).map(pair).collect::<Vec<_>>().join("\n")).expect("pairs");
        let words = "--set parallelism.pp=2 --set pipeline.num_microbatches=4 --set pipeline.schedule=gpipe";
        let gpipe = Config::from_args(&Args::parse(words.split_whitespace())).expect("gpipe").pipeline.build(2);
        let text = gpipe.expect("a schedule").to_string().replace("schedule: gpipe", "schedule: own");
        fs::write(folder.path().join("own.schedule"), text).expect("a schedule");
        Self { folder, count: AtomicUsize::new(0) }
    }

    /// A path that nobody has.
    fn fresh(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}-{}", self.count.fetch_add(1, Ordering::Relaxed)))
    }

    fn fill(&self, text: &str) -> String {
        text.replace("{dir}", &self.folder.path().display().to_string())
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        match entry.file_type().expect("a type").is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => _ = fs::copy(entry.path(), to.join(entry.file_name())).expect("a file"),
        }
    }
}

/// A run of five steps in two parts, of which the second may be repeated with other settings.
struct Parts {
    saved: PathBuf,
    whole: Numbers,
}

/// Numbers that differ by rounding alone.
fn near(a: &Numbers, b: &Numbers) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() < 1e-4 && (a.2 - b.2).abs() < 1e-3)
}

#[test]
fn every_key_has_a_value_here_or_a_reason() {
    let named: Vec<&str> = VALUES.iter().map(|(key, ..)| *key).chain(WITHOUT.iter().map(|(key, _)| *key)).collect();
    let known: Vec<String> = keys::all().map(|(section, key)| format!("{section}.{}", key.name)).collect();
    for key in &known {
        assert_eq!(
            named.iter().filter(|named| *named == key).count(),
            1,
            "{key}: give it one other value, or a reason"
        );
    }
    assert_eq!(named.len(), known.len());
}

#[test]
fn a_resumed_run_holds_each_key_to_its_effect() {
    let folder = Folder::new();
    let mut bases: BTreeMap<String, Parts> = BTreeMap::new();
    let mut failures = Vec::new();
    let permit_all = keys::SECTIONS.iter().map(|section| section.name).collect::<Vec<_>>().join(",");
    for &(name, with, value) in VALUES.iter().sampled(5) {
        let (section, own) = name.split_once('.').expect("a section");
        let effect = keys::find(section, own).expect("a key").1.effect;
        // A key of the order of sums is held to canonical numerics, where it goes with them.
        let numerics = if effect == Effect::Rounding { "training.numerics=canonical " } else { "" };
        let base = folder.fill(&format!("{SMALL} training.steps=5 {numerics}{with}"));
        let metrics = folder.fresh("metrics");
        if !bases.contains_key(&base) {
            let saved = folder.fresh("saved");
            let parts = |steps: &str| {
                format!("{base} checkpoint.dir={} training.steps={steps} lr_scheduler.decay_steps=9", saved.display())
            };
            let first = run(&parts("2"), &metrics);
            let again = folder.fresh("again");
            let second = first.and_then(|_| {
                copy(&saved, &again);
                run(
                    &format!(
                        "{base} lr_scheduler.decay_steps=9 checkpoint.dir={} checkpoint.resume=true",
                        again.display()
                    ),
                    &metrics,
                )
            });
            match second {
                Ok((whole, _)) => _ = bases.insert(base.clone(), Parts { saved, whole }),
                Err(error) => {
                    failures.push(format!("{name}: the run itself, {base}: {error}"));
                    continue;
                }
            }
        }
        let Parts { saved, whole } = &bases[&base];
        let with_value = |permit: &str| {
            let dir = folder.fresh("resumed");
            copy(saved, &dir);
            let dir = format!("checkpoint.dir={} checkpoint.resume=true checkpoint.permit={permit}", dir.display());
            let decay = if name == "lr_scheduler.decay_steps" { "" } else { "lr_scheduler.decay_steps=9" };
            run(&folder.fill(&format!("{base} {decay} {dir} {name}={}", value.replace(' ', ""))), &metrics)
        };
        let told = |problem: String| format!("{name} = {value} ({}) with {with:?}: {problem}", effect.name());
        let refused = with_value("");
        let exact = |numbers: &Numbers| numbers.iter().zip(whole).all(|(a, b)| a == b) && numbers.len() >= whole.len();
        match (effect, refused) {
            (Effect::Rounding | Effect::Speed | Effect::Output, Err(error)) => {
                failures.push(told(format!("refused: {error}")))
            }
            (Effect::Rounding, Ok((numbers, _))) if base.contains("training.numerics=fast") => {
                if !near(&numbers, whole) {
                    failures.push(told(format!("{numbers:?} instead of {whole:?}")));
                }
            }
            (Effect::Rounding | Effect::Speed | Effect::Output, Ok((numbers, _))) => {
                if !exact(&numbers) {
                    failures.push(told(format!("{numbers:?} instead of {whole:?}")));
                }
            }
            (Effect::Model | Effect::Numbers | Effect::Data, Ok(_)) => failures.push(told("not refused".to_owned())),
            (Effect::Model | Effect::Numbers | Effect::Data, Err(error)) => {
                let listed = if effect == Effect::Data {
                    "\n  data: the checkpoint has "
                } else {
                    &format!("\n  {name}: the checkpoint has ")
                };
                if !error.contains(listed) {
                    failures.push(told(format!("not listed: {error}")));
                }
                if effect == Effect::Model {
                    continue; // its weights may not fit
                }
                match with_value(&permit_all) {
                    Err(error) => failures.push(told(format!("permitted: {error}"))),
                    Ok((numbers, _)) => {
                        let later = LATER.iter().any(|(key, _)| *key == name);
                        if exact(&numbers) != later {
                            failures.push(told(format!("permitted, and the numbers are {numbers:?} after {whole:?}")));
                        }
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), VALUES.len(), failures.join("\n"));
}

/// Each key that changes numbers, given to runs that need not read it: the numbers are others, or it is told or
/// refused.
#[test]
fn a_key_that_is_given_and_changes_nothing_is_told() {
    let folder = Folder::new();
    let metrics = folder.fresh("metrics");
    let (mut failures, mut told) = (Vec::new(), BTreeSet::new());
    // What only a later step or other data would show; the presets' sizes are all given.
    let unseen = ["lr_scheduler.decay_steps", "data.end_of_text", "model.preset"];
    let unseen: BTreeSet<&str> = LATER.iter().map(|(key, _)| *key).chain(unseen).collect();
    for (nth, base) in ["", LLAMA, MOE, "optimizer.name=sgd"].into_iter().enumerate() {
        let base = format!("{SMALL} training.steps=3 {base}");
        let (plain, _) = run(&base, &metrics).expect("the run itself");
        let resolved = |settings: &str| {
            let words = settings.split_whitespace().flat_map(|setting| ["--set", setting]);
            Config::from_args(&Args::parse(words)).ok().and_then(|config| serde_json::to_value(config).ok())
        };
        let of_base = resolved(&base).expect("a configuration");
        // Each key over two of the four, in a sweep over all.
        for &(name, _, value) in VALUES.iter().sampled_in_turn(2, nth) {
            let (section, own) = name.split_once('.').expect("a section");
            let effect = keys::find(section, own).expect("a key").1.effect;
            if !matches!(effect, Effect::Model | Effect::Numbers) || unseen.contains(name) {
                continue;
            }
            let given = folder.fill(&format!("{base} {name}={}", value.replace(' ', "")));
            // The same value as before is no change.
            if resolved(&given).is_some_and(|given| given[section][own] == of_base[section][own]) {
                continue;
            }
            match run(&given, &metrics) {
                Err(error) if error.contains(name) || error.contains("model.") || error.contains("moe.") => {}
                Err(error) => failures.push(format!("{name} = {value} in {base}: {error}")),
                Ok((numbers, notices)) => {
                    let noticed = notices.iter().any(|notice| notice.starts_with(&format!("{name} = ")));
                    told.extend(noticed.then_some(name));
                    if noticed != (numbers == plain) {
                        failures.push(format!(
                            "{name} = {value} in {base}: noticed {noticed}, numbers {numbers:?} after {plain:?}"
                        ));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(told.contains("lr_scheduler.min_lr_factor") && told.len() > 20, "{told:?}");
}

/// The story: 4 steps of 8 samples, then one of 16, which took samples 64 to 80. Weights that do not change make its
/// loss the mean of the losses of the two steps of 8 that come next.
#[test]
fn another_batch_takes_the_samples_that_come_next() {
    let folder = Folder::new();
    let (metrics, saved) = (folder.fresh("metrics"), folder.fresh("saved"));
    let still = format!("{SMALL} optimizer.lr=0 optimizer.weight_decay=0");
    let (whole, _) = run(&format!("{still} training.steps=6"), &metrics).unwrap();
    let dir = format!("checkpoint.dir={}", saved.display());
    run(&format!("{still} training.steps=4 {dir}"), &metrics).unwrap();
    let other = format!(
        "{still} {dir} checkpoint.resume=true checkpoint.permit=batch training.global_batch_size=16 training.steps=5"
    );
    let (step, _) = run(&other, &metrics).unwrap();
    let wanted = (whole[4].1 + whole[5].1) / 2.0;
    assert!(step.len() == 1 && (step[0].1 - wanted).abs() < 1e-6, "{step:?} after {whole:?}");
}

/// A run over cp=4 goes on whole, and then over cp=2 and tp=2, with the numbers of a run in one part.
#[test]
fn a_checkpoint_of_cut_sequences_goes_on_over_any_mesh() {
    let folder = Folder::new();
    let (metrics, saved) = (folder.fresh("metrics"), folder.fresh("saved"));
    let base = format!(
        "{SMALL} training.numerics=canonical model.tie_embeddings=false parallelism.context_parallel_method=all_gather \
         lr_scheduler.decay_steps=9"
    );
    let (whole, _) = run(&format!("{base} training.steps=6"), &metrics).unwrap();
    let part = |steps: u64, mesh: &str| {
        let dir = format!("checkpoint.dir={} checkpoint.resume={}", saved.display(), steps > 2);
        run(&format!("{base} training.steps={steps} {dir} {mesh}"), &metrics).unwrap().0
    };
    let parts = [
        part(2, "parallelism.cp=4"),
        part(4, ""),
        part(6, "parallelism.cp=2 parallelism.tp=2 parallelism.sequence_parallel=true"),
    ];
    assert_eq!(parts.concat(), whole);
}

/// Saving drains the pipeline of an asynchronous schedule, as docs/schedules.md says: a run that is saved has the
/// numbers of its parts.
#[test]
fn a_stale_run_that_is_saved_has_the_numbers_of_its_parts() {
    let folder = Folder::new();
    let (metrics, saved) = (folder.fresh("metrics"), folder.fresh("saved"));
    let base = format!("{SMALL} {STALE}");
    let dir = |name: &Path| format!("checkpoint.dir={}", name.display());
    let (alone, _) = run(&format!("{base} training.steps=4"), &metrics).unwrap();
    let (whole, _) =
        run(&format!("{base} training.steps=4 checkpoint.every=2 {}", dir(&folder.fresh("whole"))), &metrics).unwrap();
    let part =
        |steps: u64| format!("{base} training.steps={steps} checkpoint.every=2 checkpoint.resume=true {}", dir(&saved));
    let (first, _) = run(&part(2), &metrics).unwrap();
    let (second, _) = run(&part(4), &metrics).unwrap();
    assert_eq!([first, second].concat(), whole);
    assert_ne!(whole, alone);
}

/// Sixty-four tokens that each end a document, so that none is a target, and then some that are.
#[test]
fn a_batch_without_targets_is_skipped_and_counted() {
    let folder = Folder::new();
    let (metrics, path) = (folder.fresh("metrics"), folder.fill("{dir}/ends.bin"));
    let ids = (0..600u16).map(|at| if at <= 64 { 0 } else { 1 + at * 7 % 50 });
    fs::write(&path, ids.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    let data = format!("data.path={path} data.end_of_text=0 data.documents=loss data.shuffle=false");
    for mesh in [
        "",
        "parallelism.dp=2 parallelism.tp=2",
        "parallelism.pp=2 pipeline.schedule=zb_h2 pipeline.num_microbatches=4",
    ] {
        let (steps, _) = run(&format!("{SMALL} {data} training.steps=3 {mesh}"), &metrics).unwrap();
        assert!(steps[0].1.is_nan() && steps[1..].iter().all(|step| step.1.is_finite()), "{mesh}: {steps:?}");
        let text = fs::read_to_string(&metrics).unwrap();
        let marked: Vec<bool> = text.lines().map(|line| line.contains("\"skipped\":true,\"masked\":true")).collect();
        assert_eq!(marked, [false, true, false, false, false], "{mesh}: {text}");
        assert!(text.lines().last().unwrap().contains("\"masked_steps\":1"), "{mesh}: {text}");
    }
}
