//! Runs over processes, by each MPI that `scripts/install_mpi.sh target/mpi` has installed; without any, these tests
//! pass with a message. Also launches that are refused before any MPI is needed.

use crate::program::{Ended, Running, SMALL, UNSAMPLED, command, path, succeed};
use meshwork_testkit::Sampled;
use meshwork_testkit::comm::processes::free_port;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub const STEPS: &str = "--steps 3 --set training.numerics=canonical";

/// The folders of the libraries that are installed.
pub fn installed() -> Vec<PathBuf> {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/mpi");
    let all: Vec<PathBuf> = ["mpich", "openmpi"]
        .map(|name| target.join(name))
        .into_iter()
        .filter(|mpi| mpi.join("bin/mpirun").exists())
        .collect();
    if all.is_empty() {
        eprintln!("no MPI in {}: scripts/install_mpi.sh installs two, and nothing was tested here", target.display());
    }
    all
}

/// `mpirun -n processes gpt_train ..` of the library in this folder.
pub fn launched(mpi: &Path, processes: usize, line: &str) -> Ended {
    Running::start(mpirun(mpi, processes, &path(), line)).end()
}

fn mpirun(mpi: &Path, processes: usize, program: &Path, line: &str) -> Command {
    let mut command = Command::new(mpi.join("bin/mpirun"));
    if mpi.ends_with("openmpi") {
        command.args(["--oversubscribe", "--bind-to", "none"]);
    }
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OPAL_PREFIX", mpi)
        .env("LD_LIBRARY_PATH", mpi.join("lib"))
        .env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches"));
    // Open MPI gives ranks a terminal, on which they would draw a bar.
    command
        .env("TERM", "dumb")
        .args(["-n", &processes.to_string()])
        .arg(program)
        .args(line.split_whitespace())
        .stdin(Stdio::null());
    command
}

/// A folder of its own.
pub fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("meshwork-{name}-{}", std::process::id()));
    _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// Loss and norm of each step, as they are written.
pub fn numbers(metrics: &Path) -> Vec<String> {
    let events = fs::read_to_string(metrics).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    events
        .filter(|event| event["event"] == "step")
        .map(|step| format!("{} {}", step["loss"], step["grad_norm"]))
        .collect()
}

#[test]
fn losses_over_processes_are_those_of_threads_bit_for_bit() {
    let folder = folder("processes");
    for (at, (processes, settings)) in [
        (2, "--mesh dp=2"),
        (2, "--mesh tp=2"),
        (2, "--mesh pp=2"),
        (4, "--mesh dp=2,tp=2 --set training.replay_every=2"),
        (2, "--mesh dp=2 --set parallelism.zero_stage=3"),
        (2, "--mesh dp=2,ep=2 --set moe.num_experts=4"),
        (2, "--mesh cp=2 --set parallelism.zero_stage=3"),
        (2, "--mesh cp=2 --set parallelism.context_parallel_method=all_to_all"),
        (4, "--mesh dp=2,cp=2,ep=4 --set moe.num_experts=4"),
        (4, "--mesh cp=4,ep=2 --set moe.num_experts=4 --set parallelism.context_parallel_method=ring"),
        (4, "--mesh cp=4 --set parallelism.context_parallel_method=hybrid --set parallelism.ring_degree=2"),
        (2, "--mesh dp=2,tp=2 --set comm.ranks_per_process=2"),
    ]
    .into_iter()
    .enumerate()
    {
        let metrics = |name: &str| folder.join(format!("{at}-{name}"));
        // In canonical numerics nothing goes round.
        let rings = ["ring", "hybrid"].iter().any(|method| settings.contains(&format!("method={method}")));
        let steps = if rings { STEPS.replace("canonical", "fast") } else { STEPS.to_owned() };
        let line = |name: &str| format!("{SMALL} {UNSAMPLED} {steps} {settings} --metrics {}", metrics(name).display());
        let wanted = metrics("threads");
        succeed(&line("threads").replace("--set comm.ranks_per_process=2", ""));
        let wanted = numbers(&wanted);
        assert_eq!(wanted.len(), 3);
        // Each mesh over one of two libraries, in a sweep over both.
        for mpi in installed().into_iter().sampled_in_turn(2, at) {
            let name = mpi.file_name().unwrap().to_string_lossy().into_owned();
            let ended = launched(&mpi, processes, &format!("{} --set comm.kind=mpi", line(&name)));
            assert_eq!(ended.code, Some(0), "{name} {settings}\n{}\n{}", ended.out, ended.err);
            assert_eq!(numbers(&metrics(&name)), wanted, "{name} {settings}");
            let told = format!("{processes} processes on 1 host by ");
            assert!(ended.out.contains(&told) && ended.out.contains("MPI: "), "{}", ended.out);
            assert_eq!(ended.out.matches("step 1").count(), 1, "one progress: {}", ended.out);
        }
    }
    fs::remove_dir_all(folder).unwrap();
}

