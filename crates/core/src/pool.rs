//! One pool of worker threads per process, shared by all ranks: while a rank waits, its core works for the others.
//!
//! A rank is a thread that computes. When it has work that can be cut, it hands the pieces to [`for_each`]: it begins
//! at once, and while a core is free, a worker takes pieces too. A core is free when fewer threads compute than there
//! are cores; ranks that wait for each other do not compute (`yield_core`), so in a pipeline's bubble the waiting
//! rank's core works for the rank that it waits for. With as many busy ranks as cores no worker helps, and sharing
//! costs a lock and a push.
//!
//! Processes that use the same cores may count their threads together ([`share_cores`]): then a core whose rank waits
//! works for the ranks of other processes too.
//!
//! - **Results do not depend on it.** The caller cuts the pieces; results do not depend on which thread does which
//!   piece.
//! - **No thread depends on a worker.** The thread that shares does every piece that no worker has taken. It waits only
//!   for pieces in progress.
//! - **No thread spins for long.** A worker without work looks for more for `SPIN`, about as long as a wake-up takes,
//!   so that it is ready for the next kernel of a step; then it sleeps. A worker leaves as soon as a rank needs the
//!   core again, at the end of its piece: pieces of at most about a millisecond keep that short.

use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::{self, Condvar, Instant, Mutex, MutexGuard};
use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

/// How long a thread looks for work before it sleeps: about as long as a wake-up takes in a virtual machine, where it
/// wakes the core too. On two of them steps of `tiny` are 2 to 4% faster than with 10 µs; 200 µs give no more.
const SPIN: Duration = Duration::from_micros(50);

/// The environment variable for the number of [`threads`] that may compute.
pub const THREADS_VARIABLE: &str = "MESHWORK_THREADS";

/// Threads that may compute at once: the value of [`THREADS_VARIABLE`] if that is a whole number of at least 1, else
/// the cores that this process may use. Read once.
pub fn threads() -> usize {
    #[cfg(shuttle)]
    return sync::model::threads();
    #[cfg(not(shuttle))]
    sync::once!(usize, { asked().unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from)) })
}

/// The number of threads that [`THREADS_VARIABLE`] asks for.
#[cfg(not(shuttle))]
fn asked() -> Option<usize> {
    let asked = std::env::var(THREADS_VARIABLE).ok()?.parse().ok();
    asked.filter(|&threads| threads > 0)
}

