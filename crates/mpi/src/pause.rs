//! How a thread that waits for messages leaves its core to others.

use std::hint::spin_loop;
use std::thread;
use std::time::{Duration, Instant};

/// A rank that waits first looks as often as this without a pause: a few microseconds, as a message takes.
const LOOKS: u32 = 40;

/// Then it yields, as long as this, so that a message that is about to come is not missed.
const YIELDS: Duration = Duration::from_micros(60);

/// The shortest sleep.
const SHORTEST: Duration = Duration::from_micros(10);

/// A wait: it looks, yields, and then sleeps for a sixteenth of the time since anything came, at most `longest` at a
/// time, or 1/1024 of a wait that is longer than 1024 of these. So it is late by at most that part, and a long wait
/// takes next to nothing of a core.
#[derive(Debug)]
pub(crate) struct Pause {
    looks: u32,
    most: u32,
    since: Option<Instant>,
    yields: Duration,
    longest: Duration,
}

impl Pause {
    /// Of a rank, whose short waits sleep at most for `longest` at a time.
    pub(crate) fn of_rank(longest: Duration) -> Pause {
        Pause { looks: 0, most: LOOKS, since: None, yields: YIELDS, longest }
    }

    /// Of the thread of MPI, which takes no core from ranks that compute: it sleeps at once.
    pub(crate) fn of_thread(longest: Duration) -> Pause {
        Pause { looks: LOOKS, most: LOOKS, since: None, yields: Duration::ZERO, longest }
    }

    /// Of a rank that is woken, and whose core others need: it sleeps at once.
    pub(crate) fn of_sleeper(longest: Duration) -> Pause {
        Pause { looks: 0, most: 0, since: None, yields: Duration::ZERO, longest }
    }

    /// Something came.
    pub(crate) fn reset(&mut self) {
        self.looks = self.looks.min(self.most / 2);
        self.since = None;
    }

    /// Whether it is more than a few looks.
    pub(crate) fn is_long(&self) -> bool {
        self.since.is_some()
    }

    /// Nothing came.
    pub(crate) fn rest(&mut self) {
        if !self.is_brief() {
            self.sleep();
        }
    }

    /// Nothing came: whether it looks again at once, or has yielded, and need not sleep yet.
    pub(crate) fn is_brief(&mut self) -> bool {
        if self.looks < self.most {
            self.looks += 1;
            spin_loop();
            return true;
        }
        let yields = self.since.get_or_insert_with(Instant::now).elapsed() < self.yields;
        if yields {
            thread::yield_now();
        }
        yields
    }

    /// Sleeps.
    pub(crate) fn sleep(&mut self) {
        let long = self.since.get_or_insert_with(Instant::now).elapsed();
        thread::sleep((long / 16).min(self.longest.max(long / 1024)).max(SHORTEST));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_pause_panics_when_it_sleeps() {
        for longest in [Duration::ZERO, Duration::from_micros(200)] {
            for mut pause in [Pause::of_rank(longest), Pause::of_thread(longest), Pause::of_sleeper(longest)] {
                pause.sleep();
                assert!(pause.is_long(), "{pause:?}");
            }
        }
    }
}
