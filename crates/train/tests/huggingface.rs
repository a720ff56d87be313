//! `model.init_from`: training starts from the sizes and weights of a Hugging Face folder, on any mesh. `checkpoint.export`: it ends in one.

mod small;

use meshwork_checkpoint::{Checkpoint, Slice};
use meshwork_core::comm::thread;
use meshwork_engine::Trainer;
use meshwork_models::huggingface::Pretrained;
use meshwork_models::language;
use meshwork_tensor::cpu::Cpu;
use meshwork_train::checkpoint::{CheckpointError, resume};
use meshwork_train::config::{Args, Config};
use meshwork_train::{Data, train};
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

#[test]
fn other_sizes_and_other_folders_are_refused() {
    let gpt2 = parse("gpt2", "--set model.seq_len=8 --set model.num_layers=3").unwrap_err();
    let lines: Vec<&str> = gpt2.lines().collect();
    assert_eq!(lines.len(), 2, "{gpt2}");
    assert!(
        lines[0].starts_with("model.num_layers = 3: the model in ")
            && lines[0].ends_with("has 2; use 2, or leave the key out"),
        "{gpt2}"
    );
    assert!(lines[1].starts_with("model.seq_len = 8: "), "{gpt2}");
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
    for name in ["gpt2", "llama_scaled", "llama_tied_f16_shards", "mixtral"] {
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
                let values = written.read(&spec, &spec.local(&"dp=1".parse().unwrap(), Default::default())).unwrap();
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
    let alone = parse("gpt2", "--set checkpoint.export=somewhere").unwrap_err();
    assert!(alone.starts_with("checkpoint.export = somewhere: ") && alone.ends_with("set checkpoint.dir"), "{alone}");
}

/// The logits of these samples by the model in the newest checkpoint, `[sample · position][vocab]`.
fn logits(config: &Config, dir: &Path, tokens: &[i32]) -> Vec<Vec<f32>> {
    let plan = config.plan().unwrap();
    let ranks = thread::run_mesh(&plan.mesh, |rank| {
        let mut trainer = Trainer::new(config.model(), &plan, rank, Cpu::device())?;
        resume(&mut trainer, &plan, dir, &AtomicBool::new(false), |_| Ok::<_, CheckpointError>(()))?;
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
