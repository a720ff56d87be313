//! Passes that do not train: the loss on other data, and predictions.

use super::prelude::*;
use crate::Compress;
use crate::chunk::Workspace;
use crate::clock::Clock;
use crate::compress::codec::Codec;
use crate::compress::settings::NOTHING;
use crate::running::Running;
use crate::transport::PipeTransport;
use meshwork_pipeline::{forward_only_replicated, run};
use meshwork_tensor::param::host_floats;
use meshwork_tensor::{MAX_DIMS, Tensor};

/// The treatment, in a pass that does not train, of values that training compresses: at the cuts, weights that ranks
/// gather, and the tokens of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AtCuts {
    /// They are compressed as in training, without feedback.
    #[default]
    AsTrained,
    /// They are sent as they are.
    Exact,
}

/// The result of an evaluation over some batches.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean over all terms of the loss.
    pub loss: f64,
    /// The model's metrics, by name.
    pub metrics: Vec<(&'static str, f64)>,
}

/// The output of a model for a whole batch: [`Stage::predict`](meshwork_nn::Stage::predict)'s.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// Its extents; the first counts the samples.
    pub shape: Vec<usize>,
    /// Its elements, in f32.
    pub values: Vec<f32>,
}

impl Trainer {
    /// The mean loss and metrics over some batches, without training. Each batch has only this rank's
    /// [samples](Self::samples). Every rank gets the same result.
    ///
    /// # Errors
    /// Steps that are under way; a loss that is not finite, with the parameter whose weights are not, if there is one.
    pub fn evaluate(&mut self, batches: impl IntoIterator<Item = Batch>) -> Result<Evaluation> {
        self.evaluate_at(AtCuts::AsTrained, batches)
    }

    /// As [`evaluate`](Self::evaluate), with a choice for values at the cuts. A model that was trained with
    /// compression may need it, or do without.
    pub fn evaluate_at(&mut self, cuts: AtCuts, batches: impl IntoIterator<Item = Batch>) -> Result<Evaluation> {
        let _entered = self.enter("evaluate");
        self.require_complete()?;
        let (mut loss, mut metrics, mut terms, mut samples) = (0.0, vec![0.0; self.reporting.metrics.len()], 0, 0);
        for batch in batches {
            self.require_batch(&batch)?;
            let batch = self.with_reference(&batch)?;
            terms += self.count_terms(&batch)?.into_iter().sum::<u64>();
            samples += self.plan.global_batch_size;
            let mut pass = self.pass(Purpose::Evaluate, &batch)?;
            pass.rows = self.compress_in(cuts).rows_in(pass.position.step);
            self.forward_only(&pass, cuts, self.cut.micros)?;
            let totals = self.totals_of(pass.numbers.into_inner())?;
            loss += totals.loss;
            metrics.iter_mut().zip(totals.metrics).for_each(|(sum, total)| *sum += total);
        }
        self.rank.log().drain();
        match terms {
            0 => Err(TrainError::NoTerms { step: self.steps_begun }),
            _ if !loss.is_finite() => {
                let step = self.steps_begun;
                Err(self.blame(TrainError::Evaluation { step, value: loss / terms as f64 }))
            }
            terms => Ok(Evaluation { loss: loss / terms as f64, metrics: self.means(&metrics, samples, terms) }),
        }
    }

    /// The first `columns` numbers of a row of the model's output for the samples of `batch`, which every rank passes
    /// whole. The output is [`Stage::predict`](meshwork_nn::Stage::predict)'s, seen as rows of its last dim.
    /// Every rank gets the same result.
    ///
    /// # Errors
    /// Steps that are under way; weights that are not finite, if the numbers are not; a row that does not exist; more
    /// columns than a row has.
    pub fn predict(&mut self, batch: &Batch, row: usize, columns: usize) -> Result<Vec<f32>> {
        self.predict_at(AtCuts::AsTrained, batch, row, columns)
    }

    /// As [`predict`](Self::predict), with a choice of what happens at the cuts.
    pub fn predict_at(&mut self, cuts: AtCuts, batch: &Batch, row: usize, columns: usize) -> Result<Vec<f32>> {
        let _entered = self.enter("predict");
        let mut values = vec![0f32; columns];
        if let Some(output) = self.output(cuts, batch)? {
            let width = output.shape().last().copied().unwrap_or(1);
            if columns > width {
                let problem = format!("{columns} numbers of a row that has {width}");
                return Err(Error::Shape { op: "predict", problem, shapes: vec![output.shape().to_vec()] }.into());
            }
            let first = row * width;
            let part = output.buffer().slice(first..first + columns)?;
            values.copy_from_slice(&host_floats(&self.device.download(&part)?)?);
        }
        self.rank.group(Axis::Pp).broadcast_slice(&mut values, self.last_stage())?;
        self.finite(values)
    }

