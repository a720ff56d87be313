//! One training step. This module, and no other, needs several axes at once: the last micro-batch starts the reducer,
//! the gradient norm counts each element once, tied weights are summed across stages, the loss is averaged over the
//! terms of the whole batch.
//!
//! ```text
//! batch ─ count terms (dp) ─ schedule: forward, backward ... ─ reduce buckets ─ norm, loss (world) ─ clip, update ─ report
//!                                   └ activations (pp), blocks (tp) ┘ └ started while backward runs
//! ```
//!
//! [`synchronous`] has the step of synchronous schedules, which ends with one update, or with one that is validated
//! while the next step runs; [`asynchronous`] that of asynchronous ones, which update while the schedule runs and never
//! drain.
//!
//! More than 400 lines: one constructor sets up all fields of a trainer, beside the documented public calls.

mod asynchronous;
mod driver;
mod evaluate;
mod finite;
mod loads;
mod pending;
mod samples;
mod state;
mod synchronous;
mod train;
mod verify;

pub use evaluate::{AtCuts, Evaluation};

use crate::agreement::{require_same_model, require_same_plan};
use crate::chunk::Chunk;
use crate::clock::Clock;
use crate::codec::Codec;
use crate::dry_run;
use crate::factor_sum;
use crate::feedback::crossings;
use crate::gathers::Gathers;
use crate::gradients::{Gradients, OrderedSums};
use crate::layout::{Layout, join_tied, kept_of_gradients, norm_shards, replica};
use crate::message::Message;
use crate::mixed::Scaler;
use crate::offload::Traffic;
use crate::offload::disk::Disk;
use crate::offload::parked::Parked;
use crate::offload::saved::Shelf;
use crate::one_rank;
use crate::pass::{Pass, Purpose, Seeds};
use crate::running::{LiveActivations, Running};
use crate::slow_build;
use crate::statistics::{Noted, Reported, ReportedStatistic, StatisticSums};
use crate::transport::PipeTransport;
use crate::update::{self, Updates};
use crate::verify::Verify;
use crate::weights::WeightStore;
use crate::zero::{Cuts, Shared, ZeroGroups};
use crate::{
    Compress, LocalModel, LossScale, MixedPrecision, ModelPlan, Plan, PlanError, Recompute, Samples, TiedWeight,
    TrainError, Vector, Watch, Zero, ZeroStage,
};
use asynchronous::Asynchronous;
use driver::Driver;
use loads::Loads;
use meshwork_core::comm::Entered;
use meshwork_core::{Axis, DType, Group, Rank, Record, ReduceOp, ReductionOrder, tree};
use meshwork_data_parallel::Parking;
use meshwork_nn::{Activation, Batch, Metric, Model};
use meshwork_pipeline::{Event, Interpreter, Lowered, Schedule, forward_only_replicated, lower};
use meshwork_tensor::param::LocalSlice;
use meshwork_tensor::tape::{Encoding, Mode, Position};
use meshwork_tensor::verify::Claims;
use meshwork_tensor::{Device, MemoryUse, ParamId, ParamSpec, Params};
use pending::{Measured, PendingStep, hash_of_input};
use std::cell::{Cell, Ref, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use synchronous::Synchronous;

/// One rank of a training run: its part of the model, its optimizer, and the step.
pub struct Trainer {
    rank: Arc<Rank>,
    /// With which the names of its calls begin: see [`Trainer::enter`].
    name: String,
    device: Arc<dyn Device>,
    plan: ModelPlan,
    chunks: Vec<Chunk>,
    gathers: Option<Arc<Gathers>>,
    /// Every parameter of the whole model.
    parameters: Vec<ParamSpec>,
    metrics: Rc<[Metric]>,
    reported: Reported,
    tied: Vec<TiedWeight>,
    tied_groups: BTreeMap<Vec<usize>, Group>,
    weights: RefCell<WeightStore>,
    max_norm: f64,
    driver: Driver,
    evaluation: Lowered,
    prediction: Lowered,
    transport: PipeTransport,
    codec: Rc<RefCell<Codec>>,
    interpreter: Interpreter<Message>,
    activations: Rc<[Activation]>,
    scatter: bool,
    compress: Compress,
    scaler: Scaler,
    /// The loss scale of the gradients that were reduced last.
    reduced_scale: f64,
    live: LiveActivations,
    seed: u64,
    global_batch_size: usize,
    micro_batch: usize,
    micros: usize,
    steps_begun: u64,
    /// The steps begun that are not certain yet, the oldest first.
    pending: VecDeque<PendingStep>,
    recompute: Recompute,
    saved: Rc<[Encoding]>,
    zero: Zero,
    watch: Option<Arc<dyn Watch>>,
    verify: Verify,
    samples: Samples,
    /// The claims of the step under way, if it is verified.
    claims: Option<Claims>,
    /// Steps that this trainer has begun, whatever their numbers.
    steps_of_trainer: u64,
    loads: Loads,
    /// What is offloaded.
    disk: Option<Rc<Disk>>,
    /// What it had moved, and how long this rank had waited for it, at the last report.
    moved: Cell<(Traffic, Duration)>,
}

/// The report of a step, the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean over all terms of the loss in the global batch, unmasked tokens or samples. Auxiliary losses are metrics.
    pub loss: f64,
    /// Norm of the whole gradient, before clipping; with several updates in a step, the root of their mean squared
    /// norm.
    pub grad_norm: f64,
    /// The model's metrics, by name.
    pub metrics: Vec<(&'static str, f64)>,
    /// The statistics that are reported, of every layer that has one.
    pub statistics: Vec<ReportedStatistic>,
    /// Learning rate.
    pub lr: f64,
    /// What the loss was multiplied by before backward.
    pub loss_scale: f64,
    /// Terms of the loss. In a step without any, and in an asynchronous one with an update without any, it is 0: the
    /// step is then skipped, its loss is NaN and its norm 0.
    pub terms: u64,
    /// Whether the step changed no weight, because its loss has no terms, or because a gradient overflowed at this
    /// scale. The norm is then infinite or NaN.
    pub skipped: bool,
    /// Logical bytes per group name, averaged over the ranks of the world.
    pub comm_bytes: BTreeMap<&'static str, f64>,
    /// What was offloaded, where anything is.
    pub offload: Option<Offloaded>,
    /// What held the memory of each world rank when most bytes were alive.
    pub memory: Vec<MemoryUse>,
    /// What this rank communicated in the step, call by call (the report itself not counted).
    pub records: Vec<Record>,
    /// Whether some rank had been asked to stop by the end of the step.
    pub stop: bool,
}

/// What the offload of a rank did since the report before, averaged over the ranks of the world.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offloaded {
    /// Bytes read.
    pub read: f64,
    /// Bytes written.
    pub written: f64,
    /// Seconds in which a rank stood still until its store was done.
    pub waited: f64,
}

