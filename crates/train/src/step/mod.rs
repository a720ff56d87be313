//! One training step. What needs several axes at once lives here and nowhere else: the last micro-batch tells the reducer,
//! the gradient norm counts each element once, tied weights are summed across stages, the loss is averaged over the tokens of
//! the whole batch. What can be computed without a rank is in `engine`.
//!
//! ```text
//! batch ─ count tokens (dp) ─ schedule: forward, backward ... ─ reduce buckets ─ norm, loss (world) ─ clip, update ─ report
//!                                   └ hidden states (pp), blocks (tp) ┘ └ started while backward runs
//! ```
//!
//! [`flush`] has the step of synchronous schedules, which ends with one update, or with one that is validated while the next step
//! runs; [`stream`] that of asynchronous ones, which update while the schedule runs and never drain.

mod evaluate;
mod flush;
mod mode;
mod settle;
mod stream;

use crate::config::Config;
use crate::data::Batch;
use crate::engine::{
    Blueprint, Chunk, Gradients, Learner, Live, Message, Pass, PipeTransport, Purpose, Running, TrainError, Trees,
    Watch, buckets, counted, join_ties, reducer, trace,
};
use flush::Flush;
use meshwork_core::{Axis, Rank, Record, ReduceOp};
use meshwork_pipeline::{Event, Interpreter, Lowered, forward_only_replicated, lower};
use meshwork_tensor::tape::{Position, SavedPolicy};
use meshwork_tensor::{Device, ParamId, ParamSpec, Params};
use mode::Mode;
use settle::Unsettled;
use std::cell::{Ref, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use stream::Stream;

/// One rank of a training run: its part of the model, its optimizer, and the step.
pub struct Trainer {
    rank: Arc<Rank>,
    device: Arc<dyn Device>,
    chunks: Vec<Chunk>,
    /// Every parameter of the whole model.
    model: Vec<ParamSpec>,
    learner: RefCell<Learner>,
    max_norm: f64,
    mode: Mode,
    evaluation: Lowered,
    sampling: Lowered,
    transport: PipeTransport,
    interpreter: Interpreter<Message>,
    scatter: bool,
    live: Live,
    seed: u64,
    seq_len: usize,
    micro_batch: usize,
    micros: usize,
    steps_begun: u64,
    /// Those among them that are not certain yet, the oldest first.
    unsettled: VecDeque<Unsettled>,
    policy: Rc<dyn SavedPolicy>,
    watch: Option<Arc<dyn Watch>>,
}

/// What a step did, the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean over all unmasked tokens of the global batch.
    pub loss: f64,
    /// Norm of the whole gradient, before clipping; with several updates in a step, the root of their mean squared norm.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Logical bytes per group name, averaged over the ranks of the world.
    pub comm_bytes: BTreeMap<&'static str, f64>,
    /// Most bytes ever alive on each world rank.
    pub peak_bytes: Vec<u64>,
    /// What this rank communicated in the step, call by call (the report itself not counted).
    pub records: Vec<Record>,
    /// Whether some rank was asked to stop by then.
    pub stop: bool,
}

