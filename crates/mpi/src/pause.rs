//! How a thread that waits for messages leaves its core to others.

use std::thread;
use std::time::{Duration, Instant};

/// As long as this a wait yields, so that a message that is about to come is not missed.
const YIELDS: Duration = Duration::from_micros(60);

/// A wait: it first yields, then sleeps for a sixteenth of the time since anything came. So it is late by at most that
/// part, and a long wait takes next to nothing of a core.
#[derive(Debug)]
pub(crate) struct Pause {
    since: Instant,
    longest: Duration,
}

impl Pause {
    /// A wait that sleeps at most for `longest` at a time.
    pub(crate) fn new(longest: Duration) -> Pause {
        Pause { since: Instant::now(), longest }
    }

    /// Something came.
    pub(crate) fn reset(&mut self) {
        self.since = Instant::now();
    }

    /// Nothing came.
    pub(crate) fn rest(&self) {
        match self.since.elapsed() {
            short if short < YIELDS => thread::yield_now(),
            long => thread::sleep((long / 16).clamp(Duration::from_micros(10), self.longest)),
        }
    }
}