/// `processes` processes of `gpt_train ..` by plain variables, which meet over TCP, without MPI.
pub fn over_tcp(processes: usize, line: &str) -> Vec<Ended> {
    let port = free_port().to_string();
    let start = |rank: usize| {
        let mut command = Command::new(path());
        command.args(line.split_whitespace()).stdin(Stdio::null()).env("TERM", "dumb");
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", processes.to_string());
        command.env("MASTER_ADDR", "localhost").env("MASTER_PORT", &port);
        command.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches"));
        Running::start(command)
    };
    let all: Vec<Running> = (0..processes).map(start).collect();
    all.into_iter().map(Running::end).collect()
}

#[test]
fn losses_over_tcp_are_those_of_threads_bit_for_bit() {
    let folder = folder("tcp");
    for (at, (processes, settings)) in [
        (2, "--mesh dp=2 --set parallelism.zero_stage=3"),
        (2, "--mesh pp=2,tp=2 --set comm.ranks_per_process=2"),
        (4, "--mesh dp=2,tp=2"),
    ]
    .into_iter()
    .enumerate()
    {
        let metrics = |name: &str| folder.join(format!("{at}-{name}"));
        let line = |name: &str| format!("{SMALL} {UNSAMPLED} {STEPS} {settings} --metrics {}", metrics(name).display());
        succeed(&line("threads").replace("--set comm.ranks_per_process=2", ""));
        let ended = over_tcp(processes, &format!("{} --set comm.kind=tcp", line("tcp")));
        for (rank, ended) in ended.iter().enumerate() {
            assert_eq!(ended.code, Some(0), "process {rank}, {settings}\n{}\n{}", ended.out, ended.err);
        }
        assert_eq!(numbers(&metrics("tcp")), numbers(&metrics("threads")), "{settings}");
        assert_eq!(numbers(&metrics("tcp")).len(), 3);
        assert!(ended[0].out.contains(&format!("TCP: {processes} processes")), "{}", ended[0].out);
    }
    fs::remove_dir_all(folder).unwrap();
}

/// Four processes, then three of them, of which one is spare, then four again.
#[test]
fn a_mesh_shrinks_to_the_ranks_that_are_left_and_grows_again_with_the_same_losses() {
    let folder = folder("elastic");
    let line = format!("{SMALL} {UNSAMPLED} --mesh dp=2,tp=2 --set training.numerics=canonical");
    let whole = folder.join("whole");
    succeed(&format!("{line} --steps 6 --metrics {}", whole.display()));
    for mpi in installed() {
        let name = mpi.file_name().unwrap().to_string_lossy().into_owned();
        let (saved, metrics) = (folder.join(format!("{name}-saved")), folder.join(&name));
        let line = format!(
            "{line} --set parallelism.elastic=dp --set comm.kind=mpi --set checkpoint.dir={} --set checkpoint.resume=true \
             --metrics {}",
            saved.display(),
            metrics.display()
        );
        for (processes, steps) in [(4, 2), (3, 4), (4, 6)] {
            let ended = launched(&mpi, processes, &format!("{line} --steps {steps}"));
            assert_eq!(ended.code, Some(0), "{name} {processes}\n{}\n{}", ended.out, ended.err);
            let shrunk = ended.err.contains(
                "3 ranks for a mesh of 4: parallelism.elastic trains on dp=1 instead of 2, and 1 rank is spare",
            );
            assert_eq!(shrunk, processes == 3, "{}", ended.err);
        }
        assert_eq!(numbers(&metrics), numbers(&whole), "{name}");
    }
    fs::remove_dir_all(folder).unwrap();
}

