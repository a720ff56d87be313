//! One training step. What needs several axes at once lives here and nowhere else: the last micro-batch tells the reducer,
//! the gradient norm counts each element once, tied weights are summed across stages, the loss is averaged over the tokens of
//! the whole batch. Being that one home, it is longer than other files; what can be computed without a rank is in `engine`.
//!
//! ```text
//! batch ─ count tokens (dp) ─ schedule: forward, backward ... ─ reduce buckets ─ norm, loss (world) ─ clip, update ─ report
//!                                   └ hidden states (pp), blocks (tp) ┘ └ started while backward runs
//! ```

use crate::config::Config;
use crate::data::Batch;
use crate::engine::{
    Blueprint, Chunk, Counted, Gradients, Pass, PipeTransport, Purpose, Running, TIES, TrainError, Trees, Watch,
    buckets, counted, join_ties, reducer, trace,
};
use meshwork_core::{Axis, DType, Rank, Record, ReduceOp, tree};
use meshwork_optim::{LrSchedule, Optimizer, Update, clip_factor};
use meshwork_pipeline::{Event, Lowered, by_name, forward_only, lower, run};
use meshwork_tensor::family::UpdateRule;
use meshwork_tensor::tape::Position;
use meshwork_tensor::{Device, Error, ParamId, ParamSpec, Params, Role};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// One rank of a training run: its part of the model, its optimizer, and the step.
pub struct Trainer {
    rank: Arc<Rank>,
    device: Arc<dyn Device>,
    chunks: Vec<Chunk>,
    /// Every parameter of the whole model.
    model: Vec<ParamSpec>,
    params: Arc<Params>,
    gradients: RefCell<Gradients>,
    optimizer: Box<dyn Optimizer>,
    /// Per flat buffer: the optimizer's state vectors.
    states: Vec<Vec<meshwork_core::Buffer>>,
    lr: LrSchedule,
    max_norm: f64,
    schedule: Lowered,
    evaluation: Lowered,
    sampling: Lowered,
    seed: u64,
    seq_len: usize,
    micro_batch: usize,
    batch_per_dp: usize,
    /// What this rank counts in the gradient norm.
    counted: Vec<Counted>,
    /// Sums of which the norm is made.
    norm_slots: usize,
    steps_done: u64,
    watch: Option<Arc<dyn Watch>>,
}

/// What a step did, the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean over all unmasked tokens of the global batch.
    pub loss: f64,
    /// Norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Logical bytes per group name, averaged over the ranks of the world.
    pub comm_bytes: BTreeMap<&'static str, f64>,
    /// Most bytes ever alive on each world rank.
    pub peak_bytes: Vec<u64>,
    /// What this rank communicated in the step, call by call (the report itself not counted).
    pub records: Vec<Record>,
}

impl Trainer {
    /// This rank's part of a run. Collective: every rank of the mesh makes one with the same configuration.
    pub fn new(config: &Config, rank: Arc<Rank>, device: Arc<dyn Device>) -> Result<Self, TrainError> {
        let blueprint = Blueprint::new(config)?;
        let mesh = blueprint.mesh();
        let (pp, micros) = (mesh.degree(Axis::Pp), config.pipeline.num_microbatches);
        let generator = by_name(&config.pipeline.schedule)?;
        let training = generator.build(generator.shape(pp, micros))?;
        let placement = training.placement.clone();
        let model = blueprint.rank_model(&placement, rank.coords().get(Axis::Pp))?;
        let ties = blueprint.ties(&placement)?;
        let tie_groups = join_ties(&rank, &ties)?;

        let found = trace(&blueprint, &model, rank.world_rank(), config.training.micro_batch_size)?;
        let (layout, keys) = buckets(&model, &found, &ties, &rank);
        let declarations = Arc::new(model.declarations);
        let params = Params::new(declarations.clone(), mesh, rank.coords(), &device, &layout, config.training.seed)?;
        let (reducer, places) = reducer(&params, &layout, &keys, &rank, &tie_groups, &device)?;
        let trees = declarations.leaves().map(|_| Trees::new(found.copies, found.first_copy));
        let gradients = Gradients::new(reducer, places, &found.chunks_reading, micros, trees, device.clone());

        let optimizer = config.optimizer.rule();
        let mut states = Vec::with_capacity(layout.len());
        for flat in params.flats() {
            let slots = 0..optimizer.state_slots();
            states.push(slots.map(|_| device.zeros(DType::F32, flat.count())).collect::<Result<Vec<_>, Error>>()?);
        }
        let model_specs = blueprint.parameters()?;
        let (counted, norm_slots) = counted(&params, &model_specs, &ties, &rank);
        let stages = blueprint.stages();
        Ok(Self {
            chunks: model.stages.into_iter().map(|(number, stage)| Chunk::new(number, stages, stage)).collect(),
            model: model_specs,
            params: Arc::new(params),
            gradients: RefCell::new(gradients),
            optimizer,
            states,
            lr: config.lr_scheduler.schedule(config.optimizer.lr),
            max_norm: config.training.max_norm,
            schedule: lower(&training)?,
            evaluation: lower(&forward_only(&placement, micros))?,
            sampling: lower(&forward_only(&placement, 1))?,
            seed: config.training.seed,
            seq_len: config.model.seq_len,
            micro_batch: config.training.micro_batch_size,
            batch_per_dp: micros * config.training.micro_batch_size,
            counted,
            norm_slots,
            steps_done: 0,
            watch: None,
            rank,
            device,
        })
    }

