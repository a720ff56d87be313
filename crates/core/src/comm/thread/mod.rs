//! Ranks that are threads of one process.
//!
//! - **No thread spins, and there are no progress threads.** The members of an operation do its work: the one that
//!   arrives last starts, and waiting members are woken to help if there is enough to do. If no member waits, the last
//!   one does all of the work, so that operations started early are done by the time a rank waits for them.
//! - **Same bits every time.** Reductions have a fixed order (`reduce.rs`); how the work is cut does not matter.
//! - **Memory is owned.** An operation holds its buffers until it is over, also if a rank stops waiting, fails or
//!   panics; a rank owns the buffer that it gets back from `wait`. There are no borrowed slices to revoke.
//! - **Memory of devices** is not touched: the last member to arrive has the devices'
//!   [carriers](super::device::Carrier) queue the work.
//! - **Nothing hangs.** The first fault stops the world: every operation that is not done fails on every rank, with
//!   that fault. Disagreement, panics, ranks that have ended and deadlocks (`watch.rs`) are noticed at once; a rank
//!   without progress is noticed after [`Options::timeout`].
//!
//! A rank is one thread: its communicators may be used from others, but a wait on any thread counts as the rank's
//! wait, and two such ranks may be reported as a deadlock although a third thread would have resolved it.

mod operation;
mod progress;
mod reduce;
mod state;
mod stream;
mod watch;
mod work;
mod world;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use self::reduce::{Part, reduce_parts, sum_size};
use self::world::{World, communicator};
use super::{Activity, Communicator, Ended, Group};
use crate::run_error::{Cause, RankEnd, RunError, contained};
use crate::sync;

/// Settings of a world of threads.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a rank that others wait for may show no progress: no operation started, no
    /// [`heartbeat`](super::Membership::heartbeat).
    pub timeout: Duration,
}

impl Default for Options {
    /// One minute.
    fn default() -> Options {
        Options { timeout: Duration::from_secs(60) }
    }
}

/// The communicators of a world of `n` ranks, by rank: for ranks that run on threads of the caller. A rank that drops
/// all its communicators has ended, and ranks that need it get an error.
pub fn world(n: usize, options: Options) -> Vec<Arc<dyn Communicator>> {
    let world = Arc::new(World::new("world", n, options.timeout, Instant::now()));
    (0..n).map(|rank| communicator(&world, rank)).collect()
}

/// [`World::Threads`](crate::World::Threads): each rank has its own thread, named `rank 0`, `rank 1`, ...
pub(crate) fn run<T, E, F>(n: usize, options: Options, body: F) -> Result<Vec<T>, RunError>
where
    T: Send,
    E: Into<Cause>,
    F: Fn(Group) -> Result<T, E> + Sync,
{
    if n == 0 {
        let cause = "a world has at least one rank".to_owned();
        return Err(RunError { rank: 0, cause, fault: None, ends: Vec::new() });
    }
    let world = Arc::new(World::new("world", n, options.timeout, Instant::now()));
    let results: Vec<Mutex<Option<Result<T, RankEnd>>>> = (0..n).map(|_| Mutex::default()).collect();
    let unstarted = run_threads(&world, n, &|rank, group| {
        let (result, how) = contained(|| body(group));
        *results[rank].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        how
    });
    let results = results.into_iter().zip(unstarted).map(|(result, unstarted)| {
        let result = result.into_inner().unwrap_or_else(PoisonError::into_inner);
        result.unwrap_or_else(|| Err(RankEnd::Panic(unstarted.unwrap_or_default())))
    });
    let (mut values, mut ends) = (Vec::with_capacity(n), Vec::with_capacity(n));
    for result in results {
        ends.push(result.map(|value| values.push(value)).err());
    }
    if values.len() == n {
        return Ok(values);
    }
    let Ended { first, fault, .. } = world.ended();
    let (rank, cause) = first.unwrap_or_default();
    Err(RunError { rank, cause, fault, ends })
}

/// The threads of [`run`]: `body` says how its rank ended, and the result why a thread did not start. Without type
/// parameters, so that it is compiled once and not for each program.
fn run_threads(world: &Arc<World>, n: usize, body: &(dyn Fn(usize, Group) -> Activity + Sync)) -> Vec<Option<String>> {
    let groups: Vec<_> = (0..n).map(|rank| Group::from(communicator(world, rank))).collect();
    sync::scope(|scope| {
        let start = |(rank, group)| {
            // Outlives the body, so that a panic is reported with its message, and a thread that does not start, so
            // that the report says this, and not that its communicators were dropped.
            let (life, lives) = (Group::clone(&group), Group::clone(&group));
            let run = move || {
                let _life = lives;
                world.end(rank, body(rank, group));
            };
            let started = sync::spawn_scoped(scope, format!("rank {rank}"), run);
            let failed = started.err().map(|error| format!("its thread did not start: {error}"));
            // At once, because the ranks already started may be waiting for this one.
            failed.iter().for_each(|error| world.end(rank, Activity::Failed(error.clone())));
            drop(life);
            failed
        };
        groups.into_iter().enumerate().map(start).collect()
    })
}