impl StepReport {
    /// Most bytes ever alive on each world rank.
    pub fn peak_bytes(&self) -> Vec<u64> {
        self.memory.iter().map(MemoryUse::total).collect()
    }
}

impl Trainer {
    /// Creates this rank's trainer. Collective: every rank of the mesh creates one with the same model and plan.
    ///
    /// # Errors
    /// Ranks whose plans or models differ, with the setting or parameter and the values that they have; a rank of a
    /// different mesh than the plan's; a plan that does not fit the model, the schedule or the device; a program that
    /// is wrongly distributed, or [another one on one rank](TrainError::OneRank), which the first passes over the model
    /// find without data.
    pub fn new(
        model: Arc<dyn Model>,
        plan: &Plan,
        rank: Arc<Rank>,
        device: Arc<dyn Device>,
    ) -> Result<Self, TrainError> {
        let name = rank.log().name_next("Trainer");
        let _entered = rank.enter(&*format!("{name}::new"));
        require_same_plan(plan, &rank)?;
        require_fit(plan, &rank, &*device)?;
        let (micros, micro_batch) = (plan.num_microbatches()?, plan.micro_batch_size()?);
        let schedule = plan.build_schedule()?;
        let pp_rank = rank.coords().get(Axis::Pp);
        let model_plan = ModelPlan::new(model.clone(), plan)?;
        let parameters = model_plan.parameters()?;
        require_same_model(&model_plan, &parameters, &rank)?;
        let device = model_plan.device(device);
        let local = model_plan.local_model(&schedule, pp_rank)?;
        require_synchronous(plan, &schedule, &model_plan)?;
        let tied = model_plan.tied_weights(&schedule)?;
        let tied_groups = join_tied(&rank, &tied)?;
        let (driver, versions) = match schedule.weights.is_synchronous() {
            true => {
                let overlaps = plan.schedule.overlaps_steps();
                (Driver::Synchronous(Synchronous::new(lower(&schedule)?, pp_rank, overlaps)), 1)
            }
            false => {
                let driver = Asynchronous::new(plan, pp_rank)?;
                let versions = driver.versions_kept(pp_rank);
                (Driver::Asynchronous(driver), versions)
            }
        };

        let disk = plan.offload.as_ref().map(|offload| Disk::open(offload, &rank, &device)).transpose()?;
        let micro = Batch::blank(&model_plan.model().fields(), micro_batch);
        one_rank::compare(&model_plan, rank.world_rank(), &micro, (Mode::Train, plan.verify))?;
        let layout = Layout::new(plan, &model_plan, &local, &schedule, &tied, &rank)?;
        let (cuts, zero_groups) = (Cuts::of(plan), ZeroGroups::new(&rank, plan.zero)?);
        let shared = |(flat, members): (usize, &Vec<ParamId>)| Shared {
            members: members.clone(),
            slice: layout.slice(rank.mesh(), rank.world_rank(), flat),
            sharers: layout
                .keys
                .get(flat)
                .and_then(|key| zero_groups.of(&key.axes))
                .map(|(sharers, _)| sharers.clone()),
        };
        let shared: Vec<Shared> = layout.flats.iter().enumerate().map(shared).collect();
        let gathers = match plan.zero.stage {
            ZeroStage::Weights => {
                let shared = (&layout, &shared[..]);
                Some(Arc::new(Gathers::new(plan, &model_plan, &local, shared, rank.world_rank(), &device)?))
            }
            _ => None,
        };
        let LocalModel { declarations, stages } = local;
        let declarations = Arc::new(declarations);
        let windows: Vec<_> = shared.iter().map(|shared| cuts.window(Vector::Weights, shared.slice)).collect();
        let (of, seed) = (declarations.clone(), plan.seed);
        let mut params = Params::in_windows(of, rank.mesh(), rank.coords(), &device, &layout.flats, &windows, seed)?;
        if let Some(gathers) = &gathers {
            params.gather_with(gathers.clone());
        }
        let tapes = |stage: usize| schedule.micros_at(stage, pp_rank) / driver.updates();
        let sum = |flat| layout.sum_plan(plan, &declarations, rank.world_rank(), (flat, driver.updates()));
        let lossy: Vec<_> = (0..layout.flats.len()).map(sum).collect();
        let parks = disk.as_ref().filter(|_| plan.offload.as_ref().is_some_and(|offload| offload.gradients));
        let parking = parks.map(|disk| Box::new(Parked::on(disk)) as Box<dyn Parking>);
        let of_gradients = (&device, MixedPrecision::reduced_in(plan.mixed), parking);
        let reducer = layout.reducer(&rank, cuts, (&zero_groups, &tied_groups), tapes, &lossy, of_gradients)?;
        let kept = kept_of_gradients(&layout, &lossy, &declarations, rank.mesh(), rank.world_rank())?;
        let names = declarations.specs().iter().map(|spec| spec.name.clone());
        let traced = names.zip(layout.found.types.iter().copied()).collect();
        let copies = || OrderedSums::new(layout.found.copies.clone(), layout.found.first_copy.clone());
        let ordered = declarations.reduction_blocks().map(|_| copies());
        let gradients = Gradients::new(reducer, layout.members(), traced, (ordered, kept), device.clone());

        let norms = norm_shards(&params, &layout, cuts, &tied, &rank);
        let reported = Reported::new(&model_plan.whole_model()?.declarations, &declarations, |spec| {
            replica(spec, &tied, &rank, |_| false).0 == 0
        });
        update::require_matrices(&plan.optimizer, &parameters)?;
        factor_sum::require_matrices(&plan.compress, &parameters)?;
        let updates = (&*rank, update::join(&rank, &plan.optimizer, cuts, &parameters)?);
        let updater = Updates::new(&plan.optimizer, &params, &layout, cuts, updates, &parameters, device.clone());
        let update = (plan.optimizer.clone(), updater, plan.lr);
        let of_states = disk.as_ref().filter(|_| plan.offload.as_ref().is_some_and(|offload| offload.optimizer));
        let on = (device.clone(), of_states);
        let mut weights = WeightStore::new(params, gradients, update, (cuts, shared), norms, versions, on)?;
        let initial = |spec: &ParamSpec| spec.initial(&spec.local(rank.mesh(), rank.coords()), plan.seed);
        weights.set_masters(|id| initial(declarations.spec(id)))?;
        if let Some(disk) = disk.as_ref().filter(|_| device.has_values()) {
            // A disk that is too full is found now, and not in the middle of a step.
            disk.reserve(dry_run::predict(&model, plan, rank.world_rank())?.offloaded.room)?;
        }
        let count = model_plan.stages().len();
        let shelves = disk.as_ref().filter(|_| plan.offload.as_ref().is_some_and(|offload| offload.activations));
        let shelf = shelves.map(|disk| Rc::new(Shelf::new(disk)));
        let chunk = |(number, segments)| Chunk::new(number, count, segments, (gathers.clone(), shelf.clone()));
        let chunks = stages.into_iter().map(chunk).collect();
        let activations: Rc<[Activation]> = model_plan.activations(&micro)?.into();
        let (in_flight, scatter) = (driver.in_flight(), plan.scatter_gather);
        let crossings = crossings(plan, &model_plan, &schedule, rank.mesh(), rank.coords())?;
        let of_samples = disk.as_ref().filter(|_| plan.offload.as_ref().is_some_and(|offload| offload.samples));
        let codec = Codec::training((plan, &model_plan, &schedule), crossings, &rank, of_samples, &device)?;
        let codec = Rc::new(RefCell::new(codec));
        let forward = |micros| lower(&forward_only_replicated(&schedule.placement, &schedule.replicas, micros));
        Ok(Self {
            transport: PipeTransport::new(
                &rank,
                device.clone(),
                activations.clone(),
                codec.clone(),
                scatter,
                in_flight,
            ),
            codec,
            compress: plan.compress,
            scaler: Scaler::new(plan.mixed),
            reduced_scale: Scaler::new(plan.mixed).scale(0),
            interpreter: Interpreter::default(),
            activations,
            scatter,
            chunks,
            gathers,
            parameters,
            metrics: model_plan.model().metrics().into(),
            plan: model_plan,
            reported,
            tied,
            tied_groups,
            weights: RefCell::new(weights),
            max_norm: plan.max_norm,
            driver,
            evaluation: forward(micros)?,
            prediction: forward(1)?,
            live: LiveActivations::default(),
            seed: plan.seed,
            global_batch_size: plan.global_batch_size,
            micro_batch,
            micros,
            steps_begun: 0,
            pending: VecDeque::new(),
            recompute: plan.recompute,
            saved: plan.saved.as_slice().into(),
            zero: plan.zero,
            watch: None,
            verify: plan.verify,
            samples: plan.samples,
            claims: None,
            steps_of_trainer: 0,
            loads: Loads::default(),
            moved: Cell::new((disk.as_ref().map_or(Traffic::default(), |disk| disk.traffic()), Duration::ZERO)),
            disk,
            rank,
            name,
            device,
        })
    }

