//! `model.init_from`: training starts from the sizes and weights of a Hugging Face folder, on any mesh.
//! `checkpoint.export`: it ends in one.
//!
//! More than 400 lines: one test per promise of `docs/huggingface.md`.

use crate::small;
use meshwork_checkpoint::{Checkpoint, Slice};
use meshwork_core::World;
use meshwork_cpu::Cpu;
use meshwork_engine::{ModelPlan, Trainer};
use meshwork_models::huggingface::{Dtype, Pretrained};
use meshwork_models::language;
use meshwork_tensor::Role;
use meshwork_tensor::param::LocalSlice;
use meshwork_testkit::Sampled;
use meshwork_train::checkpoint::{CheckpointError, Leeway, resume};
use meshwork_train::config::{Args, Config};
use meshwork_train::generate::Trained;
use meshwork_train::{Data, load, train};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/fixtures/huggingface").join(name)
}

fn parse(name: &str, more: &str) -> Result<Config, String> {
    let text = format!("--set model.init_from={} {more}", folder(name).display());
    Config::from_args(&Args::parse(text.split_whitespace())).map_err(|error| error.to_string())
}

#[test]
fn the_sizes_of_the_folder_are_the_defaults() {
    let llama = parse("llama_scaled", "--set model.seq_len=8").unwrap().model;
    assert_eq!((llama.vocab_size, llama.num_layers, llama.hidden_size, llama.num_kv_heads), (29, 2, 16, 2));
    assert_eq!((llama.rope_theta, llama.rope_scaling_factor, llama.rope_scaling_original_seq_len), (100.0, 8.0, 48));
    assert_eq!((llama.ffn_hidden_size, llama.seq_len, llama.tie_embeddings), (20, 8, false));
    let mixtral = parse("mixtral", "--set model.preset=switch-tiny").unwrap();
    let experts = mixtral.experts().unwrap();
    assert_eq!((experts.moe.num_experts, experts.moe.top_k, experts.moe.capacity_factor), (4, 2, 0.0));
    assert_eq!((experts.expert_hidden_size, experts.every_n_layers, experts.moe.router.name()), (20, 1, "topk"));
    let gpt2 = parse("gpt2", "--set model.dropout=0.25 --set model.hidden_size=16").unwrap().model;
    assert_eq!((gpt2.seq_len, gpt2.tie_embeddings, gpt2.dropout, gpt2.hidden_size), (12, true, 0.25, 16));
}

/// A file alone gives sizes and layers, which the run keeps as a text; the folder of a family that keys do not describe
/// gives its own.
#[test]
fn a_model_of_another_family_is_described_by_its_config() {
    let from = folder("gemma3").join("config.json");
    let scratch = |more: &str| {
        let text = format!("--set model.config={} {more}", from.display());
        Config::from_args(&Args::parse(text.split_whitespace())).map_err(|error| error.to_string())
    };
    let config = scratch("--set model.seq_len=8").unwrap();
    let of_folder = parse("gemma3", "--set model.seq_len=8").unwrap();
    assert_eq!(config.architecture(), of_folder.architecture());
    let decoder = config.decoder();
    assert_eq!((decoder.head_features(), decoder.seq_len, decoder.window(0), decoder.window(1)), (8, 8, Some(5), None));
    let text = config.model.config.clone().unwrap();
    let again = Config::from_args(&Args::parse(["--set", &format!("model.config={text}"), "--set", "model.seq_len=8"]));
    assert_eq!(again.unwrap().architecture(), config.architecture());
    assert_eq!(
        scratch("--set model.norm_eps=0.1").unwrap().notices,
        ["model.norm_eps = 0.1 has no effect without model.config unset"]
    );
    for (more, told) in [
        ("--set model.num_layers=3", "model.num_layers = 3: the model in "),
        ("--set model.config=absent.json", "model.config = absent.json: No such file"),
        ("--set model.config={}", "it has neither architectures nor model_type"),
    ] {
        let refused = scratch(more).unwrap_err();
        assert!(refused.contains(told), "{refused}");
    }
    let chunk = "--set memory.loss_chunk=4";
    assert!(
        parse("gemma2", chunk).unwrap_err().contains("logits of this model are capped")
            && parse("gemma3", chunk).is_ok()
    );
}

/// A copy of a folder, with these files beside its model.
fn with_files(copy: &str, of: &str, files: &[(&str, &str)]) -> PathBuf {
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tokenizers").join(copy);
    _ = std::fs::remove_dir_all(&copy);
    std::fs::create_dir_all(&copy).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(folder(of).join(name), copy.join(name)).unwrap();
    }
    files.iter().for_each(|(name, text)| std::fs::write(copy.join(name), text).unwrap());
    copy
}