impl Trainer {
    /// This rank's part of a run. Collective: every rank of the mesh makes one with the same configuration.
    pub fn new(config: &Config, rank: Arc<Rank>, device: Arc<dyn Device>) -> Result<Self, TrainError> {
        let blueprint = Blueprint::new(config)?;
        let mesh = blueprint.mesh();
        let micros = config.pipeline.num_microbatches;
        let pp = mesh.degree(Axis::Pp);
        let schedule = config.pipeline.build(pp)?;
        let pp_rank = rank.coords().get(Axis::Pp);
        let model = blueprint.rank_model(&schedule, pp_rank)?;
        let ties = blueprint.ties(&schedule)?;
        let tie_groups = join_ties(&rank, &ties)?;
        let (mode, kept) = match schedule.weights.is_synchronous() {
            true => (Mode::Flush(Flush::new(lower(&schedule)?, pp_rank, config.pipeline.overlaps_steps())), 1),
            false => {
                let stream = Stream::new(&config.pipeline, pp, pp_rank)?;
                let kept = stream.versions_kept(pp_rank);
                (Mode::Stream(stream), kept)
            }
        };

        let found = trace(&blueprint, &model, rank.world_rank(), config.training.micro_batch_size)?;
        let (layout, keys) = buckets(&model, &found, &ties, &rank);
        let declarations = Arc::new(model.declarations);
        let params = Params::new(declarations.clone(), mesh, rank.coords(), &device, &layout, config.training.seed)?;
        let (reducer, places) = reducer(&params, &layout, &keys, &rank, &tie_groups, &device)?;
        let trees = declarations.leaves().map(|_| Trees::new(found.copies, found.first_copy));
        let tapes = |stage: &usize| schedule.micros_at(*stage, pp_rank) / mode.updates();
        let readers = found.readers.iter().map(|stages| stages.iter().map(tapes).sum()).collect();
        let gradients = Gradients::new(reducer, places, readers, trees, device.clone());

        let model_specs = blueprint.parameters()?;
        let counted = counted(&params, &model_specs, &ties, &rank);
        let (rule, lr) = (config.optimizer.rule(), config.lr_scheduler.schedule(config.optimizer.lr));
        let learner = Learner::new(params, gradients, rule, lr, counted, kept, device.clone())?;
        let stages = blueprint.stages();
        let chunks: Vec<Chunk> =
            model.stages.into_iter().map(|(number, stage)| Chunk::new(number, stages, stage)).collect();
        let (seq_len, micro_batch) = (config.model.seq_len, config.training.micro_batch_size);
        let boundary = chunks[0].stage().boundary(micro_batch, seq_len);
        let in_flight = mode.in_flight();
        let scatter = config.pipeline.scatter_gather;
        Ok(Self {
            transport: PipeTransport::new(&rank, device.clone(), boundary, scatter, in_flight),
            interpreter: Interpreter::default(),
            scatter,
            chunks,
            model: model_specs,
            learner: RefCell::new(learner),
            max_norm: config.training.max_norm,
            mode,
            evaluation: lower(&forward_only_replicated(&schedule.placement, &schedule.replicas, micros))?,
            sampling: lower(&forward_only_replicated(&schedule.placement, &schedule.replicas, 1))?,
            live: Live::default(),
            seed: config.training.seed,
            seq_len,
            micro_batch,
            micros,
            steps_begun: 0,
            unsettled: VecDeque::new(),
            policy: config.saved_policy(),
            watch: None,
            rank,
            device,
        })
    }

    /// The rows of a global batch that this rank's dp rank takes.
    pub fn rows(&self) -> Range<usize> {
        let per_dp = self.micros * self.micro_batch;
        let first = self.rank.coords().get(Axis::Dp) * per_dp;
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

    /// This rank's parameters: the newest version.
    pub fn params(&self) -> Ref<'_, Params> {
        Ref::map(self.learner.borrow(), |learner| &**learner.params())
    }

    /// Elements of this rank's parameters, padding not counted.
    pub fn local_elements(&self) -> usize {
        let (mesh, coords) = (self.rank.mesh(), self.rank.coords());
        let params = self.params();
        params.declarations().specs().iter().map(|spec| spec.local(mesh, coords).elements()).sum()
    }

    /// Steps that are certain.
    pub fn steps_done(&self) -> u64 {
        self.steps_begun - self.unsettled.len() as u64
    }

    /// The steps that are begun before the first of them is certain: 0 where each is before the next begins.
    pub fn steps_ahead(&self) -> usize {
        match &self.mode {
            Mode::Flush(flush) => usize::from(flush.overlaps()),
            Mode::Stream(stream) => stream.lag(),
        }
    }

    /// The gradient of a parameter as of the last update: summed over its batch and all ranks, before clipping.
    pub fn gradient(&self, id: ParamId) -> Result<Vec<f32>, TrainError> {
        self.learner.borrow().gradient(id)
    }

