//! One pass over the batch: what every stage of a rank needs in it.

use crate::prelude::*;
use crate::{Recompute, Watch};
use meshwork_core::SpmdError;
use meshwork_nn::{Activation, Metric};
use meshwork_tensor::tape::{Encoded, Encoding, Notes, PerSample, Position, RowSchemes, SavedPolicy};
use meshwork_tensor::verify::Claims;

/// The purpose of a pass over the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Train,
    Evaluate,
    /// The output of the last stage.
    Predict,
    /// The [reference](Model::reference) of each sample, by the frozen model.
    Reference,
}

/// The gradients that the backward of a micro-batch starts from.
#[derive(Clone, Copy, Debug)]
pub struct Seeds {
    /// Gradient of each loss: the loss scale / the terms of all losses that an update adds up.
    pub of_loss: f64,
    /// Gradient of an auxiliary loss with coefficient 1: the loss scale / samples of the update.
    pub auxiliary: f64,
}

/// The inputs of every stage of a rank in one pass over the batch.
#[derive(Debug)]
pub struct Pass {
    pub rank: Arc<Rank>,
    pub device: Arc<dyn Device>,
    pub purpose: Purpose,
    /// Position of this rank's first sample, with seed and step.
    pub position: Position,
    pub batch: Batch,
    pub micro_batch: usize,
    /// The activation that each stage but the last sends.
    pub activations: Rc<[Activation]>,
    pub seeds: Vec<Seeds>,
    /// The factor of these seeds, by which gradients are to be divided.
    pub loss_scale: f64,
    /// Number of its first micro-batch; not 0 within an asynchronous run, where all of them are counted from its start.
    pub first_micro: usize,
    /// The difference between that count and the schedule's.
    pub ahead: usize,
    pub recompute: Recompute,
    /// The forms in which backward's other inputs are encoded.
    pub saved: Rc<[Encoding]>,
    pub metrics: Rc<[Metric]>,
    /// The numbers of the pass that this rank counts, in f64 on the device: `[losses of samples | metrics of samples |
    /// ..]`, each row as long as the global batch; of a reference, its numbers of each sample.
    pub numbers: RefCell<Buffer>,
    /// Whether a layer said that samples depend on each other by design.
    pub mixes_samples: Cell<bool>,
    /// Whether a layer decided something from values.
    pub decides: Cell<bool>,
    /// The compression of the rows that layers exchange.
    pub rows: RowSchemes,
    pub global_batch_size: usize,
    pub watch: Option<Arc<dyn Watch>>,
    pub claims: Option<Claims>,
}

impl Pass {
    pub fn micro(&self, micro: usize) -> Result<MicroBatch> {
        let first = micro * self.micro_batch;
        let position = Position { first_sample: self.position.first_sample + first as u64, ..self.position };
        let samples = self.batch.part(first..first + self.micro_batch)?;
        Ok(MicroBatch { micro, position, samples, seeds: self.seeds.get(micro).copied(), rows: self.rows })
    }

    /// The policy that encodes what `policy` then keeps, if anything is to be encoded.
    pub fn encoded(&self, policy: Rc<dyn SavedPolicy>) -> Rc<dyn SavedPolicy> {
        // The policy that encodes first is the outermost one.
        self.saved.iter().rev().fold(policy, |policy, &encoding| Rc::new(Encoded::new(policy, encoding)))
    }

    /// Adds a number for each sample to a row of the pass, where this rank counts it; of a reference, all numbers of
    /// each sample. Several layers may add to one metric.
    ///
    /// # Errors
    /// Numbers of the samples of other ranks, gathered and not cut again.
    pub fn count(&self, row: usize, first_sample: u64, value: &Var) -> Result<()> {
        let shared = |&axis: &Axis| value.types().get(axis).is_some_and(|ty| ty != Ty::Shard(0));
        if let Some(axis) = Axis::DATA.into_iter().rev().find(shared) {
            let name = row.checked_sub(1).map_or("loss", |metric| self.metrics[metric].name);
            let ty = value.ty(axis);
            return Err(SpmdError {
                op: name.to_owned(),
                axis,
                problem: format!(
                    "it is {ty}: a number for each sample of the batch lies on the rank that has the sample"
                ),
                fix: match ty {
                    Ty::Partial => "reduce_scatter(P→S) it over Axis::DATA along dim 0 first",
                    Ty::Replicate => "slice(R→S) it over Axis::DATA along dim 0 first",
                    _ => "split(I→S) it over Axis::DATA along dim 0 first",
                }
                .to_owned(),
            }
            .into());
        }
        if !value.types().counted_at(self.rank.coords()) {
            return Ok(());
        }
        let each = value.shape().count() / self.micro_batch;
        let at = row * self.global_batch_size + first_sample as usize * each;
        let numbers = &mut self.numbers.borrow_mut();
        Ok(self.device.pointwise()?.add_assign(numbers, at, value.tensor().buffer())?)
    }

    /// Counts the metrics that layers of a stage noted. Metrics of a prediction or of the frozen model count nowhere:
    /// the samples are in no step, or counted in it.
    pub fn count_metrics(&self, stage: usize, first_sample: u64, notes: &Notes) -> Result<()> {
        self.mixes_samples.set(self.mixes_samples.get() || notes.mixes_samples);
        self.decides.set(self.decides.get() || notes.decides);
        if matches!(self.purpose, Purpose::Predict | Purpose::Reference) {
            return Ok(());
        }
        for PerSample { name, value, .. } in &notes.per_sample {
            let Some(metric) = self.metrics.iter().position(|metric| metric.name == *name) else {
                let declared = self.metrics.iter().map(|metric| metric.name).collect();
                return Err(PlanError::Metric { stage, name, declared }.into());
            };
            self.count(1 + metric, first_sample, value)?;
        }
        Ok(())
    }
}

/// A micro-batch of one pass. In an asynchronous run its backward may fall into another pass.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    /// Its number in the pass.
    pub micro: usize,
    pub position: Position,
    pub samples: Batch,
    /// `None` in a pass that does not train.
    pub seeds: Option<Seeds>,
    /// The compression of the rows that layers exchange.
    pub rows: RowSchemes,
}