const WORDS: &str = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[{"id":5,"content":"<end>","single_word":false,
    "lstrip":false,"rstrip":false,"normalized":false,"special":true}],"normalizer":null,
    "pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,
    "model":{"type":"WordLevel","vocab":{"[UNK]":0,"arma":1,"virumque":2,"cano":3,"Troiae":4},"unk_token":"[UNK]"}}"#;

/// Fine-tuning on text trained on its bytes, whatever the model.
#[test]
#[cfg(feature = "tokenizers")]
fn the_tokenizer_of_the_folder_is_the_default_and_is_named() {
    let end = r#"{"eos_token": {"content": "<end>"}}"#;
    let model = with_files("whole", "llama_scaled", &[("tokenizer.json", WORDS), ("tokenizer_config.json", end)]);
    let text = model.join("text.jsonl");
    std::fs::write(&text, "{\"text\": \"arma virumque cano\"}\n{\"text\": \"Troiae arma\"}\n").unwrap();
    let line = |more: &str| {
        let (model, text) = (model.display(), text.display());
        format!("--set model.init_from={model} --data {text} --set model.seq_len=3 --set data.shuffle=false {more}")
    };
    let open = |more: &str| meshwork_train::load(&Args::parse(line(more).split_whitespace()));
    let (config, data) = open("").unwrap();
    assert_eq!(Path::new(&config.data.tokenizer), model.join("tokenizer.json"));
    let batch = data.batch(0, 2, 0..2).unwrap();
    assert_eq!(batch.values::<i32>("tokens").unwrap(), [1, 2, 3, 5, 4, 1]);
    let told = config.notices.iter().find(|told| told.starts_with("tokenizer ")).unwrap();
    let marks =
        "tokenizer.json: 6 ids; nothing begins a document; <end> (5, as tokenizer_config.json says) ends a document";
    assert!(told.ends_with(marks), "{told}");
    // What is asked for goes first.
    let bytes = open("--set data.tokenizer=bytes").unwrap_err().to_string();
    assert!(bytes.contains("data.tokenizer = \"bytes\": has 256 ids, more than model.vocab_size = 29"), "{bytes}");
}

/// A model of other tokens than bytes needs a tokenizer, unless its data are tokens.
#[test]
fn a_folder_without_a_tokenizer_is_no_model_of_bytes() {
    let model = with_files("without", "llama_scaled", &[("tokenizer.model", "")]);
    let text = model.join("text.txt");
    let ids = model.join("ids.bin");
    std::fs::write(&text, "arma virumque cano").unwrap();
    std::fs::write(&ids, [1u16, 2, 3, 4, 5].map(u16::to_le_bytes).concat()).unwrap();
    let open = |data: &Path, more: &str| {
        let line =
            format!("--set model.init_from={} --data {} --set model.seq_len=3 {more}", model.display(), data.display());
        meshwork_train::load(&Args::parse(line.split_whitespace())).map_err(|error| error.to_string())
    };
    assert_eq!(
        open(&text, "").unwrap_err(),
        format!(
            "data.tokenizer = (unset): the model in {} has 29 tokens, and its folder has no tokenizer.json, only tokenizer.model; \
             AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers writes it from tokenizer.model; or set \
             data.tokenizer",
            model.display()
        )
    );
    assert!(open(&ids, "").is_ok());
}

/// A run that reads tokens needs no library of tokenizers, nor a whole tokenizer.json; what ends a document is known
/// all the same.
#[test]
fn a_run_on_tokens_needs_no_tokenizer() {
    let broken = WORDS.replace("WordLevel", "Unknown");
    let end = r#"{"eos_token": "<end>"}"#;
    let model = with_files("tokens", "llama_scaled", &[("tokenizer.json", &broken), ("tokenizer_config.json", end)]);
    let ids = model.join("ids.bin");
    std::fs::write(&ids, [1u16, 5, 3, 4, 5, 2, 1].map(u16::to_le_bytes).concat()).unwrap();
    let line = format!("--set model.init_from={} --data {} --set model.seq_len=4", model.display(), ids.display());
    let line = format!("{line} --set data.documents=loss --set data.shuffle=false");
    let (config, data) = meshwork_train::load(&Args::parse(line.split_whitespace())).unwrap();
    assert_eq!(data.batch(0, 1, 0..1).unwrap().values::<i32>("targets").unwrap(), [5, -1, 4, 5]);
    assert!(
        config.notices.iter().any(|told| told.starts_with("tokens are shown as bytes: data.tokenizer = ")),
        "{config:?}"
    );
}

