//! Evaluation: forwards and nothing else.

use super::ActionKind::Forward;
use super::{Action, Schedule, Weights};

/// The forwards of all micro-batches, for evaluation, over the placement of whatever schedule trains the model.
///
/// Each rank runs all micro-batches through its first stage, then all through its second, and so on. Actions in
/// order of (stage, micro) cannot wait in a circle, so this holds for any placement. It is no
/// [`Generator`](crate::Generator): nobody trains with it.
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
    let ranks = placement.iter().max().map_or(0, |last| last + 1);
    let mut actions = vec![Vec::new(); ranks];
    for (stage, &rank) in placement.iter().enumerate() {
        actions[rank].extend((0..micros).map(|micro| Action::new(Forward, stage, micro)));
    }
    Schedule {
        name: "forward_only".to_string(),
        ranks,
        placement: placement.to_vec(),
        micros,
        steps: 1,
        weights: Weights::Flush,
        actions,
    }
}
