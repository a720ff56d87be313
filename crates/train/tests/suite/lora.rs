//! `[lora]`: adapters of PEFT go in, train as in PyTorch with `peft`, and come out, alone or merged, on any mesh.
//! `crates/models/tests/fixtures/make_lora_fixtures.py` says what was recorded.
//!
//! More than 400 lines: one test per promise of the section on adapters in `docs/finetune.md`.

use meshwork_engine::dry_run;
use meshwork_models::huggingface::{Lora, PretrainedAdapter};
use meshwork_tensor::param::LocalSlice;
use meshwork_train::config::{Args, Config};
use meshwork_train::{Data, load, train};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use tempfile::TempDir;

mod experts;
mod latent;
mod quantised;

const SEQ: usize = 12;
/// Adapters in the fixtures: each matrix of a fused weight has its own, or all have one; one matrix is two weights
/// here; matrices of experts, beside dense layers and shared experts.
const NAMES: [&str; 7] = ["llama_scaled", "gpt2", "phi3", "gpt_neox", "mixtral", "qwen3_moe", "deepseek_v3"];
/// Those with experts. Losses of routers are other ones in PyTorch.
const OF_EXPERTS: [&str; 3] = ["mixtral", "qwen3_moe", "deepseek_v3"];
/// The optimizer of the fixtures.
const ADAMW: &str = "--set optimizer.lr=0.005 --set optimizer.beta2=0.95 --set optimizer.weight_decay=0.1 --set training.max_norm=0 \
                     --set training.global_batch_size=2 --set training.steps=20 --set metrics.sample_tokens=0";

fn fixture(kind: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures").join(kind).join(name)
}

fn line(name: &str, more: &str) -> String {
    format!("--set model.init_from={} {more}", fixture("huggingface", name).display())
}

fn parse(line: &str) -> Result<Config, String> {
    Config::from_args(&Args::parse(line.split_whitespace())).map_err(|error| error.to_string())
}

/// Goes on from the adapter of a fixture.
fn from_adapter(name: &str, more: &str) -> Config {
    let adapter = fixture("lora", name);
    let routers = "--set moe.aux_loss_coeff=0 --set moe.z_loss_coeff=0 --set moe.bias_update_rate=0";
    let routers = if OF_EXPERTS.contains(&name) { routers } else { "" };
    let line = line(name, &format!("--set lora.init_from={} {ADAMW} {routers} {more}", adapter.display()));
    parse(&line).unwrap_or_else(|error| panic!("{name}: {error}"))
}

struct Recorded(Value);

impl Recorded {
    fn of(name: &str) -> Self {
        let path = fixture("lora", name).join("training.json");
        Self(serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
    }

    fn data(&self) -> Data {
        let tokens = self.0["tokens"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32);
        Data::from_tokens(tokens.collect(), SEQ)
    }

    fn losses(&self) -> Vec<f64> {
        self.0["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
    }

    /// The adapter after the last step, by the names of its tensors.
    fn end(&self) -> BTreeMap<String, Vec<f64>> {
        serde_json::from_value(self.0["end"].clone()).unwrap()
    }
}

/// The losses of a run's steps.
fn run(config: &Config, data: &Data) -> Vec<f64> {
    let metrics = tempfile::NamedTempFile::new().unwrap();
    train(config, data, Some(metrics.path()), &AtomicBool::new(false)).unwrap_or_else(|error| panic!("{error}"));
    let text = std::fs::read_to_string(metrics.path()).unwrap();
    let events = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events.filter(|event| event["event"] == "step").map(|event| event["loss"].as_f64().unwrap()).collect()
}

/// All tensors of a file of safetensors, in f32.
pub fn tensors(path: &Path) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..header]).unwrap();
    let values = |entry: &Value| {
        assert_eq!(entry["dtype"], "F32");
        let [from, to] = [0, 1].map(|at| header + entry["data_offsets"][at].as_u64().unwrap() as usize);
        bytes[from..to].chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let tensors = entries.iter().filter(|(name, _)| *name != "__metadata__");
    tensors.map(|(name, entry)| (name.clone(), values(entry))).collect()
}

