//! ZB-V (Qi et al., 2024, arXiv 2401.10241, section 6): two chunks per rank, placed as a V, without a bubble.

use super::ActionKind::{Forward, InputGradient, WeightGradient};
use super::placement::{one_step, v_shaped};
use super::{Action, ActionKind, Schedule};

/// The model goes down the ranks and back, so that rank 0 holds the first chunk and the last.
///
/// With equal times of F, I and W there is no bubble from 2 pp micro-batches on, and every rank holds no more
/// activations than 1F1B does at most: the activations of `pp` micro-batches.
///
/// ```
/// let schedule = meshwork_pipeline::zb_v(2, 4);
/// assert_eq!(meshwork_pipeline::check(&schedule)?.peaks, [4, 4]); // chunks: two micro-batches on each rank
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn zb_v(pp: usize, micros: usize) -> Schedule {
    let row = |rank| {
        let mut row = Row { stages: [rank, 2 * pp - 1 - rank], micros, next: Default::default(), actions: Vec::new() };
        row.write(pp, rank);
        row.actions
    };
    one_step("zb_v", v_shaped(pp), micros, (0..pp).map(row).collect())
}

/// The actions of a rank while they are written, with a count of micro-batches for each kind in each of the two chunks.
struct Row {
    stages: [usize; 2],
    micros: usize,
    next: [[usize; 2]; 3],
    actions: Vec<Action>,
}

impl Row {
    /// Adds the next micro-batch of that kind in that chunk. The pattern is written for many micro-batches; those that
    /// do not exist are counted and left out.
    fn push(&mut self, kind: ActionKind, chunk: usize) {
        let slot = match kind {
            Forward => 0,
            InputGradient => 1,
            _ => 2,
        };
        let micro = self.next[slot][chunk];
        self.next[slot][chunk] += 1;
        if micro < self.micros {
            self.actions.push(Action::new(kind, self.stages[chunk], micro));
        }
    }

    fn write(&mut self, pp: usize, rank: usize) {
        let turns = self.micros.max(2 * pp);
        // Fill: the first chunk reaches down to the last rank, the second comes back up to this one ..
        for _ in 0..2 * (pp - rank) - 1 {
            self.push(Forward, 0);
        }
        for _ in 0..rank {
            self.push(Forward, 1);
            self.push(Forward, 0);
        }
        // .. where the first gradients arrive.
        for _ in 0..pp - rank {
            self.push(Forward, 1);
            self.push(InputGradient, 1);
            self.push(WeightGradient, 1);
        }
        // Steady state: each chunk alternates one forward and one backward.
        while self.next[0][1] < turns {
            if self.next[0][0] < turns {
                self.push(Forward, 0);
            }
            self.push(InputGradient, 0);
            self.push(WeightGradient, 0);
            self.push(Forward, 1);
            self.push(InputGradient, 1);
            self.push(WeightGradient, 1);
        }
        // Drain: input gradients first, for the ranks that wait; weight gradients while this one waits, and at the end.
        for _ in 0..rank {
            self.push(InputGradient, 0);
            self.push(InputGradient, 1);
        }
        for _ in 0..pp - rank {
            self.push(InputGradient, 0);
            self.push(WeightGradient, 0);
        }
        for chunk in [1, 0] {
            while self.next[2][chunk] < turns {
                self.push(WeightGradient, chunk);
            }
        }
    }
}
