//! Timelines of the actions of each rank. Predicted and measured ones are evaluated and drawn by the same code.

use super::Action;
use super::ActionKind::{Backward, Forward, InputGradient, WeightGradient};

/// An action with its start and end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The action.
    pub action: Action,
    /// When it started.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// The start and end of each rank's actions: predicted by [`simulate`](crate::simulate), or measured in a run.
///
/// It is plain data. A run is measured by an observer that notes the time at both ends of each computation
/// ([`run`](crate::run)), with the clocks of all ranks set to one origin.
///
/// ```
/// use meshwork_pipeline::{Action, ActionKind, Interval, Timeline, text_grid};
///
/// let action = |kind| Action { kind, stage: 0, micro: 0 };
/// let measured = Timeline {
///     name: "measured".to_string(),
///     placement: vec![0],
///     micros_per_step: 1,
///     ranks: vec![vec![
///         Interval { action: action(ActionKind::Forward), start: 0.0, end: 1.1 },
///         Interval { action: action(ActionKind::Backward), start: 1.3, end: 3.5 },
///     ]],
/// };
/// assert_eq!(text_grid(&measured), "rank 0 | F0 B0---\n");
/// assert!((measured.bubble_of_total() - 0.2 / 3.5).abs() < 1e-9);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Its name in pictures.
    pub name: String,
    /// The rank of each stage.
    pub placement: Vec<usize>,
    /// The micro-batches of one optimizer step.
    pub micros_per_step: usize,
    /// The computations and updates of each rank, in the order in which it ran them. All in one unit of time, from one
    /// origin.
    pub ranks: Vec<Vec<Interval>>,
}

impl Timeline {
    /// When the first rank started.
    pub(super) fn start(&self) -> f64 {
        self.ranks.iter().flatten().map(|interval| interval.start).fold(f64::INFINITY, f64::min)
    }

    fn end(&self) -> f64 {
        self.ranks.iter().flatten().map(|interval| interval.end).fold(f64::NEG_INFINITY, f64::max)
    }

    /// From the first start to the last end over all ranks.
    pub fn makespan(&self) -> f64 {
        (self.end() - self.start()).max(0.0)
    }

    /// The longest time from the first start to the last end of one rank: what a step costs where no barrier makes
    /// ranks start together.
    pub fn span(&self) -> f64 {
        let of_rank = |row: &Vec<Interval>| match (row.first(), row.last()) {
            (Some(first), Some(last)) => last.end - first.start,
            _ => 0.0,
        };
        self.ranks.iter().map(of_rank).fold(0.0, f64::max)
    }

    /// How long the busiest rank computes: the span of a pipeline without bubbles.
    pub fn ideal(&self) -> f64 {
        let of_rank = |row: &Vec<Interval>| row.iter().map(|interval| interval.end - interval.start).sum();
        self.ranks.iter().map(of_rank).fold(0.0, f64::max)
    }

    /// The idle time. A rest that is only rounding counts as 0.
    fn idle(&self) -> f64 {
        (self.span() - self.ideal()).max(0.0)
    }

    /// The idle share of the span: (span - ideal) / span.
    pub fn bubble_of_total(&self) -> f64 {
        share(self.idle(), self.span())
    }

    /// Idle time in units of the ideal time: (span - ideal) / ideal.
    pub fn bubble_of_ideal(&self) -> f64 {
        share(self.idle(), self.ideal())
    }

    /// How many times faster this is than one rank that does all of the work: ranks times the busy share of the
    /// makespan.
    ///
    /// ```
    /// use meshwork_pipeline::{Costs, gpipe, simulate};
    ///
    /// let schedule = gpipe(4, 32);
    /// let speedup = simulate(&schedule, &Costs::unit(&schedule))?.speedup();
    /// assert!((speedup - 4.0 * 32.0 / (32.0 + 4.0 - 1.0)).abs() < 1e-9);
    /// # Ok::<(), meshwork_pipeline::CheckError>(())
    /// ```
    pub fn speedup(&self) -> f64 {
        let work = self.ranks.iter().flatten().map(|interval| interval.end - interval.start).sum();
        share(work, self.makespan())
    }

    /// The most activations that live on each rank at once, in units of one micro-batch through all layers of the rank,
    /// counted from a forward to its backward, and to its weight gradient where the backward is split. All 0 where
    /// nothing trains.
    pub fn peak_activations(&self) -> Vec<f64> {
        self.peak_held(1.0, 1.0)
    }

    /// The same where a micro-batch counts as `kept` from its forward to its input gradient, and as `deferred` from
    /// then to its weight gradient: with recomputation it then holds what its forward did not keep.
    pub fn peak_held(&self, kept: f64, deferred: f64) -> Vec<f64> {
        let actions = || self.ranks.iter().flatten().map(|interval| interval.action.kind);
        if !actions().any(|kind| kind.makes_weight_gradient()) {
            return vec![0.0; self.ranks.len()];
        }
        let peak = |(rank, row): (usize, &Vec<Interval>)| {
            let change = |interval: &Interval| match interval.action.kind {
                Forward => kept,
                InputGradient => deferred - kept,
                WeightGradient => -deferred,
                Backward => -kept,
                _ => 0.0,
            };
            let live = row.iter().map(change).scan(0.0, |live, change| {
                *live += change;
                Some(*live)
            });
            let chunks = self.placement.iter().filter(|&&home| home == rank).count();
            live.fold(0.0, f64::max) / chunks.max(1) as f64
        };
        self.ranks.iter().enumerate().map(peak).collect()
    }
}

/// The share of `part` in `whole`; 0 if the whole is 0.
fn share(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}