    /// The optimizer's state vectors of a parameter, as it lies on this rank.
    pub fn optimizer_states(&self, id: ParamId) -> Result<Vec<Vec<f32>>, TrainError> {
        let learner = self.learner.borrow();
        let (flat, _) = learner.params().place(id);
        learner.states(flat).iter().map(|state| Ok(learner.params().read_from(id, state)?)).collect()
    }

    /// The most activations that ever lived on this rank at once, in units of one micro-batch through one stage, and the most
    /// versions of the weights: what [`check`](meshwork_pipeline::check) promised.
    pub fn peaks(&self) -> (usize, usize) {
        (self.live.most(), self.learner.borrow().most_versions())
    }

    /// Shows every value of the training passes from now on to `watch`.
    pub fn watch(&mut self, watch: Arc<dyn Watch>) {
        self.watch = Some(watch);
    }

    /// Replaces the weights of a parameter. Takes the whole parameter, row-major over its global dims, of which this rank keeps
    /// the slice that it holds: nothing, where the parameter lies on other stages. Optimizer states stay as they are.
    ///
    /// Not collective; but ranks that hold the same elements must be given the same.
    pub fn load_parameter(&mut self, name: &str, whole: &[f32]) -> Result<(), TrainError> {
        let refuse = |problem: String| TrainError::Parameter { name: name.to_owned(), problem };
        let Some(spec) = self.model.iter().find(|spec| spec.name == name) else {
            return Err(refuse("the model has none of that name".to_owned()));
        };
        if whole.len() != spec.global_elements() {
            let (given, wanted) = (whole.len(), spec.global_elements());
            return Err(refuse(format!("{given} elements for its dims {:?}, which have {wanted}", spec.dims)));
        }
        self.require_settled()?;
        let params =
            self.learner.get_mut().params_mut().ok_or_else(|| refuse("its weights are being read".to_owned()))?;
        let Some(id) = params.declarations().find(name) else { return Ok(()) };
        let mut weights = params.read(id)?;
        let local = spec.local(self.rank.mesh(), self.rank.coords());
        local.for_each_run(spec.dims, |start, run| {
            let start = start as usize;
            weights[run.clone()].copy_from_slice(&whole[start..start + run.len()]);
        });
        Ok(params.write(id, &weights)?)
    }

    /// When each gradient bucket of the last step was started and done.
    pub fn bucket_events(&self) -> Vec<(std::time::Instant, meshwork_data_parallel::BucketEvent)> {
        self.learner.borrow().gradients.events().to_vec()
    }

    /// Trains on this rank's rows of one global batch, to the end: [`advance`](Self::advance), then [`settle`](Self::settle).
    pub fn step(&mut self, batch: &Batch, mut observe: impl FnMut(Event)) -> Result<StepReport, TrainError> {
        let mut reports = self.advance(batch, || false, &mut observe)?;
        reports.extend(self.settle(&mut observe)?);
        reports.pop().ok_or(TrainError::Unsettled { steps: self.unsettled.len() })
    }

    /// Trains on this rank's rows of one global batch, and gives the steps that became certain: this one, or earlier ones where the
    /// schedule lets steps overlap. `stop` is asked at the end whether this rank is to stop, `observe` sees every action of the
    /// pipeline start and end.
    pub fn advance(
        &mut self,
        batch: &Batch,
        stop: impl Fn() -> bool,
        mut observe: impl FnMut(Event),
    ) -> Result<Vec<StepReport>, TrainError> {
        self.rank.log().drain(); // of a step that was refused, or of calls in between
        let tokens = self.count_tokens(batch)?;
        if tokens.contains(&0) {
            return Err(TrainError::NoTokens { step: self.steps_begun + 1 });
        }
        match self.mode {
            Mode::Flush(_) => self.advance_with_flush(batch, &tokens, &stop, &mut observe),
            Mode::Stream(_) => self.advance_stream(batch, &tokens, &stop, &mut observe),
        }
    }

