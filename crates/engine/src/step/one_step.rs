//! The step, from top to bottom.
//!
//! ```text
//! batch ─ count terms (dp) ─ schedule: forward, backward ... ─ reduce buckets ─ norm, loss (world) ─ clip, update ─ report
//!                                   └ activations (pp), blocks (tp) ┘ └ started while backward runs
//! ```
//!
//! **Synchronous schedules**: all actions see one version of the weights, and one update ends the step. Where the end
//! of a step overlaps with the beginning of the next one, the update does not wait for the norm of the whole gradient
//! (post-validation: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4). Ranks update from their own
//! gradients and begin the next step; before its first backward they get the sums over the world. If these require
//! clipping, or show a value that is not finite, the ranks roll the update back, apply the correct one, and rerun the
//! part of the next step that they had begun. After a step that was clipped, the next one waits for its norm, because
//! it will most likely be clipped too.
//!
//! ```text
//! step n:  forward, backward ... ─ reduce ─ start sums ─ update, tentatively
//! step n+1:  forwards of the warm-up ─ see sums ┬ all is well ───────────────────────────── backward ...
//!                                               └ roll back ─ update, clipped ─ forwards again ─┘
//! ```
//!
//! **Asynchronous schedules**: weights change while the schedule runs, and the pipeline is not drained between steps
//! (PipeDream: Narayanan et al. 2019; PipeDream-2BW: Narayanan et al. 2021). A rank's part of step t ends with its last
//! forward of that step's batch. The backwards and updates of the youngest micro-batches fall into its part of step
//! t+1, or later if a step has fewer micro-batches than there are ranks. The first rank has the most micro-batches in
//! flight. So a step's loss is complete at its end, but its last updates only at the end of the next one, and it is
//! reported one step later still, when no rank has to wait for the sums.
//!
//! ```text
//! schedule of two steps:  │ F F F F B F B F │ B F B F B F B F │ B B B      (first rank, m = 4)
//!                         └ the first step ─┴ every later one ┴ drain
//! ```

use super::StepReport;
use super::pending::{Measured, PendingStep};
use super::prelude::*;
use crate::slow_build;
use crate::weights::Scales;
use meshwork_optim::clip_factor;
use meshwork_pipeline::Event;

/// A step as its caller begins it.
struct Begun<'a> {
    batch: &'a Batch,
    /// Terms of the loss of each update in the global batch.
    terms: Vec<u64>,
    stop: &'a dyn Fn() -> bool,
    observe: &'a mut dyn FnMut(Event),
}

impl Trainer {
    /// Trains on this rank's [samples](Self::samples) of one global batch, to the end:
    /// [`start_step`](Self::start_step), then [`flush`](Self::flush).
    pub fn step(&mut self, batch: &Batch) -> Result<StepReport> {
        self.observed_step(batch, |_| {})
    }

    /// As [`step`](Self::step), with an observer that sees every action of the pipeline start and end.
    pub fn observed_step(&mut self, batch: &Batch, mut observe: impl FnMut(Event)) -> Result<StepReport> {
        let mut reports = self.start_step(batch, || false, &mut observe)?;
        reports.extend(self.flush(&mut observe)?);
        reports.pop().ok_or(TrainError::Pending { steps: self.pending.len() })
    }

    /// Trains on this rank's samples of one global batch, and returns the reports of the steps that became certain:
    /// this one, or earlier ones where the schedule lets steps overlap. At the end `stop` is called to ask whether this
    /// rank should stop. `observe` sees every action of the pipeline start and end.
    pub fn start_step(
        &mut self,
        batch: &Batch,
        stop: impl Fn() -> bool,
        mut observe: impl FnMut(Event),
    ) -> Result<Vec<StepReport>> {
        self.begin(Begun { batch, terms: Vec::new(), stop: &stop, observe: &mut observe })
    }

