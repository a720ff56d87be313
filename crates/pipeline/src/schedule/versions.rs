//! The version of the weights that a micro-batch uses at a stage.

use super::ActionKind::{Backward, Forward, Update, WeightGradient};
use super::needs::Table;
use super::{Action, Fault, Schedule, Weights};
use std::collections::HashMap;

/// The versions of a schedule.
pub(super) struct Versions {
    /// By (stage, micro): the version that its forward and its backward use.
    pub(super) used: Vec<usize>,
    /// By rank: the most versions of a stage that it holds at once.
    pub(super) peaks: Vec<usize>,
}

impl Versions {
    /// Computes the versions and makes sure that each exists when it is used. The checker must have proved before that
    /// all parts exist once and in local order.
    pub(super) fn new(schedule: &Schedule, steps: &Table<Option<usize>>) -> Result<Self, Fault> {
        let latest = latest(schedule);
        let (stages, micros) = (schedule.stages(), schedule.micros);
        let per_step = schedule.micros_per_step();
        let version = |stage: usize, micro: usize| match schedule.weights {
            Weights::Flush => micro / per_step,
            Weights::Stash => latest[stage * micros + micro],
            Weights::VerticalSync => latest[micro],
            Weights::DoubleBuffered => (micro / per_step).saturating_sub(1),
        };
        let each = (0..stages).flat_map(|stage| (0..micros).map(move |micro| (stage, micro)));
        let used: Vec<usize> = each.clone().map(|(stage, micro)| version(stage, micro)).collect();
        if schedule.weights.is_synchronous() {
            return Ok(Self { used, peaks: vec![1; schedule.ranks] });
        }
        for ((stage, micro), &version) in each.zip(&used) {
            let latest = latest[stage * micros + micro];
            if version > latest {
                let action = Action::new(Forward, stage, micro);
                let (rank, step) = (schedule.rank_of(stage, micro), steps[action].unwrap_or(0));
                return Err(Fault::VersionToCome { rank, step, action, version, latest });
            }
        }
        let peaks = (0..schedule.ranks).map(|rank| {
            let of_stage = |stage| peak(schedule, steps, stage, &used[stage * micros..][..micros]);
            schedule.stages_of(rank).map(of_stage).max().unwrap_or(1)
        });
        Ok(Self { peaks: peaks.collect(), used })
    }
}

/// By (stage, micro): the number of updates of the stage before this forward.
fn latest(schedule: &Schedule) -> Vec<usize> {
    let mut latest = vec![0; schedule.stages() * schedule.micros];
    for row in &schedule.actions {
        let mut updates: HashMap<usize, usize> = HashMap::new();
        for action in row {
            match action.kind {
                Update => *updates.entry(action.stage).or_default() += 1,
                Forward => {
                    latest[action.stage * schedule.micros + action.micro] =
                        updates.get(&action.stage).copied().unwrap_or(0);
                }
                _ => {}
            }
        }
    }
    latest
}

/// The most versions of one stage that are held at once: one from the update that makes it until the next update
/// or its last use, whichever is later. An update works in place if nothing needs the old version afterwards.
fn peak(schedule: &Schedule, steps: &Table<Option<usize>>, stage: usize, used: &[usize]) -> usize {
    let row = &schedule.actions[schedule.placement[stage]];
    let updates = row.iter().enumerate().filter(|(_, action)| action.kind == Update && action.stage == stage);
    let made: Vec<usize> = std::iter::once(0).chain(updates.map(|(step, _)| step)).collect();
    let mut freed: Vec<usize> = made.iter().skip(1).copied().chain([row.len()]).collect();
    for (micro, &version) in used.iter().enumerate() {
        let ends = [Backward, WeightGradient];
        let last_use = ends.into_iter().filter_map(|kind| steps[Action::new(kind, stage, micro)]).max();
        freed[version] = freed[version].max(last_use.unwrap_or(0));
    }
    let mut change = vec![0_isize; row.len() + 1];
    for (&made, &freed) in made.iter().zip(&freed) {
        change[made] += 1;
        change[freed] -= 1;
    }
    let live = change.iter().scan(0, |live, change| {
        *live += change;
        Some(*live)
    });
    live.max().unwrap_or(1).unsigned_abs()
}
