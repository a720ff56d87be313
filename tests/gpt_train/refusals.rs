//! Bad input: one clear error before any training, exit code 2, nothing touched.

use crate::program::{folder, run};
use std::fs;
use std::path::Path;

/// Runs a command line that must be refused before anything is trained, printed or written, and returns its faults.
fn refused(folder: &Path, line: &str) -> Vec<String> {
    let metrics = folder.join("never.jsonl");
    let ended = run(&format!("{line} --metrics {}", metrics.display()));
    assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{line}\n{}", ended.err);
    assert!(!metrics.exists(), "{line} leaves metrics behind");
    assert!(!ended.err.contains("panicked") && !ended.err.contains("backtrace"), "{}", ended.err);
    let faults = ended.err.strip_prefix("error: ").unwrap_or_else(|| panic!("{line}\n{}", ended.err));
    faults.lines().map(str::to_owned).collect()
}

/// Each (command line, start of its only fault, a later part of the fault).
fn refused_alone(name: &str, cases: &[(&str, &str, &str)]) {
    let folder = folder(name);
    for (line, start, part) in cases {
        let faults = refused(&folder, line);
        assert!(
            faults.len() == 1 && faults[0].starts_with(start) && faults[0].contains(part),
            "{line}\nwants {start} ... {part}\ngot   {}",
            faults.join("\n      ")
        );
    }
}

#[test]
fn a_bad_command_line() {
    refused_alone(
        "command_line",
        &[
            ("train", "train: not a flag; ", "--mesh"),
            ("--step 3", "--step: unknown flag; ", "the nearest is --steps"),
            ("--step=3", "--step: unknown flag; ", "the nearest is --steps"),
            ("--mesh", "--mesh: no value; ", "use --mesh VALUE or --mesh=VALUE"),
            ("--device cuda:h100 --steps 1", "--device cuda:h100: is a card to predict for", "use --steps 0"),
            ("--device cuda:b1 --steps 0", "--device cuda:b1: ", "one of cuda:a100, cuda:h100, "),
            ("--steps 0 --set optimizer.name=muon --set lora.rank=1", "the update rule muon is for matrices", "rule"),
            ("--steps=", "training.steps = \"\" (from --steps): ", "use a whole number"),
            ("--steps -1", "training.steps = -1 (from --steps): is below 0; ", "at least 0"),
            ("--steps 1.5", "training.steps = 1.5 (from --steps): ", "use a whole number"),
            (
                "--steps 9223372036854775808",
                "training.steps = 9223372036854775808 (from --steps): is out of range",
                "at most 9",
            ),
            ("--set steps=3", "steps = 3 (from --set): unknown key; ", "the nearest is training.steps"),
            ("--set training.steps", "--set training.steps: no value; ", "use --set section.key=value"),
            ("--device gpu", "--device gpu: unknown device; ", "use one of cpu, cuda, cuda-emulated"),
            (
                "--device cuda:x",
                "--device cuda:x: no number of a GPU, and no card that is known; ",
                "use cuda, cuda:0, or with --steps 0 one of cuda:a100, ",
            ),
            ("--mesh=", "--mesh \"\": not an axis", "such as dp=2"),
            ("--mesh xp=2", "--mesh xp=2: unknown axis; ", "dp, tp, pp"),
            ("--mesh dp=0", "--mesh dp=0: a degree is at least 1; ", "use dp=1 or more"),
            ("--mesh dp=2,dp=2", "--mesh dp=2: the axis is named twice; ", "name dp once"),
            ("--mesh dp=99999999999999999999", "--mesh dp=99999999999999999999: the degree is too large; ", "dp=1"),
            (
                "--mesh dp=2 --set parallelism.dp=4",
                "parallelism.dp = 4: conflicts with --mesh dp=2",
                "use one of the two",
            ),
            (
                "--mesh dp=2 --set parallelism.tp=2",
                "parallelism.tp = 2: conflicts with --mesh dp=2",
                "axes not named are 1",
            ),
            (
                "--mesh cp=2 --set parallelism.context_parallel_method=none",
                "parallelism.cp = 2: cuts sequences, and parallelism.context_parallel_method is none; ",
                "use 1, or all_gather, all_to_all, ring, hybrid or auto",
            ),
            ("--set model.preset=huge", "model.preset = \"huge\" (from --set): unknown; ", "tiny, small, medium, gpt2"),
            ("--set model.preset=small --set model.preset=tny", "model.preset = \"tny\"", "the nearest is tiny"),
        ],
    );
}

