//! The sums over the world that give a step's loss, metrics and norm.
//!
//! The numbers of a step lie in one f64 vector on the device,
//! `[losses of samples | metrics of samples | sums of the squared norm | ranks that loaded something]`, which is summed
//! over the world and downloaded once, whatever the number of micro-batches and layers.

use super::prelude::*;
use meshwork_core::{Pending, exact, tree};
use meshwork_nn::Per;

/// A step that is complete on this rank, but not certain yet.
#[derive(Debug)]
pub(super) struct PendingStep {
    /// From 1.
    pub(super) number: u64,
    /// Terms of its loss.
    pub(super) terms: u64,
    /// The factor of the loss before backward.
    pub(super) loss_scale: f64,
    /// This rank's part of losses, metrics and norms, until their sum is started.
    pub(super) numbers: Option<Buffer>,
    /// The sums from which buffers of statistics were updated.
    pub(super) statistics: StatisticSums,
    /// Hash of the batch and of the terms of each update's loss, which must be the same on all ranks of a dp rank.
    pub(super) input: u64,
    /// Its communications.
    pub(super) records: Vec<Record>,
    pub(super) sums: Option<Sums>,
    /// Everything else that ranks share about it: see [`start_stats`](Trainer::start_stats).
    pub(super) stats: Option<Pending>,
}

impl PendingStep {
    pub(super) fn new(number: u64, batch: &Batch, terms: &[u64], loss_scale: f64) -> Self {
        let input = terms.iter().copied().fold(batch.hash(), combine);
        let (numbers, statistics, records, sums, stats) = Default::default();
        Self { number, terms: terms.iter().sum(), loss_scale, numbers, statistics, input, records, sums, stats }
    }
}

/// Losses, metrics and squared norms on their way to every rank.
#[derive(Debug)]
pub(super) struct Sums {
    all: Pending,
    /// Updates whose squared norms were added up.
    updates: usize,
}

/// Sums over a batch.
#[derive(Clone, Debug)]
pub(super) struct Totals {
    pub(super) loss: f64,
    /// Metrics, in the order in which the model declares them.
    pub(super) metrics: Vec<f64>,
    /// Mean squared norm over the updates.
    norm_squared: f64,
    /// Whether a rank has loaded something since the step before.
    loaded: bool,
}

/// The loss and the gradient norm of a step, not checked.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
    pub(super) metrics: Vec<(&'static str, f64)>,
    /// Whether the step changes no weight.
    pub(super) skipped: bool,
    /// Whether a rank has loaded something since the step before.
    pub(super) loaded: bool,
}

impl Measured {
    /// The first of loss and norm that is not finite, if there is one.
    pub(super) fn not_finite(&self) -> Option<(&'static str, f64)> {
        [("loss", self.loss), ("gradient norm", self.grad_norm)].into_iter().find(|(_, value)| !value.is_finite())
    }

    /// Refuses a loss or norm that is not finite, while the old weights can still be kept.
    pub(super) fn finite(self, step: u64) -> Result<Self> {
        match self.not_finite() {
            None => Ok(self),
            Some((what, value)) => Err(TrainError::NotFinite { step, what, value }),
        }
    }
}

/// The squared norm that some numbers are the sum of:
/// [`WeightStore::norm_slots`](crate::weights::WeightStore::norm_slots).
fn norm_squared(numbers: &[f64]) -> f64 {
    match numbers {
        [] => 0.0,
        [sum] => *sum,
        digits => exact::value(digits),
    }
}

impl Trainer {
    /// Memory for the numbers of a pass, all zero, with room for the sums of the squared norm if it trains.
    pub(super) fn numbers(&self, purpose: Purpose) -> Result<Buffer> {
        let count = if purpose == Purpose::Train { self.loads_at() + 1 } else { self.norms_at() };
        Ok(self.device.zeros(DType::F64, count)?)
    }

    /// Where in the numbers of a step ranks say that they loaded something.
    pub(super) fn loads_at(&self) -> usize {
        self.norms_at() + self.store.weights.borrow().norm_slots()
    }

    /// Where in the numbers of a pass the sums of the squared norm begin.
    pub(super) fn norms_at(&self) -> usize {
        (1 + self.reporting.metrics.len()) * self.plan.global_batch_size
    }

    /// Starts the sum over the world of the numbers of a step. A number that only one rank counts is not changed by
    /// this sum. So every mesh adds up the same numbers in the same order in [`totals`](Trainer::totals).
    pub(super) fn start_sums(&self, step: &mut PendingStep, numbers: Buffer, updates: usize) -> Result<()> {
        step.sums = Some(Sums { all: self.rank.world().start_all_reduce(numbers, ReduceOp::Sum)?, updates });
        Ok(())
    }

    /// The sums over a batch of the numbers of a pass that does not train.
    pub(super) fn totals_of(&self, numbers: Buffer) -> Result<Totals> {
        self.totals(Sums { all: self.rank.world().start_all_reduce(numbers, ReduceOp::Sum)?, updates: 1 })
    }

    /// Waits for the sums. Every rank adds up the same numbers in the same order.
    fn totals(&self, sums: Sums) -> Result<Totals> {
        let all = self.device.download(&sums.all.wait()?)?;
        let all = all.as_slice::<f64>()?;
        let sum = |values: &[f64]| tree::sum(values, |a, b| a + b).unwrap_or(0.0);
        let samples = self.plan.global_batch_size;
        let (per_sample, norms) = all.split_at(self.norms_at());
        let (losses, metrics) = per_sample.split_at(samples);
        let (loaded, norms) = norms.split_last().map_or((0.0, norms), |(&loaded, norms)| (loaded, norms));
        Ok(Totals {
            loss: sum(losses),
            metrics: metrics.chunks(samples).map(sum).collect(),
            norm_squared: norm_squared(norms) / sums.updates.max(1) as f64,
            loaded: loaded > 0.0,
        })
    }

    /// The mean of each metric over `samples` samples and `terms` terms of the loss.
    pub(super) fn means(&self, totals: &[f64], samples: usize, terms: u64) -> Vec<(&'static str, f64)> {
        let count = |per| match per {
            Per::Sample => samples as f64,
            Per::Term => terms as f64,
        };
        self.reporting
            .metrics
            .iter()
            .zip(totals)
            .map(|(metric, total)| (metric.name, total / count(metric.per)))
            .collect()
    }

    /// Waits for the sums of a step.
    pub(super) fn measure(&self, step: &mut PendingStep) -> Result<Measured> {
        let sums = step.sums.take().unwrap_or_else(|| unreachable!("its sums were started"));
        let Totals { loss, metrics, norm_squared, loaded } = self.totals(sums)?;
        Ok(Measured {
            loss: loss / step.terms as f64,
            grad_norm: norm_squared.sqrt() / step.loss_scale,
            metrics: self.means(&metrics, self.plan.global_batch_size, step.terms),
            skipped: false,
            loaded,
        })
    }
}
