//! The requirements of every backend of communicators: one suite, over the worlds of any of them.

mod calls;
mod faults;
mod flight;
pub mod processes;
mod programs;
mod results;

use meshwork_core::comm::thread::Options;
use meshwork_core::{Cause, Group, RunError, World};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The program of a rank in a case.
pub type Body<'a> = dyn Fn(Group) -> Result<(), Cause> + Sync + 'a;

/// The worlds of a backend, of which each case has new ones. Where ranks are processes, all of them run the suite, and
/// make the same worlds.
pub trait Worlds: Sync {
    /// The largest number of ranks; at least 4.
    fn most(&self) -> usize;

    /// How many random programs with faults the suite runs.
    fn programs(&self) -> u64;

    /// A timeout for cases that wait for it, longer than an idle machine stops a rank by chance.
    fn short(&self) -> Duration {
        Duration::from_millis(100)
    }

    /// What a rank has done last when it has just joined, in the words of faults.
    fn joined(&self) -> &str {
        "no operation yet"
    }

    /// Runs `body` as the ranks of a new world, in which a rank without progress is late after `timeout`. `None` in a
    /// process that has none of its ranks.
    fn run(&self, ranks: usize, timeout: Duration, body: &Body<'_>) -> Option<Result<(), RunError>> {
        Some(self.world(ranks, timeout)?.run_with(Options { timeout }, body).map(drop))
    }

    /// A new world, where ranks of other processes have this timeout. `None` in a process that has none of its ranks.
    fn world(&self, ranks: usize, timeout: Duration) -> Option<World>;
}

/// Ranks that are threads.
#[derive(Clone, Copy, Debug)]
pub struct Threads;

impl Worlds for Threads {
    fn most(&self) -> usize {
        16
    }

    fn programs(&self) -> u64 {
        1000
    }

    fn world(&self, ranks: usize, _timeout: Duration) -> Option<World> {
        Some(World::Threads(ranks))
    }
}

/// So long that a case which reaches it did not get its error at once.
const PATIENT: Duration = Duration::from_secs(600);

/// One case of the suite.
pub type Case = fn(&dyn Worlds);

/// The cases, in groups.
const CASES: [(&str, &[(&str, Case)]); 5] = [
    ("results", results::CASES),
    ("flight", flight::CASES),
    ("faults", faults::CASES),
    ("calls", calls::CASES),
    ("programs", programs::CASES),
];

/// Runs every case over the worlds of a backend: results against an oracle, with the bits of the order of reduction
/// that the backend promises; operations in flight; the order of messages; groups; faults and their words.
///
/// # Panics
/// If the backend does something else. The last line printed names the case. A case that hangs ends the program.
pub fn conformance(worlds: &dyn Worlds) {
    CASES.iter().for_each(|(group, _)| conformance_of(group, worlds));
}

/// Runs the cases of one group: `results`, `flight`, `faults`, `calls` or `programs`.
///
/// # Panics
/// As [`conformance`].
pub fn conformance_of(group: &str, worlds: &dyn Worlds) {
    for (name, case) in CASES.iter().filter(|(other, _)| *other == group).flat_map(|(_, cases)| *cases) {
        println!("{group}::{name}");
        let (over, ends) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                if ends.recv_timeout(LONGEST) == Err(mpsc::RecvTimeoutError::Timeout) {
                    eprintln!("{group}::{name} hangs");
                    std::process::exit(1);
                }
            });
            case(worlds);
            drop(over);
        });
    }
}

/// Longer than any case takes.
const LONGEST: Duration = Duration::from_secs(500);

/// Runs a world that must end well.
#[track_caller]
fn passes(worlds: &dyn Worlds, ranks: usize, body: impl Fn(&Group) -> Result<(), Cause> + Sync) {
    if let Some(Err(error)) = worlds.run(ranks, PATIENT, &|world| body(&world)) {
        panic!("{error}");
    }
}

/// Runs a world that must fail, at once but for the timeout; `None` in a process that has none of its ranks.
#[track_caller]
fn fails(
    worlds: &dyn Worlds,
    ranks: usize,
    timeout: Duration,
    body: impl Fn(&Group) -> Result<(), Cause> + Sync,
) -> Option<RunError> {
    let start = Instant::now();
    let error = worlds.run(ranks, timeout, &|world| body(&world))?.expect_err("this program cannot work");
    assert!(start.elapsed() < PATIENT / 2, "it was not told at once");
    Some(error)
}

/// How a run with a short timeout ended, and its timeout. On a busy machine a rank may get no core for as long as that:
/// a run that did not end as `meant` is tried again, with 6 and with 36 times as much, and the last one counts. `None`
/// in a process that has none of its ranks.
fn in_time<End>(
    worlds: &dyn Worlds,
    run: impl Fn(Duration) -> Option<End>,
    meant: impl Fn(&End) -> bool,
) -> Option<(Duration, End)> {
    let mut last = None;
    for times in [1, 6, 36] {
        let timeout = times * worlds.short();
        let end = run(timeout)?;
        if meant(&end) {
            return Some((timeout, end));
        }
        last = Some((timeout, end));
    }
    last
}

/// Runs a world with a short timeout that must end well.
#[track_caller]
fn passes_in_time(worlds: &dyn Worlds, ranks: usize, body: impl Fn(&Group, Duration) -> Result<(), Cause> + Sync) {
    let run = |timeout| worlds.run(ranks, timeout, &|world| body(&world, timeout));
    if let Some((timeout, Err(error))) = in_time(worlds, run, Result::is_ok) {
        panic!("with a timeout of {timeout:?}: {error}");
    }
}

/// The first line of a rank's error.
fn told(error: &RunError, rank: usize) -> String {
    let end = error.ends[rank].as_ref().map_or("nothing".to_owned(), ToString::to_string);
    end.lines().next().unwrap_or_default().to_owned()
}

/// The cases of a file.
macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        pub(super) const CASES: &[(&str, super::Case)] = &[$((stringify!($case), $case)),*];
    };
}
use cases;
