//! Distributes heads so that a thread's next head is the neighbour of its last one, and is known in advance.

use std::collections::VecDeque;
use std::thread::{self, ThreadId};

/// Items in runs of neighbours, initially one run per thread. A thread takes items from the front of its run. When the
/// run is empty, it takes a run that no thread has started, then the back half of the longest run.
pub(super) struct Runs<T> {
    runs: Vec<Run<T>>,
}

struct Run<T> {
    /// The thread that owns the run, once started.
    thread: Option<ThreadId>,
    items: VecDeque<T>,
}

impl<T> Runs<T> {
    /// `len` items in runs of about the same length.
    pub(super) fn new(len: usize, mut items: impl Iterator<Item = T>, threads: usize) -> Runs<T> {
        let run = |run: usize| run * len / threads..(run + 1) * len / threads;
        let runs = (0..threads).map(|at| Run { thread: None, items: items.by_ref().take(run(at).len()).collect() });
        Runs { runs: runs.collect() }
    }

    /// The run from which this thread takes its next item, if any.
    fn run(&mut self) -> Option<&mut Run<T>> {
        let me = Some(thread::current().id());
        let left = |owner| move |run: &Run<T>| run.thread == owner && !run.items.is_empty();
        let at = match self.runs.iter().position(left(me)).or_else(|| self.runs.iter().position(left(None))) {
            Some(at) => at,
            None => {
                let longest = self.runs.iter_mut().max_by_key(|run| run.items.len())?;
                let items = longest.items.split_off(longest.items.len() / 2);
                self.runs.push(Run { thread: me, items });
                self.runs.len() - 1
            }
        };
        let run = &mut self.runs[at];
        run.thread = me;
        Some(run)
    }
}

impl<T> Iterator for Runs<T> {
    /// An item, and whether its neighbour will be this thread's next item, unless an idle thread takes it first.
    type Item = (T, bool);

    fn next(&mut self) -> Option<(T, bool)> {
        let run = self.run()?;
        let item = run.items.pop_front()?;
        Some((item, !run.items.is_empty()))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.runs.iter().map(|run| run.items.len()).sum();
        (left, Some(left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A single thread gets every item once and in order, and knows each neighbour in a run.
    #[test]
    fn one_thread_takes_run_after_run() {
        for (len, threads) in [(0, 1), (1, 3), (7, 2), (8, 3)] {
            let runs = Runs::new(len, 0..len, threads);
            assert_eq!(runs.size_hint(), (len, Some(len)));
            let all: Vec<_> = runs.collect();
            assert!(all.iter().map(|(item, _)| *item).eq(0..len));
            let ends: Vec<_> = (1..=threads).map(|run| run * len / threads).collect();
            assert!(all.iter().all(|&(item, next)| next != ends.contains(&(item + 1))), "{all:?}");
        }
    }

    /// A second thread begins the second run; a thread without items takes the back half of another run.
    #[test]
    fn threads_keep_to_their_runs_and_help_each_other() {
        let mut runs = Runs::new(12, 0..12, 2);
        let mut here = Vec::from_iter(runs.next());
        let there: Vec<_> = thread::scope(|scope| {
            let taken = scope.spawn(|| runs.by_ref().take(8).map(|(item, _)| item).collect());
            taken.join().unwrap_or_default()
        });
        here.extend(runs);
        assert_eq!(there, [6, 7, 8, 9, 10, 11, 3, 4]);
        assert_eq!(here, [(0, true), (1, true), (2, false), (5, false)]);
    }
}