#[test]
fn other_sizes_and_other_folders_are_refused() {
    let gpt2 = parse("gpt2", "--set model.seq_len=20 --set model.num_layers=3").unwrap_err();
    let lines: Vec<&str> = gpt2.lines().collect();
    assert_eq!(lines.len(), 2, "{gpt2}");
    assert!(
        lines[0].starts_with("model.num_layers = 3: the model in ")
            && lines[0].ends_with("has 2; use 2, or leave the key out"),
        "{gpt2}"
    );
    assert!(lines[1].starts_with("model.seq_len = 20: ") && lines[1].contains("use 12 or fewer"), "{gpt2}");
    let dense = parse("llama_scaled", "--set moe.num_experts=4").unwrap_err();
    assert!(
        dense.starts_with("moe.num_experts = 4: the model in ")
            && dense.ends_with("has 0; use 0, or leave the key out")
    );
    let mixtral =
        parse("mixtral", "--set moe.top_k=1 --set moe.router=switch --set moe.capacity_factor=1.25").unwrap_err();
    assert!(
        mixtral.contains("moe.top_k = 1: the model in ") && mixtral.contains("has \"topk\"; use \"topk\""),
        "{mixtral}"
    );
    assert!(!mixtral.contains("capacity"), "{mixtral}");
    let nowhere = parse("nowhere", "").unwrap_err();
    assert!(nowhere.contains("config.json") && nowhere.contains("use a folder of Hugging Face"), "{nowhere}");
}

/// Rotations for longer texts, and fewer positions than a GPT-2 has learned: it takes the first ones.
#[test]
fn what_the_weights_do_not_fix_may_be_given() {
    let llama = parse("llama_scaled", "--set model.rope_scaling_factor=16 --set model.rope_theta=500").unwrap().model;
    assert_eq!((llama.rope_scaling_factor, llama.rope_theta), (16.0, 500.0));
    let pretrained = Pretrained::open(&folder("gpt2")).unwrap();
    let positions = |more: &str| {
        let config = parse("gpt2", more).unwrap();
        let specs = ModelPlan::new(config.model(), &config.plan().unwrap()).unwrap().parameters().unwrap();
        let spec = specs.into_iter().find(|spec| spec.name == "wpe.weight").unwrap();
        pretrained.read(&spec, &LocalSlice::whole(spec.dims)).unwrap()
    };
    let (all, first) = (positions(""), positions("--set model.seq_len=8"));
    assert_eq!((all.len(), first.len()), (12 * 16, 8 * 16));
    assert_eq!(first, all[..8 * 16]);
}

/// The mean cross entropy of the next token, of the logits that `transformers` computed of the first sample.
fn wanted(name: &str) -> (Vec<i32>, f64) {
    let text = std::fs::read_to_string(folder(name).join("logits.json")).unwrap();
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids = |row: usize| value["tokens"][row].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32);
    let tokens: Vec<i32> = ids(0).chain(ids(1)).collect();
    let rows = value["logits"][0].as_array().unwrap();
    let loss = |(at, row): (usize, &serde_json::Value)| {
        let logits: Vec<f64> = row.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        logits.iter().map(|x| x.exp()).sum::<f64>().ln() - logits[tokens[at + 1] as usize]
    };
    let mean = rows.iter().enumerate().map(loss).sum::<f64>() / rows.len() as f64;
    (tokens, mean)
}

#[test]
fn the_first_loss_is_that_of_the_folders_model_and_meshes_fine_tune_alike() {
    for name in ["gpt2", "llama_scaled", "llama_tied_f16_shards", "mixtral", "qwen3_moe", "gemma2", "gpt_neox"] {
        let (tokens, loss) = wanted(name);
        let run = |mesh: &str, steps: u64| {
            let more = "--set training.global_batch_size=1 --set training.numerics=canonical --set optimizer.lr=0.01";
            let config = parse(name, &format!("--mesh {mesh} {more} --set training.steps={steps}")).unwrap();
            let data = Data::from_tokens(tokens[..13].to_vec(), 12);
            train(&config, &data, None, &AtomicBool::new(false))
                .unwrap_or_else(|error| panic!("{name} on {mesh}: {error}"))
                .loss
        };
        let first = run("dp=1", 1).unwrap();
        assert!((first - loss).abs() < 1e-5 * loss, "{name}: {first}, and transformers has {loss}");
        let (third, on_mesh) = (run("dp=1", 3), run("tp=2,pp=2", 3));
        assert_eq!(third, on_mesh, "{name}");
        assert!(third.unwrap() < first, "{name}: it learns");
    }
}