/// 20 steps of AdamW on the same batches, on one rank and on meshes; then the tensors that `peft` has at the end.
#[test]
fn an_adapter_of_peft_trains_as_in_pytorch() {
    for name in NAMES {
        let recorded = Recorded::of(name);
        let experts = ["dp=2,ep=2,tp=2 --set parallelism.expert_tensor_parallel=2"];
        let experts = if OF_EXPERTS.contains(&name) { &experts[..] } else { &[] };
        let meshes = ["dp=1", "dp=2,tp=2", "tp=2,pp=2 --set parallelism.sequence_parallel=true"];
        for mesh in meshes.iter().chain(experts) {
            let folder = tempfile::tempdir().unwrap();
            let out = folder.path().join("adapter");
            let export = format!("--set checkpoint.export={} --set lora.export=adapter", out.display());
            let losses = run(&from_adapter(name, &format!("--mesh {mesh} {export}")), &recorded.data());
            for (step, (got, wanted)) in losses.iter().zip(recorded.losses()).enumerate() {
                let off = (got - wanted).abs() / wanted;
                assert!(
                    off <= 1e-6,
                    "{name} on {mesh}: loss of step {step} is {got}, in PyTorch {wanted}: {off:e} off"
                );
            }
            assert_eq!(losses.len(), 20);
            let (got, wanted) = (tensors(&out.join("adapter_model.safetensors")), recorded.end());
            assert!(got.keys().eq(wanted.keys()), "{name}: {:?}", got.keys());
            for (tensor, wanted) in wanted {
                let off = got[&tensor].iter().zip(&wanted).map(|(got, wanted)| (f64::from(*got) - wanted).abs());
                let off = off.fold(0.0, f64::max);
                assert!(off <= 2e-5, "{name} on {mesh}: {tensor} is {off:e} off");
            }
        }
    }
}

/// An adapter goes in and out unchanged, and its merged model computes the same.
#[test]
fn a_merged_model_has_the_losses_of_the_adapted_one() {
    for name in NAMES {
        let (folder, data) = (tempfile::tempdir().unwrap(), Recorded::of(name).data());
        let [adapter, merged] = ["adapter", "merged"].map(|name| folder.path().join(name));
        let still = "--set optimizer.lr=1e-30 --set optimizer.weight_decay=0 --set training.steps=1";
        let export = |out: &Path, what: &str| {
            let more =
                format!("--mesh tp=2 {still} --set checkpoint.export={} --set lora.export={what}", out.display());
            run(&from_adapter(name, &more), &data)[0]
        };
        let loss = export(&adapter, "adapter");
        assert_eq!(export(&merged, "merged"), loss);
        let came = tensors(&fixture("lora", name).join("adapter_model.safetensors"));
        assert_eq!(tensors(&adapter.join("adapter_model.safetensors")), came, "{name}");
        let plain = format!("--set model.init_from={} --mesh tp=2 {ADAMW} {still}", merged.display());
        let again = run(&parse(&plain).unwrap(), &data)[0];
        assert!((again - loss).abs() <= 1e-6 * loss, "{name}: {again} merged, {loss} adapted");
        let base = run(&parse(&line(name, &format!("--mesh tp=2 {ADAMW} {still}"))).unwrap(), &data)[0];
        assert!((base - loss).abs() > 1e-3 * loss, "{name}: the adapter changes nothing");
    }
}

/// Trains a new adapter for some steps, and exports it.
fn trained(name: &str, mesh: &str, more: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("adapter");
    let export = format!("--set checkpoint.export={} --set lora.export=adapter", out.display());
    let line = line(name, &format!("{ADAMW} --set training.steps=3 --set lora.rank=2 {export} --mesh {mesh} {more}"));
    run(&parse(&line).unwrap_or_else(|error| panic!("{error}")), &Recorded::of("gpt2").data());
    (folder, out)
}

/// Beside the weights of a folder the values of a new adapter are drawn by `training.seed`.
#[test]
fn a_new_adapter_begins_as_its_seed_says() {
    let begun = |mesh: &str, seed: u64| {
        let more = format!("--set optimizer.lr=0 --set training.seed={seed}");
        let (_folder, adapter) = trained("llama_scaled", mesh, &more);
        tensors(&adapter.join("adapter_model.safetensors"))
    };
    let one = begun("dp=1", 1);
    assert!(one == begun("tp=2,pp=2", 1));
    for (name, other) in begun("dp=1", 2) {
        let is_zero = name.contains("lora_B");
        assert!(one[&name].iter().all(|&value| (value == 0.0) == is_zero), "{name}");
        assert_eq!(one[&name] == other, is_zero, "{name}");
    }
}

