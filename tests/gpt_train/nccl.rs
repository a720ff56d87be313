//! Runs over cards of several processes: the emulated NCCL, joined over TCP and by each MPI that is installed; and the
//! stand-in for NVIDIA's libraries, whose NCCL joins the ranks of one process.

#[cfg(feature = "cuda")]
use crate::devices::StandIn;
use crate::devices::emulates;
use crate::processes::{STEPS, folder, installed, launched, numbers, over_tcp};
use crate::program::{SMALLER, UNSAMPLED, events, lines, succeed};
use meshwork_testkit::comm::processes::free_port;
use meshwork_testkit::{Sampled, sweeps};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Runs that line as processes whose ranks have an emulated card each, of four, and which meet over TCP; all must end
/// well.
#[track_caller]
fn trains(processes: usize, seed: usize, line: &str) {
    let ended = over_tcp(processes, &format!("--device cuda-emulated:{seed}:4 {line}"));
    for (rank, ended) in ended.iter().enumerate() {
        assert_eq!(ended.code, Some(0), "process {rank}, {line}\n{}\n{}", ended.out, ended.err);
    }
}

fn line(folder: &Path, name: &str, more: &str) -> String {
    format!("{SMALLER} {UNSAMPLED} {STEPS} {more} --metrics {}", folder.join(name).display())
}

/// Processes by plain variables, which `comm.kind = "auto"` joins over TCP; NCCL carries the elements.
#[test]
fn losses_over_nccl_are_those_of_one_rank_bit_for_bit() {
    if !emulates() {
        return;
    }
    let folder = folder("nccl");
    let experts = "--set moe.num_experts=4";
    // Of a sequence that cp cuts, gradients are sums of its blocks: with a method on one rank too.
    let cut = "--set parallelism.context_parallel_method=all_gather";
    for (name, settings) in
        [("dense", ""), ("cut", cut), ("experts", experts), ("experts_cut", &format!("{experts} {cut}"))]
    {
        succeed(&line(&folder, name, &format!("--mesh dp=1 {settings}")));
    }
    let always =
        [(2, "dp=2 --set training.replay_every=2"), (2, "tp=2"), (2, "pp=2 --set training.micro_batch_size=2")];
    let more = [
        (2, "dp=2,ep=2 --set moe.num_experts=4"),
        (4, "dp=2,tp=2"),
        (2, "cp=2 --set parallelism.context_parallel_method=all_to_all"),
        (2, "cp=2 --set parallelism.zero_stage=3"),
        (4, "dp=4 --set parallelism.zero_stage=3"),
        (4, "pp=2,tp=2 --set parallelism.sequence_parallel=true --set cuda.graphs=true"),
        (4, "dp=2,pp=2 --set parallelism.zero_stage=2 --set training.micro_batch_size=1"),
        (4, "dp=2,cp=2,ep=4 --set moe.num_experts=4"),
        (2, "dp=2,tp=2 --set comm.ranks_per_process=2"),
    ];
    for (at, (processes, settings)) in always.into_iter().chain(more.into_iter().sampled(9)).enumerate() {
        let name = at.to_string();
        trains(processes, at, &line(&folder, &name, &format!("--mesh {settings}")));
        let wanted = match (settings.contains(experts), settings.contains("cp=")) {
            (false, false) => "dense",
            (false, true) => "cut",
            (true, false) => "experts",
            (true, true) => "experts_cut",
        };
        assert_eq!(numbers(&folder.join(name)), numbers(&folder.join(wanted)), "{settings}");
    }
    fs::remove_dir_all(folder).unwrap();
}

/// The host of the first stage waits for the last one there, while this one's device waits for a message of the first.
#[test]
fn a_sample_over_stages_in_processes_is_that_of_one_rank() {
    if !emulates() {
        return;
    }
    let sample = |out: &str| out.split_once("A sample of the trained model:\n").map(|(_, text)| text.to_owned());
    let line = format!("{SMALLER} {STEPS} --set model.num_layers=4 --set metrics.sample_tokens=3");
    let wanted = sample(&succeed(&format!("{line} --mesh dp=1")));
    assert!(wanted.is_some());
    for (processes, mesh) in [(2, "pp=2"), (4, "pp=4")].into_iter().sampled(1) {
        let ended = over_tcp(processes, &format!("--device cuda-emulated:0:{processes} {line} --mesh {mesh}"));
        for (rank, ended) in ended.iter().enumerate() {
            assert_eq!(ended.code, Some(0), "process {rank}, {mesh}\n{}\n{}", ended.out, ended.err);
        }
        assert_eq!(sample(&ended[0].out), wanted, "{mesh}");
    }
}

