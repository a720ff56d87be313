//! The suite of communicators over processes that every installed MPI starts, over ranks that share them, and within
//! one process.
//!
//! `scripts/install_mpi.sh target/mpi` installs two libraries. Where one is missing, its part is left out, and says so.
//! With `MESHWORK_SWEEP=all` every job runs over each library that is installed.

mod launch;

use std::process::Output;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use meshwork_core::{Cause, CommError, ReduceOp, World};
use meshwork_mpi::{Kind, Library, Options, Reduction, Runtime};
use meshwork_testkit::comm::{Worlds, conformance};
use meshwork_testkit::sweeps;

use launch::{Mpi, OPEN, STANDARD, here, met, over_tcp, text};

/// The files of all libraries; MPICH by two of its interfaces.
const ALL: &[&str] = &[STANDARD, "libmpi.so.12", OPEN];

/// The suite has timeouts: two jobs at once would stop each other's ranks for as long.
static ONE_JOB: Mutex<()> = Mutex::new(());

/// Runs `body` in that many processes of each library with one of these files, or of all in a sweep; they start this
/// program again, with the test `test` alone, which calls this function with the same arguments.
fn over_each(test: &str, processes: usize, files: &[&str], body: impl FnOnce(&Mpi)) {
    over_each_until(test, processes, files, |output| output.status.success(), body);
}

/// The same, of jobs that are well if `is_well` says so.
fn over_each_until(
    test: &str,
    processes: usize,
    files: &[&str],
    is_well: impl Fn(&Output) -> bool,
    body: impl FnOnce(&Mpi),
) {
    if let Some(mpi) = here() {
        return body(&mpi);
    }
    let _alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
    let installed = Mpi::installed();
    if installed.is_empty() {
        println!("no MPI in target/mpi: {test} is left out; scripts/install_mpi.sh target/mpi installs two");
    }
    let chosen = |mpi: &Mpi| sweeps() || files.iter().any(|file| mpi.file.ends_with(file));
    for mpi in installed.into_iter().filter(chosen) {
        println!("{test}: {processes} processes of {}", mpi.file.display());
        let begun = Instant::now();
        let output = mpi.command(test, processes, &[]).output().expect("mpirun starts");
        assert!(is_well(&output), "{} of {}:\n{}", output.status, mpi.file.display(), text(&output));
        println!("    {:.1} s", begun.elapsed().as_secs_f64());
        assert!(begun.elapsed() < Duration::from_secs(600));
    }
}

/// Worlds over a runtime.
struct Over {
    runtime: Runtime,
    programs: u64,
}

impl Worlds for Over {
    fn most(&self) -> usize {
        self.runtime.ranks()
    }

    fn programs(&self) -> u64 {
        self.programs
    }

    fn short(&self) -> Duration {
        // More processes than cores wait longer for one.
        Duration::from_millis(if self.runtime.processes() < 8 { 500 } else { 1000 })
    }

    fn world(&self, ranks: usize, timeout: Duration) -> Option<World> {
        self.runtime.world_of(ranks, timeout)
    }
}

fn options(ranks_per_process: usize) -> Options {
    Options { ranks_per_process, ..Options::default() }
}

#[test]
fn ranks_of_one_process() {
    let _alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = Runtime::of_one_process(options(9)).unwrap();
    conformance(&Over { runtime, programs: if sweeps() { 100 } else { 10 } });
}

fn processes(test: &str, processes: usize, options: Options, files: &[&str]) {
    over_each(test, processes, files, |mpi: &Mpi| {
        let runtime = mpi.start(options);
        assert_eq!(runtime.processes(), processes);
        conformance(&Over { runtime, programs: if sweeps() { 300 } else { 10 } });
    });
}

#[test]
fn four_processes() {
    processes("four_processes", 4, options(1), &[OPEN]);
}

/// Sums of f32 and f64 by the library: exact ones, as it adds up in another order than the tree. A fault may leave a
/// sum behind; then MPI is not finalised, for which the launcher ends the job when the first process does.
#[test]
fn four_processes_whose_library_adds_up() {
    let conform = |output: &Output| String::from_utf8_lossy(&output.stdout).matches("it conforms\n").count() == 4;
    over_each_until("four_processes_whose_library_adds_up", 4, &[OPEN], conform, |mpi| {
        let runtime = mpi.start(Options { reduction: Reduction::Native, ..options(1) });
        conformance(&Over { runtime: runtime.clone(), programs: if sweeps() { 300 } else { 10 } });
        println!("it conforms");
        runtime.world().run(|world| world.barrier()).unwrap(); // all have said it
        std::thread::sleep(Duration::from_secs(2)); // and the launcher has passed it on
    });
}

#[test]
fn two_processes_of_four_ranks() {
    processes("two_processes_of_four_ranks", 2, options(4), &[STANDARD]);
}

