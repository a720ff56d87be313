//! 1F1B with a flush (PipeDream-flush; Narayanan et al., 2021): forwards and backwards alternate.

use super::ActionKind::{Backward, Forward};
use super::placement::{one_per_rank, one_step};
use super::{Action, Schedule};

/// A few forwards to fill the pipeline, then forwards and backwards alternate, then the remaining backwards.
///
/// Rank r runs min(pp - r - 1, micros) forwards before they alternate, so the schedule takes any number of
/// micro-batches from 1. The bubble is GPipe's, but rank r holds the activations of only min(pp - r, micros)
/// micro-batches. With fewer micro-batches than ranks, the first ranks run all forwards, then all backwards.
///
/// ```
/// let schedule = meshwork_pipeline::one_f_one_b(2, 3);
/// assert_eq!(
///     meshwork_pipeline::render(&schedule)?,
///     "rank 0 | F0 F1       B0--- F2 B1---    B2---\n\
///      rank 1 |    F0 B0--- F1 B1--- F2 B2---\n"
/// );
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn one_f_one_b(pp: usize, micros: usize) -> Schedule {
    let row = |rank| stream(pp, rank, micros).collect();
    one_step("1f1b", one_per_rank(pp), micros, (0..pp).map(row).collect())
}

/// The actions of a rank for a stream of micro-batches. PipeDream runs the same, and never drains the pipeline.
pub(super) fn stream(pp: usize, rank: usize, micros: usize) -> impl Iterator<Item = Action> {
    let forward = move |micro| Action::new(Forward, rank, micro);
    let backward = move |micro| Action::new(Backward, rank, micro);
    // The first backward reaches this rank only after going through all ranks behind it.
    let ahead = (pp - 1 - rank).min(micros);
    let fill = (0..ahead).map(forward);
    let turns = (ahead..micros).flat_map(move |micro| [forward(micro), backward(micro - ahead)]);
    let drain = (micros - ahead..micros).map(backward);
    fill.chain(turns).chain(drain)
}
