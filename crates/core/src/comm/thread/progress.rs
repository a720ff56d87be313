//! Since when each rank has made no progress.

use crate::sync::Instant;
use std::time::Duration;

/// Since when each rank has made no progress, as the waits of all ranks saw it. One table for the world: with one for
/// each wait, a look of all ranks at all others would grow with the square of their number.
#[derive(Debug, Default)]
pub(super) struct Progress {
    looked: Option<Instant>,
    still: Vec<Still>,
}

#[derive(Clone, Copy, Debug)]
struct Still {
    beats: u64,
    since: Instant,
}

impl Progress {
    /// Looks at all ranks, unless another wait did so a short time ago. Whether some rank has made no progress for
    /// `timeout`.
    pub(super) fn look(&mut self, ranks: usize, beats: impl Fn(usize) -> u64, timeout: Duration) -> bool {
        let now = Instant::now();
        if self.looked.is_none_or(|looked| now.duration_since(looked) >= timeout / 16) {
            self.looked = Some(now);
            let still = |rank: usize| {
                let (beats, before) = (beats(rank), self.still.get(rank));
                before.copied().filter(|before| before.beats == beats).unwrap_or(Still { beats, since: now })
            };
            self.still = (0..ranks).map(still).collect();
        }
        self.still.iter().any(|still| now.duration_since(still.since) >= timeout)
    }

    /// Whether `rank` had made no progress for `timeout` at the last look.
    pub(super) fn is_late(&self, rank: usize, now: Instant, timeout: Duration) -> bool {
        now.duration_since(self.still[rank].since) >= timeout
    }
}
