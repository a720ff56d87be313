//! Interleaved 1F1B (PTD-P; Narayanan et al., SC 2021, section 2.2): several chunks per rank, 1F1B over all of them.

use super::ActionKind::{Backward, Forward};
use super::placement::{looped, one_step};
use super::{Action, Schedule};

/// 1F1B with `virtual_stages` chunks per rank: the model goes that many times around the ranks.
///
/// Micro-batches go in groups of `pp` through one chunk after the other, so their number must be a multiple of `pp`.
/// Filling takes chunks instead of whole ranks, so the bubble shrinks to (pp - 1)/(virtual_stages · micros) of the
/// ideal time; rank 0 holds the activations of pp (1 + (pp - 1)/(pp · virtual_stages)) micro-batches, and there are
/// `virtual_stages` times as many messages. With a single chunk it is 1F1B with a warm-up twice as long.
///
/// ```
/// let schedule = meshwork_pipeline::interleaved_1f1b(2, 2, 2);
/// assert_eq!(
///     meshwork_pipeline::render(&schedule)?,
///     "rank 0 | 0F0 0F1 2F0 2F1         2B0----     2B1---- 0B0---- 0B1----\n\
///      rank 1 |     1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1----\n"
/// );
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn interleaved_1f1b(pp: usize, virtual_stages: usize, micros: usize) -> Schedule {
    let chunks_times_micros = virtual_stages * micros;
    // The chunk and the micro-batch of the n-th forward of a rank.
    let nth = |n: usize| {
        let (group, place) = (n / (pp * virtual_stages), n % (pp * virtual_stages));
        (place / pp, group * pp + place % pp)
    };
    let row = |rank: usize| {
        let forward = |n: usize| {
            let (chunk, micro) = nth(n);
            Action::new(Forward, chunk * pp + rank, micro)
        };
        let backward = |n: usize| {
            let (chunk, micro) = nth(n);
            Action::new(Backward, (virtual_stages - 1 - chunk) * pp + rank, micro)
        };
        // The warm-up has the forwards of one group of micro-batches through all chunks but the last, and as many more
        // as the way to the last rank and back takes.
        let ahead = ((virtual_stages - 1) * pp + 2 * (pp - 1 - rank)).min(chunks_times_micros);
        let fill = (0..ahead).map(forward);
        let turns = (ahead..chunks_times_micros).flat_map(|n| [forward(n), backward(n - ahead)]);
        let drain = (chunks_times_micros - ahead..chunks_times_micros).map(backward);
        fill.chain(turns).chain(drain).collect()
    };
    one_step("interleaved_1f1b", looped(pp, virtual_stages), micros, (0..pp).map(row).collect())
}