/// Without MPI: all groups of the suite, faults among them.
#[test]
fn processes_over_tcp() {
    if let Some(runtime) = met(options(2)) {
        let runtime = runtime.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((runtime.processes(), runtime.ranks()), (2, 4));
        assert!(runtime.describe().starts_with("TCP: 2 processes"), "{}", runtime.describe());
        return conformance(&Over { runtime, programs: if sweeps() { 300 } else { 10 } });
    }
    let _alone = ONE_JOB.lock().unwrap_or_else(PoisonError::into_inner);
    for process in over_tcp("processes_over_tcp", &[0, 1], 2) {
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
    }
}

/// In a sweep alone: minutes a library, on two cores.
#[test]
fn eight_processes() {
    if sweeps() {
        processes("eight_processes", 8, options(1), &[]);
    }
}

/// In a sweep alone. The suite needs worlds of four ranks.
#[test]
fn two_processes_of_two_ranks() {
    if sweeps() {
        processes("two_processes_of_two_ranks", 2, options(2), &[]);
    }
}

/// Processes that a launcher deals out to two hosts in turn.
#[test]
fn ranks_that_belong_together_are_on_one_host() {
    over_each("ranks_that_belong_together_are_on_one_host", 4, &[STANDARD], |mpi| {
        let number = ["PMI_RANK", "OMPI_COMM_WORLD_RANK"].iter().find_map(|name| std::env::var(name).ok());
        let number: u64 = number.unwrap().parse().unwrap();
        let runtime = mpi.start(Options { host: number % 2, ..options(1) });
        assert_eq!(*runtime.there(), [0, 1, 2, 3]);
        runtime.arrange(2);
        assert_eq!(*runtime.there(), [0, 2, 1, 3]);
        let ended = runtime.world().run(|world| {
            assert_eq!(runtime.there()[world.rank()], runtime.process());
            let mut hosts = [0; 4];
            world.all_gather_slice(&[number as i64 % 2], &mut hosts)?;
            assert_eq!(hosts, [0, 0, 1, 1]);
            if world.rank() == 1 { Err(Cause::from("the disk is full")) } else { Ok(world.barrier()?) }
        });
        // Ranks are named by their number in the mesh.
        assert_eq!(ended.unwrap_err().cause, "rank 1 returned an error: the disk is full");
    });
}

/// That many elements: these ones over and over.
fn repeated<T: Copy>(of: Vec<T>, count: usize) -> Vec<T> {
    let mut all = of.repeat(count.div_ceil(of.len()));
    all.truncate(count);
    all
}

/// Messages of several chunks of the library, and heads that are too long for a first message.
#[test]
fn long_messages() {
    let exchange = |runtime: Runtime| {
        let bytes: usize = (20 << 20) + 3;
        let ended = runtime.world().run(|world| {
            // A prime number of elements again and again: each chunk begins at another one.
            let sent = repeated((0..251).map(|i| (i * 7 % 251) as u8).collect(), bytes);
            match world.rank() {
                0 => world.send_slice(&sent, 1, 3)?,
                _ => {
                    let mut received = vec![0; bytes];
                    world.recv_slice(&mut received, 0, 3)?;
                    assert!(received == sent);
                }
            }
            let numbers = |of: i32| repeated((0..65_521).map(|i| of * i).collect(), bytes / 4);
            let mut sums = numbers(1 + world.rank() as i32);
            world.all_reduce_slice(&mut sums, ReduceOp::Sum)?;
            assert!(sums == numbers(3));
            Ok::<_, CommError>(())
        });
        ended.unwrap();
        let text = "the disk is full ".repeat(3000);
        let error =
            runtime.world().run(|world| if world.rank() == 1 { Err(text.clone()) } else { Ok(()) }).unwrap_err();
        assert_eq!(error.cause, format!("rank 1 returned an error: {text}"));
    };
    if let Some(runtime) = met(options(1)) {
        return exchange(runtime.unwrap_or_else(|error| panic!("{error}")));
    }
    over_each("long_messages", 2, ALL, |mpi| exchange(mpi.start(options(1))));
    if here().is_none() {
        for process in over_tcp("long_messages", &[0, 1], 2) {
            let output = process.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", text(&output));
        }
    }
}

/// What is found names the library and its level; a program that joins alone is a world of one process.
#[test]
fn a_library_says_what_it_is() {
    over_each("a_library_says_what_it_is", 1, ALL, |mpi| {
        let library = Library::open(&mpi.file).unwrap();
        let version = mpi.version;
        let file = mpi.file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        assert_eq!(library.to_string(), format!("{version} ({file})"));
        let again = library.clone();
        let runtime = Runtime::start(library, options(2)).unwrap();
        assert_eq!(runtime.describe(), format!("MPI: {version} ({file}), THREAD_MULTIPLE"));
        assert_eq!((runtime.process(), runtime.processes(), runtime.ranks()), (0, 1, 2));
        let error = Runtime::start(again, options(1)).unwrap_err().to_string();
        assert!(error.ends_with("is initialised already: a process initialises MPI once"), "{error}");
        let found = Library::find().unwrap();
        assert_eq!(found.kind(), if mpi.is_open { Kind::OpenMpi } else { Kind::Standard }, "beside mpirun");
    });
}