/// A ring adds up in its own order: that of threads. In a sweep alone.
#[test]
fn rings_over_nccl_have_the_losses_of_threads_bit_for_bit() {
    if !sweeps() || !emulates() {
        return;
    }
    let folder = folder("nccl_rings");
    let rings = [
        (2, "cp=2 --set parallelism.context_parallel_method=ring"),
        (4, "cp=4 --set parallelism.context_parallel_method=hybrid --set parallelism.ring_degree=2"),
        (4, "cp=4,ep=2 --set moe.num_experts=4 --set parallelism.context_parallel_method=ring"),
    ];
    for (processes, settings) in rings {
        let line = |name: &str| line(&folder, name, &format!("--mesh {settings}")).replace("canonical", "fast");
        let device = format!("--device cuda-emulated:0:{processes}");
        let mut threads = crate::program::command(&format!("{device} {}", line("threads")));
        threads.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches"));
        assert!(threads.status().unwrap().success());
        trains(processes, 0, &line("processes"));
        assert_eq!(numbers(&folder.join("processes")), numbers(&folder.join("threads")), "{settings}");
    }
    fs::remove_dir_all(folder).unwrap();
}

/// In an order of its own, which is near; canonical numerics refuse it. Two processes on one card are refused: by NCCL,
/// and before they meet where the launcher says how many the host has.
#[test]
fn sums_of_nccl_train_and_one_card_for_two_processes_is_refused() {
    if !emulates() {
        return;
    }
    let folder = folder("nccl_native");
    let native = "--device cuda-emulated:0:2 --mesh dp=2 --set comm.reduction=native";
    let ended = over_tcp(2, &line(&folder, "native", native).replace("canonical", "fast"));
    assert!(ended.iter().all(|ended| ended.code == Some(0)), "{}", ended[0].err);
    assert!(ended[0].err.contains("NCCL adds up between processes"), "{}", ended[0].err);
    let ended = over_tcp(2, &line(&folder, "refused", native));
    assert!(ended[0].err.contains("comm.reduction = native: "), "{}", ended[0].err);
    let ended = over_tcp(2, &line(&folder, "shared", "--device cuda-emulated --mesh dp=2"));
    assert!(ended.iter().all(|ended| ended.code == Some(1)), "{ended:?}");
    let told = ended.iter().any(|ended| ended.err.contains("Duplicate GPU detected: rank "));
    assert!(told, "{}\n{}", ended[0].err, ended[1].err);
    fs::remove_dir_all(folder).unwrap();
}

/// MPI is the control group, NCCL carries the elements.
#[test]
fn losses_over_nccl_beside_mpi_are_those_of_one_rank_bit_for_bit() {
    if !emulates() {
        return;
    }
    let folder = folder("nccl_mpi");
    succeed(&line(&folder, "cpu", "--mesh dp=1"));
    for mpi in installed() {
        let name = mpi.file_name().unwrap().to_string_lossy().into_owned();
        for (processes, settings) in [(2, "dp=2"), (4, "pp=2,tp=2"), (2, "tp=2")].into_iter().sampled(3) {
            let more = format!("--device cuda-emulated:1:{processes} --mesh {settings}");
            let ended = launched(&mpi, processes, &line(&folder, &name, &more));
            assert_eq!(ended.code, Some(0), "{name} {settings}\n{}\n{}", ended.out, ended.err);
            assert!(ended.out.contains(" on 1 host by ") && ended.out.contains("MPI: "), "{}", ended.out);
            assert_eq!(numbers(&folder.join(&name)), numbers(&folder.join("cpu")), "{name} {settings}");
        }
    }
    fs::remove_dir_all(folder).unwrap();
}

/// Saved by two processes, resumed by one, and by two on another mesh.
#[test]
fn a_run_over_nccl_is_saved_and_goes_on_from_mesh_to_mesh() {
    if !emulates() {
        return;
    }
    let folder = folder("nccl_saved");
    let numerics = "--set training.numerics=canonical --set model.dropout=0.1";
    let alone = folder.join("alone");
    succeed(&format!("{SMALLER} {UNSAMPLED} {numerics} --steps 3 --metrics {}", alone.display()));
    let (saved, metrics) = (folder.join("saved"), folder.join("metrics"));
    for (processes, mesh, steps) in [(2, "dp=2 --set parallelism.zero_stage=3", 1), (1, "dp=1", 2), (2, "tp=2", 3)] {
        let more = format!("{numerics} --mesh {mesh} --steps {steps} --set checkpoint.resume=true");
        let files = format!("--set checkpoint.dir={} --metrics {}", saved.display(), metrics.display());
        trains(processes, steps, &format!("{SMALLER} {UNSAMPLED} {more} {files}"));
    }
    assert_eq!(numbers(&metrics), numbers(&alone));
    let resumed = lines(&metrics);
    let resumed: Vec<_> = events(&resumed, "start").iter().map(|start| start["resumed"].as_u64()).collect();
    assert_eq!(resumed, [None, Some(1), Some(2)]);
    fs::remove_dir_all(folder).unwrap();
}

