//! Runs on the emulated CUDA device.

use crate::program::{Running, SMALLER, UNSAMPLED, command, events, folder, lines, numbers};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
#[cfg(feature = "cuda")]
use std::process::Command;
#[cfg(feature = "cuda")]
use std::sync::OnceLock;

const CANONICAL: &str = "--set training.numerics=canonical --set model.dropout=0.1";

/// Whether there is g++ for the kernels; says so if not.
pub fn emulates() -> bool {
    let found = std::process::Command::new("g++").arg("--version").output().is_ok() && cfg!(target_arch = "x86_64");
    if !found {
        eprintln!("left out: there is no g++, or this is not x86-64");
    }
    found
}

/// Runs the program, whose kernels for the host are kept among the files of the tests. Its exit code, standard output
/// and standard error.
pub fn run(line: &str) -> (Option<i32>, String, String) {
    let mut command = command(line);
    command.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches"));
    let ended = Running::start(command).end();
    (ended.code, ended.out, ended.err)
}

/// The metrics of a run on `device`.
pub fn metrics(folder: &Path, device: &str, line: &str) -> Vec<Value> {
    let path = folder.join("metrics.jsonl");
    let line = format!("{SMALLER} {line} {UNSAMPLED} --device {device} --metrics {}", path.display());
    let (code, out, err) = run(&line);
    assert_eq!((code, &*err), (Some(0), ""), "{line}\n{out}");
    lines(&path)
}

pub fn numbers_of(run: &[Value]) -> Vec<[f64; 2]> {
    numbers(run, "step", "loss").into_iter().zip(numbers(run, "step", "grad_norm")).map(|(a, b)| [a, b]).collect()
}

#[test]
fn every_rank_has_an_emulated_device_with_the_cpus_numbers_and_the_predicted_memory() {
    if !emulates() {
        return;
    }
    let (folder, more) = (folder("emulated"), format!("{CANONICAL} --steps 3"));
    let want = numbers_of(&metrics(&folder, "cpu", &more));
    for (mesh, device) in [("dp=1", "cuda-emulated"), ("dp=2,tp=2,pp=2", "cuda-emulated:7:2")] {
        let run = metrics(&folder, device, &format!("{more} --mesh {mesh}"));
        assert_eq!(numbers_of(&run), want, "{mesh}");
        let (start, end) = (events(&run, "start")[0], events(&run, "end")[0]);
        assert_eq!(start["config"]["device"], device);
        assert_eq!(start["memory_predicted"], end["memory_measured"], "{mesh}");
    }
    // With the library's products near them.
    let run = numbers_of(&metrics(&folder, "cuda-emulated", "--steps 3"));
    let cpu = numbers_of(&metrics(&folder, "cpu", "--steps 3"));
    let near = |(a, b): (&f64, &f64)| (a / b - 1.0).abs() < 1e-5;
    assert!(run.as_flattened().iter().zip(cpu.as_flattened()).all(near), "{run:?} and {cpu:?}");
    let halves = "--steps 3 --set training.dtype=bf16 --set training.matmul_dtype=bf16";
    let run = numbers_of(&metrics(&folder, "cuda-emulated", halves));
    let cpu = numbers_of(&metrics(&folder, "cpu", halves));
    let near = |(a, b): (&f64, &f64)| (a / b - 1.0).abs() < 1e-2;
    assert!(run != cpu && run.as_flattened().iter().zip(cpu.as_flattened()).all(near), "{run:?} and {cpu:?}");
}

