//! The step of asynchronous schedules: weights change while the schedule runs, and the pipeline is not drained between
//! steps (PipeDream: Narayanan et al. 2019; PipeDream-2BW: Narayanan et al. 2021).
//!
//! A rank's part of step t ends with its last forward of that step's batch. The backwards and updates of the youngest
//! micro-batches fall into its part of step t+1, or later if a step has fewer micro-batches than there are ranks. The
//! first rank has the most micro-batches in flight. So a step's loss is complete at its end, but its last updates only
//! at the end of the next one, and it is reported one step later still, when no rank has to wait for the sums.
//!
//! ```text
//! schedule of two steps:  │ F F F F B F B F │ B F B F B F B F │ B B B      (first rank, m = 4)
//!                         └ the first step ─┴ every later one ┴ drain
//! ```

use super::pending::{PendingStep, hash_of_input};
use super::{Driver, StepReport, Trainer};
use crate::pass::{Pass, Purpose};
use crate::statistics::StatisticSums;
use crate::{Plan, TrainError};
use meshwork_core::Axis;
use meshwork_nn::Batch;
use meshwork_pipeline::{Event, Lowered, lower};
use std::ops::Range;

/// An asynchronous schedule, as one pp rank sees it.
#[derive(Debug)]
pub(super) struct Asynchronous {
    /// The schedules of one step, of two, and so on, each drained at its end. The last one reaches the steady state.
    schedules: Vec<Lowered>,
    /// Per step of the last schedule: the number of actions up to the end of the step.
    ends: Vec<usize>,
    micros: usize,
    /// Steps begun since the pipeline was empty.
    begun: usize,
    /// Updates before these steps.
    updates_before: u64,
}

impl Asynchronous {
    /// The schedule of a plan.
    pub(super) fn new(plan: &Plan, pp_rank: usize) -> Result<Self, TrainError> {
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
    pub(super) fn schedule(&self) -> &Lowered {
        &self.schedules[self.part()]
    }

    fn steady(&self) -> &Lowered {
        &self.schedules[self.schedules.len() - 1]
    }

    /// The index, in its schedule, of the step begun last.
    fn part(&self) -> usize {
        self.begun.clamp(1, self.schedules.len()) - 1
    }

    /// By how many steps the step begun last is ahead of that.
    fn steps_ahead(&self) -> usize {
        self.begun.saturating_sub(self.schedules.len())
    }

    /// Number of steps begun when the first of them becomes certain. Its last updates fall into the following steps,
    /// and one step later no rank has to wait for the sums.
    pub(super) fn lag(&self) -> usize {
        self.schedules.len()
    }

    /// Number of messages that must fit in flight to one pp rank.
    pub(super) fn in_flight(&self) -> usize {
        self.steady().report().in_flight
    }

    /// Updates in a step.
    pub(super) fn updates(&self) -> usize {
        self.schedules[0].updates().max(1)
    }

    /// Number of newest versions of the weights that forwards of the rank may read.
    pub(super) fn versions_kept(&self, pp_rank: usize) -> usize {
        1 + self.steady().versions_behind(pp_rank)
    }

    /// The number of the first micro-batch of the step begun last, and how far that count is ahead of the schedule's.
    fn micros_before(&self) -> (usize, usize) {
        (self.begun.saturating_sub(1) * self.micros, self.steps_ahead() * self.micros)
    }

    /// The version that a micro-batch of the schedule reads at a stage.
    pub(super) fn version(&self, stage: usize, micro: usize) -> u64 {
        let ahead = self.steps_ahead() * self.updates();
        self.updates_before + (ahead + self.schedule().version(stage, micro)) as u64
    }

    /// The actions of the step begun last, and those that are left if no step follows.
    fn actions(&self) -> (Range<usize>, Range<usize>) {
        let part = self.part();
        let start = if part == 0 { 0 } else { self.ends[part - 1] };
        (start..self.ends[part], self.ends[part]..usize::MAX)
    }
}

impl Trainer {
    fn asynchronous(&mut self) -> &mut Asynchronous {
        match &mut self.driver {
            Driver::Asynchronous(driver) => driver,
            Driver::Synchronous(_) => unreachable!("called for asynchronous schedules only"),
        }
    }