/// mcore-bridge #173: with sequence parallelism each rank of tp trained its own copy of the whole factor, on its slice
/// of the sequence, and one of them was exported. Here the gradient of such a read is Partial, and is summed.
#[test]
fn the_whole_factor_of_an_adapter_is_one_with_sequence_parallelism() {
    for numerics in ["fast", "canonical"] {
        let more = format!("--set training.numerics={numerics}");
        let (_one, one) = trained("llama_scaled", "dp=1", &more);
        let wanted = tensors(&one.join("adapter_model.safetensors"));
        let (_cut, cut) =
            trained("llama_scaled", "tp=2,pp=2", &format!("{more} --set parallelism.sequence_parallel=true"));
        let got = tensors(&cut.join("adapter_model.safetensors"));
        for (name, wanted) in wanted {
            assert!(wanted.iter().any(|&value| value != 0.0), "{name} is not trained");
            let off = got[&name].iter().zip(&wanted).map(|(got, wanted)| (got - wanted).abs()).fold(0.0, f32::max);
            assert!(off <= if numerics == "fast" { 1e-5 } else { 0.0 }, "{numerics}: {name} is {off:e} off");
        }
    }
}

/// Bytes of weights and states, and operations of products, to the last one, and no more activations than in full
/// training. `docs/finetune.md` derives the least memory and time of adapters from them.
#[test]
fn a_frozen_base_takes_no_needless_bytes_and_operations() {
    let [layers, hidden, seq, vocab, batch, rank] = [3_u64, 48, 32, 64, 2, 4];
    let predicted = |more: &str| {
        let sizes = format!(
            "--set model.num_layers={layers} --set model.hidden_size={hidden} --set model.seq_len={seq} \
             --set model.vocab_size={vocab} --set model.num_heads=4 --set training.global_batch_size={batch} \
             --set training.micro_batch_size=1 --set memory.recompute=selective {more}"
        );
        let config = parse(&sizes).unwrap();
        dry_run::predict(&config.model(), &config.plan().unwrap(), 0).unwrap()
    };
    let (full, adapted) = (predicted(""), predicted(&format!("--set lora.rank={rank}")));
    // Features of the inputs and outputs of qkv, the output projection, and both matrices of the MLP.
    let features = 4 * hidden + 2 * hidden + 2 * 5 * hidden;
    let adapters = layers * rank * features;

    // Four bytes of a frozen weight; of an adapter's the gradient and two moments too.
    assert_eq!(full.model_bytes, 16 * full.parameters as u64);
    assert_eq!(adapted.model_bytes, 4 * full.parameters as u64 + 16 * adapters);

    // With ZeRO-3 ranks share out all of it, frozen weights too, whose matrices then are a message of each rank; and
    // gradients have memory from backward on. Ranks with other samples do, and ranks with other parts of a sequence.
    for (form, headers) in [("none", 0), ("nf4", 16 * 4 * layers)] {
        let base = format!("--set lora.rank={rank} --set lora.quantization={form} --set lora.block_size=16");
        let whole = predicted(&base).model_bytes;
        for mesh in ["dp=2", "cp=2"] {
            let half = predicted(&format!("{base} --mesh {mesh} --set parallelism.zero_stage=3")).model_bytes;
            assert_eq!(2 * half, whole + headers - 4 * adapters, "{form} on {mesh}");
        }
    }

    // One byte in place of four for the scale of each block.
    let of = |twice: bool| {
        let form =
            format!("--set lora.quantization=nf4 --set lora.double_quantization={twice} --set lora.block_size=16");
        predicted(&format!("--set lora.rank={rank} {form}")).model_bytes
    };
    assert_eq!(of(false) - of(true), 3 * layers * 12 * hidden * hidden / 16);

    // No products for the gradients of frozen matrices and of the head, and none for that of the first block's input,
    // below which nothing is trained. Each adapter has three products, the first layer's A two.
    let of_each_weight = 2 * batch * seq;
    let matrices = layers * 12 * hidden * hidden + vocab * hidden;
    let left_out = of_each_weight * (matrices + 3 * hidden * hidden);
    let added = of_each_weight * (3 * adapters - rank * hidden);
    assert_eq!(adapted.flops, full.flops - left_out + added);

    // Activations of full training, and beside them those of rank features. The activation function of an adapted layer
    // is no part of its product, whose result has memory of its own.
    let activations = |of: &dry_run::Prediction| of.peak_bytes() - of.model_bytes;
    let beside = 4 * seq * (4 * layers * rank + 4 * hidden);
    let (full, adapted) = (activations(&full), activations(&adapted));
    assert!(adapted <= full + beside, "{adapted} bytes, of full training {full}");
}