/// Products of experts on tensor cores, with weights and activations in bf16: numbers near the CPU's on meshes, and the
/// predicted memory.
#[test]
fn experts_in_bf16_are_near_the_cpus() {
    if !emulates() {
        return;
    }
    let folder = folder("experts_in_bf16");
    let halves = "--steps 2 --set training.dtype=bf16 --set moe.num_experts=4 --set moe.top_k=2";
    let cpu = numbers_of(&metrics(&folder, "cpu", halves));
    for mesh in ["dp=1", "dp=2,ep=2", "dp=2,ep=2,tp=2", "pp=2"] {
        let run = metrics(&folder, "cuda-emulated:3", &format!("{halves} --mesh {mesh}"));
        let found = numbers_of(&run);
        let near = |(a, b): (&f64, &f64)| (a / b - 1.0).abs() < 1e-2;
        assert!(found.as_flattened().iter().zip(cpu.as_flattened()).all(near), "{mesh}: {found:?} and {cpu:?}");
        // Over `ep` what a rank is sent depends on the choices; the prediction assumes even ones.
        if !mesh.contains("ep") {
            let (start, end) = (events(&run, "start")[0], events(&run, "end")[0]);
            assert_eq!(start["memory_predicted"], end["memory_measured"], "{mesh}");
        }
    }
}

#[test]
fn a_checkpoint_goes_from_device_to_device() {
    if !emulates() {
        return;
    }
    let want = numbers_of(&metrics(&folder("devices_alone"), "cpu", &format!("{CANONICAL} --steps 4")));
    for (name, first, second) in [("to_cuda", "cpu", "cuda-emulated"), ("from_cuda", "cuda-emulated:3", "cpu")] {
        let folder = folder(name);
        let run: PathBuf = folder.join("run");
        let more = format!("{CANONICAL} --set checkpoint.dir={}", run.display());
        metrics(&folder, first, &format!("{more} --steps 2"));
        let found = metrics(&folder, second, &format!("{more} --mesh tp=2 --steps 4 --set checkpoint.resume=true"));
        assert_eq!(numbers_of(&found), want, "{first} and {second}");
    }
}

/// A trained model continues a text on the device, with a cache of keys and values there.
#[test]
fn the_device_writes_the_text_of_the_cpu() {
    if !emulates() {
        return;
    }
    for kind in ["gpt2", "llama"] {
        let folder = folder(&format!("writes_{kind}"));
        let model = folder.join("model").display().to_string();
        let more = format!("--set model.kind={kind} --set model.num_heads=4 --set checkpoint.dir={model}");
        metrics(&folder, "cpu", &format!("{more} --steps 2"));
        let written = |device: &str| {
            let mut command = std::process::Command::new(crate::program::path().with_file_name("generate"));
            let line = format!("--model {model} --prompt ab --tokens 40 --temperature 1.5 --device {device}");
            command.args(line.split_whitespace()).args(["--set", "training.numerics=canonical"]);
            command.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches"));
            let ended = command.output().unwrap_or_else(|error| panic!("the example generate: {error}"));
            assert!(ended.status.success(), "{device}: {}", String::from_utf8_lossy(&ended.stderr));
            ended.stdout
        };
        let text = written("cpu");
        assert!(text.len() > 20, "{text:?}");
        assert_eq!(written("cuda-emulated"), text, "{kind}");
        assert_eq!(written("cuda-emulated:5 --mesh tp=2"), text, "{kind} on two ranks");
    }
}

#[test]
fn a_profile_of_a_device_has_its_own_ceilings() {
    if !emulates() {
        return;
    }
    let folder = folder("profiled_device");
    let trace = folder.join("trace.json").display().to_string();
    let line =
        format!("--steps 2 --set metrics.profile=true --set metrics.profile_steps=1 --set metrics.trace={trace}");
    let (code, out, err) = run(&format!("--device cuda-emulated {SMALLER} {line}"));
    assert_eq!(code, Some(0), "{err}");
    let found = |what| out.contains(what) || err.contains(what);
    assert!(found("GB/s (copy by the device)") && found("  causal_grad"), "{out}{err}");
}

