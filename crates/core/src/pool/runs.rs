//! Items handed out so that a thread's next one is the neighbour of its last, and that the same part of every job is the
//! same thread's.
//!
//! Operations follow each other over the same rows. What another core wrote comes from its cache, which on CPUs with
//! several last caches takes as long as from memory, or longer: there a step of 0.8 M parameters takes 5% more if threads
//! take items one by one.

use std::ops::Range;

/// Items in runs of neighbours, one for each thread of a pool. A thread takes its own run from the front; when that is
/// empty, one that nobody has begun, then the back half of the longest.
pub(super) struct Runs<I> {
    items: Vec<Option<I>>,
    runs: Vec<Run>,
}

struct Run {
    left: Range<usize>,
    begun: bool,
}

impl<I> Runs<I> {
    /// The items in about as long runs.
    pub(super) fn new(items: impl Iterator<Item = I>, threads: usize) -> Runs<I> {
        let items: Vec<_> = items.map(Some).collect();
        let start = |run: usize| run * items.len() / threads;
        let runs = (0..threads).map(|run| Run { left: start(run)..start(run + 1), begun: false }).collect();
        Runs { items, runs }
    }

    /// The next item of a thread, and whether the one that follows it is this thread's next, unless somebody takes that who
    /// has nothing else to do.
    pub(super) fn take(&mut self, thread: usize) -> Option<(I, bool)> {
        if self.runs[thread].left.is_empty() {
            self.runs[thread].left = self.others();
        }
        let run = &mut self.runs[thread];
        run.begun = true;
        let item = self.items[run.left.next()?].take()?;
        Some((item, !run.left.is_empty()))
    }

    /// Items of another's run, if any are left.
    fn others(&mut self) -> Range<usize> {
        if let Some(run) = self.runs.iter_mut().find(|run| !run.begun && !run.left.is_empty()) {
            return std::mem::take(&mut run.left);
        }
        let Some(longest) = self.runs.iter_mut().max_by_key(|run| run.left.len()) else { return 0..0 };
        let Range { start, end } = longest.left;
        let half = start + (end - start) / 2;
        longest.left.end = half;
        half..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread alone gets every item once and in order from its own run on, and is told of each neighbour in a run.
    #[test]
    fn one_thread_takes_run_after_run() {
        for (len, threads) in [(0, 1), (1, 3), (7, 2), (8, 3)] {
            let mut runs = Runs::new(0..len, threads);
            let all: Vec<_> = std::iter::from_fn(|| runs.take(0)).collect();
            assert!(all.iter().map(|(item, _)| *item).eq(0..len));
            let ends: Vec<_> = (1..=threads).map(|run| run * len / threads).collect();
            assert!(all.iter().all(|&(item, next)| next != ends.contains(&(item + 1))), "{all:?}");
        }
    }

    /// A second thread has the second run; who has nothing left takes the back half of what another has.
    #[test]
    fn threads_keep_to_their_runs_and_help_each_other() {
        let mut runs = Runs::new(0..12, 2);
        let mut here = Vec::from_iter(runs.take(0));
        let there: Vec<_> = (0..8).filter_map(|_| runs.take(1)).map(|(item, _)| item).collect();
        here.extend(std::iter::from_fn(|| runs.take(0)));
        assert_eq!(there, [6, 7, 8, 9, 10, 11, 3, 4]);
        assert_eq!(here, [(0, true), (1, true), (2, false), (5, false)]);
    }
}
