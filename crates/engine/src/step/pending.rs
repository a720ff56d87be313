//! The sums over the world that give a step's loss, metrics and norm, and the report of the step.
//!
//! The numbers of a step lie in one f64 vector on the device,
//! `[losses of samples | metrics of samples | sums of the squared norm | ranks that loaded something]`, which is summed
//! over the world and downloaded once, whatever the number of micro-batches and layers.

use super::{Offloaded, StepReport, Trainer};
use crate::pass::Purpose;
use crate::statistics::StatisticSums;
use crate::{OPTIMIZER, SAMPLES, TIED, TrainError, ZERO, ZERO_REPLICAS};
use meshwork_core::agreement::Disagreement;
use meshwork_core::exact;
use meshwork_core::hash::combine;
use meshwork_core::{Axis, Buffer, DType, EXPERT_DATA, Pending, Record, ReduceOp, tree};
use meshwork_nn::{Batch, Per};
use meshwork_tensor::{Category, Error, MemoryUse};

/// Name of the group of all ranks.
const WORLD: &str = "world";

/// A step that is complete on this rank, but not certain yet.
#[derive(Debug)]
pub(super) struct PendingStep {
    pub(super) step: u64,
    /// Terms of its loss.
    pub(super) terms: u64,
    /// What the loss was multiplied by before backward.
    pub(super) loss_scale: f64,
    /// This rank's part of losses, metrics and norms, until their sum is started.
    pub(super) numbers: Option<Buffer>,
    /// The sums from which buffers of statistics were updated.
    pub(super) statistics: StatisticSums,
    /// Hash of this rank's batch and of the number of its terms.
    pub(super) batch: u64,
    /// Its communications.
    pub(super) records: Vec<Record>,
    pub(super) sums: Option<Sums>,
    pub(super) stats: Option<StepStats>,
}

/// Losses, metrics and squared norms on their way to every rank.
#[derive(Debug)]
pub(super) struct Sums {
    all: Pending,
    /// Updates whose squared norms were added up.
    updates: usize,
}

/// What ranks share about a step besides its loss, metrics and norm: bytes per group, peaks of memory, requests to
/// stop, statistics.
#[derive(Debug)]
pub(super) struct StepStats(Pending);

/// Sums over a batch.
#[derive(Clone, Debug)]
pub(super) struct Totals {
    pub(super) loss: f64,
    /// Metrics, in the order in which the model declares them.
    pub(super) metrics: Vec<f64>,
    /// Mean squared norm over the updates.
    pub(super) norm_squared: f64,
    /// Whether a rank has loaded something since the step before.
    pub(super) loaded: bool,
}

