//! When weights change: the schedule of a run, as one pp rank sees it.

use super::prelude::*;
use meshwork_pipeline::{Action, Lowered, Tag};

/// The schedules of a run, and how far the steps have come in them.
///
/// A synchronous schedule is drained at the end of every step, and all actions of a step see one version of the
/// weights. An asynchronous one goes on over the end of steps, and weights change while it runs.
#[derive(Debug)]
pub(super) struct Driver {
    pub(super) asynchronous: bool,
    /// The schedules of one step, of two, and so on, each drained at its end. The last one reaches the steady state: in
    /// a synchronous run it is the first.
    schedules: Vec<Lowered>,
    /// Per step of the last schedule: the number of actions up to the end of the step.
    ends: Vec<usize>,
    micros: usize,
    /// Steps begun since the pipeline was empty, in an asynchronous run.
    pub(super) begun: usize,
    /// Updates before these steps.
    pub(super) updates_before: u64,
    pub(super) overlap: Overlap,
}

/// The overlap of a synchronous step with the end of the step before.
#[derive(Debug, Default)]
pub(super) struct Overlap {
    /// Number of actions before the first backward; 0 where steps do not overlap.
    pub(super) warm_up: usize,
    /// Per pp rank: the activations that it sends in its warm-up and that this rank does not receive in its own
    /// warm-up.
    pub(super) stale: Vec<Vec<Tag>>,
    /// Whether the last step was clipped.
    pub(super) clipped: bool,
}

impl Driver {
    /// The driver of the plan's schedule, which is `schedule`.
    pub(super) fn new(plan: &Plan, schedule: &Schedule, pp_rank: usize) -> Result<Self> {
        let (pp, micros) = (plan.mesh.degree(Axis::Pp), plan.num_microbatches()?);
        let asynchronous = !schedule.weights.is_synchronous();
        if !asynchronous {
            let schedule = lower(schedule)?;
            let overlap = Overlap::new(&schedule, pp_rank, plan.schedule.overlaps_steps());
            let ends = vec![schedule.actions(pp_rank).len()];
            return Ok(Self {
                asynchronous,
                schedules: vec![schedule],
                ends,
                micros,
                begun: 0,
                updates_before: 0,
                overlap,
            });
        }
        // The first rank is up to pp micro-batches ahead of its backwards, so the pipeline fills up during this number
        // of steps.
        let filling = pp.div_ceil(micros);
        let build = |steps| Ok(lower(&plan.schedule.build_steps(pp, micros, steps)?)?);
        let schedules = (1..=filling + 1).map(build).collect::<Result<Vec<Lowered>>>()?;
        // Where the forwards of the following step begin.
        let longer = build(filling + 2)?;
        let ends = (1..=filling + 1).map(|step| longer.after_forwards(pp_rank, step * micros)).collect();
        Ok(Self { asynchronous, schedules, ends, micros, begun: 0, updates_before: 0, overlap: Overlap::default() })
    }

    /// The schedule of the steps begun: in the steady state the last one.
    pub(super) fn schedule(&self) -> &Lowered {
        &self.schedules[self.last_step()]
    }

    fn steady(&self) -> &Lowered {
        &self.schedules[self.schedules.len() - 1]
    }

    /// The index, in its schedule, of the step begun last.
    fn last_step(&self) -> usize {
        self.begun.clamp(1, self.schedules.len()) - 1
    }

    /// Number of messages that must fit in flight to one pp rank.
    pub(super) fn in_flight(&self) -> usize {
        self.steady().report().in_flight
    }

    /// Updates in a step.
    pub(super) fn updates(&self) -> usize {
        self.schedules[0].updates().max(1)
    }

    /// The version of the weights that a micro-batch reads at a stage; `None` where all read the newest.
    pub(super) fn version(&self, stage: usize, micro: usize) -> Option<u64> {
        let before = self.updates_before + (self.steps_past_steady() * self.updates()) as u64;
        self.asynchronous.then(|| before + self.schedule().version(stage, micro) as u64)
    }

    /// Number of newest versions of the weights that forwards of the rank may read.
    pub(super) fn versions_kept(&self, pp_rank: usize) -> usize {
        1 + self.steady().versions_behind(pp_rank)
    }

    /// Number of steps begun before the first of them is certain: 0 if each step is certain before the next begins.
    pub(super) fn steps_ahead(&self) -> usize {
        match self.asynchronous {
            false => usize::from(self.overlap.warm_up > 0),
            // The last updates of a step fall into the following steps, and one step later no rank has to wait for the
            // sums.
            true => self.schedules.len(),
        }
    }

    /// By how many steps the step begun last is ahead of the last step of its schedule.
    fn steps_past_steady(&self) -> usize {
        self.begun.saturating_sub(self.schedules.len())
    }

    /// The number of the first micro-batch of the step begun last, and how far that count is ahead of the schedule's.
    pub(super) fn micros_before(&self) -> [usize; 2] {
        [self.begun.saturating_sub(1) * self.micros, self.steps_past_steady() * self.micros]
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

impl Overlap {
    fn new(schedule: &Lowered, pp_rank: usize, overlaps: bool) -> Self {
        let Some(counts) = schedule.unreceived(pp_rank).filter(|_| overlaps) else { return Self::default() };
        let counts = counts.into_iter().enumerate();
        let stale = counts.map(|(from, count)| last_sent(schedule, from, pp_rank, count)).collect();
        Self { warm_up: schedule.warm_up(pp_rank), stale, clipped: false }
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
