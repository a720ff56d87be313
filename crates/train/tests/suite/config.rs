//! Valid configurations and their values.
//!
//! More than 400 lines: one short test per section of the configuration.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use meshwork_train::config::keys::{self, ValueKind};
use meshwork_train::config::{Args, Config, DecayName, Dtype, MatmulDtype, ModelKind, OptimizerName, reference, usage};
use meshwork_train::load;

fn args(line: &str) -> Args {
    Args::parse(line.split_whitespace())
}

fn config(line: &str) -> Config {
    Config::from_args(&args(line)).unwrap_or_else(|error| panic!("{line}: {error}"))
}

fn file(name: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn the_defaults_are_those_of_the_contract() {
    let c = config("");
    assert_eq!((c.model.preset.as_str(), c.model.kind.name()), ("tiny", "gpt2"));
    let m = &c.model;
    assert_eq!((m.vocab_size, m.num_layers, m.hidden_size, m.num_heads, m.seq_len), (256, 4, 128, 4, 128));
    assert_eq!((m.num_kv_heads, m.ffn_hidden_size, m.tie_embeddings, m.dropout), (4, 512, true, 0.0));
    let p = &c.parallelism;
    assert_eq!([p.dp, p.tp, p.pp, p.cp, p.ep, p.expert_tensor_parallel], [1; 6]);
    assert_eq!((p.sequence_parallel, p.zero_stage, p.context_parallel_method.name()), (false, 0, "none"));
    let p = &c.pipeline;
    assert_eq!((p.schedule.as_str(), p.virtual_stages, &p.partition[..]), ("1f1b", 1, &[4][..]));
    let t = &c.training;
    assert_eq!((t.steps, t.global_batch_size, t.seed, t.max_norm), (100, 16, 1234, 1.0));
    assert_eq!((t.dtype, t.numerics.as_str()), (Dtype::F32, "fast"));
    let o = &c.optimizer;
    assert_eq!((o.name, o.lr, o.beta1, o.beta2), (OptimizerName::Adamw, 3e-4, 0.9, 0.95));
    assert_eq!((o.eps, o.weight_decay, o.momentum), (1e-8, 0.1, 0.0));
    let s = &c.lr_scheduler;
    assert_eq!((s.warmup_steps, s.decay, s.decay_steps, s.min_lr_factor), (0, DecayName::None, 100, 0.0));
    assert_eq!((c.data.path, c.data.tokenizer.as_str(), c.data.shuffle), (None, "bytes", true));
    assert_eq!((c.validation.every, c.validation.fraction), (0, 0.05));
    assert_eq!((c.checkpoint.keep, c.checkpoint.resume, c.metrics.profile), (2, false, false));
    assert_eq!((c.comm.timeout_seconds, c.numerics.reduction_blocks), (60.0, 8));
    assert!(c.notices.is_empty());
}

#[test]
fn presets_are_those_of_the_contract_and_any_field_can_be_overridden() {
    for (preset, shape) in [
        ("tiny", (256, 4, 128, 4, 128)),
        ("small", (256, 6, 384, 6, 256)),
        ("medium", (50257, 6, 512, 8, 256)),
        ("gpt2", (50257, 12, 768, 12, 512)),
    ] {
        let m = config(&format!("--set model.preset={preset}")).model;
        assert_eq!((m.vocab_size, m.num_layers, m.hidden_size, m.num_heads, m.seq_len), shape);
        assert_eq!((m.ffn_hidden_size, m.num_kv_heads), (4 * m.hidden_size, m.num_heads));
    }
    let m = config("--set model.preset=gpt2 --set model.num_heads=16 --set model.ffn_hidden_size=1000").model;
    assert_eq!((m.num_heads, m.num_kv_heads, m.ffn_hidden_size, m.hidden_size), (16, 16, 1000, 768));
}

#[test]
fn llama_presets_are_the_published_ones() {
    for (preset, shape, llama) in [
        ("llama-tiny", (256, 4, 128, 4, 128), (2, 512, 10_000.0)),
        ("llama3-8b", (128_256, 32, 4096, 32, 8192), (8, 14336, 500_000.0)),
        ("llama3-70b", (128_256, 80, 8192, 64, 8192), (8, 28672, 500_000.0)),
        ("llama3-405b", (128_256, 126, 16384, 128, 8192), (8, 53248, 500_000.0)),
    ] {
        let m = config(&format!("--set model.preset={preset}")).model;
        assert_eq!((m.vocab_size, m.num_layers, m.hidden_size, m.num_heads, m.seq_len), shape, "{preset}");
        assert_eq!((m.num_kv_heads, m.ffn_hidden_size, m.rope_theta), llama, "{preset}");
        assert_eq!((m.kind, m.tie_embeddings, m.norm_eps), (ModelKind::Llama, false, 1e-5), "{preset}");
        assert_eq!(m.rope_scaling_factor, 1.0, "scaling is off");
    }
}

#[test]
fn a_llama_of_any_size() {
    // The sizes of a GPT-2, and everything else of a Llama.
    let m = config("--set model.preset=small --set model.kind=llama").model;
    assert_eq!((m.hidden_size, m.num_heads, m.num_kv_heads, m.ffn_hidden_size), (384, 6, 6, 1024));
    assert_eq!((m.tie_embeddings, m.rope_theta), (false, 10_000.0));
    // A given width determines that of the feed-forward layer.
    let m = config("--set model.preset=llama-tiny --set model.hidden_size=384").model;
    assert_eq!((m.num_heads, m.num_kv_heads, m.ffn_hidden_size), (4, 2, 1024));
    let m = config("--set model.preset=llama3-8b --set model.kind=gpt2").model;
    assert_eq!((m.num_kv_heads, m.ffn_hidden_size, m.tie_embeddings), (32, 4 * 4096, true));
    let scaled = "--set model.preset=llama3-8b --set model.rope_scaling_factor=8 --set model.seq_len=131072";
    let m = config(scaled).model;
    assert_eq!((m.rope_scaling_low_freq_factor, m.rope_scaling_high_freq_factor), (1.0, 4.0));
    assert_eq!((m.rope_scaling_factor, m.rope_scaling_original_seq_len), (8.0, 8192));
}

#[test]
fn compression_is_read_and_refused_by_key() {
    let compress = config("--mesh pp=2 --set compress.activations=topk:0.1+quant:4 --set compress.rounding=stochastic");
    let plan = compress.plan().unwrap().compress;
    assert_eq!(plan.activations.to_string(), "topk:0.1+quant:4/stochastic");
    assert_eq!(plan.activation_gradients.to_string(), "none");
    for (settings, fault) in [
        (
            "activations=topk:0",
            "compress.activations = \"topk:0\": the number of elements kept is \"0\", it must be a whole number from 1",
        ),
        (
            "activations=quant:0",
            "compress.activations = \"quant:0\": the number of bits is \"0\", it must be 1 to 8; use one of none, bf16",
        ),
        (
            "activation_gradients=zip",
            "compress.activation_gradients = \"zip\": there is no method \"zip\"; use one of none",
        ),
        ("activations=powersgd:2", "compress.activations = \"powersgd:2\": the factors of a message start from"),
        ("feedback=ef", "compress.feedback = \"ef\": brings back what compression loses, and nothing is compressed"),
        (
            "gradients=powersgd:200 --set parallelism.dp=2",
            "compress.gradients = \"powersgd:200\": its factors are smaller than no parameter; use a rank of 1 to 102",
        ),
        (
            "gradients=powersgd:2 --set parallelism.dp=2 --set lora.rank=1",
            "compress.gradients = \"powersgd:2\": its factors are smaller than no parameter; use another scheme",
        ),
        (
            "dispatch=quant:8/block7 --set moe.num_experts=2",
            "compress.dispatch = \"quant:8/block7\": does not compress each token of 128 features by itself; use blocks that divide",
        ),
        (
            "dispatch_gradients=randk:0.1 --set moe.num_experts=2",
            "compress.dispatch_gradients = \"randk:0.1\": it draws elements of all tokens of a message together",
        ),
        (
            "weights=quant:8 --set parallelism.dp=2 --set parallelism.zero_stage=2",
            "compress.weights = \"quant:8\": ranks gather no weights to use them below ZeRO stage 3: each keeps all of them; use ZeRO stage 3",
        ),
        (
            "weights=topk:0.5 --set parallelism.dp=2 --set parallelism.zero_stage=3",
            "compress.weights = \"topk:0.5\": a weight that is not sent would be zero",
        ),
        (
            "gradients=powersgd:2 --set compress.feedback=ef21 --set parallelism.dp=2",
            "compress.feedback = \"ef21\": powersgd makes factors of the sum of all ranks",
        ),
        (
            "gradients=topk:0.1 --set compress.feedback=ef21 --set parallelism.dp=2 --set parallelism.zero_stage=1",
            "compress.feedback = \"ef21\": ranks that keep slices of a sum have no estimate of it; use ef, or ZeRO stage 0",
        ),
        (
            "feedback=ef20",
            "compress.feedback = \"ef20\": there is no such feedback; valid are none, ef, ef21 and ef21m:ETA",
        ),
        (
            "activations=sign --set training.numerics=canonical",
            "compress.activations = \"sign\": canonical numerics promise the bits of one rank, which has nobody to send",
        ),
        (
            "activations=sign/row --set training.numerics=canonical --set compress.virtual_cuts=[1,3]",
            "compress.activations = \"sign/row\": cut.2: canonical numerics promise the bits of one rank, which has nobody to send compressed \
             values to: let every mesh simulate this cut, with virtual_cuts = [1, 2, 3], or use numerics Fast",
        ),
        (
            "activations=randk:0.1/unbiased --set compress.feedback=ef",
            "compress.activations = \"randk:0.1/unbiased\": cut.2: ef with randk:0.1/unbiased: of 4x16384 its error",
        ),
        (
            "activations=topk:0.1 --set compress.share_indices=true",
            "compress.share_indices = true: gradients of activations have the indices of activations, and these are topk:0.1, their gradients \
             none; use topk of one fraction",
        ),
        (
            "activations=sign --set compress.virtual_cuts=[2,1]",
            "compress.virtual_cuts = [2, 1]: are no cuts of the model; use increasing numbers of layers from 0 to 4",
        ),
    ] {
        let refused =
            load(&args(&format!("--set parallelism.pp=2 --set compress.{settings}"))).unwrap_err().to_string();
        assert!(refused.starts_with(fault) && refused.lines().count() == 1, "{refused}");
    }
    // With AQ-SGD samples must come again, and each has a place.
    let aqsgd =
        "--mesh pp=2 --set compress.activations=topk:0.1 --set compress.aqsgd=true --set training.global_batch_size=64";
    let (read, data) = load(&args(&format!("{aqsgd} --steps 9"))).unwrap();
    assert_eq!(read.plan().unwrap().compress.aqsgd, Some(data.training_samples()));
    let numbers = |step| data.batch(step, 64, 0..64).unwrap().values::<i32>("sample").unwrap().to_vec();
    let mut seen: Vec<i32> = (0..9).flat_map(numbers).collect();
    seen.sort_unstable();
    seen.dedup();
    assert!(seen.len() == data.training_samples() && seen.last() == Some(&(seen.len() as i32 - 1)), "{}", seen.len());
    let refused = |more: &str| load(&args(&format!("{aqsgd} {more}"))).unwrap_err().to_string();
    // A first part of a run, which meets its samples again when it is resumed.
    let (first_part, _) = load(&args(&format!("{aqsgd} --steps 5"))).unwrap();
    let once = &first_part.notices[..];
    assert!(once.len() == 1 && once[0].contains("5 steps take 320 of"), "{once:?}");
    assert!(read.notices.is_empty(), "{:?}", read.notices);
    let few = refused("--steps 9 --set compress.aqsgd_samples=5");
    assert!(few.starts_with("compress.aqsgd_samples = 5: the data have"), "{few}");
    let each = refused("--steps 9 --set compress.feedback=ef");
    assert!(each.starts_with("compress.aqsgd = true: it brings back") && each.lines().count() == 1, "{each}");
    let asked = args(&format!("{} --steps 0", aqsgd.replace("pp=2", "dp=2,pp=2")));
    assert!(load(&asked).is_ok(), "what a step takes may be asked");
    let unread = |line: &str| Config::from_args(&args(line)).unwrap().notices;
    let idle = unread("--set memory.offload=samples --set memory.offload_dir=/tmp");
    assert_eq!(idle, ["memory.offload = \"samples\" has no effect without compress.aqsgd = true, if samples"]);
    let idle = unread("--set compress.activations=sign");
    let cuts = "parallelism.pp above 1 or compress.virtual_cuts";
    assert_eq!(idle, [format!("compress.activations = \"sign\" has no effect without {cuts}")]);
    assert!(unread("--set compress.activations=sign --set compress.virtual_cuts=[2]").is_empty());
    let idle = unread("--set compress.virtual_cuts=[2] --set validation.compression=both");
    let [validation, cuts] = [
        "compress.activations, compress.weights or compress.dispatch",
        "compress.activations or compress.activation_gradients",
    ];
    let [validation, cuts] = [
        format!("validation.compression = \"both\" has no effect without {validation}"),
        format!("compress.virtual_cuts = [2] has no effect without {cuts}"),
    ];
    assert_eq!(idle, [validation, cuts]);
    let idle = unread("--set compress.gradients=sign");
    assert_eq!(idle, ["compress.gradients = \"sign\" has no effect without parallelism.dp above 1"]);
    let idle = unread("--mesh pp=2 --set compress.start_step=3");
    assert_eq!(idle, ["compress.start_step = 3 has no effect without something to compress"]);
}

#[test]
fn leaving_out_zeros_has_no_effect_where_nothing_gives_any() {
    let unread = |line: &str| Config::from_args(&args(line)).unwrap().notices;
    let zeros = "model.dropout, lora.dropout or moe.num_experts above 0, if sparse";
    let told = [format!("memory.saved_encoding = \"sparse\" has no effect without {zeros}")];
    assert_eq!(unread("--set memory.saved_encoding=sparse"), told);
    assert!(unread("--set memory.saved_encoding=sparse --set model.dropout=0.1").is_empty());
}

#[test]
fn an_offload_without_a_folder_is_refused() {
    let refused = |line: &str| load(&args(line)).unwrap_err().to_string();
    assert_eq!(
        refused("--set memory.offload=optimizer"),
        "memory.offload = optimizer: memory.offload_dir is not set; name a folder on a disk by memory.offload_dir, or use none"
    );
    let missing = refused("--set memory.offload=all --set memory.offload_dir=/no/such/folder");
    assert!(missing.starts_with("memory.offload_dir = /no/such/folder: no file can be made there: "), "{missing}");
    assert!(missing.ends_with("; name a folder that exists and that this process may write"), "{missing}");
    let unread = Config::from_args(&args("--set memory.offload_dir=/no/such/folder")).unwrap().notices;
    assert!(unread[0].ends_with(" has no effect without memory.offload"), "{unread:?}");
}

#[test]
fn a_llama_that_cannot_be_is_refused() {
    assert_eq!(
        load(&args(
            "--mesh tp=3 --set model.kind=llama --set model.hidden_size=12 --set model.num_heads=3 \
             --set model.num_kv_heads=1"
        ))
        .unwrap_err()
        .to_string(),
        "model.num_kv_heads = 1: makes 3 ranks of parallelism.tp = 3 share each key and value head, whose width of 4 they \
         cannot split evenly; use more model.num_kv_heads, or heads whose width is a multiple of 3"
    );
    let refused = |line: &str| Config::from_args(&args(line)).unwrap_err().to_string();
    let tiny = "--set model.preset=llama-tiny --set";
    for (line, fault) in [
        (
            format!("{tiny} model.num_kv_heads=3"),
            "model.num_heads = 4: is not divisible by model.num_kv_heads = 3; use a multiple of 3, such as 3 or 6",
        ),
        (
            format!("{tiny} model.hidden_size=132"),
            "model.hidden_size = 132: gives each of model.num_heads = 4 a width of 33: rotary embeddings need an even one; use a \
             multiple of 8, such as 128 or 136",
        ),
        (
            format!("--mesh tp=2 {tiny} model.num_heads=6 --set model.num_kv_heads=3 --set model.hidden_size=96"),
            "model.num_kv_heads = 3: can be neither split nor replicated evenly over parallelism.tp = 2; use a multiple or a \
             divisor of 2",
        ),
        (
            format!("{tiny} model.rope_scaling_factor=8 --set model.rope_scaling_high_freq_factor=1"),
            "model.rope_scaling_high_freq_factor = 1: is not above model.rope_scaling_low_freq_factor = 1: no frequencies lie \
             between; use more than 1",
        ),
        (
            "--set model.num_kv_heads=2".to_owned(),
            "model.num_kv_heads = 2: gpt2 has a key and value head for each head: only llama groups them; use 4, as \
             model.num_heads, or model.kind = \"llama\"",
        ),
        (
            format!("{tiny} model.rope_scaling_factor=0.5"),
            "model.rope_scaling_factor = 0.5 (from --set): is out of range; use a number of at least 1",
        ),
    ] {
        assert_eq!(refused(&line), fault, "{line}");
    }
    // Key and value heads may be fewer than tp: they are replicated.
    assert_eq!(config(&format!("--mesh tp=4 {tiny} model.num_kv_heads=1")).model.num_kv_heads, 1);
}

/// All tokens by default; a number of tokens in either kind of model. A GPT-2 with a window has no class in
/// transformers.
#[test]
fn a_sliding_window_is_a_number_of_tokens() {
    assert_eq!(config("").model.sliding_window, 0);
    assert_eq!(config("--set model.kind=llama --set model.sliding_window=12").model.sliding_window, 12);
    let refused = |line: &str| Config::from_args(&args(line)).unwrap_err().to_string();
    for bad in ["-1", "1.5", "all"] {
        let told = refused(&format!("--set model.sliding_window={bad}"));
        assert!(told.starts_with("model.sliding_window = "), "{told}");
        assert!(told.contains("use a whole number of at least 0"), "{told}");
    }
    assert_eq!(
        refused("--set model.sliding_window=12 --set checkpoint.export=out"),
        "checkpoint.export = out: a GPT2LMHeadModel has no sliding window; leave it out, or use model.sliding_window = 0"
    );
}

/// What is stored in 16 bits has no more bits than TF32 keeps.
#[test]
fn tf32_rounds_what_is_stored_in_f32() {
    assert_eq!(config("--set training.matmul_dtype=tf32").training.matmul_dtype, MatmulDtype::Tf32);
    for (dtype, valid) in [("bf16", "use bf16 or f32"), ("f16", "use f32")] {
        let line = format!("--set training.dtype={dtype} --set training.matmul_dtype=tf32");
        assert_eq!(
            Config::from_args(&args(&line)).unwrap_err().to_string(),
            format!(
                "training.matmul_dtype = tf32: rounds operands of f32, and training.dtype = {dtype:?} \
                 stores them in 16 bits; {valid}, or training.dtype = \"f32\""
            )
        );
    }
}

#[test]
fn flags_take_both_forms_and_later_ones_win() {
    let path = file("flags.toml", "[training]\nsteps = 5\nseed = 7\n[optimizer]\nlr = 1\n");
    let path = path.display();
    let c = config(&format!("--config {path} --mesh=pp=2,dp=2 --steps 6 --set training.steps=8 --device cpu"));
    assert_eq!((c.training.steps, c.training.seed, c.optimizer.lr), (8, 7, 1.0));
    assert_eq!((c.parallelism.dp, c.parallelism.pp, c.parallelism.tp), (2, 2, 1));
    assert_eq!(config(&format!("--set training.steps=8 --steps=6 --config={path}")).training.steps, 6);
    let c = config("--data 2024 --set data.tokenizer=\"gpt2\" --set model.dropout=0.5");
    assert_eq!((c.data.path.as_deref(), c.data.tokenizer.as_str(), c.model.dropout), (Some("2024"), "gpt2", 0.5));
    assert!(Args::parse(["--help"]).help && !args("--steps 1").help);
}

#[test]
fn layers_are_dealt_to_stages() {
    let dealt = |line: &str| config(&format!("--mesh pp=3 {line}")).pipeline.partition;
    assert_eq!(dealt(""), [2, 1, 1]);
    assert_eq!(dealt("--set pipeline.partition=uniform"), [2, 1, 1]);
    assert_eq!(dealt("--set pipeline.partition=[0,4,0]"), [0, 4, 0]);
    assert_eq!(dealt("--set pipeline.partition=[1,0,0] --set model.num_layers=1"), [1, 0, 0]);
    let file = file("partition.toml", "[parallelism]\npp = 2\n[pipeline]\npartition = [4, 0]\n");
    assert_eq!(config(&format!("--config {}", file.display())).pipeline.partition, [4, 0]);
}

/// The head costs vocab · hidden products for each token, a layer 12 · hidden² and attention: with a vocabulary of
/// 50,257 and a width of 512, the head is worth nearly eight layers.
#[test]
fn layers_are_dealt_by_cost() {
    let dealt = |line: &str| config(&format!("--set pipeline.partition=cost {line}")).pipeline.partition;
    // With a small vocabulary, the head costs less than a layer.
    assert_eq!(dealt("--mesh pp=2"), [2, 2]);
    assert_eq!(dealt("--mesh pp=2 --set model.num_layers=5"), [3, 2]);
    let medium = |line: &str| dealt(&format!("--set model.preset=medium {line}"));
    assert_eq!(medium("--mesh pp=1"), [6]);
    assert_eq!(medium("--mesh pp=2"), [6, 0]);
    assert_eq!(medium("--mesh pp=4"), [2, 2, 2, 0]);
    assert_eq!(medium("--mesh pp=4 --set model.num_layers=32"), [10, 10, 10, 2]);
    // The other axes of the mesh, the batch and the numerics change nothing.
    let more = "--mesh dp=2,tp=2,pp=4 --set parallelism.sequence_parallel=true --set training.numerics=canonical \
                --set training.matmul_dtype=bf16 --set training.global_batch_size=32";
    assert_eq!(medium(&format!("{more} --set model.num_layers=32")), [10, 10, 10, 2]);
    // With several chunks, the sum of the rank counts: the last chunk of a loop has the head, and its rank has another
    // chunk.
    let looped = "--mesh pp=2 --set pipeline.schedule=interleaved_1f1b --set model.num_layers=16";
    assert_eq!(medium(looped), [6, 4, 6, 0]);
    let turned = "--mesh pp=2 --set pipeline.schedule=zb_v --set model.num_layers=16";
    assert_eq!(medium(turned), [4, 6, 6, 0]);
}

/// The settings of the training pipeline do not apply to the small one on which costs are counted.
#[test]
fn layers_are_dealt_by_cost_over_replicas() {
    // The head is worth 7.9 layers; three ranks share the first stage: 30 / 3 layers, and 2 with the head.
    let line = "--set pipeline.partition=cost --set model.preset=medium --set model.num_layers=32 --mesh pp=4";
    assert_eq!(config(&format!("{line} --set pipeline.replication=[3,1]")).pipeline.partition, [30, 2]);
}

#[test]
fn layers_are_dealt_by_cost_for_a_schedule_of_ones_own() {
    let text = "name: mine\nranks: 2\nplacement: 0 1 1 0\nmicros: 2\n\
                rank 0: 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1\nrank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1\n";
    let path = file("cost_schedule.txt", text);
    let line = "--set pipeline.partition=cost --set model.preset=medium --set model.num_layers=16 --mesh pp=2";
    let line = format!("{line} --set pipeline.schedule_file={}", path.display());
    assert_eq!(config(&line).pipeline.partition, [4, 6, 6, 0]);
}

/// Configurations that were refused and have a meaning; `configurations` found them.
#[test]
fn what_was_once_wrongly_refused_is_accepted() {
    // By cost a stage may have no layer, even where there are fewer layers than stages.
    let dealt = config("--mesh pp=4 --set model.num_layers=1 --set pipeline.partition=cost").pipeline.partition;
    assert_eq!((dealt.len(), dealt.iter().sum::<usize>()), (4, 1));
    // virtual_stages goes with a file that has as many, and its stages need not be even.
    let shape = meshwork_pipeline::Shape { pp: 2, virtual_stages: 2, micros: 4 };
    let text = meshwork_pipeline::Generator::Interleaved.build(shape).unwrap().to_string();
    let path = file("two_chunks.txt", &text);
    let own = format!("--mesh pp=2 --set model.num_layers=5 --set pipeline.schedule_file={}", path.display());
    assert_eq!(config(&format!("{own} --set pipeline.virtual_stages=2")).pipeline.partition, [2, 1, 1, 1]);
    let refusal = load(&args(&format!("{own} --set pipeline.virtual_stages=3"))).unwrap_err().to_string();
    let told = "has 4 stages over 2 ranks, not pipeline.virtual_stages = 3 on each; leave out pipeline.virtual_stages";
    assert!(refusal.contains(told), "{refusal}");
    // One stage has its tied table in one version.
    config("--set pipeline.schedule=pipedream --set training.max_norm=0");
}

/// The one rank on which costs are counted shares out nothing.
#[test]
fn layers_are_dealt_by_cost_with_zero_in_groups() {
    let line = "--set pipeline.partition=cost --set model.preset=medium --set model.num_layers=16 --mesh dp=4,pp=2";
    let plain = config(line).pipeline.partition;
    let zero = config(&format!("{line} --set parallelism.zero_stage=3 --set parallelism.zero_group=2"));
    assert_eq!(zero.pipeline.partition, plain);
}

#[test]
fn layers_are_dealt_by_cost_with_vertical_sync() {
    let line = "--set pipeline.partition=cost --set model.preset=medium --set model.num_layers=32 --mesh pp=4 \
                --set model.tie_embeddings=false --set training.max_norm=0 --set pipeline.schedule=pipedream \
                --set pipeline.vertical_sync=true";
    assert_eq!(config(line).pipeline.partition, [10, 10, 10, 2]);
}

#[test]
fn settings_without_effect_are_noticed() {
    assert_eq!(
        config("--set metrics.profile_steps=5 --set metrics.trace=t.json").notices,
        [
            "metrics.profile_steps = 5 has no effect without metrics.profile = true",
            "metrics.trace = \"t.json\" has no effect without metrics.profile = true"
        ]
    );
    assert!(config("--set metrics.profile=true --set metrics.trace=t.json").notices.is_empty());
    assert_eq!(
        config("--set optimizer.momentum=0.9").notices,
        ["optimizer.momentum = 0.9 has no effect without optimizer.name = sgd"]
    );
    assert_eq!(
        config("--set model.norm_eps=1e-6").notices,
        ["model.norm_eps = 0.000001 has no effect without model.kind = llama"]
    );
    assert_eq!(
        config("--set model.kind=llama --set model.dropout=0.1 --set model.rope_scaling_low_freq_factor=2").notices,
        [
            "model.dropout = 0.1 has no effect without model.kind = gpt2",
            "model.rope_scaling_low_freq_factor = 2.0 has no effect without model.rope_scaling_factor above 1"
        ]
    );
    assert_eq!(config("--set optimizer.name=sgd --set optimizer.momentum=0.9").notices, [""; 0]);
}

#[test]
fn the_dump_holds_every_key_of_the_table_and_no_other() {
    let dump = serde_json::to_value(config("")).unwrap();
    let dumped: BTreeSet<String> = dump
        .as_object()
        .unwrap()
        .iter()
        .filter_map(|(section, keys)| Some((section, keys.as_object()?)))
        .flat_map(|(section, keys)| keys.keys().map(move |key| format!("{section}.{key}")))
        .collect();
    let known: BTreeSet<String> = keys::all().map(|(section, key)| format!("{section}.{}", key.name)).collect();
    assert_eq!(dumped, known);
    assert_eq!(dump["optimizer"]["name"], "adamw");
    assert_eq!(dump["lr_scheduler"]["decay"], "none");
    assert_eq!(dump["device"], "cpu");
}

#[test]
fn every_word_that_has_landed_is_understood() {
    for (section, key) in keys::all() {
        if let ValueKind::Choice(words) = key.kind {
            for word in words {
                let name = format!("{section}.{}", key.name);
                // Settings that others require.
                let more = match (&*name, *word) {
                    (_, word) if word.starts_with("pipedream") => {
                        " --set model.tie_embeddings=false --set training.max_norm=0"
                    }
                    ("memory.offload", word) if word != "none" => " --set memory.offload_dir=.",
                    ("training.reduce_dtype", "bf16") => " --set training.dtype=bf16",
                    ("training.reduce_dtype", "f16") => " --set training.dtype=f16",
                    ("training.objective", "dpo") => " --set lora.rank=2",
                    _ => "",
                };
                let config = config(&format!("--set {name}={word}{more}"));
                let dump = serde_json::to_value(config).unwrap();
                // A rule stands for the word that it chooses: on one rank none.
                let kept =
                    if (&*name, *word) == ("parallelism.context_parallel_method", "auto") { "none" } else { *word };
                assert_eq!(dump[section][key.name], kept, "{name}");
            }
        }
    }
}

#[test]
fn the_reference_and_the_help_name_every_key() {
    let (reference, usage) = (reference(), usage("gpt_train"));
    for (_, key) in keys::all() {
        assert!(reference.contains(&format!("| `{}` | ", key.name)));
        assert!(usage.contains(&format!("\n  {} ", key.name)));
    }
    for line in [
        "| `lr` | 3e-4 | number of at least 0 | numbers | Full learning rate. |",
        "| `kind` | by preset | gpt2, llama | model | Architecture. |",
        "| `context_parallel_method` | all_gather with cp above 1, else none | none, all_gather, all_to_all, ring, hybrid, auto | rounding |",
        "| `momentum` | 0 | number of at least 0 and below 1 | numbers | Momentum of sgd. Only with optimizer.name = sgd. |",
    ] {
        assert!(reference.contains(line), "{line} is not in\n{reference}");
    }
}

#[test]
fn sections_give_the_rules_that_they_describe() {
    let c = config("--set lr_scheduler.warmup_steps=2 --set lr_scheduler.decay=linear --steps 6 --set optimizer.lr=1");
    let schedule = c.lr_scheduler.schedule(c.optimizer.lr);
    assert_eq!([1, 2, 3, 4, 7].map(|step| schedule.lr(step)), [0.5, 1.0, 1.0, 0.75, 0.0]);
    assert_eq!(c.optimizer.rule().state_names().len(), 2);
    assert_eq!(config("--set optimizer.name=sgd").optimizer.rule().state_names().len(), 0);
    assert_eq!(config("--set optimizer.name=sgd --set optimizer.momentum=0.5").optimizer.rule().state_names().len(), 1);
    let timeout = config("--set comm.timeout_seconds=0.5").comm.timeout();
    assert_eq!(timeout.as_millis(), 500);
    _ = config("--set comm.timeout_seconds=1e300").comm.timeout();
}

/// The rule of `auto` counts windows, documents and shared heads, and says so.
#[test]
fn auto_says_which_method_of_context_parallelism_it_takes() {
    const KEY: &str = "parallelism.context_parallel_method";
    let told = |more: &str| {
        let config = config(&format!("--mesh cp=4 --set {KEY}=auto {more}"));
        let method = config.context().map(|context| context.method().to_string());
        let told =
            config.notices.iter().find_map(|told| told.strip_prefix(&format!("{KEY} = auto: "))).unwrap().to_owned();
        assert_eq!(told.split(';').next(), method.as_deref(), "{told}");
        told
    };
    let whole = told("");
    assert!(whole.starts_with("all_to_all; bytes of each rank for a sequence and layer that"), "{whole}");
    assert!(whole.contains(": all_to_all 98304, all_gather 196608, ring "), "{whole}");
    // Of four blocks one travels to the next rank. All ranks but the first have as many pairs.
    let window = told("--set model.sliding_window=16");
    assert!(
        window.starts_with("all_gather; bytes of each rank for a sequence and layer, within a window of 16 tokens")
    );
    assert!(window.contains(": all_to_all 98304, all_gather 97655, ring 97655, "), "{window}");
    let documents = told("--set data.documents=attention");
    assert!(documents.contains("; within documents, whose lengths are unknown, it hides none: "), "{documents}");
    assert!(documents.contains(", ring 294912, "), "{documents}");
    // Both heads of keys and values are on each of four ranks of tp.
    let shared = "--mesh tp=4,cp=2 --set model.preset=llama-tiny --set model.num_heads=8 --set model.num_kv_heads=2";
    let shared = config(&format!("{shared} --set {KEY}=auto")).notices.concat();
    assert!(shared.contains("all_gather"), "{shared}");
}
