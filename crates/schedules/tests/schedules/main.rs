//! The worker pool and the communicator of threads under a model checker: `shuttle` runs each test over many schedules,
//! and a schedule on which a test fails, deadlocks or does not end is printed. `docs/checked_by_tools.md` has the
//! commands, and how a schedule is run again.
//!
//! A panic of a rank is raised without its hook and after everything was dropped: `shuttle` prints a schedule in the
//! hook, and cannot switch threads while one unwinds. What a rank does as it unwinds is then what it does here.

#![cfg(shuttle)]

mod collectives;
mod faults;
mod planted;
mod pool;

use meshwork_core::comm::thread::Options;
use meshwork_core::sync::model::{FOREVER, set_threads};
use meshwork_core::{CommError, Group, World};
use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler, Scheduler};
use shuttle::{Config, Runner};
use std::env;
use std::sync::Arc;

/// Schedules per test. Half of them are random; the other half are of changing priorities.
const SCHEDULES: &str = "MESHWORK_SCHEDULES";
/// A printed schedule: the test runs this one alone.
const REPLAY: &str = "MESHWORK_REPLAY";
/// The seed of the schedulers, unless `SHUTTLE_RANDOM_SEED` is set.
const SEED: u64 = 1;

/// Where the schedulers of changing priorities switch threads against priority, at most.
const PREEMPTIONS: usize = 3;

/// Runs `body` over schedules, with `threads` threads that may compute.
fn check(threads: usize, body: impl Fn() + Send + Sync + 'static) {
    check_over(1000, threads, body);
}

/// The same over another number of schedules than a thousand, unless the environment says how many.
fn check_over(schedules: usize, threads: usize, body: impl Fn() + Send + Sync + 'static) {
    set_threads(threads);
    let body = Arc::new(body);
    if let Ok(schedule) = env::var(REPLAY) {
        return over(ReplayScheduler::new_from_encoded(&schedule), body);
    }
    let schedules: usize = env::var(SCHEDULES).map_or(schedules, |number| number.parse().expect(SCHEDULES));
    let half = schedules.div_ceil(2);
    over(RandomScheduler::new_from_seed(SEED, half), body.clone());
    over(PctScheduler::new_from_seed(SEED, PREEMPTIONS, schedules - half), body);
}

fn over(scheduler: impl Scheduler + 'static, body: Arc<impl Fn() + Send + Sync + 'static>) {
    let mut config = Config::new();
    config.stack_size = 256 << 10;
    // Else other threads go on while one panics, and panic too.
    config.ungraceful_shutdown_config.immediately_return_on_panic = true;
    config.silence_warnings = true; // about weaker orderings: see `sync/model.rs`
    Runner::new(scheduler, config).run(move || body());
}

/// A number of the schedule's, to vary programs: the same when the schedule is run again.
fn choice() -> u64 {
    shuttle::rand::RngCore::next_u64(&mut shuttle::rand::thread_rng())
}

/// No rank is ever late, so that one that sleeps too long is a deadlock.
const NEVER_LATE: Options = Options { timeout: FOREVER.saturating_mul(4) };

/// A world of `n` ranks that ends well.
fn ranks<T: Send>(n: usize, body: impl Fn(&Group) -> Result<T, CommError> + Sync) -> Vec<T> {
    World::Threads(n).run_with(NEVER_LATE, |world| body(&world)).unwrap_or_else(|error| panic!("{error}"))
}