#[test]
fn the_last_step_is_exported_bit_by_bit() {
    for (kind, mesh) in [
        ("gpt2", "dp=2,tp=2,pp=2"),
        ("llama", "dp=2,tp=2,pp=2"),
        ("llama --set moe.num_experts=4", "dp=2,ep=2,tp=2,pp=2"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (dir, out) = (folder.path().join("run"), folder.path().join("model"));
        let flags = |mesh: &str, steps: u64| {
            small::config(&format!(
                "{mesh} --set model.kind={kind} --set training.steps={steps} --set checkpoint.dir={} --set checkpoint.export={}",
                dir.display(),
                out.display()
            ))
        };
        let stop = AtomicBool::new(false);
        train(&flags(mesh, 2), &small::data(), None, &stop).unwrap();
        let compare = |step: u64| {
            let (saved, written) = (Checkpoint::open_step(&dir, step).unwrap(), Pretrained::open(&out).unwrap());
            for spec in written.architecture().parameters().unwrap() {
                let dims: Vec<u64> = spec.dims.iter().map(|&extent| extent as u64).collect();
                let bytes = saved.read(&spec.name, &Slice::whole(&dims)).unwrap();
                let values = written.read(&spec, &LocalSlice::whole(spec.dims)).unwrap();
                let written: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                assert_eq!(written, bytes, "{kind}: {}", spec.name);
            }
        };
        compare(2);
        // A run that is stopped before its last step exports nothing; one that goes on replaces the model.
        let stopped = AtomicBool::new(true);
        std::fs::remove_dir_all(&out).unwrap();
        let mut config = flags("tp=2", 4);
        config.checkpoint.resume = true;
        assert!(train(&config, &small::data(), None, &stopped).unwrap().stopped && !out.exists());
        train(&config, &small::data(), None, &stop).unwrap();
        compare(4);
        let next = small::config(&format!("pp=2 --set model.init_from={} --set training.steps=1", out.display()));
        assert!(train(&next, &small::data(), None, &stop).is_ok());
    }
    for (settings, problem) in [
        ("model.kind=gpt2 --set moe.num_experts=4", "a GPT2LMHeadModel has no experts; leave it out"),
        (
            "model.kind=llama --set moe.num_experts=4 --set moe.router=switch --set moe.num_shared_experts=1",
            "a MixtralForCausalLM has other experts, not these: router switch, 1 shared experts; leave it out",
        ),
    ] {
        let text = format!("--set {settings} --set checkpoint.dir=run --set checkpoint.export=out");
        let refused = Config::from_args(&Args::parse(text.split_whitespace())).unwrap_err().to_string();
        assert!(refused.starts_with("checkpoint.export = out: ") && refused.contains(problem), "{refused}");
    }
}

fn bytes_of(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap()))
        .collect()
}

/// The weights of a run come from the trainer: from every mesh the same bytes, without a checkpoint. In canonical
/// numerics each mesh has the same weights.
#[test]
fn every_mesh_exports_the_same_bytes_without_a_checkpoint() {
    for (turn, (kind, meshes)) in [
        (
            "gpt2",
            &[
                "dp=2 --set parallelism.zero_stage=1",
                "dp=4 --set parallelism.zero_stage=3",
                "dp=2,tp=2,pp=2 --set parallelism.zero_stage=2",
            ][..],
        ),
        (
            "llama --set model.num_kv_heads=2",
            &[
                "tp=4",
                "dp=2,pp=2 --set parallelism.zero_stage=3",
                "dp=2,tp=2 --set parallelism.zero_stage=3 --set parallelism.sequence_parallel=true",
            ],
        ),
        (
            "llama --set moe.num_experts=4",
            &["dp=2,ep=2,tp=2", "dp=4,ep=2 --set parallelism.zero_stage=3 --set parallelism.zero_group=2", "pp=2"],
        ),
    ]
    .into_iter()
    .enumerate()
    {
        for dtype in ["f32"].into_iter().chain(["bf16", "f16"].into_iter().sampled_in_turn(2, turn)) {
            let run = |mesh: &str| {
                let folder = tempfile::tempdir().unwrap();
                let out = folder.path().join("out");
                let config = small::config(&format!(
                    "{mesh} --set model.kind={kind} --set training.steps=2 --set training.numerics=canonical \
                     --set checkpoint.export_dtype={dtype} --set checkpoint.export={}",
                    out.display()
                ));
                train(&config, &small::data(), None, &AtomicBool::new(false))
                    .unwrap_or_else(|error| panic!("{mesh}: {error}"));
                assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is written");
                bytes_of(&out)
            };
            let one = run("dp=1");
            let header = String::from_utf8_lossy(&one["model.safetensors"][..1000]).into_owned();
            assert!(header.contains(&format!("{{\"dtype\":\"{}\"", dtype.to_uppercase())), "{header}");
            // One pass over the meshes shows where weights lie; the other types round what rank 0 has.
            for mesh in meshes.iter().take(if dtype == "f32" { 3 } else { 1 }) {
                assert!(run(mesh) == one, "{kind} in {dtype} on {mesh}");
            }
        }
    }
}