    fn begin(&mut self, begun: Begun<'_>) -> Result<Vec<StepReport>> {
        let _entered = self.enter("step");
        slow_build::warn(&*self.device);
        self.require_batch(begun.batch)?;
        self.require_samples_apart(begun.batch)?;
        self.rank.log().drain(); // of a step that was refused, or of calls in between
        self.store.gathers.iter().for_each(|gathers| gathers.gatherer.clear_events());
        let Begun { batch, stop, observe, .. } = begun;
        let batch = &self.with_reference(batch)?;
        let begun = Begun { batch, terms: self.count_terms(batch)?, stop, observe: &mut *observe };
        if begun.terms.contains(&0) {
            return self.pass_over(begun);
        }
        self.pipeline.codec.borrow_mut().begin_step(begun.batch, self.rank.data_group())?;
        self.begin_claims(begun.batch)?;
        if self.pipeline.driver.asynchronous { self.step_asynchronously(begun) } else { self.step_synchronously(begun) }
    }

    fn step_synchronously(&mut self, begun: Begun<'_>) -> Result<Vec<StepReport>> {
        let Begun { batch, terms, stop, observe } = begun;
        let step = self.steps_begun + 1;
        let mut pass = self.training_pass(batch, &terms)?;
        let warm_up = if self.pending.is_empty() { 0 } else { self.pipeline.driver.overlap.warm_up };
        self.walk(&pass, 0..warm_up, observe)?;
        let mut reports = Vec::new();
        if let Some((report, redone)) = self.validate(warm_up > 0)? {
            reports.push(report);
            if redone {
                // With new memory for its numbers: losses of forwards with the wrong weights do not count.
                pass = self.training_pass(batch, &terms)?;
                self.walk(&pass, 0..warm_up, observe)?;
            }
        }

        self.store.weights.get_mut().gradients.begin(step - 1);
        self.walk(&pass, warm_up..usize::MAX, observe)?;
        self.pipeline.transport.flush()?;
        self.pipeline.codec.borrow_mut().end_step()?;
        self.store.weights.get_mut().gradients.finish()?;

        let mut pending = PendingStep::new(step, batch, &terms, pass.loss_scale);
        pending.statistics = self.sum_statistics()?;
        self.verify_claims(&pending.statistics)?;
        self.verify_told()?;
        let mut numbers = pass.numbers.into_inner();
        self.store.weights.borrow().add_norms(&mut numbers, self.norms_at())?;
        self.tell_loads(&mut numbers)?;
        self.start_sums(&mut pending, numbers, 1)?;
        self.reduced_scale = pending.loss_scale;

        let overlap = &self.pipeline.driver.overlap;
        if overlap.warm_up > 0 && !overlap.clipped {
            let scales = self.scales(&pending, 1.0);
            self.store.weights.get_mut().update_tentatively(scales, &pending.statistics)?;
            self.steps_begun = step;
            pending.records = self.rank.log().drain();
            self.start_stats(&mut pending, stop())?;
            self.pending.push_back(pending);
        } else {
            let measured = self.measured(&mut pending);
            self.verify_told()?;
            let measured = self.certain(measured)?;
            self.pipeline.driver.overlap.clipped = self.clip_and_update(&pending, &measured)?;
            self.steps_begun = step;
            pending.records = self.rank.log().drain();
            self.start_stats(&mut pending, stop())?;
            reports.push(self.report(pending, measured)?);
        }
        Ok(reports)
    }

    /// Makes the last step certain, if it is not yet. Returns its report, and whether its update had to be redone. If
    /// it had to be, and after an error, the part of the next step that was `begun` with the wrong weights is
    /// discarded.
    fn validate(&mut self, begun: bool) -> Result<Option<(StepReport, bool)>> {
        let Some(mut step) = self.pending.pop_front() else { return Ok(None) };
        let measured = match self.measured(&mut step) {
            Err(error) => {
                self.rollback(begun)?;
                self.steps_begun = step.number - 1;
                self.certain(Err(error))?
            }
            Ok(measured) => measured,
        };
        let redone = measured.skipped || clip_factor(measured.grad_norm, self.plan.max_norm) != 1.0;
        if redone {
            self.rollback(begun)?;
            self.clip_and_update(&step, &measured)?;
        } else {
            self.store.weights.get_mut().commit();
        }
        self.pipeline.driver.overlap.clipped = redone;
        Ok(Some((self.report(step, measured)?, redone)))
    }