/// What a configuration asks for runs on the device, or is refused before the first step by a message that names it.
#[test]
fn what_the_device_has_runs_and_what_it_lacks_is_told_before_the_first_step() {
    if !emulates() {
        return;
    }
    let folder = folder("lacking");
    let offload = format!("memory.offload=all --set memory.offload_dir={}", folder.display());
    for setting in [
        "optimizer.name=lamb",
        "optimizer.name=adafactor",
        "optimizer.name=muon",
        "optimizer.name=adam8bit",
        "memory.saved_encoding=sparse --set model.dropout=0.1",
        &offload,
    ] {
        let line = format!("--mesh pp=2 --steps 2 --set training.numerics=canonical --set {setting}");
        let run = metrics(&folder, "cuda-emulated", &line);
        assert_eq!(numbers_of(&run), numbers_of(&metrics(&folder, "cpu", &line)), "{setting}");
    }
    // Without a folder, to the host's memory.
    let (line, in_memory) =
        ("--mesh dp=2,pp=2 --steps 2 --set training.numerics=canonical", "--set memory.offload=all");
    let offloaded = metrics(&folder, "cuda-emulated", &format!("{line} {in_memory}"));
    assert_eq!(numbers_of(&offloaded), numbers_of(&metrics(&folder, "cpu", line)));
    let (start, end) = (events(&offloaded, "start")[0], events(&offloaded, "end")[0]);
    assert_eq!(start["memory_predicted"], end["memory_measured"]);
    for step in events(&offloaded, "step") {
        let moved = &step["offload"];
        assert!(moved["read"].as_f64() > Some(0.0) && moved["wait_ms"].as_f64() == Some(0.0), "{step}");
    }

    let path = folder.join("refused.jsonl");
    let long = "--set model.hidden_size=528 --set model.num_heads=2 --set model.num_layers=2 --set model.seq_len=8";
    let (code, out, err) = run(&format!("{long} --steps 1 --metrics {} --device cuda-emulated", path.display()));
    assert_eq!((code, &*out), (Some(2), ""), "{err}");
    assert!(err.contains("attention of heads above 256: device cuda-emulated has no kernel for f32"), "{err}");
    assert!(!fs::read_to_string(&path).unwrap_or_default().contains("step"));
}

/// The stand-in for NVIDIA's libraries of `crates/cuda`: two GPUs that are none.
#[cfg(feature = "cuda")]
pub struct StandIn {
    folder: PathBuf,
    kernels: PathBuf,
}

#[cfg(feature = "cuda")]
impl StandIn {
    /// Its libraries in a folder, with `more` ones than the driver, the compiler and products.
    pub fn new(folder: &Path, more: &[&str]) -> Self {
        static COMPILED: OnceLock<PathBuf> = OnceLock::new();
        let compiled = COMPILED.get_or_init(|| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/cuda/tests/gpu/stand_in.cpp");
            let library = crate::program::folder("stand_in_compiled").join("stand_in.so");
            let mut compiler = Command::new("g++");
            compiler.args(["-std=c++17", "-O1", "-shared", "-fPIC"]).arg(source).arg("-o").arg(&library);
            assert!(compiler.arg("-ldl").status().unwrap().success());
            library
        });
        for library in ["libcuda.so", "libnvrtc.so", "libcublasLt.so"].iter().chain(more) {
            std::os::unix::fs::symlink(compiled, folder.join(library)).unwrap();
        }
        let host = Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches/meshwork/kernels");
        let kernels = meshwork_kernels::host::Host::new(&host).unwrap().path().to_owned();
        Self { folder: folder.to_owned(), kernels }
    }

    /// The program over it.
    pub fn command(&self, line: &str) -> Command {
        let mut command = command(line);
        command.env("LD_LIBRARY_PATH", &self.folder).env("XDG_CACHE_HOME", &self.folder);
        command.env("STAND_IN_KERNELS", &self.kernels).env("STAND_IN_REPORT", self.folder.join("report"));
        command
    }
}