/// Masters in f32 of a run in 16 bits, and memory that the host cannot read.
#[test]
fn mixed_precision_and_offloaded_weights_are_exported_as_a_checkpoint_has_them() {
    for more in [
        "--set training.dtype=bf16",
        "--set training.dtype=f16 --set parallelism.zero_stage=3",
        "--set memory.offload=all",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (dir, out, disk) = (folder.path().join("run"), folder.path().join("out"), folder.path().join("disk"));
        std::fs::create_dir(&disk).unwrap();
        let offload = if more.contains("offload") {
            format!("--set memory.offload_dir={}", disk.display())
        } else {
            String::new()
        };
        let config = small::config(&format!(
            "dp=2 --set training.steps=2 {more} {offload} --set checkpoint.dir={} --set checkpoint.export={}",
            dir.display(),
            out.display()
        ));
        train(&config, &small::data(), None, &AtomicBool::new(false)).unwrap_or_else(|error| panic!("{more}: {error}"));
        let (saved, written) = (Checkpoint::open_step(&dir, 2).unwrap(), Pretrained::open(&out).unwrap());
        assert_eq!(written.dtype(), Some(Dtype::F32), "the type of a model that comes from no folder");
        for spec in written.architecture().parameters().unwrap() {
            let dims: Vec<u64> = spec.dims.iter().map(|&extent| extent as u64).collect();
            let values = written.read(&spec, &LocalSlice::whole(spec.dims)).unwrap();
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert!(bytes == saved.read(&spec.name, &Slice::whole(&dims)).unwrap(), "{more}: {}", spec.name);
        }
    }
}

/// A rate of zero changes nothing: the numbers of a folder leave as they came, through the masters of a run in 16 bits.
/// Ranks keep other slices of masters than of weights.
#[test]
fn a_folder_leaves_a_run_without_a_rate_bit_by_bit() {
    for (name, mesh, more) in [
        ("llama_scaled", "dp=1", "bf16"),
        ("gpt2", "dp=2,tp=2", "bf16 --set parallelism.zero_stage=1"),
        ("mixtral", "dp=2,ep=2", "bf16 --set parallelism.zero_stage=3"),
        ("llama_tied_f16_shards", "dp=2,pp=2", "f16 --set parallelism.zero_stage=2"),
        ("llama_scaled", "dp=2", "bf16 --set memory.offload=optimizer --set parallelism.zero_stage=1"),
    ] {
        let temporary = tempfile::tempdir().unwrap();
        let (out, disk) = (temporary.path().join("model"), temporary.path().display());
        let offload = if more.contains("offload") { format!("--set memory.offload_dir={disk}") } else { String::new() };
        let settings = "--set training.global_batch_size=2 --set training.steps=1 --set optimizer.lr=0";
        let export = format!("{offload} --set checkpoint.export={}", out.display());
        let line = format!("--mesh {mesh} {settings} --set training.dtype={more} {export}");
        let data = Data::from_tokens(wanted(name).0[..13].to_vec(), 12);
        train(&parse(name, &line).unwrap(), &data, None, &AtomicBool::new(false))
            .unwrap_or_else(|error| panic!("{name} on {mesh}: {error}"));
        let [came, left] = [folder(name), out].map(|folder| Pretrained::open(&folder).unwrap());
        assert_eq!(came.dtype(), left.dtype());
        for spec in came.architecture().parameters().unwrap() {
            let slice = LocalSlice::whole(spec.dims);
            let [came, left] = [&came, &left].map(|of| of.read(&spec, &slice).unwrap());
            assert!(came == left, "{name} on {mesh}, {more}: {}", spec.name);
        }
    }
}

