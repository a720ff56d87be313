//! Evaluation: only forwards.

use super::ActionKind::Forward;
use super::{Action, Schedule, Weights};

/// The forwards of all micro-batches, for evaluation, over the placement of the schedule that trains the model.
///
/// Each rank runs all micro-batches through its first stage, then all through its second, and so on. Actions in order
/// of (stage, micro) cannot wait in a circle, so this works for any placement. It is not a
/// [`Generator`](crate::Generator), because it cannot train.
///
/// ```
/// use meshwork_pipeline::{forward_only, gpipe, render};
///
/// let evaluation = forward_only(&gpipe(2, 8).placement, 3);
/// assert_eq!(
///     render(&evaluation)?,
///     "rank 0 | F0 F1 F2\n\
///      rank 1 |    F0 F1 F2\n"
/// );
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn forward_only(placement: &[usize], micros: usize) -> Schedule {
    forward_only_replicated(placement, &vec![1; placement.len()], micros)
}

/// The same over replicated stages: see [`Schedule::replicas`].
pub fn forward_only_replicated(placement: &[usize], replicas: &[usize], micros: usize) -> Schedule {
    let last = placement.iter().zip(replicas).map(|(rank, replicas)| rank + replicas).max();
    let mut schedule = Schedule {
        name: "forward_only".to_string(),
        ranks: last.unwrap_or(0),
        placement: placement.to_vec(),
        replicas: replicas.to_vec(),
        micros,
        steps: 1,
        weights: Weights::Flush,
        actions: vec![Vec::new(); last.unwrap_or(0)],
    };
    for stage in 0..placement.len() {
        for micro in 0..micros {
            let rank = schedule.rank_of(stage, micro);
            schedule.actions[rank].push(Action::new(Forward, stage, micro));
        }
    }
    schedule
}
