//! The parts of a step: the terms of its loss, a pass over its batch, and walks over the actions of the schedule.

use super::AtCuts;
use super::prelude::*;
use crate::chunk::{Chunk, Workspace};
use crate::clock::Clock;
use crate::pass::Seeds;
use crate::running::Running;
use crate::statistics::Noted;
use meshwork_pipeline::Event;
use meshwork_tensor::tape::Position;

impl Trainer {
    /// Refuses a batch without this rank's samples of each field of the model, its [reference](Model::reference) apart.
    pub(super) fn require_batch(&self, batch: &Batch) -> Result<()> {
        let model = self.cut.model.model();
        let given: Vec<_> =
            model.fields().into_iter().filter(|field| Some(field) != model.reference().as_ref()).collect();
        Ok(batch.require(&given, self.samples().len())?)
    }

    /// The batch with its [reference](Model::reference), if the model has one: a pass of the frozen model over this
    /// rank's samples. Frozen weights are the same in each step, so that it waits for no update. Collective over the
    /// world.
    pub(super) fn with_reference(&mut self, batch: &Batch) -> Result<Batch> {
        let Some(field) = self.cut.model.model().reference() else { return Ok(batch.clone()) };
        let (each, own) = (field.dims.count(), self.samples());
        let with = |values: Vec<f64>| batch.clone().with(field.name, field.dims, values);
        let mut pass = self.pass(Purpose::Reference, &with(vec![0.0; each * own.len()])?)?;
        pass.numbers = RefCell::new(self.device.zeros(DType::F64, each * self.plan.global_batch_size)?);
        pass.rows = self.plan.compress.rows_in(pass.position.step);
        self.forward_only(&pass, AtCuts::AsTrained, self.cut.micros)?;
        let sums = self.rank.world().start_all_reduce(pass.numbers.into_inner(), ReduceOp::Sum)?;
        let all = self.device.download(&sums.wait()?)?;
        Ok(with(all.as_slice::<f64>()?[each * own.start..each * own.end].to_vec())?)
    }

    /// Terms of the loss in the global batch, per update: integer sums over dp.
    pub(super) fn count_terms(&self, batch: &Batch) -> Result<Vec<u64>> {
        let updates = self.pipeline.driver.updates();
        let each = batch.samples() / updates;
        let count = |samples: Range<usize>| self.cut.model.model().loss_terms(batch, samples);
        let of_update = |update: usize| {
            let samples = update * each..(update + 1) * each;
            let terms = count(samples.clone())?;
            if self.plan.verify.includes(self.steps_of_trainer) {
                let alone: u64 = samples.clone().map(|sample| count(sample..sample + 1)).sum::<Result<u64, _>>()?;
                self.require_additive(samples, terms, alone)?;
            }
            Ok(terms as i64)
        };
        let mut counts = (0..updates).map(of_update).collect::<Result<Vec<i64>>>()?;
        self.rank.data_group().all_reduce_slice(&mut counts, ReduceOp::Sum)?;
        Ok(counts.into_iter().map(|count| count as u64).collect())
    }

    pub(super) fn pass(&self, purpose: Purpose, batch: &Batch) -> Result<Pass> {
        Ok(Pass {
            rank: self.rank.clone(),
            device: self.device.clone(),
            purpose,
            position: Position {
                seed: self.plan.seed,
                step: self.steps_begun,
                first_sample: self.samples().start as u64,
                rank_samples: self.samples().len() as u64,
            },
            batch: batch.clone(),
            micro_batch: self.cut.micro_batch,
            activations: self.pipeline.activations.clone(),
            seeds: Vec::new(),
            loss_scale: 1.0,
            first_micro: 0,
            ahead: 0,
            recompute: self.plan.recompute,
            saved: self.pipeline.saved.clone(),
            metrics: self.reporting.metrics.clone(),
            numbers: RefCell::new(self.numbers(purpose)?),
            mixes_samples: Cell::new(false),
            decides: Cell::new(false),
            rows: self.plan.compress.rows_in(self.steps_begun),
            global_batch_size: self.plan.global_batch_size,
            watch: self.watch.clone(),
            claims: self.claims.clone(),
        })
    }

    /// A pass that trains: the mean loss over the terms of each update, and auxiliary losses by the mean over its
    /// samples.
    pub(super) fn training_pass(&self, batch: &Batch, terms: &[u64]) -> Result<Pass> {
        let per_update = self.cut.micros / terms.len();
        let auxiliary = terms.len() as f64 / self.plan.global_batch_size as f64;
        let scale = self.scaler.scale(self.steps_begun);
        let seeds = |micro| Seeds { of_loss: scale / terms[micro / per_update] as f64, auxiliary: scale * auxiliary };
        Ok(Pass {
            seeds: (0..self.cut.micros).map(seeds).collect(),
            loss_scale: scale,
            ..self.pass(Purpose::Train, batch)?
        })
    }

    /// The sums of this step's statistics over all of its samples.
    pub(super) fn sum_statistics(&mut self) -> Result<StatisticSums> {
        let mut noted = Noted::default();
        self.pipeline.chunks.iter_mut().for_each(|chunk| noted.extend(std::mem::take(&mut chunk.noted)));
        noted.sum(&self.cut.layout.declarations, &*self.device, &self.rank, &self.cut.tied)
    }

    /// Runs some of this rank's actions in the training schedule.
    pub(super) fn walk(&mut self, pass: &Pass, actions: Range<usize>, observe: &mut dyn FnMut(Event)) -> Result<()> {
        let (pipeline, weights) = (&mut self.pipeline, &self.store.weights);
        let schedule = pipeline.driver.schedule();
        let on = Workspace {
            pass,
            weights,
            gathers: self.store.gathers.as_deref(),
            shelf: self.store.shelf.as_ref(),
            codec: &pipeline.codec,
            schedule: schedule.schedule(),
            live: &pipeline.live,
            versions: &|stage, micro| pipeline.driver.version(stage, micro),
        };
        let clock = Clock {
            purpose: pass.purpose,
            step: pass.position.step,
            first_micro: pass.first_micro as i64 - pass.ahead as i64,
            micros: self.cut.micros,
        };
        let may_repeat = !pipeline.driver.asynchronous && !self.pending.is_empty();
        on.codec.borrow_mut().begin(clock, may_repeat);
        on.gathers
            .iter()
            .for_each(|gathers| gathers.now.set_compresses(self.plan.compress.includes(pass.position.step)));
        let mut stages: Vec<Running<'_>> = pipeline.chunks.iter_mut().map(|chunk| Running { chunk, on: &on }).collect();
        let (interpreter, transport) = (&mut pipeline.interpreter, &mut pipeline.transport);
        let pp_rank = self.rank.coords().get(Axis::Pp);
        let walked = interpreter.advance(schedule, pp_rank, actions, &mut stages, transport, &mut |event| {
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
        self.pipeline.codec.borrow_mut().histories.forget();
    }

    /// Forgets the passes in flight, after a failure or to run them again.
    pub(super) fn forget_passes(&mut self) {
        self.pipeline.chunks.iter_mut().for_each(Chunk::clear);
        self.store.shelf.iter().for_each(|shelf| shelf.clear());
        self.pipeline.interpreter.clear();
        self.pipeline.codec.borrow_mut().clear();
        self.pipeline.live.now.set(0);
    }
}