/// A program of one's own, without a configuration: each of two processes has four of the eight ranks.
#[test]
fn a_model_of_ones_own_trains_over_processes() {
    let program = path().with_file_name("custom_model");
    for mpi in installed().into_iter().sampled_in_turn(2, 1) {
        let ended = Running::start(mpirun(&mpi, 2, &program, "")).end();
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        assert_eq!(ended.out.matches("step  50  loss ").count(), 1, "{}", ended.out);
        let ended = Running::start(mpirun(&mpi, 3, &program, "")).end();
        assert!(
            ended.code.is_some_and(|code| code != 0)
                && ended.err.contains("started 3 processes, and a mesh of 8 ranks"),
            "{}",
            ended.err
        );
    }
}

/// The digits over two processes, with one output; the study of one rank is refused.
#[test]
fn other_programs_train_over_processes_or_say_that_they_do_not() {
    for mpi in installed() {
        let digits = path().with_file_name("digits");
        let of_two = Running::start(mpirun(&mpi, 2, &digits, "--epochs 1 --pp 1 --dp 2")).end();
        assert_eq!(of_two.code, Some(0), "{}", of_two.err);
        assert_eq!(of_two.out.matches("epoch  1 | loss ").count(), 1, "{}", of_two.out);
        let study = path().with_file_name("compression_study");
        let ended = Running::start(mpirun(&mpi, 2, &study, "--quick")).end();
        assert_eq!(ended.code, Some(2), "{}", ended.out);
        assert!(ended.err.contains("runs in one process, and this one is rank "), "{}", ended.err);
    }
}

/// Two meshes compared over processes: what one process says of them, a fault that another process injects, a launch
/// that fits neither mesh, and settings that differ between processes.
#[test]
fn two_meshes_are_compared_over_processes() {
    const TINY: &str = "--set model.hidden_size=16 --set model.num_layers=2 --set model.seq_len=16 \
         --set training.global_batch_size=8 --steps 2 --numerics canonical";
    let [mesh_diff, digits] = ["mesh_diff", "digits"].map(|name| path().with_file_name(name));
    let alone = |program: &Path, line: &str| {
        let mut command = Command::new(program);
        command.args(line.split_whitespace()).stdin(Stdio::null());
        Running::start(command).end()
    };
    for mpi in installed() {
        let told = |ended: Ended, code: i32| {
            assert_eq!(ended.code, Some(code), "{}{}", ended.out, ended.err);
            ended.out
        };
        // The smaller mesh first, the smaller second, two of one size, and a fault on a stage that rank 0 does not
        // have.
        let smaller = "--mesh dp=1 --mesh dp=2,pp=2";
        for (line, processes, code) in [
            (smaller, 4, 0),
            ("--mesh tp=2,pp=2 --mesh cp=2", 2, 0),
            ("--mesh dp=4 --mesh dp=2,tp=2 --set-b pipeline.num_microbatches=2", 4, 0),
            (&format!("{smaller} --break vocab_parallel_cross_entropy"), 2, 1),
        ] {
            let line = format!("{line} {TINY} --set comm.ranks_per_process={}", 4 / processes);
            let whole = told(alone(&mesh_diff, &line), code);
            let result = ["\nidentical: 2 steps, ", "\nthe first divergence: "][code as usize];
            assert!(whole.contains(result), "{whole}");
            assert_eq!(told(Running::start(mpirun(&mpi, processes, &mesh_diff, &line)).end(), code), whole, "{line}");
        }
        let ended = Running::start(mpirun(&mpi, 3, &mesh_diff, &format!("{smaller} {TINY}"))).end();
        assert_ne!(ended.code, Some(0), "{}", ended.out);
        let refused = ["tp=1,dp=2,pp=2: has 4 ranks, and ", "started 3 processes"];
        assert!(refused.iter().all(|words| ended.err.contains(words)), "{}", ended.err);
        let mut both = mpirun(&mpi, 2, &mesh_diff, &format!("{smaller} {TINY}"));
        both.args([":", "-n", "2"])
            .arg(&mesh_diff)
            .args(format!("{smaller} {TINY} --set-b optimizer.lr=1").split_whitespace());
        let ended = Running::start(both).end();
        assert_ne!(ended.code, Some(0), "{}", ended.out);
        assert!(ended.err.contains("optimizer.lr: 0.0003 on ranks 0, 1 "), "{}", ended.err);
        let whole = told(alone(&digits, "--compare dp=2 --pp 1"), 0);
        assert_eq!(told(Running::start(mpirun(&mpi, 2, &digits, "--compare dp=2 --pp 1")).end(), 0), whole);
    }
}

