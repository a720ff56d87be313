//! Training on a source of batches, step after step.

use super::StepReport;
use super::prelude::*;
use meshwork_nn::BatchSource;

impl Trainer {
    /// Trains `steps` further steps on this rank's [samples](Self::samples) of `source`, which follow those already
    /// begun, and passes the report of each to `report` as soon as the step is certain. Reports come in order and none
    /// is left out; where the schedule lets steps overlap, a later step may have begun by then. All steps are certain
    /// at the end. Use [`start_step`](Self::start_step) to stop early, or to validate and save between steps.
    ///
    /// ```
    /// # use meshwork_core::World;
    /// # use meshwork_engine::{Plan, TrainError, Trainer};
    /// # use meshwork_nn::{BatchSource, Model};
    /// # use meshwork_tensor::Device;
    /// # use std::sync::Arc;
    /// fn losses(model: &Arc<dyn Model>, device: &Arc<dyn Device>, data: &dyn BatchSource) -> Vec<Vec<f64>> {
    ///     let plan = Plan { mesh: "dp=2,pp=2".parse().unwrap(), ..Plan::default() };
    ///     let ranks = World::Threads(4).run_mesh(&plan.mesh, |rank| {
    ///         let mut losses = Vec::new();
    ///         let mut trainer = Trainer::new(model.clone(), &plan, rank, device.clone())?;
    ///         trainer.train(data, 100, |report| losses.push(report.loss))?;
    ///         Ok::<_, TrainError>(losses)
    ///     });
    ///     ranks.unwrap()
    /// }
    /// ```
    ///
    /// # Errors
    /// The first error of the source or of a step; later steps are not begun, and steps that were not certain have no
    /// report.
    pub fn train(&mut self, source: &dyn BatchSource, steps: u64, mut report: impl FnMut(StepReport)) -> Result<()> {
        for step in self.steps_begun..self.steps_begun.saturating_add(steps) {
            let batch = source.batch(step, self.plan.global_batch_size, self.samples())?;
            self.start_step(&batch, || false, |_| {})?.into_iter().for_each(&mut report);
        }
        self.flush(|_| {})?.into_iter().for_each(report);
        Ok(())
    }
}