    /// Begins one of its collective calls: what this rank communicates until the result is dropped carries the name.
    /// Faults print it, and ranks in different calls are refused.
    fn enter(&self, call: &str) -> Entered {
        self.rank.enter(&*format!("{}::{call}", self.name))
    }

    /// The samples of a global batch that this rank's dp rank takes, and that [`step`](Self::step) expects.
    pub fn samples(&self) -> Range<usize> {
        let per_dp = self.micros * self.micro_batch;
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
        &self.plan
    }

    /// This rank's parameters: the newest version.
    pub fn params(&self) -> Ref<'_, Params> {
        Ref::map(self.weights.borrow(), |weights| &**weights.params())
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
        self.driver.steps_ahead()
    }

    /// The slices of a parameter that this rank keeps of a vector, in the order in which [`params`](Self::params),
    /// [`gradient`](Self::gradient) and [`optimizer_states`](Self::optimizer_states) give their elements: one, what the
    /// placement says, unless ZeRO cuts the vector.
    pub fn slices(&self, id: ParamId, vector: Vector) -> Vec<LocalSlice> {
        let weights = self.weights.borrow();
        let local = weights.params().declarations().spec(id).local(self.rank.mesh(), self.rank.coords());
        local.boxes(weights.part(id, vector)).into_iter().map(|(slice, _)| slice).collect()
    }

    /// Whether ranks share out a vector of a parameter.
    fn is_cut(&self, id: ParamId, vector: Vector) -> bool {
        self.weights.borrow().is_cut(id, vector)
    }

    /// The gradient of a parameter as of the last update, as far as this rank keeps it: summed over its batch and all
    /// ranks, before clipping. Empty for a frozen one.
    pub fn gradient(&self, id: ParamId) -> Result<Vec<f32>, TrainError> {
        let mut gradient = self.weights.borrow().gradient(id)?;
        gradient.iter_mut().for_each(|element| *element = (f64::from(*element) / self.reduced_scale) as f32);
        Ok(gradient)
    }

    /// The optimizer's states of the elements of a parameter, as far as this rank keeps them.
    pub fn optimizer_states(&self, id: ParamId) -> Result<Vec<Vec<f32>>, TrainError> {
        self.weights.borrow().states(id)
    }

    /// Its states of rows, columns and other sets of the elements of a parameter, which every rank that holds some of
    /// it keeps whole.
    pub fn set_states(&self, id: ParamId) -> Result<Vec<Vec<f32>>, TrainError> {
        self.weights.borrow().sets(id)
    }

    /// The largest number of activations alive at once on this rank, in units of one micro-batch through one stage, and
    /// of versions of the weights. Both are as [`check`](meshwork_pipeline::check) predicted.
    pub fn peaks(&self) -> (usize, usize) {
        (self.live.most(), self.weights.borrow().most_versions())
    }

    /// What this rank's offload has moved so far, and the most room that it took.
    pub fn offloaded(&self) -> Traffic {
        self.disk.as_ref().map_or(Traffic::default(), |disk| disk.traffic())
    }

    /// Shows every value of the training passes from now on to `watch`.
    pub fn watch(&mut self, watch: Arc<dyn Watch>) {
        self.watch = Some(watch);
    }

    /// When each gradient bucket of the last step was started and done.
    pub fn bucket_events(&self) -> Vec<(std::time::Instant, meshwork_data_parallel::BucketEvent)> {
        self.weights.borrow().gradients.events().to_vec()
    }

    /// When each flat buffer of weights was gathered and used in the last step, where ranks have slices of them.
    pub fn gather_events(&self) -> Vec<(std::time::Instant, meshwork_data_parallel::GatherEvent)> {
        self.gathers.as_ref().map_or_else(Vec::new, |gathers| gathers.events())
    }

    /// Trains on this rank's [samples](Self::samples) of one global batch, to the end:
    /// [`start_step`](Self::start_step), then [`flush`](Self::flush).
    pub fn step(&mut self, batch: &Batch) -> Result<StepReport, TrainError> {
        self.observed_step(batch, |_| {})
    }

    /// As [`step`](Self::step), with an observer that sees every action of the pipeline start and end.
    pub fn observed_step(&mut self, batch: &Batch, mut observe: impl FnMut(Event)) -> Result<StepReport, TrainError> {
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
    ) -> Result<Vec<StepReport>, TrainError> {
        self.begin(batch, &stop, &mut observe)
    }

    fn begin(
        &mut self,
        batch: &Batch,
        stop: &dyn Fn() -> bool,
        observe: &mut dyn FnMut(Event),
    ) -> Result<Vec<StepReport>, TrainError> {
        let _entered = self.enter("step");
        slow_build::warn(&*self.device);
        self.require_batch(batch)?;
        self.require_samples_apart(batch)?;
        self.rank.log().drain(); // of a step that was refused, or of calls in between
        self.gathers.iter().for_each(|gathers| gathers.begin_step());
        let terms = self.count_terms(batch)?;
        if terms.contains(&0) {
            return self.pass_over(batch, &terms, stop, observe);
        }
        self.codec.borrow_mut().begin_step(batch, self.rank.data_group())?;
        self.begin_claims(batch)?;
        match self.driver {
            Driver::Synchronous(_) => self.step_synchronously(batch, &terms, stop, observe),
            Driver::Asynchronous(_) => self.step_asynchronously(batch, &terms, stop, observe),
        }
    }

    /// Skips a step in which the loss, or the loss of one of its updates, has no terms. The step changes nothing and is
    /// counted. Terms are summed over ranks, so all ranks skip it.
    fn pass_over(
        &mut self,
        batch: &Batch,
        terms: &[u64],
        stop: &dyn Fn() -> bool,
        observe: &mut dyn FnMut(Event),
    ) -> Result<Vec<StepReport>, TrainError> {
        let mut reports = self.flush(observe)?;
        self.steps_begun += 1;
        let records = self.rank.log().drain();
        let statistics = self.sum_statistics()?;
        let stats = self.start_stats(&records, &statistics, stop(), hash_of_input(batch, terms))?;
        let loss_scale = self.scaler.scale(self.steps_begun - 1);
        self.scaler.pass_over(self.steps_begun);
        let nothing = Measured {
            loss: f64::NAN,
            grad_norm: 0.0,
            metrics: Vec::new(),
            loss_scale,
            terms: 0,
            skipped: true,
            loaded: false,
        };
        reports.push(self.report(self.steps_begun, nothing, stats, records)?);
        Ok(reports)
    }

    /// Completes every step that was begun, and drains the pipeline. Call it before reading weights, and at the end of
    /// a run.
    pub fn flush(&mut self, mut observe: impl FnMut(Event)) -> Result<Vec<StepReport>, TrainError> {
        let _entered = self.enter("flush");
        let reports = match self.driver {
            Driver::Synchronous(_) => self.validate(false)?.into_iter().map(|(report, _)| report).collect(),
            Driver::Asynchronous(_) => self.drain(&mut observe)?,
        };
        self.verify_told()?;
        Ok(reports)
    }

    fn require_complete(&self) -> Result<(), TrainError> {
        match self.pending.len() {
            0 => Ok(()),
            steps => Err(TrainError::Pending { steps }),
        }
    }

    /// Refuses a batch that is not this rank's share of what the model takes.
    fn require_batch(&self, batch: &Batch) -> Result<(), TrainError> {
        Ok(batch.require(&self.plan.model().fields(), self.micros * self.micro_batch)?)
    }

    /// Terms of the loss in the global batch, per update: integer sums over dp.
    fn count_terms(&self, batch: &Batch) -> Result<Vec<u64>, TrainError> {
        let share = batch.samples() / self.driver.updates();
        let count = |samples: Range<usize>| self.plan.model().loss_terms(batch, samples);
        let of_update = |update: usize| {
            let samples = update * share..(update + 1) * share;
            let terms = count(samples.clone())?;
            if self.verify.includes(self.steps_of_trainer) {
                let alone: u64 = samples.clone().map(|sample| count(sample..sample + 1)).sum::<Result<u64, _>>()?;
                self.require_additive(samples, terms, alone)?;
            }
            Ok(terms)
        };
        let counts = (0..self.driver.updates()).map(of_update).collect::<Result<Vec<u64>, TrainError>>()?;
        let mut counts: Vec<i64> = counts.into_iter().map(|count| count as i64).collect();
        self.rank.data_group().all_reduce_slice(&mut counts, ReduceOp::Sum)?;
        Ok(counts.into_iter().map(|count| count as u64).collect())
    }

    fn pass(&self, purpose: Purpose, batch: &Batch) -> Result<Pass, TrainError> {
        Ok(Pass {
            rank: self.rank.clone(),
            device: self.device.clone(),
            purpose,
            position: Position {
                seed: self.seed,
                step: self.steps_begun,
                first_sample: self.samples().start as u64,
                rank_samples: self.samples().len() as u64,
            },
            batch: batch.clone(),
            micro_batch: self.micro_batch,
            activations: self.activations.clone(),
            seeds: Vec::new(),
            loss_scale: 1.0,
            first_micro: 0,
            ahead: 0,
            recompute: self.recompute,
            saved: self.saved.clone(),
            metrics: self.metrics.clone(),
            numbers: RefCell::new(self.numbers(purpose)?),
            mixes_samples: Cell::new(false),
            decides: Cell::new(false),
            rows: self.compress.rows_in(self.steps_begun),
            global_batch_size: self.global_batch_size,
            watch: self.watch.clone(),
            claims: self.claims.clone(),
        })
    }

    /// A pass that trains: the mean loss over the terms of each update, and auxiliary losses by the mean over its
    /// samples.
    fn training_pass(&self, batch: &Batch, terms: &[u64]) -> Result<Pass, TrainError> {
        let per_update = self.micros / terms.len();
        let auxiliary = terms.len() as f64 / self.global_batch_size as f64;
        let scale = self.scaler.scale(self.steps_begun);
        let seeds = |micro| Seeds { of_loss: scale / terms[micro / per_update] as f64, auxiliary: scale * auxiliary };
        Ok(Pass {
            seeds: (0..self.micros).map(seeds).collect(),
            loss_scale: scale,
            ..self.pass(Purpose::Train, batch)?
        })
    }

    /// The sums of this step's statistics over all of its samples.
    fn sum_statistics(&mut self) -> Result<StatisticSums, TrainError> {
        let mut noted = Noted::default();
        self.chunks.iter_mut().for_each(|chunk| noted.extend(chunk.take_noted()));
        let declarations = self.weights.get_mut().params().declarations().clone();
        noted.sum(&declarations, &*self.device, &self.rank, &self.tied, &self.tied_groups)
    }

    /// Runs some of this rank's actions in the training schedule.
    fn walk(&mut self, pass: &Pass, actions: Range<usize>, observe: &mut dyn FnMut(Event)) -> Result<(), TrainError> {
        let (schedule, weights) = (self.driver.schedule(), &self.weights);
        let versions = |stage, micro| self.driver.version(stage, micro);
        let (codec, live, placed) = (&*self.codec, &self.live, schedule.schedule());
        let running = |chunk| Running { chunk, pass, weights, codec, schedule: placed, live, versions: &versions };
        let mut stages: Vec<Running<'_>> = self.chunks.iter_mut().map(running).collect();
        let pp_rank = self.rank.coords().get(Axis::Pp);
        let clock = Clock {
            purpose: pass.purpose,
            step: pass.position.step,
            first_micro: pass.first_micro as i64 - pass.ahead as i64,
            micros: self.micros,
        };
        let may_repeat = matches!(self.driver, Driver::Synchronous(_)) && !self.pending.is_empty();
        self.codec.borrow_mut().begin(clock, may_repeat);
        self.gathers.iter().for_each(|gathers| gathers.set_compresses(self.compress.includes(pass.position.step)));
        let walked =
            self.interpreter.advance(schedule, pp_rank, actions, &mut stages, &mut self.transport, &mut |event| {
                observe(event);
                weights.borrow_mut().gradients.poll();
            });
        if walked.is_err() {
            self.forget_passes();
        }
        Ok(walked?)
    }

    /// Forgets the activations that AQ-SGD keeps of samples, which are then new in the next step: where numbers stand
    /// for other samples now.
    pub fn forget_samples(&mut self) {
        self.codec.borrow_mut().histories_mut().forget();
    }

    /// Forgets the passes in flight, after a failure or to run them again.
    fn forget_passes(&mut self) {
        self.chunks.iter_mut().for_each(Chunk::clear);
        self.interpreter.clear();
        self.codec.borrow_mut().clear();
        self.live.clear();
    }
}

