//! PipeDream-2BW (Narayanan et al., ICML 2021, arXiv 2006.09503, section 3.1): double-buffered weight updates.

use super::pipedream::undrained;
use super::{Schedule, Weights};

/// 1F1B over the micro-batches of all steps, with no flush between them: each stage updates its weights once per batch
/// of `micros_per_step`, with gradients of the previous version. It is asynchronous. Each rank holds two versions of
/// the weights; for that, a batch needs at least as many micro-batches as there are ranks.
///
/// ```
/// let schedule = meshwork_pipeline::pipedream_2bw(3, 3, 4);
/// assert_eq!(meshwork_pipeline::check(&schedule)?.weight_versions, [2, 2, 2]);
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn pipedream_2bw(pp: usize, micros_per_step: usize, steps: usize) -> Schedule {
    let ends_batch = |micro: usize| (micro + 1).is_multiple_of(micros_per_step);
    undrained("pipedream_2bw", Weights::DoubleBuffered, pp, micros_per_step, steps, ends_batch)
}