#[test]
fn a_model_or_batch_that_does_not_fit_the_mesh() {
    refused_alone(
        "fit",
        &[
            ("--mesh tp=8", "model.num_heads = 4: is not divisible by parallelism.tp = 8; ", "a multiple of 8"),
            (
                "--set model.hidden_size=130",
                "model.hidden_size = 130: is not divisible by model.num_heads = 4",
                "128 or 132",
            ),
            (
                "--mesh tp=2 --set model.ffn_hidden_size=501 --set training.numerics=canonical",
                "model.ffn_hidden_size = 501: is not divisible by parallelism.tp = 2 (training.numerics is canonical); ",
                "500 or 502",
            ),
            ("--mesh pp=8", "model.num_layers = 4: fewer layers than stages", "pp of at most 4"),
            ("--mesh dp=3", "training.global_batch_size = 16: is not divisible by dp = 3; ", "15 or 18"),
            (
                "--mesh dp=2 --set pipeline.num_microbatches=3",
                "training.global_batch_size = 16: is not divisible by dp · num_microbatches = 2 · 3 = 6; ",
                "12 or 18",
            ),
            (
                "--set training.micro_batch_size=3",
                "training.global_batch_size = 16: is not divisible by dp · micro_batch_size = 1 · 3 = 3; ",
                "15 or 18",
            ),
            (
                "--set training.micro_batch_size=4 --set pipeline.num_microbatches=8",
                "training.global_batch_size = 16: is not dp · num_microbatches · micro_batch_size = 1 · 8 · 4 = 32",
                "use training.global_batch_size = 32",
            ),
            (
                "--mesh pp=4 --set pipeline.schedule=zb_h2 --set pipeline.num_microbatches=2",
                "pipeline.num_microbatches = 2: schedule zb_h2 over pp=4 needs at least 4 micro-batches, got 2",
                "use 4 or more",
            ),
            (
                "--mesh dp=8,pp=4 --set pipeline.schedule=zb_h2",
                "training.global_batch_size = 16: gives each of dp = 8 ranks 2 samples",
                "32 or more",
            ),
        ],
    );
}

#[test]
fn sizes_that_no_machine_has() {
    const HUGE: &str = "4611686018427387904"; // 2^62
    let set = |key: &str| format!("--set {key}={HUGE}");
    let batch = "--set training.global_batch_size";
    refused_alone(
        "sizes",
        &[
            (&set("model.hidden_size"), "model = vocab_size=256,", "parameters, too many to count; use smaller sizes"),
            (&set("model.vocab_size"), "model = vocab_size=4611686018427387904,", "too many to count"),
            (&set("model.ffn_hidden_size"), "model = vocab_size=256,", "too many to count"),
            (&set("model.num_layers"), "model.num_layers = 4611686018427387904: too many layers; ", "or fewer"),
            (
                &set("training.global_batch_size"),
                "training.global_batch_size = 46",
                "use a smaller batch or model.seq_len",
            ),
            (
                &format!("{batch}=1048576 --set model.hidden_size=65536"),
                "training.global_batch_size = 1048576: a step",
                "more ranks",
            ),
            (
                &format!("{batch}=8388608 --set training.micro_batch_size=1 --set model.seq_len=8"),
                "pipeline.num_microbatches = 8388608: too many over pp = 1; ",
                "4194304 or fewer",
            ),
            (
                &format!("--mesh dp=100000 {batch}=100000"),
                "parallelism = dp=100000,tp=1,pp=1: 100000 ranks",
                "--steps 0 reports",
            ),
        ],
    );
    let folder = folder("overflow");
    let faults = refused(&folder, &format!("--mesh dp={HUGE},pp={HUGE} {batch}={HUGE}"));
    assert!(
        faults.iter().any(|fault| fault.contains("the number of ranks, dp · tp · pp · cp, overflows")),
        "{faults:?}"
    );
    let faults = refused(&folder, &set("model.seq_len")).join("\n");
    assert!(faults.contains("tokens a step") && faults.contains("fewer than one sample"), "{faults}");
}