/// The loss and the gradient norm of a step, not checked.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
    pub(super) metrics: Vec<(&'static str, f64)>,
    pub(super) loss_scale: f64,
    pub(super) terms: u64,
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
    pub(super) fn finite(self, step: u64) -> Result<Self, TrainError> {
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
    pub(super) fn numbers(&self, purpose: Purpose) -> Result<Buffer, TrainError> {
        let count = if purpose == Purpose::Train { self.loads_at() + 1 } else { self.norms_at() };
        Ok(self.device.zeros(DType::F64, count)?)
    }

    /// Where in the numbers of a step ranks say that they loaded something.
    pub(super) fn loads_at(&self) -> usize {
        self.norms_at() + self.weights.borrow().norm_slots()
    }

    /// Where in the numbers of a pass the sums of the squared norm begin.
    pub(super) fn norms_at(&self) -> usize {
        (1 + self.metrics.len()) * self.global_batch_size
    }

    /// Starts the sum over the world of the numbers of a pass. A number that only one rank counts is not changed by
    /// this sum. So every mesh adds up the same numbers in the same order in [`totals`](Trainer::totals).
    pub(super) fn start_sums(&self, numbers: Buffer, updates: usize) -> Result<Sums, TrainError> {
        Ok(Sums { all: self.rank.world().start_all_reduce(numbers, ReduceOp::Sum)?, updates })
    }

    /// Waits for the sums. Every rank adds up the same numbers in the same order.
    pub(super) fn totals(&self, sums: Sums) -> Result<Totals, TrainError> {
        let all = self.device.download(&sums.all.wait()?)?;
        let all = all.as_slice::<f64>().map_err(Error::from)?;
        let sum = |values: &[f64]| tree::sum(values, |a, b| a + b).unwrap_or(0.0);
        let samples = self.global_batch_size;
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
        self.metrics.iter().zip(totals).map(|(metric, total)| (metric.name, total / count(metric.per))).collect()
    }

    /// Waits for the sums of a step whose loss has `terms` terms, and whose gradients are `loss_scale` times too large.
    pub(super) fn measure(&self, sums: Sums, terms: u64, loss_scale: f64) -> Result<Measured, TrainError> {
        let Totals { loss, metrics, norm_squared, loaded } = self.totals(sums)?;
        let metrics = self.means(&metrics, self.global_batch_size, terms);
        Ok(Measured {
            loss: loss / terms as f64,
            grad_norm: norm_squared.sqrt() / loss_scale,
            metrics,
            loss_scale,
            terms,
            skipped: false,
            loaded,
        })
    }

    /// Groups whose bytes are reported: those of experts where these are shared out, those of ZeRO where it has groups
    /// of its own, those that bring together what the update rule measures.
    fn names(&self) -> Vec<&'static str> {
        let experts = self.rank.mesh().degree(Axis::Ep) > 1;
        let axes = Axis::ALL.into_iter().filter(|&axis| axis != Axis::Ep || experts).map(Axis::name);
        let zero = self.zero.group.is_some().then_some([ZERO, ZERO_REPLICAS]).into_iter().flatten();
        let optimizer = self.weights.borrow().reads_whole().then_some(OPTIMIZER);
        let samples = self.compress.aqsgd.map(|_| SAMPLES);
        axes.chain(samples)
            .chain(experts.then_some(EXPERT_DATA))
            .chain(zero)
            .chain(optimizer)
            .chain([TIED, WORLD])
            .collect()
    }

    /// Starts the sum that gives every rank the bytes per group, summed over the ranks, every rank's peak, whether some
    /// rank should stop, and the statistics that are reported.
    ///
    /// Also sends the number of this rank's steps, and the hash of its [input](hash_of_input).
    pub(super) fn start_stats(
        &self,
        records: &[Record],
        statistics: &StatisticSums,
        stop: bool,
        batch: u64,
    ) -> Result<StepStats, TrainError> {
        let world = self.rank.world();
        let on_group = |name| records.iter().filter(move |record| record.group == name);
        let bytes = |name| on_group(name).fold(0.0, |sum, record| sum + record.bytes()); // `sum` of nothing is -0.0
        let mut values: Vec<f64> = self.names().into_iter().map(bytes).collect();
        values.push(f64::from(u8::from(stop)));
        values.extend(self.moved());
        let peaks = values.len();
        values.resize(peaks + world.size() * (CATEGORIES + HASHES), 0.0);
        for (at, (_, bytes)) in self.device.meter().peak().iter().enumerate() {
            values[peaks + world.rank() * CATEGORIES + at] = bytes as f64;
        }
        let hashes = peaks + world.size() * CATEGORIES + world.rank() * HASHES;
        let [high, low] = halves(batch);
        values[hashes..hashes + HASHES].copy_from_slice(&[self.steps_begun as f64, high, low]);
        values.extend(self.reported.part(statistics));
        let pending = world.start_all_reduce(Buffer::from_vec(values), ReduceOp::Sum)?;
        self.rank.log().drain(); // the report itself does not count
        Ok(StepStats(pending))
    }

    /// What this rank has offloaded since it was asked last: bytes read and written, seconds waited. Nothing if it does
    /// not offload.
    fn moved(&self) -> Vec<f64> {
        let Some(disk) = &self.disk else { return Vec::new() };
        let now = (disk.traffic(), disk.waited());
        let (traffic, waited) = self.moved.replace(now);
        let moved = now.0.since(traffic);
        vec![moved.read as f64, moved.written as f64, (now.1 - waited).as_secs_f64()]
    }

    /// Refuses a step that is not the same step on all ranks, or for which ranks of one dp rank were given other
    /// samples. `hashes` are those of all ranks, which find the same.
    fn require_agreement(&self, step: u64, hashes: &[f64]) -> Result<(), TrainError> {
        if !self.device.has_values() {
            return Ok(()); // a dry run has no other ranks
        }
        let mesh = self.rank.mesh();
        let of_rank = |rank: usize| &hashes[rank * HASHES..(rank + 1) * HASHES];
        let differ = |ranks: &[usize], of: fn(&[f64]) -> String, claim: &str, over: String, valid: &str| {
            let values: Vec<String> = ranks.iter().map(|&rank| of(of_rank(rank))).collect();
            match Disagreement::between(claim, over, &values, ranks, valid) {
                None => Ok(()),
                Some(of) => Err(TrainError::Disagreement { step, of: Box::new(of) }),
            }
        };
        let all: Vec<usize> = (0..mesh.world_size()).collect();
        differ(
            &all,
            |sent| sent[0].to_string(),
            "the number of steps should be the same",
            "on all ranks".to_owned(),
            "call step() as often on every rank, and load the same state on each",
        )?;
        // The ranks of one dp rank are those that differ along the other axes.
        let axes: Vec<Axis> = mesh.axes().filter(|axis| !Axis::DATA.contains(axis)).collect();
        for ranks in all.iter().map(|&rank| mesh.group(rank, &axes)).filter(|ranks| ranks.len() > 1) {
            differ(
                &ranks,
                |sent| format!("those of hash {:08x}{:08x}", sent[1] as u32, sent[2] as u32),
                "the samples of a dp rank, and the count of their terms, should be the same",
                "on each of its ranks".to_owned(),
                "give each rank the Trainer::samples() of one global batch",
            )?;
        }
        Ok(())
    }

    /// The report of a step whose loss and norm are known.
    pub(super) fn report(
        &self,
        step: u64,
        Measured { loss, grad_norm, metrics, loss_scale, terms, skipped, .. }: Measured,
        stats: StepStats,
        records: Vec<Record>,
    ) -> Result<StepReport, TrainError> {
        let all = stats.0.wait()?;
        let values = all.as_slice::<f64>().map_err(Error::from)?;
        let world = self.rank.world().size() as f64;
        let names = self.names();
        let comm_bytes = names.iter().zip(values).map(|(&name, bytes)| (name, bytes / world)).collect();
        let [stop, rest @ ..] = &values[names.len()..] else { unreachable!("sent as many values") };
        let (offload, rest) = match (&self.disk, rest) {
            (Some(_), [read, written, waited, rest @ ..]) => {
                let [read, written, waited] = [read, written, waited].map(|sum| sum / world);
                (Some(Offloaded { read, written, waited }), rest)
            }
            (_, rest) => (None, rest),
        };
        let (peaks, rest) = rest.split_at(self.rank.world().size() * CATEGORIES);
        let (hashes, statistics) = rest.split_at(self.rank.world().size() * HASHES);
        self.require_agreement(step, hashes)?;
        Ok(StepReport {
            step,
            loss,
            grad_norm,
            metrics,
            statistics: self.reported.read(statistics),
            lr: self.weights.borrow().lr(step),
            loss_scale,
            terms,
            skipped,
            comm_bytes,
            offload,
            memory: peaks.as_chunks().0.iter().map(|peak| MemoryUse::new(peak.map(|bytes| bytes as u64))).collect(),
            records,
            stop: *stop > 0.0,
        })
    }
}

/// Hash of what ranks of one dp rank must have the same: the batch, and the terms of each update's loss.
pub(super) fn hash_of_input(batch: &Batch, terms: &[u64]) -> u64 {
    terms.iter().copied().fold(batch.hash(), combine)
}

/// Numbers by which a rank sends what holds its memory.
const CATEGORIES: usize = Category::ALL.len();

/// Numbers by which a rank sends its steps and the hash of its input, as two halves, which f64 holds exactly.
const HASHES: usize = 3;

fn halves(hash: u64) -> [f64; 2] {
    [(hash >> 32) as f64, f64::from(hash as u32)]
}