#[test]
fn what_a_model_has_no_adapter_for_is_refused_with_what_is_valid() {
    let modules =
        "use some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, with commas, or all-linear";
    for (more, told) in [
        (
            "--set lora.targets=c_attn",
            &*format!("lora.targets = c_attn: c_attn names no linear layer of the blocks; {modules}"),
        ),
        ("--set lora.targets=q_proj,lm_head", "lm_head names no linear layer of the blocks"),
        ("--set lora.targets=,", "lora.targets = ,: there are no targets"),
        (
            "--set lora.rank=17",
            "no adapter of a matrix of [4, 4] outputs and [16] inputs has rank 17; use a rank of 1 to 16",
        ),
        ("--set model.freeze=embedding", "model.freeze = embedding: all of the model is frozen beside its adapters"),
        (
            "--set parallelism.sequence_parallel=true --set training.numerics=canonical --set model.seq_len=8 \
             --set memory.sequence_block=4",
            "memory.sequence_block = 4: in canonical numerics an adapter computes on whole sequences, which sequence",
        ),
        (
            "--set parallelism.tp=2 --set parallelism.sequence_parallel=true --set lora.dropout=0.1 \
             --set model.seq_len=8 --set memory.sequence_block=4",
            "memory.sequence_block = 4: dropout of an adapter's features needs their positions in the sequence, which",
        ),
        (
            "--set parallelism.cp=3 --set parallelism.context_parallel_method=ring --set lora.dropout=0.1 \
             --set model.seq_len=8",
            "parallelism.cp = 3: does not divide model.seq_len = 8 into 3 equal parts, and lora.dropout draws for each",
        ),
    ] {
        let refused = parse(&line("llama_scaled", &format!("--set lora.rank=2 {more}"))).unwrap_err();
        assert!(refused.contains(told), "{more}: {refused}");
    }
    // Of a base that is not there, the names of a GPT-2's layers were told.
    let refused = parse("--set model.init_from=absent --set lora.rank=2 --set lora.targets=q_proj").unwrap_err();
    assert!(refused.contains("there is no such folder") && !refused.contains("lora.targets"), "{refused}");
    let adapter = fixture("lora", "llama_scaled");
    for (line, told) in [
        (format!("--set lora.init_from={}", adapter.display()), "there is no model that the adapter belongs to"),
        (line("llama_scaled", "--set lora.init_from=absent"), "lora.init_from = absent: absent/adapter_config.json: "),
        (
            line("llama_scaled", &format!("--set lora.init_from={} --set lora.rank=8", adapter.display())),
            "lora.rank = 8: the adapter in ",
        ),
        (
            "--set lora.rank=2 --set checkpoint.export=out --set lora.export=adapter".to_owned(),
            "an adapter belongs to the weights of a model, and there is no model.init_from",
        ),
    ] {
        let refused = parse(&line).unwrap_err();
        assert!(refused.contains(told), "{refused}");
    }
}