#[test]
#[cfg(target_os = "linux")] // Elsewhere nobody has asked the system yet.
fn more_memory_than_the_machine_has() {
    let fault = "parallelism = dp=1,tp=1,pp=1: all ranks together need 768.5 TiB, ";
    refused_alone("memory", &[("--set model.hidden_size=1048576", fault, "--steps 0 reports on any size")]);
}

/// A limit of the process is no reason to abort in the middle of a run: it counts before.
#[cfg(target_os = "linux")]
#[test]
fn more_memory_than_the_process_may_take() {
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "ulimit -v 1500000; exec \"$0\" $1"]).arg(crate::program::path());
    let line = "--mesh dp=2 --set model.hidden_size=1024 --set model.num_layers=8 --steps 1";
    limited.arg(line);
    let ended = crate::program::Running::start(limited).end();
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let told = "parallelism = dp=2,tp=1,pp=1: all ranks together need ";
    assert!(
        ended.err.contains(told) && ended.err.contains(", the limit on address space (ulimit -v) leaves "),
        "{}",
        ended.err
    );
}

#[test]
fn a_bad_configuration_file() {
    let folder = folder("files");
    let wrong = [
        ("[training]\nstepz = 3\n", "training.stepz = 3: unknown key; the nearest is training.steps"),
        ("[trainning]\nsteps = 3\n", "trainning.steps = 3: unknown key; the nearest is training.steps"),
        ("[model]\nheads = 3\n", "model.heads = 3: unknown key; the nearest is model.num_heads"),
        ("[model]\nnum_heads = \"4\"\n", "model.num_heads = \"4\": is a string, not a whole number"),
        ("[model]\nnum_heads = 4.0\n", "model.num_heads = 4.0: is a number with a fraction, not a whole number"),
        ("[model]\ntie_embeddings = 1\n", "model.tie_embeddings = 1: is a whole number, not a boolean"),
        ("[optimizer]\nlr = \"fast\"\n", "optimizer.lr = \"fast\": is a string, not a number"),
        ("[optimizer]\nlr = nan\n", "optimizer.lr = nan: is out of range"),
        ("[data]\npath = 3\n", "data.path = 3: is a whole number, not a string"),
        ("model = 3\n", "model = 3: is a whole number, not a section"),
        ("[training]\nnumerics = \"exact\"\n", "training.numerics = \"exact\": unknown; the nearest is fast"),
        (
            "[checkpoint]\nresume = true\n",
            "checkpoint.resume = true: there is no folder to resume from; set checkpoint.dir",
        ),
        ("[memory]\nrecompute = 0\n", "memory.recompute = 0: is below 1; use \"none\""),
        (
            "[compress]\nfeedback = \"ef21\"\n",
            "compress.feedback = \"ef21\": brings back what compression loses, and nothing is compressed; compress something, or use none",
        ),
        (
            "[moe]\nnum_experts = 8\ntop_k = 9\n",
            "moe.top_k = 9: top_k is 9: with router topk and 8 experts it is from 1 to 8",
        ),
        ("[model]\nnum_heads = \n", "--config "),
        ("not toml", "--config "),
        ("[parallelism]\ndp = 0\n", "parallelism.dp = 0: is below 1"),
    ];
    let path = folder.join("bad.toml");
    for (toml, fault) in wrong {
        fs::write(&path, toml).unwrap();
        let faults = refused(&folder, &format!("--config {}", path.display()));
        assert!(faults.len() == 1 && faults[0].starts_with(fault), "{toml}\nwants {fault}\ngot {faults:?}");
    }
    fs::write(&path, b"[model]\n# caf\xe9").unwrap();
    assert!(refused(&folder, &format!("--config {}", path.display()))[0].contains("is not UTF-8 from byte 13 on"));
    assert!(refused(&folder, &format!("--config {}", folder.display()))[0].contains("cannot be read: Is a directory"));
    assert!(refused(&folder, "--config no/such.toml")[0].contains("no/such.toml: cannot be read: No such file"));
}