    /// Waits for the sums of a step, and follows its gradients with the loss scale: a step whose gradients overflowed
    /// at a dynamic scale is skipped. Any other value that is not finite is refused.
    fn measured(&mut self, step: &mut PendingStep) -> Result<Measured> {
        let measured = self.measure(step)?;
        if measured.loaded {
            self.loads.told = Some(step.number);
        }
        let overflowed = measured.loss.is_finite() && !measured.grad_norm.is_finite();
        match self.scaler.skips(step.number, step.loss_scale, overflowed) {
            true => Ok(Measured { skipped: true, ..measured }),
            false => measured.finite(step.number),
        }
    }

    /// After a step that was not finite: what compression lost in it is not finite either, and would spoil every later
    /// step. Names the weights, if they are the reason.
    fn certain(&mut self, measured: Result<Measured>) -> Result<Measured> {
        if measured.is_err() {
            self.pipeline.codec.borrow_mut().forget()?;
            self.store.weights.get_mut().gradients.forget_sums()?;
        }
        measured.map_err(|error| self.blame(error))
    }

    /// Updates the weights by a step that is certain, unless it is skipped. Returns whether its gradients were clipped.
    fn clip_and_update(&mut self, step: &PendingStep, measured: &Measured) -> Result<bool> {
        let factor = clip_factor(measured.grad_norm, self.plan.max_norm);
        if !measured.skipped {
            let scales = self.scales(step, factor);
            self.store.weights.get_mut().update(scales, &step.statistics)?;
        }
        Ok(factor != 1.0)
    }

    fn scales(&self, step: &PendingStep, factor: f32) -> Scales {
        let lr = self.plan.lr.lr(step.number);
        Scales { lr, grad_scale: (f64::from(factor) / step.loss_scale) as f32 }
    }

    /// Undoes the last update, and what was begun with its weights.
    fn rollback(&mut self, begun: bool) -> Result<()> {
        self.forget_passes();
        self.store.weights.get_mut().rollback();
        if begun {
            let stale = self.pipeline.driver.overlap.stale.clone();
            for (from, messages) in stale.iter().enumerate() {
                self.pipeline.transport.discard(from, messages)?;
            }
        }
        Ok(())
    }

    fn step_asynchronously(&mut self, begun: Begun<'_>) -> Result<Vec<StepReport>> {
        let Begun { batch, terms, stop, observe } = begun;
        let updates = self.store.weights.get_mut().updates;
        let driver = &mut self.pipeline.driver;
        driver.begun += 1;
        if driver.begun == 1 {
            driver.updates_before = updates;
            self.store.weights.get_mut().gradients.begin(updates);
        }
        let ([first_micro, ahead], actions) = (driver.micros_before(), driver.actions());
        let pass = Pass { first_micro, ahead, ..self.training_pass(batch, &terms)? };
        self.walk(&pass, actions, observe)?;
        self.pipeline.codec.borrow_mut().end_step()?;
        self.verify_claims(&StatisticSums::new())?;
        self.steps_begun += 1;
        let mut pending = PendingStep::new(self.steps_begun, batch, &terms, pass.loss_scale);
        let mut numbers = pass.numbers.into_inner();
        self.tell_loads(&mut numbers)?;
        (pending.numbers, pending.records) = (Some(numbers), self.rank.log().drain());
        self.pending.push_back(pending);
        let complete = (self.steps_begun + 1).saturating_sub(self.steps_ahead() as u64);
        self.start_completing(complete, stop)?;
        self.finish_completing(complete)
    }

