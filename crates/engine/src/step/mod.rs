//! A trainer: one rank of a run. This folder, and no other place, needs several axes at once: the last micro-batch
//! starts the reducer, the gradient norm counts each element once, tied weights are summed across stages, the loss is
//! averaged over the terms of the whole batch.
//!
//! A [`Trainer`] has four parts: the [partition](cut), the [store](stored), the [messages](pipeline) and the
//! [report](report). [`one_step`] has the step, [`train`] the loop over steps.

mod cut;
mod driver;
mod evaluate;
mod finite;
mod held;
mod loads;
mod one_step;
mod passes;
mod pending;
mod pipeline;
pub(crate) mod prediction;
mod report;
mod samples;
mod state;
mod stored;
mod train;
mod verify;

/// Items that most parts of a trainer use.
mod prelude {
    pub(super) use super::Trainer;
    pub(super) use crate::pass::{Pass, Purpose};
    pub(super) use crate::prelude::*;
    pub(super) use crate::state_vector::StateVector;
    pub(super) use crate::statistics::StatisticSums;
    pub(super) use meshwork_core::Record;
    pub(super) use meshwork_core::hash::combine;
    pub(super) use meshwork_pipeline::lower;
}

pub use evaluate::{AtCuts, Evaluation, Outputs};
pub use held::HeldVector;
pub use report::{Offloaded, RankTime, StepReport};

use crate::agreement::require_same_plan;
use crate::fit::require_fit;
use crate::mixed::Scaler;
use crate::offload::Traffic;
use crate::{ModelPlan, Plan, Result, Watch};
use cut::Cut;
use driver::Driver;
use loads::Loads;
use meshwork_core::comm::Entered;
use meshwork_core::{Axis, Rank};
use meshwork_nn::Model;
use meshwork_tensor::verify::Claims;
use meshwork_tensor::{Device, Params};
use pending::PendingStep;
use pipeline::Pipeline;
use report::Reporting;
use std::cell::Ref;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use stored::Store;

/// One rank of a training run: its part of the model, its optimizer, and the step.
pub struct Trainer {
    rank: Arc<Rank>,
    /// The beginning of the names of its calls: see [`Trainer::enter`].
    name: String,
    device: Arc<dyn Device>,
    plan: Plan,
    cut: Cut,
    store: Store,
    pipeline: Pipeline,
    reporting: Reporting,
    scaler: Scaler,
    /// The loss scale of the gradients that were reduced last.
    reduced_scale: f64,
    steps_begun: u64,
    /// Steps that this trainer has begun, whatever their numbers.
    steps_of_trainer: u64,
    /// The steps begun that are not certain yet, the oldest first.
    pending: VecDeque<PendingStep>,
    watch: Option<Arc<dyn Watch>>,
    /// The claims of the step under way, if it is verified.
    claims: Option<Claims>,
    loads: Loads,
}

impl Trainer {
    /// Creates this rank's trainer. Collective: every rank of the mesh creates one with the same model and plan.
    ///
    /// # Errors
    /// Ranks whose plans or models differ, with the setting or parameter and the values that they have; a rank of a
    /// different mesh than the plan's; a plan that does not fit the model, the schedule or the device; a program that
    /// is wrongly distributed, or [another one on one rank](crate::TrainError::OneRank), which the first passes over
    /// the model find without data.
    pub fn new(model: Arc<dyn Model>, plan: &Plan, rank: Arc<Rank>, device: Arc<dyn Device>) -> Result<Self> {
        let name = rank.log().name_next("Trainer");
        let _entered = rank.enter(&*format!("{name}::new"));
        require_same_plan(plan, &rank)?;
        require_fit(plan, &rank, &*device)?;
        let mut cut = Cut::new(model, plan, &rank)?;
        let device = cut.model.device(device);
        let driver = Driver::new(plan, &cut.schedule, rank.coords().get(Axis::Pp))?;
        let store = Store::new(plan, &cut, &driver, &rank, &device)?;
        let pipeline = Pipeline::new(plan, &mut cut, driver, &store, &rank, &device)?;
        Ok(Self {
            reporting: Reporting::new(plan, &cut, &store, rank.mesh())?,
            plan: plan.clone(),
            cut,
            store,
            pipeline,
            scaler: Scaler::new(plan.mixed),
            reduced_scale: Scaler::new(plan.mixed).scale(0),
            steps_begun: 0,
            steps_of_trainer: 0,
            pending: VecDeque::new(),
            watch: None,
            claims: None,
            loads: Loads::default(),
            rank,
            name,
            device,
        })
    }

    /// Begins a collective call: communications of this rank carry its name until the result is dropped.
    /// Faults print it, and ranks in different calls are refused.
    fn enter(&self, call: &str) -> Entered {
        self.rank.enter(&*format!("{}::{call}", self.name))
    }

    /// The samples of a global batch that this rank's dp rank takes, and that [`step`](Self::step) expects.
    pub fn samples(&self) -> Range<usize> {
        let per_dp = self.cut.micros * self.cut.micro_batch;
        let first = self.rank.mesh().data_rank(self.rank.coords()) * per_dp;
        first..first + per_dp
    }

    /// This rank.
    pub fn rank(&self) -> &Arc<Rank> {
        &self.rank
    }

    /// This rank's device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The model, cut into stages as the plan says.
    pub fn plan(&self) -> &ModelPlan {
        &self.cut.model
    }

    /// This rank's parameters: the newest version.
    pub fn params(&self) -> Ref<'_, Params> {
        Ref::map(self.store.weights.borrow(), |weights| &**weights.params())
    }

    /// Elements of this rank's parameters, padding not counted.
    pub fn local_elements(&self) -> usize {
        let (mesh, coords) = (self.rank.mesh(), self.rank.coords());
        let params = self.params();
        params.declarations().specs().iter().map(|spec| spec.local(mesh, coords).elements()).sum()
    }

    /// Steps that are certain.
    pub fn steps_done(&self) -> u64 {
        self.steps_begun - self.pending.len() as u64
    }

    /// Number of steps begun before the first of them is certain: 0 if each step is certain before the next begins.
    pub fn steps_ahead(&self) -> usize {
        self.pipeline.driver.steps_ahead()
    }

    /// The largest number of activations alive at once on this rank, in units of one micro-batch through one stage, and
    /// of versions of the weights. Both are as [`check`](meshwork_pipeline::check) predicted.
    pub fn peaks(&self) -> (usize, usize) {
        (self.pipeline.live.most.get(), self.store.weights.borrow().most_versions)
    }

    /// Bytes that this rank has offloaded so far, and the most room that they took.
    pub fn offloaded(&self) -> Traffic {
        self.store.disk.as_ref().map_or(Traffic::default(), |disk| disk.traffic())
    }

    /// Shows every value of the training passes from now on to `watch`.
    pub fn watch(&mut self, watch: Arc<dyn Watch>) {
        self.watch = Some(watch);
    }

    /// When each gradient bucket of the last step was started and done.
    pub fn bucket_events(&self) -> Vec<(std::time::Instant, meshwork_data_parallel::BucketEvent)> {
        self.store.weights.borrow().gradients.events.clone()
    }

    /// When each flat buffer of weights was gathered and used in the last step, where ranks have slices of them.
    pub fn gather_events(&self) -> Vec<(std::time::Instant, meshwork_data_parallel::GatherEvent)> {
        self.store.gathers.as_ref().map_or_else(Vec::new, |gathers| gathers.gatherer.events())
    }
}
