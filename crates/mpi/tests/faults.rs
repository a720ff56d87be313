//! Processes that end without a word, or stand still: what the others are told, as far as the launcher lets them live,
//! and that nothing is left behind.

#![cfg(unix)]

mod launch;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, exit, id};
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use meshwork_core::{Buffer, ReduceOp, RunError};
use meshwork_mpi::{Library, Options, Reduction, Runtime};
use meshwork_testkit::comm::processes::free_port;

use launch::{Mpi, STANDARD, here, met, over_tcp, text};

/// Tells a process which signal one of them gets.
const SIGNAL: &str = "MESHWORK_TEST_SIGNAL";

const TIMEOUT: Duration = Duration::from_secs(3);

/// One job at a time: jobs whose processes are stopped leave files in shared memory, and jobs take each other's cores.
fn one_job() -> MutexGuard<'static, ()> {
    static ONE_JOB: Mutex<()> = Mutex::new(());
    ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends this process a signal.
fn signal(name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), id().to_string()]).status();
    assert!(sent.is_ok_and(|sent| sent.success()), "no signal was sent");
    std::thread::sleep(4 * TIMEOUT); // it takes effect when the system comes to it
}

/// In a process that a launcher started: a world of three in which a rank gets a signal, and what this rank is told.
fn signalled(mpi: &Mpi, name: &str, rank: usize) -> RunError {
    signalled_in(&mpi.start(patient()), name, rank)
}

fn patient() -> Options {
    Options { timeout: TIMEOUT, ..Options::default() }
}

fn signalled_in(runtime: &Runtime, name: &str, rank: usize) -> RunError {
    println!("process {}", id());
    let ended = runtime.world().run(|world| {
        world.barrier()?;
        if world.rank() == rank {
            signal(name);
        }
        world.barrier()
    });
    ended.unwrap_err()
}

/// The libraries whose launchers let other processes live: Open MPI has it from version 5 on.
fn tolerant() -> Vec<Mpi> {
    Mpi::installed().into_iter().filter(|mpi| mpi.is_open && !mpi.version.starts_with("Open MPI 4")).collect()
}

/// The processes that a run started, once all of them are gone.
#[track_caller]
fn gone(output: &Output) -> usize {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let ids: Vec<&str> = text.lines().filter_map(|line| line.split("process ").nth(1)).collect();
    let begun = Instant::now();
    while let Some(left) = ids.iter().find(|id| {
        let state = std::fs::read_to_string(Path::new("/proc").join(id.trim()).join("stat")).unwrap_or_default();
        !state.is_empty() && !state.contains(") Z ")
    }) {
        assert!(begun.elapsed() < Duration::from_secs(20), "process {left} is left: {text}");
        std::thread::sleep(Duration::from_millis(50));
    }
    ids.len()
}

/// Files in shared memory of the libraries.
fn shared_memory() -> BTreeSet<PathBuf> {
    let files = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    files
        .filter(|file| {
            ["mpich", "vader", "sm_segment"].iter().any(|of| file.file_name().to_string_lossy().contains(of))
        })
        .map(|file| file.path())
        .collect()
}

/// Whether a process that is alive has mapped a file, which then is not one of a job whose processes are gone.
fn is_mapped(file: &Path) -> bool {
    let file = file.to_string_lossy();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| std::fs::read_to_string(process.path().join("maps")).ok())
        .any(|it| it.contains(&*file))
}