    /// The rows of a global batch that this rank's dp rank takes.
    pub fn rows(&self) -> Range<usize> {
        let first = self.rank.coords().get(Axis::Dp) * self.batch_per_dp;
        first..first + self.batch_per_dp
    }

    /// This rank.
    pub fn rank(&self) -> &Arc<Rank> {
        &self.rank
    }

    /// This rank's device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// This rank's parameters.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// Elements of this rank's parameters, padding not counted.
    pub fn local_elements(&self) -> usize {
        let (mesh, coords) = (self.rank.mesh(), self.rank.coords());
        self.params.declarations().specs().iter().map(|spec| spec.local(mesh, coords).elements()).sum()
    }

    /// Steps done so far.
    pub fn steps_done(&self) -> u64 {
        self.steps_done
    }

    /// The gradient of a parameter as of the last step: summed over the whole batch and all ranks, before clipping.
    pub fn gradient(&self, id: ParamId) -> Result<Vec<f32>, TrainError> {
        let (flat, range) = self.params.place(id);
        let gradients = self.gradients.borrow();
        let Some(all) = gradients.bucket(flat) else { return Ok(Vec::new()) };
        let host = self.device.download(all).map_err(TrainError::from)?;
        Ok(host.as_slice::<f32>().map_err(Error::from)?[range].to_vec())
    }

    /// The optimizer's state vectors of a parameter, as it lies on this rank.
    pub fn optimizer_states(&self, id: ParamId) -> Result<Vec<Vec<f32>>, TrainError> {
        let (flat, range) = self.params.place(id);
        let state = |all| -> Result<Vec<f32>, TrainError> {
            let host = self.device.download(all).map_err(TrainError::from)?;
            Ok(host.as_slice::<f32>().map_err(Error::from)?[range.clone()].to_vec())
        };
        self.states[flat].iter().map(state).collect()
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
        let Some(id) = self.params.declarations().find(name) else { return Ok(()) };
        let (flat, place) = self.params.place(id);
        let params = Arc::get_mut(&mut self.params).ok_or_else(|| refuse("its weights are being read".to_owned()))?;
        let all = params.flats_mut()[flat].as_mut_slice::<f32>().map_err(Error::from)?;
        let weights = &mut all[place];
        let local = spec.local(self.rank.mesh(), self.rank.coords());
        local.for_each_run(spec.dims, |start, run| {
            let start = start as usize;
            weights[run.clone()].copy_from_slice(&whole[start..start + run.len()]);
        });
        Ok(())
    }

    /// When each gradient bucket of the last step was started and done.
    pub fn bucket_events(&self) -> Vec<(std::time::Instant, meshwork_data_parallel::BucketEvent)> {
        self.gradients.borrow().events().to_vec()
    }

    /// Trains on this rank's rows of one global batch. `observe` sees every action of the pipeline start and end.
    pub fn step(&mut self, batch: &Batch, mut observe: impl FnMut(Event)) -> Result<StepReport, TrainError> {
        let step = self.steps_done + 1;
        self.rank.log().drain(); // of a step that was refused, or of calls in between
        let tokens = self.count_tokens(batch)?;
        if tokens == 0 {
            return Err(TrainError::NoTokens { step });
        }
        self.gradients.get_mut().begin();
        let pass = self.pass(Purpose::Train, batch, 1.0 / tokens as f64);
        self.walk(&pass, &mut observe)?;
        drop(pass); // it reads the weights, which are about to change
        self.gradients.get_mut().finish()?;

        let losses = self.losses();
        let norms = self.norms()?;
        let (loss, norm_squared) = self.sum_over_world(losses, norms)?;
        let (loss, grad_norm) = (loss / tokens as f64, norm_squared.sqrt());
        for (what, value) in [("loss", loss), ("gradient norm", grad_norm)] {
            if !value.is_finite() {
                return Err(TrainError::NotFinite { step, what, value });
            }
        }
        let lr = self.lr.lr(step);
        self.update(step, lr, clip_factor(grad_norm, self.max_norm))?;
        self.steps_done = step;

        let records = self.rank.log().drain();
        let (comm_bytes, peak_bytes) = self.gather_report(&records)?;
        Ok(StepReport { step, loss, grad_norm, lr, comm_bytes, peak_bytes, records })
    }