/// Counts the threads of this process that compute in `busy` from now on: memory that it has in common with other
/// processes which use the same cores. A worker helps while fewer threads of all of them compute than there are cores.
/// Only the first call counts, before the process has ranks, and none where [`THREADS_VARIABLE`] gives the process a
/// number of its own.
#[cfg(not(shuttle))]
pub fn share_cores(busy: &'static AtomicUsize) {
    let pool = Pool::of_process();
    if asked().is_none() && pool.shared.set(busy).is_ok() {
        busy.fetch_add(pool.own.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// Calls `work` on every item, on this thread and on cores that are free; returns when all are done.
///
/// Items are taken in order, one at a time under a lock. An item should take 20 µs or more, and a few items per core
/// keep all cores busy to the end. Inside one of several items, `for_each` runs serially. A panic of `work` is raised
/// here again, when no other thread is in an item any more; items not begun by then may not be done.
///
/// ```
/// let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
/// let mut y = vec![0.0; 1000];
/// meshwork_core::pool::for_each(x.chunks(256).zip(y.chunks_mut(256)), |(x, y)| {
///     y.iter_mut().zip(x).for_each(|(y, x)| *y = 2.0 * x);
/// });
/// assert_eq!(y[999], 1998.0);
/// ```
pub fn for_each<I, S>(items: S, work: impl Fn(I) + Sync)
where
    S: IntoIterator<Item = I>,
    S::IntoIter: Send,
    I: Send,
{
    Pool::of_process().for_each(items.into_iter(), work);
}

/// Calls `wait`, during which this thread does not compute: its core works for others. It is for a rank that waits for
/// something other than its peers; waits for peers yield already.
pub fn yield_core<R>(wait: impl FnOnce() -> R) -> R {
    if HOLDS_CORE.with(Cell::get) { Pool::of_process().yield_core(wait) } else { wait() }
}

/// Whether no thread computes and no work is listed.
#[cfg(shuttle)]
pub fn is_idle() -> bool {
    let pool = Pool::of_process();
    pool.busy().load(Ordering::Relaxed) == 0 && pool.lock().jobs.is_empty()
}

sync::thread_local! {
    /// Whether this thread is counted among those that compute.
    static HOLDS_CORE: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread is inside an item.
    static IN_ITEM: Cell<bool> = const { Cell::new(false) };
}

/// Counts this thread among those that compute, until dropped. The thread of a rank holds one all its life, any other
/// thread while it shares work.
pub(crate) struct Core {
    pool: Option<&'static Pool>,
}

impl Core {
    /// For the thread that runs a rank.
    pub(crate) fn of_rank() -> Core {
        Core::enter(Pool::of_process())
    }

    fn enter(pool: &'static Pool) -> Core {
        let pool = (!HOLDS_CORE.with(|holds| holds.replace(true))).then_some(pool);
        if let Some(pool) = pool {
            pool.busy().fetch_add(1, Ordering::Relaxed);
        }
        Core { pool }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if let Some(pool) = self.pool {
            HOLDS_CORE.with(|holds| holds.set(false));
            pool.leave();
        }
    }
}

/// Shared work: lives on the stack of the thread that shares it.
struct Job<'a> {
    /// Takes items until there are none, or as a helper until the core is needed. Returns whether there are none.
    drain: &'a (dyn Fn(bool) -> bool + Sync),
    /// Threads other than the owner that are in `drain`. Decreased as the last thing that a helper does with a job.
    helpers: AtomicUsize,
    /// The panic of the first helper that panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job<'_> {
    fn drain(&self, helping: bool) -> thread::Result<bool> {
        struct Inside;
        impl Drop for Inside {
            fn drop(&mut self) {
                IN_ITEM.with(|inside| inside.set(false));
            }
        }
        IN_ITEM.with(|inside| inside.set(true));
        let _inside = Inside;
        // Unwind safe: after a panic the items are only dropped.
        catch_unwind(AssertUnwindSafe(|| (self.drain)(helping)))
    }
}

/// A job that a worker may join. Listed only while its owner is in [`Pool::run`].
struct Listed(*const Job<'static>);

// SAFETY: a `Job` is shared between threads by reference: `drain` is `Sync`, the rest atomic or locked.
unsafe impl Send for Listed {}

#[derive(Default)]
struct State {
    jobs: Vec<Listed>,
    /// Workers asleep.
    sleeping: usize,
    /// Owners asleep until their helpers have left.
    owners: usize,
}

struct Pool {
    threads: usize,
    state: Mutex<State>,
    /// Wakes workers.
    work: Condvar,
    /// Wakes owners.
    out: Condvar,
    /// Threads of this process that compute, unless processes count together: ranks that do not wait, and workers in a
    /// job. Read by [`Pool::busy`].
    own: AtomicUsize,
    /// The same of all processes that use the same cores.
    shared: OnceLock<&'static AtomicUsize>,
    /// Length of `State::jobs`, readable without the lock.
    listed: AtomicUsize,
}

impl Pool {
    /// The pool of the process, which [`for_each`] uses.
    fn of_process() -> &'static Pool {
        sync::once!(&'static Pool, Pool::start(threads()))
    }

    /// A pool for `threads` threads that compute at once, with one worker fewer. It lives as long as the process.
    fn start(threads: usize) -> &'static Pool {
        let pool: &'static Pool = Box::leak(Box::new(Pool {
            threads,
            state: Mutex::default(),
            work: Condvar::new(),
            out: Condvar::new(),
            own: AtomicUsize::new(0),
            shared: OnceLock::new(),
            listed: AtomicUsize::new(0),
        }));
        for i in 1..threads {
            // If a worker does not start, there is one helper fewer.
            let _ = sync::spawn_daemon(format!("worker {i}"), || pool.serve());
        }
        pool
    }

    /// [`for_each`]. Only the step that takes an item and works on it is compiled for each caller, and only once: the
    /// kernels of a device are most of its code.
    fn for_each<I: Send>(&'static self, items: impl Iterator<Item = I> + Send, work: impl Fn(I) + Sync) {
        let single = items.size_hint().1.is_some_and(|most| most <= 1);
        let items = Mutex::new(items.fuse());
        self.repeat(single, &|| {
            let item = items.lock().unwrap_or_else(PoisonError::into_inner).next();
            item.map(&work).is_some()
        });
    }

    /// Calls `step` until it finds no item, on this thread and, unless there is a `single` item, on free cores.
    fn repeat(&'static self, single: bool, step: &(dyn Fn() -> bool + Sync)) {
        if single || self.threads == 1 || IN_ITEM.with(Cell::get) {
            while step() {}
            return;
        }
        let drain = |helping: bool| {
            while step() {
                if helping && self.busy().load(Ordering::Relaxed) > self.threads {
                    return false;
                }
            }
            true
        };
        let core = Core::enter(self);
        let done = self.run(&Job { drain: &drain, helpers: AtomicUsize::new(0), panic: Mutex::new(None) });
        drop(core);
        if let Err(panic) = done {
            resume_unwind(panic);
        }
    }

    /// [`yield_core`].
    fn yield_core<R>(&self, wait: impl FnOnce() -> R) -> R {
        struct Back<'a>(&'a Pool);
        impl Drop for Back<'_> {
            fn drop(&mut self) {
                self.0.busy().fetch_add(1, Ordering::Relaxed);
            }
        }
        self.leave();
        let _back = Back(self);
        wait()
    }

    /// Threads that compute on the cores of this process.
    fn busy(&self) -> &AtomicUsize {
        self.shared.get().copied().unwrap_or(&self.own)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_free_core(&self) -> bool {
        self.busy().load(Ordering::Relaxed) < self.threads
    }

    /// This thread stops computing; a worker may take its core.
    fn leave(&self) {
        self.busy().fetch_sub(1, Ordering::Relaxed);
        if self.listed.load(Ordering::Relaxed) > 0 && self.has_free_core() && self.lock().sleeping > 0 {
            self.work.notify_one();
        }
    }

    /// Runs a job, with help from free cores. Returns the panic of an item, if one panicked.
    fn run(&self, job: &Job<'_>) -> thread::Result<()> {
        let listed = Listed(std::ptr::from_ref(job).cast());
        let at = listed.0;
        let mut state = self.lock();
        state.jobs.push(listed);
        self.listed.store(state.jobs.len(), Ordering::Relaxed);
        let sleeping = state.sleeping;
        drop(state);
        let free = self.threads.saturating_sub(self.busy().load(Ordering::Relaxed));
        for _ in 0..free.min(sleeping) {
            self.work.notify_one();
        }

        let mine = job.drain(false);
        self.unlist(&mut self.lock(), at);
        // No worker joins any more. The code below must not unwind before the helpers have left.
        let out = || job.helpers.load(Ordering::Acquire) == 0;
        if !spin_until(out) {
            self.yield_core(|| {
                #[cfg(shuttle)]
                let planted = sync::model::planted(sync::model::Bug::OwnerSleepsLate) && !out();
                let mut state = self.lock();
                state.owners += 1;
                #[cfg(shuttle)]
                if planted {
                    state = self.out.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                while !out() {
                    state = self.out.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                state.owners -= 1;
            });
        }
        let theirs = job.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        mine.err().or(theirs).map_or(Ok(()), Err)
    }

    /// Takes a job off the list, if it is still there.
    fn unlist(&self, state: &mut State, job: *const Job<'static>) {
        state.jobs.retain(|listed| !std::ptr::eq(listed.0, job));
        self.listed.store(state.jobs.len(), Ordering::Relaxed);
    }

    /// The loop of a worker.
    fn serve(&self) {
        let mut state = self.lock();
        loop {
            // The oldest first: its owner has waited longest.
            let at = state.jobs.first().filter(|_| self.has_free_core()).map(|listed| listed.0);
            let Some(at) = at else {
                drop(state);
                let found = spin_until(|| self.listed.load(Ordering::Relaxed) > 0 && self.has_free_core());
                state = self.lock();
                if !found && (state.jobs.is_empty() || !self.has_free_core()) {
                    state.sleeping += 1;
                    state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.sleeping -= 1;
                }
                continue;
            };
            // SAFETY: the job is listed, so its owner is in `run` and will take it off under this lock before it looks
            // at `helpers`; with `helpers` above 0 it stays in `run`, and the job alive, until the last use below.
            let job = unsafe { &*at };
            job.helpers.fetch_add(1, Ordering::Relaxed);
            self.busy().fetch_add(1, Ordering::Relaxed);
            drop(state);
            let none_left = job.drain(true).unwrap_or_else(|panic| {
                job.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
                true
            });
            self.busy().fetch_sub(1, Ordering::Relaxed);
            state = self.lock();
            if none_left {
                self.unlist(&mut state, at);
            }
            job.helpers.fetch_sub(1, Ordering::Release); // the last use of the job
            if state.owners > 0 {
                self.out.notify_all();
            }
        }
    }
}

/// Checks `seen` for at most [`SPIN`]; returns whether it became true.
fn spin_until(seen: impl Fn() -> bool) -> bool {
    if seen() {
        return true;
    }
    let start = Instant::now();
    loop {
        sync::pause();
        if seen() {
            return true;
        }
        if start.elapsed() >= SPIN {
            return false;
        }
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests;