/// The hash of the base is in the folder of an adapter: of another base it is refused before the first step.
#[test]
fn an_adapter_of_another_base_is_refused() {
    let (_folder, adapter) = trained("llama_scaled", "dp=1", "");
    let ids = adapter.parent().unwrap().join("ids.bin");
    std::fs::write(&ids, [3, 0].repeat(400)).unwrap();
    let on = |base: &Path| {
        let [base, adapter, ids] = [base, &adapter, &ids].map(|path| path.display());
        let data = format!("--data {ids} --set data.token_type=u16 {ADAMW}");
        let line = format!("--set model.init_from={base} --set lora.init_from={adapter} {data}");
        load(&Args::parse(line.split_whitespace())).map(drop).map_err(|error| error.to_string())
    };
    let own = fixture("huggingface", "llama_scaled");
    assert_eq!(on(&own), Ok(()));
    // One bit of one weight.
    let other = adapter.parent().unwrap().join("other");
    std::fs::create_dir(&other).unwrap();
    for file in ["config.json", "model.safetensors"] {
        let mut bytes = std::fs::read(own.join(file)).unwrap();
        if file == "model.safetensors" {
            *bytes.last_mut().unwrap() ^= 1;
        }
        std::fs::write(other.join(file), bytes).unwrap();
    }
    let refused = on(&other).unwrap_err();
    assert!(refused.contains("was trained on weights of the hash "), "{refused}");
    assert!(refused.contains("use the model that the adapter was trained on in model.init_from"), "{refused}");
}

/// A file of PEFT is read slice by slice: queries, keys and values of a GPT-2 from one B.
#[test]
fn slices_of_a_file_are_those_of_whole_tensors() {
    for name in NAMES {
        let config = from_adapter(name, "");
        let (of, lora) = (config.architecture(), config.lora.clone());
        let described = Lora::open(&fixture("lora", name)).unwrap().0;
        assert_eq!((described.rank, described.rslora), (lora.rank, lora.rslora));
        let opened = PretrainedAdapter::open(&fixture("lora", name), &of, &described).unwrap();
        let whole: f64 = tensors(&fixture("lora", name).join("adapter_model.safetensors"))
            .values()
            .flatten()
            .map(|&value| f64::from(value).powi(2))
            .sum();
        let adapters = of.adapters(&described).unwrap();
        let (mut read, mut seen) = (0.0, Vec::new());
        for weight in of.parameters().unwrap() {
            for adapter in adapters.of(&weight.name) {
                for spec in adapter.specs(&weight, lora.rank).unwrap() {
                    if seen.contains(&spec.name) {
                        continue;
                    }
                    let values = opened.read(&spec, &LocalSlice::whole(spec.dims)).unwrap().unwrap();
                    read += values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>();
                    seen.push(spec.name);
                }
            }
        }
        assert!((read - whole).abs() < 1e-9 * whole, "{name}: each element of the file once");
    }
}

/// The real `peft` reads what was exported, and computes what the merged model computes.
#[test]
fn peft_reads_an_exported_adapter() {
    let Some(python) = std::env::var_os("MESHWORK_PEER_PYTHON") else {
        eprintln!("skipped: set MESHWORK_PEER_PYTHON to a Python that has torch, transformers and peft");
        return;
    };
    for (name, more) in [
        ("llama_scaled", "--set lora.rslora=true"),
        ("gpt2", "--set lora.targets=c_attn,mlp.c_proj"),
        ("phi3", ""),
        ("gpt_neox", ""),
        ("qwen3", "--set lora.targets=q_proj,v_proj,down_proj"),
        ("mixtral", ""),
        ("qwen3_moe", "--set lora.rslora=true"),
        ("qwen3_moe", "--set lora.targets=q_proj,mlp.gate_proj"),
        ("deepseek_v2", ""),
        ("deepseek_v3", ""),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let [adapter, merged] = ["adapter", "merged"].map(|what| {
            let out = folder.path().join(what);
            let mesh = if what == "merged" { "dp=1" } else { "dp=2,tp=2" };
            let export = format!("--set checkpoint.export={} --set lora.export={what} --mesh {mesh}", out.display());
            let numbers = "--set training.numerics=canonical --set optimizer.lr=0.1";
            let line = line(name, &format!("{ADAMW} {numbers} --set lora.rank=2 {export} {more}"));
            run(&parse(&line).unwrap_or_else(|error| panic!("{error}")), &Recorded::of("gpt2").data());
            out
        });
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/check_adapter.py");
        let base = fixture("huggingface", name);
        let checked = std::process::Command::new(&python).arg(script).args([base, adapter, merged]).output().unwrap();
        let said = String::from_utf8_lossy(&checked.stdout);
        assert!(checked.status.success(), "{name}: {said}{}", String::from_utf8_lossy(&checked.stderr));
        print!("{name}: {said}");
    }
}