/// Refuses a rank or a device that is not what the plan is for.
pub(crate) fn require_fit(plan: &Plan, rank: &Rank, device: &dyn Device) -> Result<(), PlanError> {
    let same = |axis| plan.mesh.degree(axis) == rank.mesh().degree(axis);
    if !Axis::ALL.into_iter().all(same) {
        return Err(PlanError::Mesh { plan: plan.mesh.to_string(), rank: rank.mesh().to_string() });
    }
    if plan.blocks().is_some() && rank.world().communicator().reduction_order() < ReductionOrder::BalancedTree {
        return Err(PlanError::ReductionOrder);
    }
    // The samples of each rank, and those of the ranks that share experts: the gradients of these are summed over the
    // rest of dp.
    let batch = plan.global_batch_size;
    for (degree, value) in [("dp", plan.mesh.data_degree()), ("dp / ep", plan.mesh.degree(Axis::Dp))] {
        if plan.blocks().is_some() && !tree::fits(batch, value) {
            return Err(PlanError::Subtree { batch, degree, value });
        }
    }
    plan.zero.require_groups(&plan.mesh)?;
    plan.compress.require_fit(plan)?;
    if let Some(mixed) = plan.mixed {
        mixed.require_fit(plan)?;
    }
    if device.operand_dtype(DType::F32) != plan.precision.operand_dtype(DType::F32) {
        return Err(PlanError::Precision { plan: plan.precision, device: device.name().to_owned() });
    }
    Ok(())
}

