//! How a thread that waits for messages leaves its core to others.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A rank that waits first looks as often as this without a pause: a few microseconds, as a message takes.
const LOOKS: u32 = 40;

/// Then it yields, as long as this, so that a message that is about to come is not missed.
const YIELDS: Duration = Duration::from_micros(60);

/// A wait: it looks, yields, and then sleeps for a sixteenth of the time since anything came, at most `longest` at a
/// time, or 1/1024 of a wait that is longer than 1024 of these. So it is late by at most that part, and a long wait
/// takes next to nothing of a core.
#[derive(Debug)]
pub(crate) struct Pause {
    looks: u32,
    since: Option<Instant>,
    yields: Duration,
    longest: Duration,
}

impl Pause {
    /// Of a rank, whose short waits sleep at most for `longest` at a time.
    pub(crate) fn of_rank(longest: Duration) -> Pause {
        Pause { looks: 0, since: None, yields: YIELDS, longest }
    }

    /// Of the thread of MPI, which takes no core from ranks that compute: it sleeps at once.
    pub(crate) fn of_thread(longest: Duration) -> Pause {
        Pause { looks: LOOKS, since: None, yields: Duration::ZERO, longest }
    }

    /// Something came.
    pub(crate) fn reset(&mut self) {
        self.looks = self.looks.min(LOOKS / 2);
        self.since = None;
    }

    /// Whether it is more than a few looks.
    pub(crate) fn is_long(&self) -> bool {
        self.since.is_some()
    }

    /// Nothing came.
    pub(crate) fn rest(&mut self) {
        if self.looks < LOOKS {
            self.looks += 1;
            return spin_loop();
        }
        match self.since.get_or_insert_with(Instant::now).elapsed() {
            short if short < self.yields => thread::yield_now(),
            long => thread::sleep((long / 16).clamp(Duration::from_micros(10), self.longest.max(long / 1024))),
        }
    }
}

/// The ranks of a process that wait, and so move its messages: while there are any, no other thread needs to.
#[derive(Debug, Default)]
pub(crate) struct Drivers(AtomicUsize);

/// A rank that waits, as long as this lives.
pub(crate) struct Driver<'a>(&'a Drivers);

impl Drivers {
    pub(crate) fn enter(&self) -> Driver<'_> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Driver(self)
    }

    pub(crate) fn is_any(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }
}

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}