    /// Runs the remaining actions of the steps begun, and completes them.
    fn drain(&mut self, observe: &mut dyn FnMut(Event)) -> Result<Vec<StepReport>> {
        let driver = &self.pipeline.driver;
        if driver.begun == 0 {
            return Ok(Vec::new());
        }
        let ([first_micro, ahead], rest) = (driver.micros_before(), driver.rest());
        let last = self.steps_begun;
        let mut pass = Pass { first_micro, ahead, ..self.pass(Purpose::Train, &Batch::new(0))? };
        pass.position.step = last - 1;
        self.walk(&pass, rest, observe)?;
        self.pipeline.transport.flush()?;
        self.pipeline.driver.begun = 0;
        self.rank.log().drain();
        self.start_completing(last, &|| false)?;
        self.finish_completing(last + 1)
    }

    /// Starts the sums of the steps up to and with `last`, all of whose updates have been made on this rank.
    fn start_completing(&mut self, last: u64, stop: &dyn Fn() -> bool) -> Result<()> {
        let mut pending = std::mem::take(&mut self.pending);
        for step in pending.iter_mut().filter(|step| step.number <= last) {
            let Some(mut numbers) = step.numbers.take() else { continue };
            let norms = self.store.weights.get_mut().norms.remove(&step.number);
            if let Some(norms) = &norms {
                let range = 0..norms.sum.count();
                self.device.layout()?.copy_into(&norms.sum, range, &mut numbers, self.norms_at())?;
            }
            self.start_sums(step, numbers, norms.map_or(1, |norms| norms.updates))?;
            self.start_stats(step, stop())?;
        }
        self.pending = pending;
        Ok(())
    }

    /// Waits for the sums of the steps before `end`.
    fn finish_completing(&mut self, end: u64) -> Result<Vec<StepReport>> {
        let mut reports = Vec::new();
        while let Some(mut step) = self.pending.pop_front_if(|step| step.number < end) {
            let measured = self.measure(&mut step)?;
            if measured.loaded {
                self.loads.told = Some(step.number);
                self.verify_told()?;
            }
            if let Some((what, value)) = measured.not_finite() {
                return Err(TrainError::Diverged { step: step.number, what, value });
            }
            reports.push(self.report(step, measured)?);
        }
        Ok(reports)
    }

    /// Skips a step in which the loss, or the loss of one of its updates, has no terms. The step changes nothing and is
    /// counted. Terms are summed over ranks, so all ranks skip it.
    fn pass_over(&mut self, begun: Begun<'_>) -> Result<Vec<StepReport>> {
        let Begun { batch, terms, stop, observe } = begun;
        let mut reports = self.flush(observe)?;
        let loss_scale = self.scaler.scale(self.steps_begun);
        self.steps_begun += 1;
        let mut step = PendingStep::new(self.steps_begun, batch, &terms, loss_scale);
        step.records = self.rank.log().drain();
        step.statistics = self.sum_statistics()?;
        self.start_stats(&mut step, stop())?;
        self.scaler.certain = self.steps_begun;
        step.terms = 0;
        let (loss, grad_norm, metrics) = (f64::NAN, 0.0, Vec::new());
        reports.push(self.report(step, Measured { loss, grad_norm, metrics, skipped: true, loaded: false })?);
        Ok(reports)
    }

    /// Completes every step that was begun, and drains the pipeline. Call it before reading weights, and at the end of
    /// a run.
    pub fn flush(&mut self, mut observe: impl FnMut(Event)) -> Result<Vec<StepReport>> {
        let _entered = self.enter("flush");
        let reports = match self.pipeline.driver.asynchronous {
            false => self.validate(false)?.into_iter().map(|(report, _)| report).collect(),
            true => self.drain(&mut observe)?,
        };
        self.verify_told()?;
        Ok(reports)
    }

    pub(super) fn require_complete(&self) -> Result<()> {
        match self.pending.len() {
            0 => Ok(()),
            steps => Err(TrainError::Pending { steps }),
        }
    }
}