/// Refuses what has no meaning where weights change within a step.
fn require_synchronous(plan: &Plan, schedule: &Schedule, model: &ModelPlan) -> Result<(), TrainError> {
    if schedule.weights.is_synchronous() {
        return Ok(());
    }
    let name = || schedule.name.clone();
    let refuse = |what, fix| Err(PlanError::Asynchronous { what, schedule: name(), fix }.into());
    if plan.mixed.is_some_and(|mixed| matches!(mixed.loss_scale, LossScale::Dynamic { .. })) {
        return refuse(
            "a dynamic loss scale",
            "use a fixed one, or bf16: no rank knows in time that a gradient overflowed",
        );
    }
    if plan.blocks().is_some() {
        return refuse("canonical numerics", "use numerics Fast: no other mesh makes the same updates");
    }
    if plan.max_norm > 0.0 {
        return refuse("clipping", "use max_norm 0: no rank knows the norm of a whole gradient");
    }
    if !model.tied_weights(schedule)?.is_empty() {
        return refuse("a tied weight", "untie it: its stages update it at different times");
    }
    for pp_rank in 0..schedule.ranks {
        if !model.local_model(schedule, pp_rank)?.declarations.statistics().is_empty() {
            return Err(PlanError::Statistics { schedule: name() }.into());
        }
    }
    Ok(())
}