    /// The output for a whole batch, whose samples the ranks of dp share out: each passes its own, in the order of
    /// their numbers, and as many as the others. Every rank gets the output for all samples. What ranks of other axes
    /// pass is the same.
    ///
    /// ```no_run
    /// # use meshwork_engine::{TrainError, Trainer};
    /// # fn predict(trainer: &mut Trainer, own: &meshwork_nn::Batch) -> Result<(), TrainError> {
    /// let all = trainer.predict_all(own)?;
    /// println!("{} samples, {:?}", all.shape[0], &all.values[..4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Steps that are under way; weights that are not finite, if the numbers are not; ranks with other numbers of
    /// samples.
    pub fn predict_all(&mut self, own: &Batch) -> Result<Outputs> {
        let _entered = self.enter("predict_all");
        let (mut extents, mut values) = ([0_i64; MAX_DIMS + 1], Vec::new());
        if let Some(output) = self.output(AtCuts::AsTrained, own)? {
            extents[0] = output.shape().len() as i64;
            extents[1..].iter_mut().zip(&*output.shape()).for_each(|(to, &extent)| *to = extent as i64);
            values = host_floats(&self.device.download(output.buffer())?)?;
        }
        let (stages, from) = (self.rank.group(Axis::Pp), self.last_stage());
        stages.broadcast_slice(&mut extents, from)?;
        let mut shape: Vec<usize> = extents[1..=extents[0] as usize].iter().map(|&extent| extent as usize).collect();
        values.resize(shape.iter().product(), 0.0);
        stages.broadcast_slice(&mut values, from)?;
        let ranks = self.rank.data_group();
        let mut all = vec![0.0; values.len() * ranks.size()];
        ranks.all_gather_slice(&values, &mut all)?;
        if let Some(samples) = shape.first_mut() {
            *samples *= ranks.size();
        }
        Ok(Outputs { shape, values: self.finite(all)? })
    }

    /// The output for the samples of `batch`, on the ranks of the last stage.
    fn output(&mut self, cuts: AtCuts, batch: &Batch) -> Result<Option<Tensor>> {
        self.require_complete()?;
        let mut pass = self.pass(Purpose::Predict, batch)?;
        pass.micro_batch = batch.samples();
        pass.rows = self.compress_in(cuts).rows_in(pass.position.step);
        pass.activations = self.cut.model.activations(batch)?.into();
        self.forward_only(&pass, cuts, 1)?;
        Ok(self.pipeline.chunks.iter_mut().find_map(|chunk| chunk.prediction.take()))
    }

    /// The rank, among the stages, that has the last one of a prediction.
    fn last_stage(&self) -> usize {
        let schedule = self.pipeline.prediction.schedule();
        schedule.rank_of(schedule.stages() - 1, 0)
    }

    /// The end of a prediction: numbers that are not finite are blamed on weights, if these are not.
    fn finite(&mut self, values: Vec<f32>) -> Result<Vec<f32>> {
        if !values.iter().all(|value| value.is_finite()) {
            self.require_finite()?;
        }
        self.rank.log().drain();
        Ok(values)
    }

    /// The schemes of a pass that does not train.
    fn compress_in(&self, cuts: AtCuts) -> Compress {
        match cuts {
            AtCuts::AsTrained => self.plan.compress,
            AtCuts::Exact => self.plan.compress.exact_in_forward(),
        }
    }

    /// Runs the first `micros` micro-batches of a pass that does not train.
    pub(super) fn forward_only(&mut self, pass: &Pass, cuts: AtCuts, micros: usize) -> Result<()> {
        let compress = self.compress_in(cuts);
        let other;
        let pipeline = &mut self.pipeline;
        let schedule = match micros {
            1 => &pipeline.prediction,
            _ if micros == self.cut.micros => &pipeline.evaluation,
            _ => {
                let Schedule { placement, replicas, .. } = pipeline.evaluation.schedule();
                other = lower(&forward_only_replicated(placement, replicas, micros))?;
                &other
            }
        };
        let clock = Clock::beside(pass.purpose, pass.position.step, micros);
        let (rank, device) = (&self.rank, &self.device);
        let boundaries = self.cut.model.boundaries().into();
        let codec = Codec::plain(&compress, self.plan.seed, boundaries, rank, device, clock)?;
        let codec = Rc::new(RefCell::new(codec));
        let (sent, in_flight, scatter) =
            (pass.activations.clone(), schedule.report().in_flight, self.plan.scatter_gather);
        let mut transport = PipeTransport::new(rank, device.clone(), sent, codec.clone(), scatter, in_flight);
        let on = Workspace {
            pass,
            weights: &self.store.weights,
            gathers: self.store.gathers.as_deref(),
            shelf: None,
            codec: &codec,
            schedule: schedule.schedule(),
            live: &pipeline.live,
            versions: &|_, _| None,
        };
        let compresses = compress.weights != NOTHING && compress.includes(pass.position.step);
        on.gathers.iter().for_each(|gathers| gathers.now.set_compresses(compresses));
        let mut stages: Vec<Running<'_>> = pipeline.chunks.iter_mut().map(|chunk| Running { chunk, on: &on }).collect();
        let walked = run(schedule, rank.coords().get(Axis::Pp), &mut stages, &mut transport, &mut |_| {});
        if walked.is_err() {
            self.forget_passes();
        }
        Ok(walked?)
    }
}
