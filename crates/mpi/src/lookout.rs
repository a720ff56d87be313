//! How the ranks of a process sleep until something comes for them.
//!
//! Each sleeps by its own [`Bell`], which rings when something has arrived for it, or memory of its operations is free
//! again. One thread looks out for what other processes send: the first rank that sleeps, or the thread of MPI while
//! all ranks compute. Over TCP it sleeps until a connection has something; MPI has to be asked, with pauses. A rank
//! whose wait is over hands this on to one that sleeps.
//!
//! Every sleep ends after [`LONGEST`] at the latest, for what is done from time to time.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::pause::Pause;
use crate::watch::Watch;

/// The longest sleep of a rank, or of the thread of MPI at the connections.
const LONGEST: Duration = Duration::from_millis(5);

/// The longest sleep of the thread of MPI where it has to ask, and while ranks wait, which move the messages. Each time
/// it wakes it takes a core from a rank that computes: with a quarter of this, steps of two ranks on two cores took 3%
/// longer.
const SLEEP: Duration = Duration::from_millis(2);

/// The longest sleep of a rank that has to ask MPI, on a core of its own: so late it may be.
const LONGEST_PAUSE: Duration = Duration::from_micros(200);

/// What brings messages of other processes.
#[derive(Debug)]
pub(crate) enum Source {
    /// There are no other processes.
    Nothing,
    /// It has to be asked.
    Asked,
    Connections(Arc<Watch>),
}

/// The ranks of a process that wait, and how they sleep.
#[derive(Debug)]
pub(crate) struct Lookout {
    source: Source,
    /// See [`LONGEST`].
    longest: Duration,
    /// Held by the thread that looks out.
    post: Mutex<()>,
    /// Whether that is the thread of MPI.
    is_spare: AtomicBool,
    asleep: Mutex<Vec<Arc<Bell>>>,
    /// Ranks that wait, and waits that have begun.
    waiting: AtomicUsize,
    begun: AtomicUsize,
    /// Whether something has arrived for a rank that computes while its operations are under way.
    is_unattended: AtomicBool,
    /// The ranks of this host for each of its cores.
    crowd: AtomicU32,
}

/// What wakes a rank.
#[derive(Debug)]
pub(crate) struct Bell {
    lookout: Arc<Lookout>,
    rings: AtomicU32,
    /// Whether the rank sleeps by this bell, or at the connections.
    is_asleep: AtomicBool,
    is_at_post: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
    /// Waits of the rank, which looks after its operations itself meanwhile, and operations under way.
    waiting: AtomicUsize,
    flying: AtomicUsize,
}

/// A wait of a rank, as long as this lives.
pub(crate) struct Waiting<'a>(&'a Bell);

/// Rings when it is dropped: memory of an operation is free again.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ring(Option<Arc<Bell>>);

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // What is under these locks is whole between calls, and no call panics halfway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lookout {
    /// A lookout where `ranks` ranks share this host's cores.
    pub(crate) fn new(source: Source, ranks: usize) -> Lookout {
        Lookout {
            source,
            longest: LONGEST,
            post: Mutex::default(),
            is_spare: AtomicBool::new(false),
            asleep: Mutex::default(),
            waiting: AtomicUsize::new(0),
            begun: AtomicUsize::new(0),
            is_unattended: AtomicBool::new(false),
            crowd: AtomicU32::new(crowd(ranks)),
        }
    }

    /// Takes note of how many ranks are on this host.
    pub(crate) fn share_host(&self, ranks: usize) {
        self.crowd.store(crowd(ranks), Ordering::Relaxed);
    }

    /// A sleep where ranks share cores, whose looks alone would take all of these.
    fn longer(&self, alone: Duration) -> Duration {
        alone.saturating_mul(self.crowd.load(Ordering::Relaxed))
    }

    /// The pauses of a rank that waits, and that its bell wakes.
    pub(crate) fn pause(&self) -> Pause {
        match self.source {
            Source::Connections(_) if self.crowd.load(Ordering::Relaxed) > 1 => {
                Pause::of_sleeper(self.longer(LONGEST_PAUSE))
            }
            _ => self.pause_at_device(),
        }
    }

    /// The pauses of a rank that waits for its device, which wakes nobody.
    pub(crate) fn pause_at_device(&self) -> Pause {
        Pause::of_rank(self.longer(LONGEST_PAUSE))
    }

    /// The pauses of the thread of MPI.
    pub(crate) fn pause_spare(&self) -> Pause {
        Pause::of_thread(self.longer(SLEEP))
    }

    /// Whether a rank waits, and so moves messages: then no other thread needs to.
    pub(crate) fn is_any(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Whether something has arrived for a rank that computes since this was asked last.
    pub(crate) fn take_unattended(&self) -> bool {
        self.is_unattended.swap(false, Ordering::SeqCst)
    }

    /// Wakes the thread that looks out, if there is something to attend to.
    pub(crate) fn call_if_unattended(&self) {
        if self.is_unattended.load(Ordering::SeqCst) {
            self.call();
        }
    }

    fn call(&self) {
        if let Source::Connections(watch) = &self.source {
            watch.call();
        }
    }

    /// A rank that waits sleeps until its bell has rung more often than when it was `heard`.
    pub(crate) fn sleep(&self, bell: &Arc<Bell>, heard: u32, pause: &mut Pause) {
        lock(&self.asleep).push(bell.clone()); // before it looks for the post, which somebody may hand on just now
        match self.post.try_lock() {
            Ok(_post) => match &self.source {
                Source::Nothing => bell.sleep(heard, self.longer(self.longest)),
                Source::Asked => pause.sleep(),
                Source::Connections(watch) => {
                    bell.is_at_post.store(true, Ordering::SeqCst);
                    if bell.heard() == heard {
                        watch.sleep(self.longer(self.longest));
                    }
                    bell.is_at_post.store(false, Ordering::SeqCst);
                }
            },
            Err(_) => {
                if self.is_spare.load(Ordering::SeqCst) {
                    self.call(); // it hands the post on
                }
                bell.sleep(heard, self.longer(self.longest));
            }
        }
        let mut asleep = lock(&self.asleep);
        if let Some(at) = asleep.iter().position(|other| Arc::ptr_eq(other, bell)) {
            asleep.swap_remove(at);
        }
    }

    /// The thread of MPI sleeps. `begun` is how many waits it had seen.
    pub(crate) fn sleep_spare(&self, begun: &mut usize, pause: &mut Pause) {
        let Source::Connections(watch) = &self.source else { return pause.rest() };
        let before = std::mem::replace(begun, self.begun.load(Ordering::Relaxed));
        // Ranks that communicate all the time are not disturbed.
        if self.is_any() || *begun != before {
            return thread::sleep(self.longer(SLEEP));
        }
        if let Ok(post) = self.post.try_lock() {
            self.is_spare.store(true, Ordering::SeqCst);
            if !self.is_any() {
                watch.sleep(self.longest);
            }
            self.is_spare.store(false, Ordering::SeqCst);
            drop(post);
        }
        self.hand_on();
    }

    /// Wakes a rank that sleeps, if nobody looks out.
    fn hand_on(&self) {
        let is_free = self.post.try_lock().is_ok();
        if is_free && let Some(bell) = lock(&self.asleep).first() {
            bell.wake();
        }
    }
}