#[test]
fn bad_data() {
    let folder = folder("bad_data");
    let ids = |ids: &[u16]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    let cases: [(&str, Vec<u8>, &str); 6] = [
        ("empty.txt", vec![], "is empty"),
        ("empty.bin", vec![], "is empty"),
        ("short.txt", b"arma virumque cano".to_vec(), "fewer than one sample of model.seq_len + 1 = 129 tokens"),
        ("latin1.txt", b"caf\xe9 au lait".repeat(50), "is not UTF-8 from byte 3 on"),
        ("odd.bin", vec![1; 301], "has 301 bytes of ids, of 2 bytes each"),
        ("beyond.bin", ids(&[[7; 200], [300; 200]].concat()), "token 200 is 300, beyond model.vocab_size = 256"),
    ];
    for (name, bytes, problem) in cases {
        let path = folder.join(name);
        fs::write(&path, bytes).unwrap();
        let faults = refused(&folder, &format!("--data {}", path.display()));
        let start = format!("data.path = {path:?}: ");
        assert!(faults.len() == 1 && faults[0].starts_with(&start) && faults[0].contains(problem), "{faults:?}");
    }
    fs::create_dir(folder.join("nothing")).unwrap();
    assert!(refused(&folder, &format!("--data {}/nothing", folder.display()))[0].contains("holds no text"));
    refused_alone(
        "bad_data",
        &[
            ("--data no/such/file", "data.path = \"no/such/file\": does not exist; ", "use a UTF-8 text"),
            ("--set data.tokenizer=gtp2", "data.tokenizer = \"gtp2\": is neither", "bytes, gpt2 or the path"),
            (
                "--set validation.every=1 --set validation.fraction=0.001",
                "validation.fraction = 0.001: holds out 49 of 49068 tokens",
                "use a larger fraction",
            ),
        ],
    );
}

#[test]
#[cfg(feature = "tokenizers")]
fn a_tokenizer_that_does_not_fit() {
    refused_alone(
        "tokenizer",
        &[
            ("--set data.tokenizer=gpt2", "data.tokenizer = \"gpt2\": has 50257 ids", "use model.vocab_size = 50257"),
            ("--set data.tokenizer=Cargo.toml", "data.tokenizer = \"Cargo.toml\": is not a tokenizer.json", ""),
        ],
    );
}

#[test]
#[cfg(not(feature = "tokenizers"))]
fn a_tokenizer_that_this_build_lacks() {
    let how = "build it with --features tokenizers";
    refused_alone(
        "tokenizer",
        &[
            ("--set data.tokenizer=gpt2", "data.tokenizer = \"gpt2\": needs the feature tokenizers", how),
            ("--set data.tokenizer=Cargo.toml", "data.tokenizer = \"Cargo.toml\": needs the feature tokenizers", how),
        ],
    );
}

#[test]
fn metrics_that_cannot_be_written() {
    let folder = folder("unwritable");
    let text = folder.join("text.txt");
    fs::write(&text, "arma virumque cano ".repeat(50)).unwrap();
    let at = |path: &Path| path.display().to_string();
    let cases = [
        (at(&folder), "is a folder"),
        (at(&folder.join("no/such/run.jsonl")), "its folder does not exist"),
        (at(&text.join("run.jsonl")), "cannot be written"),
        // Found before a file is overwritten.
        (format!("{0} --data {0}", at(&text)), "would replace what data.path reads"),
        (format!("{} --data {}", at(&text), at(&folder)), "would replace what data.path reads"),
        ("Cargo.toml --config Cargo.toml".to_owned(), "would replace what --config reads"),
    ];
    for (line, problem) in cases {
        let ended = run(&format!("--metrics {line}"));
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{line}\n{}", ended.err);
        assert!(ended.err.contains("--metrics ") && ended.err.contains(problem), "{line}\n{}", ended.err);
    }
    assert!(fs::read_to_string(&text).unwrap().starts_with("arma"));
}