    pub(super) fn step_asynchronously(
        &mut self,
        batch: &Batch,
        terms: &[u64],
        stop: &dyn Fn() -> bool,
        observe: &mut dyn FnMut(Event),
    ) -> Result<Vec<StepReport>, TrainError> {
        let updates = self.weights.get_mut().updates();
        let driver = self.asynchronous();
        driver.begun += 1;
        let begins = driver.begun == 1;
        if begins {
            driver.updates_before = updates;
            self.weights.get_mut().gradients.begin(updates);
        }
        let driver = self.asynchronous();
        let ((first_micro, ahead), (actions, _)) = (driver.micros_before(), driver.actions());
        let pass = Pass { first_micro, ahead, ..self.training_pass(batch, terms)? };
        let loss_scale = pass.loss_scale;
        self.walk(&pass, actions, observe)?;
        self.codec.borrow_mut().end_step()?;
        self.verify_claims(&StatisticSums::new())?;
        self.steps_begun += 1;
        let mut numbers = pass.numbers.into_inner();
        self.tell_loads(&mut numbers)?;
        let (step, numbers) = (self.steps_begun, Some(numbers));
        let (batch, terms) = (hash_of_input(batch, terms), terms.iter().sum());
        let (records, statistics) = (self.rank.log().drain(), StatisticSums::new());
        self.pending.push_back(PendingStep {
            step,
            terms,
            loss_scale,
            numbers,
            statistics,
            batch,
            records,
            sums: None,
            stats: None,
        });
        let lag = self.asynchronous().lag() as u64;
        self.start_completing((step + 1).saturating_sub(lag), stop)?;
        self.finish_completing((step + 1).saturating_sub(lag))
    }

    /// Runs the remaining actions of the steps begun, and completes them.
    pub(super) fn drain(&mut self, observe: &mut dyn FnMut(Event)) -> Result<Vec<StepReport>, TrainError> {
        let driver = self.asynchronous();
        if driver.begun == 0 {
            return Ok(Vec::new());
        }
        let ((first_micro, ahead), (_, rest)) = (driver.micros_before(), driver.actions());
        let last = self.steps_begun;
        let mut pass = Pass { first_micro, ahead, ..self.pass(Purpose::Train, &Batch::new(0))? };
        pass.position.step = last - 1;
        self.walk(&pass, rest, observe)?;
        self.transport.flush()?;
        self.asynchronous().begun = 0;
        self.rank.log().drain();
        self.start_completing(last, &|| false)?;
        self.finish_completing(last + 1)
    }

    /// Starts the sums of the steps up to and with `last`, all of whose updates have been made on this rank.
    fn start_completing(&mut self, last: u64, stop: &dyn Fn() -> bool) -> Result<(), TrainError> {
        let mut pending = std::mem::take(&mut self.pending);
        for step in pending.iter_mut().filter(|step| step.step <= last && step.sums.is_none()) {
            let Some(mut numbers) = step.numbers.take() else { continue };
            let norms = self.weights.get_mut().take_norms(step.step);
            if let Some((_, norms)) = &norms {
                self.device.layout()?.copy_into(norms, 0..norms.count(), &mut numbers, self.norms_at())?;
            }
            step.sums = Some(self.start_sums(numbers, norms.map_or(1, |(updates, _)| updates))?);
            step.stats = Some(self.start_stats(&step.records, &step.statistics, stop(), step.batch)?);
        }
        self.pending = pending;
        Ok(())
    }

    /// Waits for the sums of the steps before `end`.
    fn finish_completing(&mut self, end: u64) -> Result<Vec<StepReport>, TrainError> {
        let mut reports = Vec::new();
        while self.pending.front().is_some_and(|step| step.step < end)
            && let Some(PendingStep { step, terms, loss_scale, records, sums: Some(sums), stats: Some(stats), .. }) =
                self.pending.pop_front()
        {
            let measured = self.measure(sums, terms, loss_scale)?;
            if measured.loaded {
                self.loads.told(step);
                self.verify_told()?;
            }
            if let Some((what, value)) = measured.not_finite() {
                return Err(TrainError::Diverged { step, what, value });
            }
            reports.push(self.report(step, measured, stats, records)?);
        }
        Ok(reports)
    }
}
