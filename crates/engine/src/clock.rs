//! Which step a micro-batch belongs to.

use crate::pass::Purpose;

/// The step of each micro-batch of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    pub purpose: Purpose,
    /// The step of the pass, from 0.
    pub step: u64,
    /// Number of its first micro-batch, in the count of the schedule.
    pub first_micro: i64,
    pub micros: usize,
}

impl Clock {
    /// The clock of a pass that does not train. `micros` is its number of micro-batches.
    pub fn beside(purpose: Purpose, step: u64, micros: usize) -> Self {
        Self { purpose, step, first_micro: 0, micros }
    }

    /// The step of a micro-batch as the schedule counts them, and its number in that step.
    pub fn step_of(&self, micro: usize) -> (u64, usize) {
        let (after, micros) = (micro as i64 - self.first_micro, self.micros.max(1) as i64);
        (self.step.saturating_add_signed(after.div_euclid(micros)), after.rem_euclid(micros) as usize)
    }
}
