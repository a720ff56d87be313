//! The measurements of a schedule's proof, valid under any timing.

use super::ActionKind::Forward;
use super::{Action, Schedule};

/// The requirements of a schedule under any timing, measured by its proof.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The most activations that live on each rank at once, in units of one micro-batch through one stage, counted
    /// from its forward to its backward, and to its weight gradient where the backward is split. All 0 in a
    /// forward-only schedule, which keeps none.
    pub peaks: Vec<usize>,
    /// The most versions of the weights of a stage that each rank holds at once: 1 in synchronous training.
    pub weight_versions: Vec<usize>,
    /// Number of messages from one rank to another that must be able to wait for their receives, so that the schedule
    /// ends under any timing. At 1 it is enough that a send is a rendezvous that the sender completes before its next
    /// send to the same rank. 0 before messages are added.
    pub in_flight: usize,
}

impl Report {
    /// Measures a proved schedule.
    pub(super) fn new(schedule: &Schedule, weight_versions: Vec<usize>, in_flight: usize) -> Self {
        let keeps = !schedule.is_forward_only();
        let peak = |row: &Vec<Action>| {
            let (mut live, mut peak) = (0, 0);
            for action in row {
                match action.kind {
                    Forward if keeps => live += 1,
                    kind if kind.makes_weight_gradient() => live -= 1,
                    _ => {}
                }
                peak = peak.max(live);
            }
            peak
        };
        Self { peaks: schedule.actions.iter().map(peak).collect(), weight_versions, in_flight }
    }
}