    /// The mean loss over the unmasked tokens of some batches, without training. Every rank gets it.
    pub fn evaluate(&mut self, batches: impl Iterator<Item = Batch>) -> Result<f64, TrainError> {
        let (mut loss, mut tokens) = (0.0, 0);
        for batch in batches {
            tokens += self.count_tokens(&batch)?;
            let pass = self.pass(Purpose::Evaluate, &batch, 0.0);
            self.walk(&pass, &mut |_| {})?;
            let losses = self.losses();
            loss += self.sum_over_world(losses, Vec::new())?.0;
        }
        self.rank.log().drain();
        match tokens {
            0 => Err(TrainError::NoTokens { step: self.steps_done }),
            tokens => Ok(loss / tokens as f64),
        }
    }

    /// The logits of the token that follows `tokens`, for the real part of the vocabulary; of a longer text than a sequence only the
    /// last tokens count. Every rank gets the same.
    pub fn next_token_logits(&mut self, tokens: &[i32], vocab: usize) -> Result<Vec<f32>, TrainError> {
        let mut window = tokens[tokens.len().saturating_sub(self.seq_len)..].to_vec();
        let position = window.len().saturating_sub(1);
        // What stands behind the last token does not matter: attention is causal. Sequence parallelism cuts the sequence
        // evenly, and a few lengths for all tokens of a sample let the device use its memory again.
        let tp = self.rank.mesh().degree(Axis::Tp);
        let even = window.len().next_multiple_of(tp * SAMPLE_BLOCK.div_ceil(tp));
        window.resize(even.min(self.seq_len), 0);
        let seq_len = window.len();
        let batch = Batch { inputs: window, targets: Vec::new(), rows: 1, seq_len };
        let pass = Pass { micro_batch: 1, seq_len, ..self.pass(Purpose::Sample, &batch, 0.0) };
        self.walk(&pass, &mut |_| {})?;
        let mut row = vec![0f32; vocab];
        if let Some(logits) = self.chunks.iter_mut().find_map(Chunk::take_logits) {
            let width = logits.shape()[2];
            let host = self.device.download(logits.buffer())?;
            row.copy_from_slice(&host.as_slice::<f32>().map_err(Error::from)?[position * width..][..vocab]);
        }
        let last_stage = self.sampling.schedule().placement.last().copied().unwrap_or(0);
        self.rank.group(Axis::Pp).broadcast_slice(&mut row, last_stage)?;
        self.rank.log().drain();
        Ok(row)
    }

    /// Unmasked tokens of the global batch: an integer sum over dp.
    fn count_tokens(&self, batch: &Batch) -> Result<i64, TrainError> {
        let mut count = [batch.unmasked() as i64];
        self.rank.group(Axis::Dp).all_reduce_slice(&mut count, ReduceOp::Sum)?;
        Ok(count[0])
    }

    fn pass(&self, purpose: Purpose, batch: &Batch, seed: f64) -> Pass {
        Pass {
            rank: self.rank.clone(),
            device: self.device.clone(),
            params: self.params.clone(),
            purpose,
            position: Position { seed: self.seed, step: self.steps_done, first_sample: self.rows().start as u64 },
            inputs: batch.inputs.clone(),
            targets: batch.targets.clone(),
            micro_batch: self.micro_batch,
            seq_len: self.seq_len,
            seed,
            watch: self.watch.clone(),
        }
    }

    /// Walks the schedule over all micro-batches.
    fn walk(&mut self, pass: &Pass, observe: &mut impl FnMut(Event)) -> Result<(), TrainError> {
        let boundary = self.chunks[0].stage().boundary(pass.micro_batch, pass.seq_len);
        let mut transport = PipeTransport::new(self.rank.group(Axis::Pp).clone(), self.device.clone(), boundary);
        let schedule = match pass.purpose {
            Purpose::Train => &self.schedule,
            Purpose::Evaluate => &self.evaluation,
            Purpose::Sample => &self.sampling,
        };
        let gradients = &self.gradients;
        let mut stages: Vec<Running<'_>> =
            self.chunks.iter_mut().map(|chunk| Running { chunk, pass, gradients }).collect();
        let pp_rank = self.rank.coords().get(Axis::Pp);
        let walked = run(schedule, pp_rank, &mut stages, &mut transport, &mut |event| {
            observe(event);
            gradients.borrow_mut().poll();
        });
        if walked.is_err() {
            self.chunks.iter_mut().for_each(Chunk::clear);
        }
        Ok(walked?)
    }

