//! The suite of communicators over processes that every installed MPI starts, over ranks that share them, and within one
//! process.
//!
//! `scripts/install_mpi.sh target/mpi` installs two libraries. Where one is missing, its part is left out, and says so.

mod launch;

use std::time::{Duration, Instant};

use meshwork_core::World;
use meshwork_mpi::{Options, Runtime};
use meshwork_testkit::comm::{Worlds, conformance};

use launch::{Mpi, here, text};

/// Runs `body` in that many processes of each library; they start this program again, with the test `test` alone, which
/// calls this function with the same arguments.
fn over_each(test: &str, processes: usize, body: impl FnOnce(&Mpi)) {
    if let Some(mpi) = here() {
        return body(&mpi);
    }
    let installed = Mpi::installed();
    if installed.is_empty() {
        println!("no MPI in target/mpi: {test} is left out; scripts/install_mpi.sh target/mpi installs two");
    }
    for mpi in installed {
        println!("{test}: {processes} processes of {}", mpi.file.display());
        let begun = Instant::now();
        let output = mpi.command(test, processes, &[]).output().expect("mpirun starts");
        assert!(output.status.success(), "{} of {}:\n{}", output.status, mpi.file.display(), text(&output));
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
        Duration::from_secs(1)
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
    let runtime = Runtime::of_one_process(options(9)).unwrap();
    conformance(&Over { runtime, programs: 100 });
}

fn processes(test: &str, processes: usize, ranks_per_process: usize) {
    over_each(test, processes, |mpi: &Mpi| {
        let runtime = mpi.start(options(ranks_per_process));
        assert_eq!(runtime.processes(), processes);
        conformance(&Over { runtime, programs: 20 });
    });
}

#[test]
fn four_processes() {
    processes("four_processes", 4, 1);
}

#[test]
fn eight_processes() {
    processes("eight_processes", 8, 1);
}

#[test]
fn two_processes_of_four_ranks() {
    processes("two_processes_of_four_ranks", 2, 4);
}