/// Nothing is left in shared memory of a job that began when `before` was there, and whose processes are gone. The
/// launcher may take a moment to remove it.
#[track_caller]
fn nothing_is_left(before: &BTreeSet<PathBuf>, mpi: &Mpi) {
    let begun = Instant::now();
    while let Some(left) = shared_memory().difference(before).find(|file| !is_mapped(file)) {
        assert!(begun.elapsed() < Duration::from_secs(5), "{} left {}", mpi.file.display(), left.display());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_killed_process_is_named_to_survivors_under_ulfm() {
    let test = "a_killed_process_is_named_to_survivors_under_ulfm";
    if let Some(mpi) = here() {
        let error = signalled(&mpi, "KILL", 1);
        assert!(error.rank == 1 && error.cause.contains("rank 1 is lost (its process ended)"), "{error}");
        println!("told");
        exit(0);
    }
    let _alone = one_job();
    for mpi in tolerant() {
        println!("{}", mpi.version);
        let before = shared_memory();
        let output = mpi.command(test, 3, &["--with-ft", "ulfm"]).output().expect("mpirun starts");
        assert_eq!(text(&output).matches("told\n").count(), 2, "{}", text(&output));
        assert_eq!(gone(&output), 3);
        nothing_is_left(&before, &mpi);
    }
}

/// The survivors of a world of four make a world of three, and then of two: sums, groups and large messages of it.
#[test]
fn survivors_go_on_in_place_under_ulfm() {
    let test = "survivors_go_on_in_place_under_ulfm";
    if let Some(mpi) = here() {
        let runtime = mpi.start(Options { timeout: TIMEOUT, ..Options::default() });
        println!("process {}", id());
        for (ranks, killed) in [(4, Some(0)), (3, Some(1)), (2, None)] {
            assert_eq!(runtime.ranks(), ranks);
            let ended = runtime.world().run(|world| {
                let mut sum = vec![1f32; 100_000];
                world.all_reduce_slice(&mut sum, ReduceOp::Sum)?;
                assert_eq!(sum, vec![ranks as f32; 100_000]);
                let place = world.rank() % 2;
                let members: Vec<usize> = (0..ranks).filter(|rank| rank % 2 == place).collect();
                let part = world.split("part", &members)?;
                let mut sum = [world.rank() as f32];
                part.all_reduce_slice(&mut sum, ReduceOp::Sum)?;
                assert_eq!(sum[0] as usize, members.iter().sum::<usize>());
                if Some(world.rank()) == killed {
                    signal("KILL");
                }
                world.barrier()
            });
            let Some(killed) = killed else {
                ended.unwrap();
                println!("told");
                break;
            };
            let error = ended.unwrap_err();
            assert!(error.to_string().contains(&format!("rank {killed} is lost")), "{error}");
            runtime.without(&[runtime.there()[killed]]);
        }
        exit(0);
    }
    let _alone = one_job();
    for mpi in tolerant() {
        let before = shared_memory();
        let output = mpi.command(test, 4, &["--with-ft", "ulfm"]).output().expect("mpirun starts");
        assert_eq!(text(&output).matches("told\n").count(), 2, "{}", text(&output));
        assert_eq!(gone(&output), 4);
        nothing_is_left(&before, &mpi);
    }
}

/// A sum of the library is under way when a process is killed, or stands still. One of each kind of group has been made
/// before, so that the last sum waits in the library itself.
#[test]
fn a_sum_of_the_library_does_not_outlive_a_process() {
    let test = "a_sum_of_the_library_does_not_outlive_a_process";
    if let Some(mpi) = here() {
        let reduction = Reduction::Native;
        let runtime = mpi.start(Options { timeout: TIMEOUT, reduction, ..Options::default() });
        println!("process {}", id());
        let name = std::env::var(SIGNAL).expect("it is passed on");
        let ended = runtime.world().run(|world| {
            for last in [false, true] {
                let sum = world.start_all_reduce(Buffer::from_vec(vec![1f32; 100_000]), ReduceOp::Sum);
                if last && world.rank() == 1 {
                    signal(&name);
                }
                assert_eq!(sum?.wait()?.as_slice::<f32>()?, [3.0; 100_000]);
            }
            world.barrier()
        });
        let error = ended.unwrap_err();
        let causes = ["rank 1 is lost (its process ended)", "rank 1 made no progress for 3s: rank "];
        assert!(error.rank == 1 && causes.iter().any(|cause| error.cause.contains(cause)), "{error}");
        println!("told");
        exit(if name == "STOP" { 1 } else { 0 }); // the first survivor to fail ends a job whose launcher waits
    }
    let _alone = one_job();
    let killed = tolerant().into_iter().map(|mpi| (mpi, "KILL", &["--with-ft", "ulfm"][..]));
    for (mpi, name, flags) in killed.chain(Mpi::installed().into_iter().map(|mpi| (mpi, "STOP", &[][..]))) {
        let before = shared_memory();
        let output = mpi.command(test, 3, flags).env(SIGNAL, name).output().expect("mpirun starts");
        assert!(text(&output).contains("told\n"), "{} of {}: {}", name, mpi.file.display(), text(&output));
        gone(&output);
        if name == "KILL" {
            nothing_is_left(&before, &mpi);
        }
    }
}

/// One of three processes never calls MPI, as one that has loaded another library. Of the others one is asked to stop.
#[test]
fn a_process_that_never_joins_is_told_to_the_others() {
    if let Some(mpi) = here() {
        let number = ["PMI_RANK", "OMPI_COMM_WORLD_RANK"].iter().find_map(|name| std::env::var(name).ok()).unwrap();
        if number == "1" {
            std::thread::sleep(TIMEOUT);
            exit(1);
        }
        let library = Library::open(&mpi.file).unwrap_or_else(|error| panic!("{error}"));
        let options = Options { timeout: TIMEOUT / 15, ..Options::default() };
        let asked = AtomicBool::new(number == "2");
        let error = Runtime::start_unless(library, options, &asked).unwrap_err().to_string();
        let expected = match &*number {
            "2" => "asked to stop while ",
            _ => "has waited for the other processes for 1 s: one of them has ended, hangs",
        };
        assert!(error.contains(expected), "{error}");
        println!("told {number}");
        if number == "2" {
            std::thread::sleep(TIMEOUT); // the first to end ends the others
        }
        exit(1);
    }
    let _alone = one_job();
    for mpi in Mpi::installed().into_iter().filter(|mpi| !mpi.file.ends_with(STANDARD)) {
        let output =
            mpi.command("a_process_that_never_joins_is_told_to_the_others", 3, &[]).output().expect("mpirun starts");
        let text = text(&output);
        assert!(text.contains("told 0\n") && text.contains("told 2\n"), "{}: {text}", mpi.file.display());
    }
}

/// Launchers without fault tolerance end the job.
#[test]
fn a_killed_process_ends_the_job_elsewhere() {
    if let Some(mpi) = here() {
        signalled(&mpi, "KILL", 1);
        exit(1);
    }
    let _alone = one_job();
    for mpi in Mpi::installed() {
        let (before, begun) = (shared_memory(), Instant::now());
        let output = mpi.command("a_killed_process_ends_the_job_elsewhere", 3, &[]).output().expect("mpirun starts");
        assert!(!output.status.success() && begun.elapsed() < Duration::from_secs(60), "{}", text(&output));
        gone(&output);
        nothing_is_left(&before, &mpi);
    }
}

#[test]
fn a_stopped_process_is_named_within_the_timeout() {
    if let Some(mpi) = here() {
        let error = signalled(&mpi, "STOP", 1);
        assert!(error.rank == 1 && error.cause.contains("rank 1 made no progress for 3s: rank "), "{error}");
        assert!(error.to_string().contains("rank 1 is lost (its process does not answer)"), "{error}");
        println!("told");
        exit(1);
    }
    let _alone = one_job();
    for mpi in Mpi::installed() {
        let begun = Instant::now();
        let output =
            mpi.command("a_stopped_process_is_named_within_the_timeout", 3, &[]).output().expect("mpirun starts");
        // The first survivor to end ends the job.
        assert!(text(&output).contains("told\n"), "{}: {}", mpi.file.display(), text(&output));
        assert!(!output.status.success() && begun.elapsed() < Duration::from_secs(60), "{}", text(&output));
        gone(&output);
    }
}

/// Rank 0 finds the faults of others. When it stands still, another one does.
#[test]
fn a_judge_that_stands_still_is_named_too() {
    if let Some(mpi) = here() {
        let error = signalled(&mpi, "STOP", 0);
        assert!(error.cause.contains("rank 0 is lost (its process does not answer)"), "{error}");
        println!("told");
        exit(1);
    }
    let _alone = one_job();
    for mpi in Mpi::installed().into_iter().filter(|mpi| mpi.is_open) {
        let output = mpi.command("a_judge_that_stands_still_is_named_too", 3, &[]).output().expect("mpirun starts");
        assert!(text(&output).contains("told\n"), "{}: {}", mpi.file.display(), text(&output));
        gone(&output);
    }
}

/// Over TCP the others live, whatever started them.
#[test]
fn a_killed_process_is_named_over_tcp() {
    let test = "a_killed_process_is_named_over_tcp";
    if let Some(runtime) = met(patient()) {
        let error = signalled_in(&runtime.unwrap_or_else(|error| panic!("{error}")), "KILL", 1);
        assert!(error.rank == 1 && error.cause.contains("rank 1 is lost (its process ended)"), "{error}");
        println!("told");
        return;
    }
    let _alone = one_job();
    let processes = over_tcp(test, &[0, 1, 2], 3);
    let outputs: Vec<Output> = processes.into_iter().map(|process| process.wait_with_output().unwrap()).collect();
    for (rank, output) in outputs.iter().enumerate() {
        assert_eq!(text(output).contains("told\n"), rank != 1, "rank {rank}: {}", text(output));
    }
}

/// Rank 2 never starts: rank 0 knows who is missing, and tells the others.
#[test]
fn a_process_that_never_comes_is_named_over_tcp() {
    let test = "a_process_that_never_comes_is_named_over_tcp";
    if let Some(runtime) = met(Options { timeout: TIMEOUT / 15, ..Options::default() }) {
        println!("told: {}", runtime.unwrap_err());
        return;
    }
    let _alone = one_job();
    for process in over_tcp(test, &[0, 1], 3) {
        let output = process.wait_with_output().unwrap();
        assert!(text(&output).contains("it has waited 800ms for rank 2\n"), "{}", text(&output));
    }
    for process in over_tcp(test, &[1], 3) {
        let output = process.wait_with_output().unwrap();
        assert!(text(&output).contains("it has tried to reach 127.0.0.1:"), "{}", text(&output));
    }
}

/// The agent of torchrun has the port, and its store says where rank 0 listens.
#[test]
fn torchrun_starts_processes_that_meet_by_its_store() {
    let test = "torchrun_starts_processes_that_meet_by_its_store";
    if let Some(runtime) = met(patient()) {
        let runtime = runtime.unwrap_or_else(|error| panic!("{error}"));
        let ended = runtime.world().run(|world| {
            let mut sum = [world.rank() as f32];
            world.all_reduce_slice(&mut sum, ReduceOp::Sum)?;
            assert_eq!(sum, [3.0]);
            Ok::<_, meshwork_core::CommError>(())
        });
        return ended.map(drop).unwrap();
    }
    let torchrun = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/peer-venv/bin/torchrun");
    if !torchrun.exists() {
        return println!("no torchrun in target/peer-venv: {test} is left out");
    }
    let _alone = one_job();
    let port = free_port().to_string();
    let mut command = Command::new(torchrun);
    command.args(["--nproc-per-node", "3", "--master-addr", "127.0.0.1", "--master-port", &port, "--no-python"]);
    command.arg(std::env::current_exe().unwrap()).args([test, "--exact", "--nocapture"]).env("MESHWORK_TEST_TCP", "1");
    let output = command.output().expect("torchrun starts");
    assert!(output.status.success(), "{}", text(&output));
}
