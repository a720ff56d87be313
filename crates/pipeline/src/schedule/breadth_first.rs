//! Breadth-first (Lamy-Poirier, 2023, arXiv 2211.05953, section 4): GPipe over looped chunks.

use super::ActionKind::{Backward, Forward};
use super::placement::{looped, one_step};
use super::{Action, Schedule};

/// All forwards, chunk by chunk, then all backwards, chunk by chunk from the last: looped GPipe.
///
/// The bubble is as large as in interleaved 1F1B, for any number of micro-batches; each rank holds the activations of
/// all of them, as in GPipe. Its advantage is that all micro-batches of a chunk run in a row, so that sharded weights
/// are gathered, and gradients reduced, once per chunk.
///
/// ```
/// let schedule = meshwork_pipeline::breadth_first(2, 2, 2);
/// assert_eq!(
///     meshwork_pipeline::render(&schedule)?,
///     "rank 0 | 0F0 0F1 2F0 2F1             2B0---- 2B1---- 0B0---- 0B1----\n\
///      rank 1 |     1F0 1F1 3F0 3F1 3B0---- 3B1---- 1B0---- 1B1----\n"
/// );
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn breadth_first(pp: usize, virtual_stages: usize, micros: usize) -> Schedule {
    let row = |rank: usize| {
        let pass = move |kind, chunk| (0..micros).map(move |micro| Action::new(kind, chunk * pp + rank, micro));
        let forwards = (0..virtual_stages).flat_map(move |chunk| pass(Forward, chunk));
        let backwards = (0..virtual_stages).rev().flat_map(move |chunk| pass(Backward, chunk));
        forwards.chain(backwards).collect()
    };
    one_step("breadth_first", looped(pp, virtual_stages), micros, (0..pp).map(row).collect())
}
