//! What a schedule costs: measured on the timeline that its proof ran.

use super::ActionKind::{Backward, Forward};
use super::walk::cost;
use super::{Action, Schedule};

/// What a schedule costs, as a by-product of the proof that it is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The most activations that live on each rank at once, in units of one micro-batch through one stage,
    /// counted from its forward to its backward. All 0 in a forward-only schedule, which keeps none.
    pub peaks: Vec<usize>,
    /// When each action starts if every forward and every backward takes 1 and a message 0; in the shape of
    /// [`Schedule::actions`].
    pub starts: Vec<Vec<usize>>,
    /// When the last action ends.
    pub span: usize,
    /// How long the busiest rank computes: the span of a pipeline without bubbles.
    pub ideal: usize,
}

impl Report {
    /// The idle share of the timeline: (span - ideal) / span.
    ///
    /// ```
    /// let report = meshwork_pipeline::check(&meshwork_pipeline::gpipe(2, 3))?;
    /// assert_eq!((report.span, report.ideal), (8, 6));
    /// assert_eq!(report.bubble(), 0.25);
    /// # Ok::<(), meshwork_pipeline::CheckError>(())
    /// ```
    pub fn bubble(&self) -> f64 {
        (self.span - self.ideal) as f64 / self.span as f64
    }

    /// Measures a proved schedule; `starts` is its walk.
    pub(super) fn new(schedule: &Schedule, starts: Vec<Vec<usize>>) -> Self {
        let keeps = !schedule.is_forward_only();
        let peak = |row: &Vec<Action>| {
            let (mut live, mut peak) = (0, 0);
            for action in row {
                match action.kind {
                    Forward if keeps => live += 1,
                    Backward => live -= 1,
                    _ => {}
                }
                peak = peak.max(live);
            }
            peak
        };
        let ends = schedule.actions.iter().flatten().zip(starts.iter().flatten()).map(|(&a, start)| start + cost(a));
        let work = |row: &Vec<Action>| row.iter().map(|&action| cost(action)).sum();
        Self {
            peaks: schedule.actions.iter().map(peak).collect(),
            span: ends.max().unwrap_or(0),
            ideal: schedule.actions.iter().map(work).max().unwrap_or(0),
            starts,
        }
    }
}