/// A weight that the type of the export does not have ends the run on every rank, and nothing is written.
#[test]
fn weights_that_are_no_numbers_are_not_exported() {
    for mesh in ["tp=2", "dp=2,pp=2"] {
        let folder = tempfile::tempdir().unwrap();
        let config = small::config(&format!(
            "{mesh} --set training.steps=1 --set training.max_norm=0 --set metrics.sample_tokens=0 --set optimizer.name=sgd \
             --set optimizer.lr=1e9 --set checkpoint.export_dtype=f16 --set checkpoint.export={}",
            folder.path().join("out").display()
        ));
        let error = train(&config, &small::data(), None, &AtomicBool::new(false)).unwrap_err().to_string();
        let told = error.contains("checkpoint.export: the weights of ") && error.contains("is no number in f16");
        assert!(told, "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

/// A copy of a fixture with these files beside it.
fn copy(name: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
    let copied = tempfile::tempdir().unwrap();
    bytes_of(&folder(name)).iter().for_each(|(name, bytes)| std::fs::write(copied.path().join(name), bytes).unwrap());
    files.iter().for_each(|(name, text)| std::fs::write(copied.path().join(name), text).unwrap());
    copied
}

fn set(path: &Path, change: impl Fn(&mut serde_json::Value)) {
    let mut value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

/// A fine-tuned model has the type, the tokens, the positions and the tokenizer of the folder that it comes from; so
/// has one that comes from it.
#[test]
fn an_export_keeps_what_its_folder_had() {
    let files = [
        ("merges.txt", "#version: 0.2\n"),
        ("vocab.json", "{\"a\": 0}"),
        ("special_tokens_map.json", "{}"),
        ("chat_template.jinja", "{{ x }}"),
    ];
    let from = copy("gpt2_untied_bf16", &files);
    set(&from.path().join("config.json"), |config| {
        config["eos_token_id"] = vec![3, 7].into();
        config["bos_token_id"] = 4.into();
        config["ours"] = "kept".into();
    });
    set(&from.path().join("generation_config.json"), |config| config["eos_token_id"] = vec![3, 7].into());
    let rounds = tempfile::tempdir().unwrap();
    let outs = ["one", "two"].map(|name| rounds.path().join(name));
    for (from, out) in [(from.path(), &outs[0]), (&*outs[0], &outs[1])] {
        let text = format!(
            "--set model.init_from={} --set checkpoint.export={} --mesh tp=2 --set training.global_batch_size=2 --set training.steps=1",
            from.display(),
            out.display()
        );
        let config = Config::from_args(&Args::parse(text.split_whitespace())).unwrap();
        let data = Data::from_tokens((0..100).map(|id| id % 29).collect(), 12);
        train(&config, &data, None, &AtomicBool::new(false)).unwrap_or_else(|error| panic!("{error}"));
        let written = Pretrained::open(out).unwrap();
        assert_eq!((written.dtype(), written.ends_of_text()), (Some(Dtype::Bf16), &[3, 7][..]));
        let (before, after) = (bytes_of(from), bytes_of(out));
        let json = |of: &BTreeMap<String, Vec<u8>>, name: &str| {
            serde_json::from_slice::<serde_json::Value>(&of[name]).unwrap()
        };
        assert_eq!(json(&after, "config.json"), json(&before, "config.json"));
        assert_eq!(json(&after, "generation_config.json"), json(&before, "generation_config.json"));
        for (name, _) in files {
            assert_eq!(after[name], before[name], "{name}");
        }
        assert_ne!(after["model.safetensors"], before["model.safetensors"], "it was trained");
    }
}

/// Found before training, with all other faults, and nothing is written.
#[test]
fn folders_that_an_export_cannot_have_are_refused_before_training() {
    let from = copy("gpt2", &[]);
    let work = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(work.path().join("runs/one")).unwrap();
    std::fs::write(work.path().join("file"), "").unwrap();
    let refused = |set: &str| {
        let text = format!("--set training.steps=1 {set}").replace("FROM", &from.path().display().to_string());
        let text = text.replace("WORK", &work.path().display().to_string());
        load(&Args::parse(text.split_whitespace())).map(drop).unwrap_err().to_string()
    };
    let other = refused("--set checkpoint.export=FROM");
    assert!(
        other.contains("has files of a model already: config.json, generation_config.json, model.safetensors"),
        "{other}"
    );
    assert!(
        other.ends_with("set checkpoint.export_overwrite = true to replace that model, or use another folder"),
        "{other}"
    );
    for (set, told) in [
        (
            "--set model.init_from=FROM/. --set checkpoint.export=FROM --set checkpoint.export_overwrite=true",
            "is the folder of model.init_from",
        ),
        (
            "--set checkpoint.dir=WORK/new --set checkpoint.export=WORK/new/../new",
            "has the folder of checkpoint.dir in it, or is it",
        ),
        (
            "--set metrics.tensorboard=WORK/new/board --set checkpoint.export=WORK/new",
            "has the folder of metrics.tensorboard in it",
        ),
        ("--set checkpoint.export=WORK/runs", "has folders in it (one), and the whole folder is replaced"),
        ("--set checkpoint.export=WORK/file", "is a file, not a folder"),
        ("--set checkpoint.export=WORK/file/inside", "Not a directory"),
        ("--set checkpoint.export=/proc", "is where a file system begins"),
        ("--set checkpoint.export=/proc/self/out", "/proc/"),
    ] {
        let refused = refused(set);
        assert!(
            refused.lines().any(|line| line.starts_with("checkpoint.export = ") && line.contains(told)),
            "{set}: {refused}"
        );
    }
    let both = refused("--set checkpoint.export=WORK/file --set optimizer.beta1=2");
    assert_eq!(both.lines().count(), 2, "{both}");
    assert_eq!(bytes_of(from.path()), bytes_of(&folder("gpt2")));
}

/// The tokenizer of a run lies beside its model in the form that other programs read.
#[test]
fn the_tokenizer_of_the_run_is_exported() {
    let work = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &str| {
        let out = work.path().join(name);
        let text = format!(
            "--set model.hidden_size=16 --set model.num_heads=2 --set model.num_layers=1 --set model.seq_len=16 --set training.steps=1 \
             --set training.global_batch_size=2 --set checkpoint.export={} {more}",
            out.display()
        );
        let (config, data) = load(&Args::parse(text.split_whitespace())).unwrap();
        train(&config, &data, None, &AtomicBool::new(false)).unwrap_or_else(|error| panic!("{error}"));
        bytes_of(&out)
    };
    let json =
        |of: &BTreeMap<String, Vec<u8>>, name: &str| serde_json::from_slice::<serde_json::Value>(&of[name]).unwrap();
    let bytes = run("bytes", "");
    assert_eq!(json(&bytes, "tokenizer.json")["model"]["vocab"].as_object().unwrap().len(), 256);
    assert_eq!(json(&bytes, "tokenizer_config.json")["tokenizer_class"], "PreTrainedTokenizerFast");
    assert_eq!(json(&bytes, "config.json")["eos_token_id"], serde_json::Value::Null);
    let ended = run("ended", "--set data.end_of_text=300 --set model.vocab_size=301");
    assert_eq!(json(&ended, "config.json")["eos_token_id"], 300);
    assert_eq!(json(&ended, "tokenizer_config.json")["eos_token"], "<|endoftext|>");
    assert_eq!(json(&ended, "tokenizer.json")["added_tokens"][0]["id"], 300);
}

/// What is frozen leaves as it came, bit by bit, on another mesh after a resume too; the rest is trained.
#[test]
fn frozen_parts_are_exported_as_they_came() {
    for (name, freeze) in
        [("gpt2", "embedding,layers.0"), ("llama_scaled", "layers.0,norm,head"), ("mixtral", "layers.1")]
    {
        let temporary = tempfile::tempdir().unwrap();
        let (dir, out) = (temporary.path().join("run"), temporary.path().join("model"));
        let (tokens, _) = wanted(name);
        let data = Data::from_tokens(tokens[..13].to_vec(), 12);
        for (mesh, steps) in [("dp=1", 1), ("tp=2,pp=2", 2)] {
            let out = if steps == 2 { format!("--set checkpoint.export={}", out.display()) } else { String::new() };
            let paths = format!("--set checkpoint.dir={} {out}", dir.display());
            let more = "--set training.global_batch_size=1 --set optimizer.lr=0.01 --set checkpoint.resume=true";
            let line = format!("--mesh {mesh} {more} {paths} --set model.freeze={freeze} --set training.steps={steps}");
            train(&parse(name, &line).unwrap(), &data, None, &AtomicBool::new(false))
                .unwrap_or_else(|error| panic!("{name} on {mesh}: {error}"));
        }
        let [came, left] = [folder(name), out].map(|folder| Pretrained::open(&folder).unwrap());
        let frozen: language::Frozen = freeze.parse().unwrap();
        for spec in came.architecture().parameters().unwrap() {
            let mut parts = spec.name.split('.');
            let stays = match parts.next().unwrap() {
                "wte" | "wpe" | "embed_tokens" => frozen.embedding,
                "ln_f" | "norm" => frozen.norm,
                "lm_head" => frozen.head,
                _ => frozen.has_layer(parts.next().unwrap().parse().unwrap()),
            };
            let slice = LocalSlice::whole(spec.dims);
            let [came, left] = [&came, &left].map(|of| of.read(&spec, &slice).unwrap());
            assert!(spec.role == Role::Buffer || (came == left) == stays, "{name}: {}", spec.name);
        }
    }
}

/// An update that makes weights infinite, with numbers that f32 has: the run ends with the parameter's name, and
/// neither saves nor exports.
#[test]
fn weights_that_are_no_numbers_are_not_saved_and_not_exported() {
    for (mesh, more) in [("dp=1", ""), ("dp=2,tp=2,pp=2", ""), ("pp=2", "--set validation.every=1"), ("dp=2", "none")] {
        let temporary = tempfile::tempdir().unwrap();
        let (dir, out) = (temporary.path().join("run"), temporary.path().join("model"));
        let paths = format!("--set checkpoint.dir={} --set checkpoint.export={}", dir.display(), out.display());
        let paths = if more == "none" { "" } else { &paths };
        let line = format!(
            "{mesh} --set optimizer.lr=3e38 --set training.steps=1 {paths} {}",
            more.trim_start_matches("none")
        );
        let error =
            train(&small::config(&line), &small::data(), None, &AtomicBool::new(false)).unwrap_err().to_string();
        assert!(
            error.contains("after step 1 wte.weight has elements that are not finite: go on from an earlier"),
            "{mesh}: {error}"
        );
        assert!(!out.exists(), "{mesh}");
        assert!(Checkpoint::open_step(&dir, 1).is_err(), "{mesh}");
    }
}

/// The logits of these samples by the model in the newest checkpoint, `[sample · position][vocab]`.
fn logits(config: &Config, dir: &Path, tokens: &[i32]) -> Vec<Vec<f32>> {
    let plan = config.plan().unwrap();
    let ranks = World::threads(&plan.mesh).run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(config.model(), &plan, rank, Cpu::device())?;
        resume(&mut trainer, &plan, dir, &AtomicBool::new(false), |_, _| Ok::<_, CheckpointError>(Leeway::default()))?;
        let batch = language::batch(tokens.to_vec(), vec![-1; tokens.len()], small::SEQ).expect("whole samples");
        let rows = (0..tokens.len()).map(|row| trainer.predict(&batch, row, 61));
        Ok::<_, CheckpointError>(rows.collect::<Result<_, _>>()?)
    });
    ranks.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
}

#[test]
fn transformers_has_the_logits_of_the_checkpoint_that_was_exported() {
    let Some(python) = std::env::var_os("MESHWORK_PEER_PYTHON") else {
        eprintln!("skipped: set MESHWORK_PEER_PYTHON to a Python that has torch and transformers");
        return;
    };
    for more in [
        "kind=gpt2",
        "kind=llama",
        "kind=llama --set model.num_kv_heads=2 --set model.tie_embeddings=true",
        "kind=llama --set moe.num_experts=4 --set moe.expert_hidden_size=24",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (dir, out) = (folder.path().join("run"), folder.path().join("model"));
        let config = |mesh: &str, rest: &str| small::config(&format!("{mesh} --set model.{more} {rest}"));
        let saved = format!(
            "--set training.steps=20 --set checkpoint.dir={} --set checkpoint.export={}",
            dir.display(),
            out.display()
        );
        train(&config("dp=2,tp=2", &saved), &small::data(), None, &AtomicBool::new(false)).unwrap();
        let tokens: Vec<i32> = (0..2 * small::SEQ as i32).map(|at| at * at * 7 % 61).collect();
        let rows = logits(&config("tp=2,pp=2", ""), &dir, &tokens);
        let samples = |rows: &[Vec<f32>]| rows.chunks(small::SEQ).map(<[_]>::to_vec).collect::<Vec<_>>();
        let tokens: Vec<&[i32]> = tokens.chunks(small::SEQ).collect();
        let path = folder.path().join("logits.json");
        std::fs::write(&path, serde_json::json!({"tokens": tokens, "logits": samples(&rows)}).to_string()).unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/check_export.py");
        let checked = std::process::Command::new(&python).arg(script).args([&out, &path]).output().unwrap();
        let said = String::from_utf8_lossy(&checked.stdout);
        assert!(checked.status.success(), "{more}: {said}{}", String::from_utf8_lossy(&checked.stderr));
        print!("{more}: {said}");
    }
}

/// `AutoTokenizer` and a pipeline of `transformers` have the tokens of the run, and its end of text.
#[test]
fn transformers_has_the_tokenizer_of_the_run() {
    let Some(python) = std::env::var_os("MESHWORK_PEER_PYTHON") else {
        eprintln!("skipped: set MESHWORK_PEER_PYTHON to a Python that has torch and transformers");
        return;
    };
    let sizes = "--set model.hidden_size=16 --set model.num_heads=2 --set model.num_layers=1 --set model.seq_len=32";
    for (more, text, ids, ends) in [
        ("--set model.kind=gpt2", "Cicero é", vec![67, 105, 99, 101, 114, 111, 32, 195, 169], vec![]),
        (
            "--set model.kind=llama --set model.vocab_size=257 --set data.end_of_text=256",
            "a b",
            vec![97, 32, 98],
            vec![256],
        ),
        #[cfg(feature = "tokenizers")]
        ("--set data.tokenizer=gpt2 --set model.vocab_size=50257", "Hello world", vec![15496, 995], vec![50256]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let (dir, out) = (folder.path().join("run"), folder.path().join("model"));
        let args = format!(
            "{sizes} {more} --set training.steps=1 --set training.global_batch_size=2 --set checkpoint.dir={} --set checkpoint.export={}",
            dir.display(),
            out.display()
        );
        let (config, data) = load(&Args::parse(args.split_whitespace())).unwrap();
        train(&config, &data, None, &AtomicBool::new(false)).unwrap_or_else(|error| panic!("{error}"));
        let trained = Trained::open(&dir, None, Args::parse([""; 0])).unwrap();
        assert_eq!((trained.ends_of_text, trained.tokenizer.encode(text).unwrap()), (ends.clone(), ids.clone()));
        let path = folder.path().join("logits.json");
        // No logits: the model has some of its own.
        let wanted = serde_json::json!({"text": text, "ids": ids, "ends": ends});
        std::fs::write(&path, wanted.to_string()).unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/check_export.py");
        let checked = std::process::Command::new(&python).arg(script).args([&out, &path]).output().unwrap();
        let said = String::from_utf8_lossy(&checked.stdout);
        assert!(checked.status.success(), "{more}: {said}{}", String::from_utf8_lossy(&checked.stderr));
    }
}
