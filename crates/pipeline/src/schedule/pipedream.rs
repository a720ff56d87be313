//! PipeDream (Harlap et al., 2018; Narayanan et al., SOSP 2019, section 3): 1F1B that is never drained.

use super::ActionKind::Update;
use super::one_f_one_b::stream;
use super::placement::one_per_rank;
use super::{Action, ActionKind, Schedule, Weights};

/// 1F1B over the micro-batches of all steps, with no flush between them: each stage updates its weights after each
/// backward, and stashes the versions that its micro-batches in flight still need. Asynchronous: there is no bubble but
/// at the very start and end; rank r holds `pp - r` versions of its weights.
///
/// A step is only a number of micro-batches for counting. For vertical sync, set the schedule's `weights` to
/// [`Weights::VerticalSync`]; the actions are the same.
///
/// ```
/// let schedule = meshwork_pipeline::pipedream(2, 3, 1);
/// assert_eq!(
///     meshwork_pipeline::render(&schedule)?,
///     "rank 0 | F0 F1       B0--- F2 B1---    B2---\n\
///      rank 1 |    F0 B0--- F1 B1--- F2 B2---\n"
/// );
/// assert_eq!(meshwork_pipeline::check(&schedule)?.weight_versions, [2, 1]);
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn pipedream(pp: usize, micros_per_step: usize, steps: usize) -> Schedule {
    undrained("pipedream", Weights::Stash, pp, micros_per_step, steps, |_| true)
}

/// 1F1B over all steps, with an update after the backward of each micro-batch for which `updates` is true.
pub(super) fn undrained(
    name: &str,
    weights: Weights,
    pp: usize,
    micros_per_step: usize,
    steps: usize,
    updates: impl Fn(usize) -> bool,
) -> Schedule {
    let micros = micros_per_step * steps;
    let with_update = |action: Action| {
        let update = action.kind == ActionKind::Backward && updates(action.micro);
        [Some(action), update.then_some(Action { kind: Update, ..action })].into_iter().flatten()
    };
    let row = |rank| stream(pp, rank, micros).flat_map(with_update).collect();
    Schedule {
        name: name.to_string(),
        ranks: pp,
        placement: one_per_rank(pp),
        replicas: vec![1; pp],
        micros,
        steps,
        weights,
        actions: (0..pp).map(row).collect(),
    }
}