/// How many ranks of a host share a core.
fn crowd(ranks: usize) -> u32 {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    (ranks / cores).clamp(1, 64) as u32
}

impl Bell {
    pub(crate) fn new(lookout: &Arc<Lookout>) -> Bell {
        Bell {
            lookout: lookout.clone(),
            rings: AtomicU32::new(0),
            is_asleep: AtomicBool::new(false),
            is_at_post: AtomicBool::new(false),
            lock: Mutex::default(),
            wake: Condvar::new(),
            waiting: AtomicUsize::new(0),
            flying: AtomicUsize::new(0),
        }
    }

    /// How often it has rung.
    pub(crate) fn heard(&self) -> u32 {
        self.rings.load(Ordering::SeqCst)
    }

    /// Something has come. If the rank computes, and this is for more than what it begins later, somebody attends to
    /// it.
    pub(crate) fn ring(&self, is_for_now: bool) {
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.wake();
        } else if is_for_now || self.flying.load(Ordering::SeqCst) > 0 {
            self.lookout.is_unattended.store(true, Ordering::SeqCst);
        }
    }

    fn wake(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
        if self.is_asleep.load(Ordering::SeqCst) {
            drop(lock(&self.lock)); // it looks at the rings under this lock, or sleeps
            self.wake.notify_all();
        }
        if self.is_at_post.load(Ordering::SeqCst) {
            self.lookout.call();
        }
    }

    /// Sleeps until it has rung more often than when it was `heard`.
    fn sleep(&self, heard: u32, longest: Duration) {
        let guard = lock(&self.lock);
        self.is_asleep.store(true, Ordering::SeqCst);
        let rung = self.wake.wait_timeout_while(guard, longest, |()| self.heard() == heard);
        self.is_asleep.store(false, Ordering::SeqCst);
        drop(rung);
    }

    /// Takes note of how many operations are under way.
    pub(crate) fn fly(&self, flying: usize) {
        self.flying.store(flying, Ordering::SeqCst);
    }

    /// Whether the rank waits.
    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// The rank waits.
    pub(crate) fn enter(&self) -> Waiting<'_> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        self.lookout.waiting.fetch_add(1, Ordering::SeqCst);
        self.lookout.begun.fetch_add(1, Ordering::Relaxed);
        Waiting(self)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Bell { lookout, waiting, flying, .. } = self.0;
        lookout.waiting.fetch_sub(1, Ordering::SeqCst);
        waiting.fetch_sub(1, Ordering::SeqCst);
        // What came just now.
        if flying.load(Ordering::SeqCst) > 0 {
            lookout.is_unattended.store(true, Ordering::SeqCst);
        }
        lookout.hand_on();
    }
}

impl Ring {
    pub(crate) fn of(bell: &Arc<Bell>) -> Ring {
        Ring(Some(bell.clone()))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if let Some(bell) = &self.0 {
            bell.ring(false);
        }
    }
}

#[cfg(test)]
mod tests;