    /// The loss of each sample of the global batch, zero where this rank does not count it: the last stage does, where its
    /// types say so.
    fn losses(&mut self) -> Vec<f64> {
        let coords = self.rank.coords();
        let mut losses = vec![0.0; self.batch_per_dp * self.rank.mesh().degree(Axis::Dp)];
        for (own, types) in self.chunks.iter_mut().filter_map(Chunk::take_losses) {
            if types.counted_at(coords) {
                own.into_iter().for_each(|(sample, loss)| losses[sample] = loss);
            }
        }
        losses
    }

    /// This rank's share of the sums that make up the squared gradient norm: each element of the model is counted by one rank.
    fn norms(&self) -> Result<Vec<f64>, TrainError> {
        let gradients = self.gradients.borrow();
        let optim = self.device.optim()?;
        let mut sums = vec![0.0; self.norm_slots];
        for Counted { flat, range, blocks, pitch, slot } in &self.counted {
            if let Some(all) = gradients.bucket(*flat) {
                sums[*slot] += optim.sum_of_squares(all, range.clone(), *blocks, *pitch)?;
            }
        }
        Ok(sums)
    }

    /// The sum of all losses, and that of all norms. What one rank alone counts comes through as it is, and so every mesh adds
    /// up the same numbers, here, in one order.
    fn sum_over_world(&self, losses: Vec<f64>, norms: Vec<f64>) -> Result<(f64, f64), TrainError> {
        let samples = losses.len();
        let mut all = [losses, norms].concat();
        self.rank.world().all_reduce_slice(&mut all, ReduceOp::Sum)?;
        let sum = |values: &[f64]| tree::sum(values, |a, b| a + b).unwrap_or(0.0);
        Ok((sum(&all[..samples]), sum(&all[samples..])))
    }

    /// Clips and updates every weight from its reduced gradient. Weight decay goes by role: weights only.
    fn update(&mut self, step: u64, lr: f64, grad_scale: f32) -> Result<(), TrainError> {
        let declarations = self.params.declarations().clone();
        let places: Vec<_> = declarations.ids().map(|id| (declarations.spec(id).role, self.params.place(id))).collect();
        let params = Arc::get_mut(&mut self.params).ok_or(TrainError::Stage {
            stage: 0,
            micro: 0,
            problem: "weights are still being read at the end of the step",
        })?;
        let gradients = self.gradients.borrow();
        let optim = self.device.optim()?;
        for (role, (flat, range)) in places {
            let update = Update { step, lr, grad_scale, decay: role == Role::Weight };
            let rule = Rule { optimizer: &*self.optimizer, update };
            if let Some(grads) = gradients.bucket(flat) {
                optim.update(&rule, &mut params.flats_mut()[flat], grads, &mut self.states[flat], range)?;
            }
        }
        Ok(())
    }

    /// Bytes per group, averaged over the ranks, and every rank's peak: one sum over the world.
    fn gather_report(&self, records: &[Record]) -> Result<(BTreeMap<&'static str, f64>, Vec<u64>), TrainError> {
        let world = self.rank.world();
        let names = Axis::ALL.map(Axis::name).into_iter().chain([TIES, WORLD]);
        let on_group = |name| records.iter().filter(move |record| record.group == name);
        let bytes = |name| on_group(name).fold(0.0, |sum, record| sum + record.bytes()); // `sum` of nothing is -0.0
        let mut values: Vec<f64> = names.clone().map(bytes).collect();
        let peaks = values.len();
        values.resize(peaks + world.size(), 0.0);
        values[peaks + world.rank()] = self.device.meter().peak_bytes() as f64;
        world.all_reduce_slice(&mut values, ReduceOp::Sum)?;
        self.rank.log().drain();
        let bytes = names.zip(&values).map(|(name, bytes)| (name, bytes / world.size() as f64)).collect();
        Ok((bytes, values[peaks..].iter().map(|&peak| peak as u64).collect()))
    }
}

/// Tokens of a sample are added to a sequence whose length grows in blocks of at least so many.
const SAMPLE_BLOCK: usize = 32;

/// Name of the group of all ranks.
const WORLD: &str = "world";

/// An optimizer's rule for one step and one role.
struct Rule<'a> {
    optimizer: &'a dyn Optimizer,
    update: Update,
}

impl UpdateRule for Rule<'_> {
    fn apply(&self, weights: &mut [f32], grads: &[f32], states: &mut [&mut [f32]]) -> Result<(), Error> {
        self.optimizer.update(self.update, weights, grads, states).map_err(|error| Error::Update(error.to_string()))
    }
}