/// Two GPUs that are none: `--device cuda` over the stand-in for NVIDIA's libraries of `crates/cuda`.
#[cfg(feature = "cuda")]
#[test]
fn ranks_share_the_gpus_of_a_machine() {
    if !emulates() {
        return;
    }
    let folder = folder("stand_in");
    let stand_in = StandIn::new(&folder, &[]);
    let start = |line: &str, settings: &[(&str, &str)]| {
        let mut command = stand_in.command(&format!("{line} {SMALLER} {UNSAMPLED}"));
        command.envs(settings.iter().copied());
        let ended = Running::start(command).end();
        (ended.code, ended.out, ended.err)
    };
    let run = |line: &str, settings: &[(&str, &str)]| start(&format!("{line} {CANONICAL}"), settings);
    let path = folder.join("metrics.jsonl");
    let want = numbers_of(&metrics(&folder, "cpu", &format!("{CANONICAL} --steps 2")));
    for (more, settings) in [("", &[][..]), ("--set memory.offload=all", &[("STAND_IN_PEERS", "0")])] {
        let line = format!("--steps 2 --device cuda --mesh dp=2,tp=2,pp=2 {more} --metrics {}", path.display());
        let (code, out, err) = run(&line, settings);
        assert_eq!((code, &*err), (Some(0), ""), "{out}");
        assert_eq!(numbers_of(&lines(&path)), want, "{more} {settings:?}");
    }
    let report = fs::read_to_string(folder.join("report")).unwrap();
    let left = "left: 0 allocations, 0 pinned, 0 events, 0 streams, 0 modules, 0 graphs, 0 queued, 0 communicators";
    let ends: Vec<&str> = report.lines().filter(|line| line.starts_with("left: ")).collect();
    assert!(!ends.is_empty() && ends.iter().all(|end| *end == left), "{report}");

    // The same as graphs; and where the driver captures none.
    let want = numbers_of(&metrics(&folder, "cpu", &format!("{CANONICAL} --steps 5")));
    for graphs in ["1", "0"] {
        let line =
            format!("--device cuda --mesh dp=2,pp=2 --steps 5 --set cuda.graphs=true --metrics {}", path.display());
        let (code, out, err) = run(&line, &[("STAND_IN_GRAPHS", graphs)]);
        assert_eq!((code, &*err), (Some(0), ""), "{out}");
        let found = lines(&path);
        assert_eq!(numbers_of(&found), want);
        let last = &events(&found, "end")[0]["launches"]["last_step"];
        let [launches, asked, refused] = ["launches", "asked", "refused"].map(|name| last[name].as_u64().unwrap());
        match graphs {
            "1" => assert!(3 * launches < asked && refused == 0, "{last}"),
            _ => assert!(launches == asked && 2 * refused > asked, "{last}"),
        }
    }
    let report = fs::read_to_string(folder.join("report")).unwrap();
    assert!(report.lines().filter(|line| line.starts_with("left: ")).all(|line| line == left), "{report}");

    // Products of experts run the form that has room: the usual one needs 144 KiB of shared memory, a variant 96. The
    // library has what is left.
    let experts = "--steps 1 --device cuda --set moe.num_experts=4 --set training.dtype=bf16";
    for (shared, form) in
        [("65536", None), ("101376", Some(".grouped_tensor_forward_bf16.stages=2")), ("232448", Some(""))]
    {
        fs::remove_file(folder.join("report")).unwrap();
        let (code, out, err) = start(experts, &[("STAND_IN_SHARED", shared)]);
        assert_eq!((code, &*err), (Some(0), ""), "{out}");
        let report = fs::read_to_string(folder.join("report")).unwrap();
        let compiled =
            |form: &str| report.lines().any(|line| line.starts_with(&format!("compiles grouped_tensor{form}.cu ")));
        for (other, of) in [("usual", ""), ("stages=2", ".grouped_tensor_forward_bf16.stages=2")] {
            assert_eq!(compiled(of), form == Some(of), "{shared}, {other}: {report}");
        }
    }

    let (code, out, err) = run("--steps 2 --device cuda:2", &[]);
    let told = "error: --device cuda:2: there is no GPU 2: this machine has 2, numbered from 0; use cpu\n";
    assert_eq!((code, &*out, &*err), (Some(2), "", told));
    let (code, _, err) = run("--steps 2 --device cuda:1", &[("STAND_IN_MEMORY", "300000")]);
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains("of its 300000 are in use by all ranks; this rank's buffers hold "), "{err}");
}