    /// Makes every step certain that was begun, and drains the pipeline. Before weights are read from outside, and at the end.
    pub fn settle(&mut self, mut observe: impl FnMut(Event)) -> Result<Vec<StepReport>, TrainError> {
        match self.mode {
            Mode::Flush(_) => Ok(self.validate(false)?.into_iter().map(|(report, _)| report).collect()),
            Mode::Stream(_) => self.drain_stream(&mut observe),
        }
    }

    fn require_settled(&self) -> Result<(), TrainError> {
        match self.unsettled.len() {
            0 => Ok(()),
            steps => Err(TrainError::Unsettled { steps }),
        }
    }

    /// Unmasked tokens of the global batch, per update: integer sums over dp.
    fn count_tokens(&self, batch: &Batch) -> Result<Vec<i64>, TrainError> {
        let updates = self.mode.updates();
        let share = (batch.targets.len() / updates).max(1);
        let mut counts: Vec<i64> =
            batch.targets.chunks(share).map(|targets| targets.iter().filter(|&&t| t >= 0).count() as i64).collect();
        self.rank.group(Axis::Dp).all_reduce_slice(&mut counts, ReduceOp::Sum)?;
        Ok(counts)
    }

    fn pass(&self, purpose: Purpose, batch: &Batch) -> Pass {
        Pass {
            rank: self.rank.clone(),
            device: self.device.clone(),
            purpose,
            position: Position { seed: self.seed, step: self.steps_begun, first_sample: self.rows().start as u64 },
            inputs: batch.inputs.clone(),
            targets: batch.targets.clone(),
            micro_batch: self.micro_batch,
            seq_len: self.seq_len,
            seeds: Vec::new(),
            first_micro: 0,
            ahead: 0,
            policy: self.policy.clone(),
            watch: self.watch.clone(),
        }
    }

    /// A pass that trains: the mean loss over the tokens of each update.
    fn training_pass(&self, batch: &Batch, tokens: &[i64]) -> Pass {
        let per_update = self.micros / tokens.len();
        let seeds = (0..self.micros).map(|micro| 1.0 / tokens[micro / per_update] as f64).collect();
        Pass { seeds, ..self.pass(Purpose::Train, batch) }
    }

    /// Runs some of this rank's actions in the training schedule.
    fn walk(&mut self, pass: &Pass, actions: Range<usize>, observe: &mut impl FnMut(Event)) -> Result<(), TrainError> {
        let (schedule, learner) = (self.mode.schedule(), &self.learner);
        let versions = |stage, micro| self.mode.version(stage, micro);
        let mut stages: Vec<Running<'_>> = self
            .chunks
            .iter_mut()
            .map(|chunk| Running { chunk, pass, learner, live: &self.live, versions: &versions })
            .collect();
        let pp_rank = self.rank.coords().get(Axis::Pp);
        let walked =
            self.interpreter.advance(schedule, pp_rank, actions, &mut stages, &mut self.transport, &mut |event| {
                observe(event);
                learner.borrow_mut().gradients.poll();
            });
        if walked.is_err() {
            self.forget_passes();
        }
        Ok(walked?)
    }

    /// Forgets the passes in flight, after a failure or to run them again.
    fn forget_passes(&mut self) {
        self.chunks.iter_mut().for_each(Chunk::clear);
        self.interpreter.clear();
        self.live.clear();
    }

    /// The loss of each sample of the global batch, zero where this rank does not count it: the last stage does, where its
    /// types say so.
    fn losses(&mut self) -> Vec<f64> {
        let coords = self.rank.coords();
        let mut losses = vec![0.0; self.micros * self.micro_batch * self.rank.mesh().degree(Axis::Dp)];
        for (own, types) in self.chunks.iter_mut().filter_map(Chunk::take_losses) {
            if types.counted_at(coords) {
                own.into_iter().for_each(|(sample, loss)| losses[sample] = loss);
            }
        }
        losses
    }
}
