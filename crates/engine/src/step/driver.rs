//! When weights change: the schedule of a run, as one pp rank sees it.

use crate::{Plan, TrainError};
use meshwork_core::Axis;
use meshwork_pipeline::{Action, Lowered, Schedule, Tag, lower};
use std::ops::Range;

/// When weights change.
pub(super) enum Driver {
    /// After every step.
    Synchronous(Synchronous),
    /// While the schedule runs.
    Asynchronous(Asynchronous),
}

/// A schedule in which all actions of a step see one version of the weights.
#[derive(Debug)]
pub(super) struct Synchronous {
    schedule: Lowered,
    /// Number of actions before the first backward; 0 where steps do not overlap.
    pub(super) warm_up: usize,
    /// Per pp rank: the activations that it sends in its warm-up and that this rank does not receive in its own
    /// warm-up.
    pub(super) stale: Vec<Vec<Tag>>,
    /// Whether the last step was clipped.
    pub(super) clipped: bool,
}

/// A schedule that goes on over the end of steps.
#[derive(Debug)]
pub(super) struct Asynchronous {
    /// The schedules of one step, of two, and so on, each drained at its end. The last one reaches the steady state.
    schedules: Vec<Lowered>,
    /// Per step of the last schedule: the number of actions up to the end of the step.
    ends: Vec<usize>,
    micros: usize,
    /// Steps begun since the pipeline was empty.
    pub(super) begun: usize,
    /// Updates before these steps.
    pub(super) updates_before: u64,
}

impl Driver {
    /// The driver of the plan's schedule, which is `schedule`.
    pub(super) fn new(plan: &Plan, schedule: &Schedule, pp_rank: usize) -> Result<Self, TrainError> {
        Ok(match schedule.weights.is_synchronous() {
            true => {
                let overlaps = plan.schedule.overlaps_steps();
                Self::Synchronous(Synchronous::new(lower(schedule)?, pp_rank, overlaps))
            }
            false => Self::Asynchronous(Asynchronous::new(plan, pp_rank)?),
        })
    }

    /// The schedule of the next step.
    pub(super) fn schedule(&self) -> &Lowered {
        match self {
            Self::Synchronous(driver) => &driver.schedule,
            Self::Asynchronous(driver) => driver.schedule(),
        }
    }

    /// Number of messages that must fit in flight to one pp rank.
    pub(super) fn in_flight(&self) -> usize {
        match self {
            Self::Synchronous(driver) => driver.schedule.report().in_flight,
            Self::Asynchronous(driver) => driver.steady().report().in_flight,
        }
    }

    /// Updates in a step.
    pub(super) fn updates(&self) -> usize {
        match self {
            Self::Synchronous(_) => 1,
            Self::Asynchronous(driver) => driver.updates(),
        }
    }

    /// The version of the weights that a micro-batch reads at a stage; `None` where all read the newest.
    pub(super) fn version(&self, stage: usize, micro: usize) -> Option<u64> {
        match self {
            Self::Synchronous(_) => None,
            Self::Asynchronous(driver) => Some(driver.version(stage, micro)),
        }
    }

    /// Number of newest versions of the weights that forwards of the rank may read.
    pub(super) fn versions_kept(&self, pp_rank: usize) -> usize {
        match self {
            Self::Synchronous(_) => 1,
            Self::Asynchronous(driver) => 1 + driver.steady().versions_behind(pp_rank),
        }
    }

    /// Number of steps begun before the first of them is certain: 0 if each step is certain before the next begins.
    pub(super) fn steps_ahead(&self) -> usize {
        match self {
            Self::Synchronous(driver) => usize::from(driver.warm_up > 0),
            // The last updates of a step fall into the following steps, and one step later no rank has to wait for the
            // sums.
            Self::Asynchronous(driver) => driver.schedules.len(),
        }
    }
}

impl Synchronous {
    fn new(schedule: Lowered, pp_rank: usize, overlaps: bool) -> Self {
        let counts = if overlaps { schedule.unreceived(pp_rank) } else { None };
        let warm_up = if counts.is_some() { schedule.warm_up(pp_rank) } else { 0 };
        let counts = counts.unwrap_or_default().into_iter().enumerate();
        let stale = counts.map(|(from, count)| last_sent(&schedule, from, pp_rank, count)).collect();
        Self { warm_up, stale, schedule, clipped: false }
    }
}

/// The last `count` messages that `from` sends to `to` in its warm-up.
fn last_sent(schedule: &Lowered, from: usize, to: usize, count: usize) -> Vec<Tag> {
    let warm_up = &schedule.actions(from)[..schedule.warm_up(from)];
    let to_peer = warm_up.iter().filter(|action| {
        let receives = |other: Action| schedule.schedule().rank_of(other.stage, other.micro) == to;
        action.kind.is_send() && action.counterpart().is_some_and(receives)
    });
    let tags: Vec<Tag> = to_peer.filter_map(|action| action.tag()).collect();
    tags[tags.len() - count..].to_vec()
}

impl Asynchronous {
    fn new(plan: &Plan, pp_rank: usize) -> Result<Self, TrainError> {
        let (pp, micros) = (plan.mesh.degree(Axis::Pp), plan.num_microbatches()?);
        // The first rank is up to pp micro-batches ahead of its backwards, so the pipeline fills up during this number
        // of steps.
        let filling = pp.div_ceil(micros);
        let build = |steps| Ok(lower(&plan.schedule.build_steps(pp, micros, steps)?)?);
        let schedules = (1..=filling + 1).map(build).collect::<Result<Vec<Lowered>, TrainError>>()?;
        // Where the forwards of the following step begin.
        let longer = build(filling + 2)?;
        let ends = (1..=filling + 1).map(|step| longer.after_forwards(pp_rank, step * micros)).collect();
        Ok(Self { ends, schedules, micros, begun: 0, updates_before: 0 })
    }

    /// The schedule of the steps begun; in the steady state, the last schedule.
    fn schedule(&self) -> &Lowered {
        &self.schedules[self.last_step()]
    }

    fn steady(&self) -> &Lowered {
        &self.schedules[self.schedules.len() - 1]
    }

    /// The index, in its schedule, of the step begun last.
    fn last_step(&self) -> usize {
        self.begun.clamp(1, self.schedules.len()) - 1
    }

    /// By how many steps the step begun last is ahead of that.
    fn steps_ahead(&self) -> usize {
        self.begun.saturating_sub(self.schedules.len())
    }

    fn updates(&self) -> usize {
        self.schedules[0].updates().max(1)
    }

    /// The number of the first micro-batch of the step begun last, and how far that count is ahead of the schedule's.
    pub(super) fn micros_before(&self) -> [usize; 2] {
        [self.begun.saturating_sub(1) * self.micros, self.steps_ahead() * self.micros]
    }

    fn version(&self, stage: usize, micro: usize) -> u64 {
        let ahead = self.steps_ahead() * self.updates();
        self.updates_before + (ahead + self.schedule().version(stage, micro)) as u64
    }

    /// The actions of the step begun last.
    pub(super) fn actions(&self) -> Range<usize> {
        let last = self.last_step();
        (if last == 0 { 0 } else { self.ends[last - 1] })..self.ends[last]
    }

    /// The actions that are left if no step follows.
    pub(super) fn rest(&self) -> Range<usize> {
        self.ends[self.last_step()]..usize::MAX
    }
}
