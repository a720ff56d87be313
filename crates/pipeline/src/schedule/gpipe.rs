//! GPipe (Huang et al., 2019): all forwards, then all backwards.

use super::ActionKind::{Backward, Forward};
use super::placement::{one_per_rank, one_step};
use super::{Action, Schedule};

/// All forwards, then all backwards, one stage per rank. It takes any number of micro-batches from 1.
///
/// Every rank holds the activations of all `micros` at its peak, whatever the order of the backwards. The paper's
/// figure runs them last to first; here they run first to last, with the same peak and the same bubble, so that
/// gradients are summed in micro-batch order as in every other schedule and the sums are equal bit for bit.
///
/// Writes the data without checking it. [`Generator::build`](crate::Generator::build) refuses invalid shapes (no rank,
/// no micro-batch), and [`check`](crate::check) would find them.
///
/// ```
/// let schedule = meshwork_pipeline::gpipe(2, 2);
/// assert_eq!(
///     meshwork_pipeline::render(&schedule)?,
///     "rank 0 | F0 F1          B0--- B1---\n\
///      rank 1 |    F0 F1 B0--- B1---\n"
/// );
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn gpipe(pp: usize, micros: usize) -> Schedule {
    let row = |rank| {
        let forwards = (0..micros).map(move |micro| Action::new(Forward, rank, micro));
        let backwards = (0..micros).map(move |micro| Action::new(Backward, rank, micro));
        forwards.chain(backwards).collect()
    };
    one_step("gpipe", one_per_rank(pp), micros, (0..pp).map(row).collect())
}
