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
        self.require_complete()?;
        let mut pass = self.pass(Purpose::Predict, batch)?;
        pass.micro_batch = batch.samples();
        pass.rows = self.compress_in(cuts).rows_in(pass.position.step);
        pass.activations = self.cut.model.activations(batch)?.into();
        self.forward_only(&pass, cuts, 1)?;
        let mut values = vec![0f32; columns];
        if let Some(output) = self.pipeline.chunks.iter_mut().find_map(|chunk| chunk.prediction.take()) {
            let width = output.shape().last().copied().unwrap_or(1);
            if columns > width {
                let problem = format!("{columns} numbers of a row that has {width}");
                return Err(Error::Shape { op: "predict", problem, shapes: vec![output.shape().to_vec()] }.into());
            }
            let first = row * width;
            let part = output.buffer().slice(first..first + columns)?;
            values.copy_from_slice(&host_floats(&self.device.download(&part)?)?);
        }
        let schedule = self.pipeline.prediction.schedule();
        let from = schedule.rank_of(schedule.stages() - 1, 0);
        self.rank.group(Axis::Pp).broadcast_slice(&mut values, from)?;
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
