//! Locks, atomics, threads and the clock, as the pool and the communicator of threads use them.
//!
//! They come from `std`, and under `--cfg shuttle` from the model checker `shuttle`, which runs the same
//! code over schedules that it chooses: `model.rs`, `tests/schedules`, `docs/checked_by_tools.md`.

#[cfg(not(shuttle))]
mod real {
    use std::io;
    use std::sync::PoisonError;
    use std::thread::Builder;
    use std::time::Duration;

    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, atomic};
    pub(crate) use std::thread::{Scope, ScopedJoinHandle, scope};
    pub(crate) use std::thread_local;
    pub(crate) use std::time::Instant;

    /// A moment in a loop that looks for something.
    pub(crate) fn pause() {
        (0..16).for_each(|_| std::hint::spin_loop());
    }

    /// Waits for a notification, at most for `timeout`. Returns whether the time ran out. `guard` locks `mutex`.
    pub(crate) fn wait_timeout<'a, T>(
        condvar: &Condvar,
        _mutex: &'a Mutex<T>,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        let (guard, result) = condvar.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner);
        (guard, result.timed_out())
    }

    /// Starts a thread that lives as long as the process.
    pub(crate) fn spawn_daemon(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        Builder::new().name(name).spawn(run).map(drop)
    }

    /// Starts a thread that ends before `scope` does.
    pub(crate) fn spawn_scoped<'scope, T: Send + 'scope>(
        scope: &'scope Scope<'scope, '_>,
        name: String,
        run: impl FnOnce() -> T + Send + 'scope,
    ) -> io::Result<ScopedJoinHandle<'scope, T>> {
        Builder::new().name(name).spawn_scoped(scope, run)
    }

    /// The value of `$init`, computed once per process.
    macro_rules! once {
        ($type:ty, $init:expr) => {{
            static VALUE: std::sync::OnceLock<$type> = std::sync::OnceLock::new();
            *VALUE.get_or_init(|| $init)
        }};
    }
    pub(crate) use once;
}

#[cfg(not(shuttle))]
pub(crate) use real::*;

#[cfg(shuttle)]
pub mod model;
#[cfg(shuttle)]
pub(crate) use model::*;