/// The library of one MPI, and the launcher of the other. (MPICH's library under `mpirun` of Open MPI ends the process
/// by itself, with a message of its own.)
#[test]
fn processes_that_met_as_several_worlds_are_refused() {
    let all = installed();
    let [mpich, open_mpi] = &all[..] else { return };
    for (launcher, library) in [(mpich, open_mpi.join("lib/libmpi.so.40")), (open_mpi, mpich.join("lib/libmpi.so.12"))]
    {
        let line = format!("{SMALL} {UNSAMPLED} {STEPS} --mesh dp=2 --set comm.library={}", library.display());
        let ended = launched(launcher, 2, &line);
        assert!(ended.code.is_some_and(|code| code != 0), "{}", ended.out);
        assert!(!ended.out.contains("step 1"), "nothing was trained: {}", ended.out);
        if launcher == mpich {
            let told = "mpiexec started 2 processes, and this one met a world of 1 by Open MPI ";
            assert!(
                ended.err.contains(told) && ended.err.contains("the library is not that of this mpiexec"),
                "{}",
                ended.err
            );
        }
    }
}

/// Two hosts with programs of other builds.
#[test]
fn another_build_of_the_program_is_told_before_the_first_step() {
    let folder = folder("build");
    let other = folder.join("gpt_train");
    let mut bytes = fs::read(path()).unwrap();
    bytes.extend_from_slice(b"another build"); // behind what is loaded
    fs::write(&other, bytes).unwrap();
    fs::set_permissions(&other, fs::metadata(path()).unwrap().permissions()).unwrap();
    for mpi in installed() {
        let line = format!(
            "{SMALL} {UNSAMPLED} {STEPS} --mesh dp=3 --set training.global_batch_size=6 --set training.numerics=fast"
        );
        let mut both = mpirun(&mpi, 2, &path(), &line);
        both.args([":", "-n", "1"]).arg(&other).args(line.split_whitespace());
        let ended = Running::start(both).end();
        assert_eq!(ended.code, Some(1), "{}", ended.err);
        let told = "rank 2 on host ";
        assert!(
            ended.err.contains(told) && ended.err.contains(": the build of the program, by hash, "),
            "{}",
            ended.err
        );
        assert_eq!(ended.err.matches("error: a world of ").count(), 1, "one report: {}", ended.err);
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_launch_that_cannot_be_joined_is_bad_input() {
    for (variables, settings, message) in [
        (&[("RANK", "1"), ("WORLD_SIZE", "2")][..], "--mesh dp=2", "gpt_train --mesh dp=2"),
        (
            &[("PMI_RANK", "0"), ("PMI_SIZE", "2")],
            "--mesh dp=4",
            "has 4 ranks, and mpiexec started 2 processes; use a mesh of 2 ranks",
        ),
        (
            &[("PMI_RANK", "x"), ("PMI_SIZE", "2")],
            "--mesh dp=2",
            "PMI_RANK = \"x\", which mpiexec sets, is not a whole number",
        ),
        (&[], "--mesh dp=2 --set comm.kind=mpi", "no launcher has started this process"),
        (
            &[("PMI_RANK", "0"), ("PMI_SIZE", "2")],
            "--mesh dp=2 --set comm.library=/nowhere/libmpi.so.12",
            "comm.kind: /nowhere/libmpi.so.12: cannot open shared object file: No such file or directory",
        ),
        // On the second of two hosts alone: rank 0 does not know it.
        (
            &[("PMI_RANK", "1"), ("PMI_SIZE", "2")],
            "--mesh dp=2 --set comm.library=/nowhere/libmpi.so.12",
            "rank 1 of 2 by mpiexec cannot join the others: comm.kind: /nowhere/libmpi.so.12: cannot open shared object",
        ),
    ] {
        let mut command = command(settings);
        command.envs(variables.iter().copied());
        let ended = Running::start(command).end();
        assert_eq!(ended.code, Some(2), "{}", ended.err);
        assert!(ended.err.contains(message), "{}", ended.err);
    }
}

/// Of several processes the one with rank 0 reports, without any MPI.
#[test]
fn a_report_before_training_comes_from_rank_0() {
    for flags in ["--steps 0", "--plan-memory"] {
        let of = |rank: &str| {
            let mut command = command(&format!("{SMALL} --mesh dp=2 {flags}"));
            command.envs([("PMI_RANK", rank), ("PMI_SIZE", "2")]);
            let ended = Running::start(command).end();
            assert_eq!((ended.code, &*ended.err), (Some(0), ""));
            ended.out
        };
        assert!(!of("0").is_empty() && of("1").is_empty(), "{flags}");
    }
}
