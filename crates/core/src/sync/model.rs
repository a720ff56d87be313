//! The same names over `shuttle`, and the settings of its tests: how many threads compute, which bug is planted.
//!
//! Where the model differs from a machine:
//!
//! - Every atomic operation is sequentially consistent, whatever ordering it names.
//! - A piece of a collective, and an item of the pool, is one step: threads are switched at locks, atomics, waits and
//!   the start and end of threads.
//! - A wait with a timeout of at least [`FOREVER`] never times out, so a lost wake-up is a deadlock, which the checker
//!   reports. A shorter one never blocks: it ends at any time, as timed out or for no reason, and the clock moves by
//!   the timeout if it timed out.
//! - The clock also moves by [`LOOK`] whenever somebody looks at it.

use std::cell::Cell;
use std::io;
use std::sync::PoisonError;
use std::time::Duration;

pub(crate) use shuttle::sync::{Condvar, Mutex, MutexGuard, atomic};
pub(crate) use shuttle::thread::{Scope, ScopedJoinHandle, scope};
pub(crate) use shuttle::thread_local;

/// A timeout that is never reached.
pub const FOREVER: Duration = Duration::from_secs(1 << 40);

/// The time that a look at the clock takes.
const LOOK: Duration = Duration::from_micros(4);

/// A bug that a test plants in a protocol, to see the checker find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The rank that decides to sleep releases the lock before it does.
    RankSleepsLate,
    /// The owner of a job looks for its helpers before it takes the lock, not under it.
    OwnerSleepsLate,
    /// An operation is done as soon as all of its pieces are taken.
    DoneWhenClaimed,
}

// An execution is one thread of the system, and so is a test: these are settings of the test.
std::thread_local! {
    static THREADS: Cell<usize> = const { Cell::new(2) };
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

/// Threads that may compute at once.
pub fn threads() -> usize {
    THREADS.get()
}

/// Sets [`threads`] for the executions that this thread starts.
pub fn set_threads(threads: usize) {
    THREADS.set(threads);
}

/// Plants a bug in the executions that this thread starts.
pub fn plant(bug: Bug) {
    PLANTED.set(Some(bug));
}

pub(crate) fn planted(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// A moment of the model's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

impl Instant {
    pub(crate) fn now() -> Instant {
        advance(LOOK);
        Instant(NOW.get())
    }

    pub(crate) fn duration_since(self, earlier: Instant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    pub(crate) fn elapsed(self) -> Duration {
        Instant::now().duration_since(self)
    }
}

fn advance(by: Duration) {
    NOW.set(NOW.get() + by);
}

pub(crate) fn pause() {
    shuttle::thread::yield_now();
}

pub(crate) fn wait_timeout<'a, T>(
    condvar: &Condvar,
    mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    timeout: Duration,
) -> (MutexGuard<'a, T>, bool) {
    if timeout >= FOREVER {
        return (condvar.wait(guard).unwrap_or_else(PoisonError::into_inner), false);
    }
    drop(guard);
    let timed_out = shuttle::rand::Rng::r#gen(&mut shuttle::rand::thread_rng());
    if timed_out {
        advance(timeout);
    }
    shuttle::thread::yield_now();
    (mutex.lock().unwrap_or_else(PoisonError::into_inner), timed_out)
}

/// As a task without a handle, so that an execution ends although it sleeps.
pub(crate) fn spawn_daemon(_name: String, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    drop(shuttle::future::spawn(async { run() }));
    Ok(())
}

pub(crate) fn spawn_scoped<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    _name: String,
    run: impl FnOnce() -> T + Send + 'scope,
) -> io::Result<ScopedJoinHandle<'scope, T>> {
    Ok(scope.spawn(run))
}

/// The value of `$init`, computed once per execution.
macro_rules! once {
    ($type:ty, $init:expr) => {{
        shuttle::lazy_static! { static ref VALUE: $type = $init; }
        *VALUE
    }};
}
pub(crate) use once;