#[test]
fn old_metrics_survive_a_refusal() {
    let path = folder("old_metrics").join("run.jsonl");
    fs::write(&path, "an old run\n").unwrap();
    for line in ["--mesh dp=0", "--data no/such/file", "--set optimizer.lr=-1"] {
        assert_eq!(run(&format!("{line} --metrics {}", path.display())).code, Some(2));
        assert_eq!(fs::read_to_string(&path).unwrap(), "an old run\n", "{line}");
    }
}

#[test]
fn all_faults_come_at_once() {
    let folder = folder("all_faults");
    let path = folder.join("bad.toml");
    fs::write(&path, "[model]\nnum_heads = 3\nwidth = 1\n[optimizer]\nlr = -1\n[training]\ndtype = \"fp16\"\n")
        .unwrap();
    let flags = format!("--config {} --mesh dp=3 --data no/such/text --device gpu --step 3", path.display());
    let faults = refused(&folder, &flags);
    let keys: Vec<&str> = faults.iter().map(|fault| fault.split([':', ' ']).next().unwrap()).collect();
    let expected = [
        "--step",
        "model.width",
        "optimizer.lr",
        "training.dtype",
        "--device",
        "model.hidden_size",
        "training.global_batch_size",
        "data.path",
    ];
    assert_eq!(keys, expected, "{faults:#?}");
}

#[test]
fn a_timeline_that_cannot_be_written_or_would_replace_something() {
    let folder = folder("timeline_refused");
    let (config, metrics) = (folder.join("run.toml"), folder.join("run.jsonl"));
    fs::write(&config, "[training]\nsteps = 3\n").unwrap();
    let (config, metrics) = (config.display().to_string(), metrics.display().to_string());
    for (trace, more, problem) in [
        (folder.display().to_string(), String::new(), "is a folder"),
        ("no/such/folder/trace.json".to_owned(), String::new(), "its folder does not exist"),
        (config.clone(), format!("--config {config}"), "would replace what --config reads"),
        (metrics.clone(), format!("--metrics {metrics}"), "is the file of --metrics too"),
    ] {
        let ended = run(&format!("{more} --set metrics.profile=true --set metrics.trace={trace}"));
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{trace}");
        assert_eq!(ended.err.lines().count(), 1, "{trace}\n{}", ended.err);
        assert!(ended.err.contains("metrics.trace") && ended.err.contains(problem), "{trace}\n{}", ended.err);
    }
    assert_eq!(fs::read_to_string(&config).unwrap(), "[training]\nsteps = 3\n");
}

/// A build without GPUs says how to get one with them; a machine without them, where the driver was looked for.
#[test]
fn a_device_that_is_not_there() {
    let folder = folder("no_device");
    // A machine with a driver may have a GPU.
    let devices = ["cuda", "cuda:1"].into_iter().filter(|_| !Path::new("/dev/nvidiactl").exists());
    for device in devices {
        let faults = refused(&folder, &format!("--device {device} --steps 1"));
        let told = match cfg!(feature = "cuda") {
            false => format!("--device {device}: is not in this build; build with --features cuda, or use cpu"),
            true => format!("--device {device}: no CUDA driver found (looked for libcuda.so, libcuda.so.13, "),
        };
        assert!(faults.len() == 1 && faults[0].starts_with(&told), "{faults:#?}");
    }
    if !cfg!(feature = "emulator") {
        let faults = refused(&folder, "--device cuda-emulated --steps 1");
        let told = "--device cuda-emulated: is not in this build; build with --features emulator, or use cpu";
        assert_eq!(faults, [told]);
    }
}
