//! DualPipeV (DeepSeek-AI's DualPipe, 2024, arXiv 2412.19437, cut in half by Sea AI Lab): a V of two chunks per rank,
//! in which a forward through one chunk runs next to a backward through the other.

use super::ActionKind::{Backward, Forward, InputGradient, WeightGradient};
use super::placement::{one_step, v_shaped};
use super::{Action, ActionKind, Schedule};

/// Two chunks per rank, placed as a V; in the steady state each forward has a backward of the other chunk next to it,
/// for devices that overlap the two. It takes 2 pp micro-batches or more.
///
/// The bubble is at most (pp - 1)(F&B + B - 3W) in times of chunks, F&B being a forward and a backward next to each
/// other (their sum where they do not overlap); a rank holds the activations of at most pp + ½ micro-batches. Most
/// backwards are whole; where ranks would wait, at both ends, they are split.
///
/// ```
/// let schedule = meshwork_pipeline::dualpipe_v(2, 4);
/// assert_eq!(meshwork_pipeline::check(&schedule)?.peaks, [5, 5]); // chunks: 2½ micro-batches on each rank
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn dualpipe_v(pp: usize, micros: usize) -> Schedule {
    let row = |rank| {
        let mut row = Row { stages: [rank, 2 * pp - 1 - rank], next: Default::default(), late: Default::default() };
        row.write(pp, rank, micros)
    };
    one_step("dualpipe_v", v_shaped(pp), micros, (0..pp).map(row).collect())
}

/// The state of writing a rank: by chunk, the next micro-batch of each direction, and the deferred weight gradients.
struct Row {
    stages: [usize; 2],
    next: [[usize; 2]; 2],
    late: std::collections::VecDeque<Action>,
}

impl Row {
    fn forward(&mut self, chunk: usize) -> Action {
        self.step(Forward, 0, chunk)
    }

    fn backward(&mut self, chunk: usize) -> Action {
        self.step(Backward, 1, chunk)
    }

    /// The part of a split backward that others wait for.
    fn input_gradient(&mut self, chunk: usize) -> Action {
        let action = self.step(InputGradient, 1, chunk);
        self.late.push_back(Action { kind: WeightGradient, ..action });
        action
    }

    fn step(&mut self, kind: ActionKind, direction: usize, chunk: usize) -> Action {
        let micro = self.next[direction][chunk];
        self.next[direction][chunk] += 1;
        Action::new(kind, self.stages[chunk], micro)
    }

    /// The eight phases of the published schedule.
    fn write(&mut self, pp: usize, rank: usize, micros: usize) -> Vec<Action> {
        let mut actions = Vec::with_capacity(6 * micros);
        let (behind, up_to) = (pp - rank - 1, rank + 1);
        // 1. The first chunk alone, until its micro-batches have gone down to the last rank and come back up ..
        for _ in 0..2 * behind {
            actions.push(self.forward(0));
        }
        // 2. .. both chunks ..
        for _ in 0..up_to {
            actions.extend([self.forward(0), self.forward(1)]);
        }
        // 3. .. and the second alone, with the first backwards: split, as the ranks before this one wait for them.
        for _ in 0..behind {
            actions.push(self.input_gradient(1));
            actions.extend(self.late.pop_front());
            actions.push(self.forward(1));
        }
        // 4. The steady state: each forward with a backward of the other chunk.
        for _ in 0..micros + up_to - 2 * pp {
            actions.extend([self.forward(0), self.backward(1), self.forward(1), self.backward(0)]);
        }
        // 5. The first chunk has no more forwards ..
        for _ in 0..behind {
            actions.extend([self.backward(1), self.forward(1), self.backward(0)]);
        }
        // 6. .. nor has the second; half-way from here, backwards are split for the ranks that wait.
        for i in 0..2 * up_to {
            let chunk = 1 - i % 2;
            let action = if i < up_to { self.backward(chunk) } else { self.input_gradient(chunk) };
            actions.push(action);
        }
        // 7. The rest of the first chunk, between weight gradients.
        for _ in 0..behind {
            actions.extend(self.late.pop_front());
            actions.push(self.input_gradient(0));
        }
        // 8. The remaining weight gradients.
        actions.extend(self.late.drain(..));
        actions
    }
}