/// The bytes of each group a step and rank in a report of `--steps 0`, each with the half of its last digit.
fn predicted(report: &str) -> BTreeMap<String, (f64, f64)> {
    let parts: Vec<&str> = report.lines().filter_map(|line| line.trim_start().strip_prefix("communication ")).collect();
    let mut bytes = BTreeMap::<_, (f64, f64)>::new();
    for part in parts.iter().flat_map(|part| part.trim().split(';')) {
        let words: Vec<&str> = part.split_whitespace().collect();
        let [group, count, unit, "in", ..] = words[..] else { panic!("{part}") };
        let unit = 1024_f64.powi(["B", "KiB", "MiB"].iter().position(|known| *known == unit).unwrap() as i32);
        let sum = bytes.entry(group.to_owned()).or_default();
        sum.0 += count.parse::<f64>().unwrap() * unit / parts.len() as f64;
        sum.1 = 0.06 * unit;
    }
    bytes
}

/// What `--steps 0` says of the communication is what processes measure.
#[test]
fn communication_over_nccl_is_as_predicted() {
    if !emulates() {
        return;
    }
    let folder = folder("nccl_predicted");
    let meshes = [(2, "dp=2 --set parallelism.zero_stage=3"), (2, "pp=2"), (4, "dp=2,tp=2")];
    for (processes, mesh) in meshes.into_iter().sampled(3) {
        let line = |steps: usize| {
            let metrics = folder.join("metrics");
            _ = fs::remove_file(&metrics);
            format!("{SMALLER} {UNSAMPLED} --mesh {mesh} --steps {steps} --metrics {}", metrics.display())
        };
        let reports = over_tcp(processes, &format!("--device cuda-emulated:0:{processes} {}", line(0)));
        let wanted = predicted(&reports[0].out);
        trains(processes, 0, &line(2));
        let metrics = lines(&folder.join("metrics"));
        for step in events(&metrics, "step") {
            let measured = step["comm_bytes"].as_object().unwrap();
            for (group, bytes) in measured {
                let (wanted, near) = wanted.get(group).copied().unwrap_or_default();
                assert!((bytes.as_f64().unwrap() - wanted).abs() <= near, "{mesh}: {group} {bytes}, {wanted}");
            }
            assert!(measured.values().any(|bytes| bytes.as_u64() > Some(0)), "{step}");
        }
        let (start, end) = (events(&metrics, "start")[0], events(&metrics, "end")[0]);
        assert_eq!(start["memory_predicted"], end["memory_measured"], "{mesh}");
    }
    fs::remove_dir_all(folder).unwrap();
}

/// The ranks of a process join by the library itself; one that is missing or too old is told by each process, which
/// waits for no other one.
#[cfg(feature = "cuda")]
#[test]
fn a_missing_or_old_nccl_is_told_by_each_process_before_they_meet() {
    if !emulates() {
        return;
    }
    let (bare, whole) = (crate::program::folder("nccl_bare"), crate::program::folder("nccl_whole"));
    let (bare, whole) = (StandIn::new(&bare, &[]), StandIn::new(&whole, &["libnccl.so.2"]));
    let folder = folder("nccl_library");
    let run = |on: &StandIn, [rank, processes]: [usize; 2], more: &str, settings: &[(&str, &str)]| {
        let mut command = on.command(&line(&folder, "gpus", &format!("--device cuda --mesh dp=2 {more}")));
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", processes.to_string());
        command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", free_port().to_string());
        command.env("VIRTUAL_ENV", "").env("CONDA_PREFIX", "").envs(settings.iter().copied());
        crate::program::Running::start(command).end()
    };
    for rank in [0, 1] {
        let missing = run(&bare, [rank, 2], "", &[]);
        let old = run(&whole, [rank, 2], "", &[("STAND_IN_NCCL", "21705")]);
        let mut told =
            vec![(old, "--device cuda: libnccl.so.2 is NCCL 2.17.5, and NCCL 2.18.0 or newer is needed: install ")];
        if std::path::Path::new("/usr/lib/x86_64-linux-gnu/libnccl.so.2").exists() {
            eprintln!("left out: this machine has the library itself");
        } else {
            told.push((
                missing,
                "--device cuda: no NCCL found, which connects GPUs of several processes (looked for libnccl.so.2, ",
            ));
        }
        for (ended, text) in told {
            assert_eq!((ended.code, &*ended.out), (Some(2), ""), "{}", ended.err);
            assert!(ended.err.contains(text) && ended.err.contains("nvidia-nccl-cu12"), "{}", ended.err);
        }
    }
    succeed(&line(&folder, "cpu", "--mesh dp=1"));
    let together = "--set comm.kind=tcp --set comm.ranks_per_process=2";
    let ended = run(&whole, [0, 1], together, &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_eq!(numbers(&folder.join("gpus")), numbers(&folder.join("cpu")));
    let few = run(&whole, [0, 1], together, &[("STAND_IN_DEVICES", "1")]);
    let told = "--device cuda: 1 GPU for 2 ranks of a process, and NCCL, which connects them, refuses two on one";
    assert!(few.code == Some(2) && few.err.contains(told), "{}", few.err);
    fs::remove_dir_all(folder).unwrap();
}
