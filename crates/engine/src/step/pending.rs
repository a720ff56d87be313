//! From what ranks know to what is certain: the sums over the world that make a step's loss and norm, and its report.

use super::{StepReport, Trainer};
use crate::engine::{TIES, TrainError};
use meshwork_core::{Axis, Buffer, DType, Pending, Record, ReduceOp, tree};
use meshwork_tensor::Error;

/// Name of the group of all ranks.
const WORLD: &str = "world";

/// A step that is over on this rank, and not certain yet.
#[derive(Debug)]
pub(super) struct Unsettled {
    pub(super) step: u64,
    pub(super) tokens: i64,
    /// Losses of the samples that this rank counts, until they are on their way.
    pub(super) losses: Vec<f64>,
    /// What it communicated.
    pub(super) records: Vec<Record>,
    pub(super) sums: Option<Sums>,
    pub(super) tally: Option<Tally>,
}

/// Losses and squared norms on their way to every rank.
#[derive(Debug)]
pub(super) struct Sums {
    samples: usize,
    all: Pending,
}

/// What ranks tell each other about a step beside the numbers that it made.
#[derive(Debug)]
pub(super) struct Tally(Pending);

/// The loss and the gradient norm of a step, not checked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measured {
    pub(super) loss: f64,
    pub(super) grad_norm: f64,
}

impl Measured {
    /// What is not finite, if anything is.
    pub(super) fn not_finite(self) -> Option<(&'static str, f64)> {
        [("loss", self.loss), ("gradient norm", self.grad_norm)].into_iter().find(|(_, value)| !value.is_finite())
    }

    /// Refuses what is not finite, where the weights can still be what they were.
    pub(super) fn finite(self, step: u64) -> Result<Self, TrainError> {
        self.not_finite().map_or(Ok(self), |(what, value)| Err(TrainError::NotFinite { step, what, value }))
    }
}

impl Trainer {
    /// Starts the sum of all losses and that of all norms. What one rank alone counts comes through as it is, and so every mesh adds
    /// up the same numbers, in one order, when they are [there](Sums::wait).
    pub(super) fn start_sums(&self, losses: Vec<f64>, norms: Vec<f64>) -> Result<Sums, TrainError> {
        let samples = losses.len();
        let all = Buffer::from_vec([losses, norms].concat());
        Ok(Sums { samples, all: self.rank.world().start_all_reduce(all, ReduceOp::Sum)? })
    }

    /// The sum of all losses.
    pub(super) fn sum_over_world(&self, losses: Vec<f64>) -> Result<f64, TrainError> {
        Ok(self.start_sums(losses, Vec::new())?.wait()?.0)
    }

    /// Starts telling every rank the bytes per group, summed over the ranks, every rank's peak, and whether some rank is to stop.
    pub(super) fn start_tally(&self, records: &[Record], stop: bool) -> Result<Tally, TrainError> {
        let world = self.rank.world();
        let on_group = |name| records.iter().filter(move |record| record.group == name);
        let bytes = |name| on_group(name).fold(0.0, |sum, record| sum + record.bytes()); // `sum` of nothing is -0.0
        let mut values: Vec<f64> = names().map(bytes).collect();
        values.push(f64::from(u8::from(stop)));
        let peaks = values.len();
        values.resize(peaks + world.size(), 0.0);
        values[peaks + world.rank()] = self.device.meter().peak_bytes() as f64;
        let pending = world.start_all_reduce(Buffer::from_vec(values), ReduceOp::Sum)?;
        self.rank.log().drain(); // the report itself does not count
        Ok(Tally(pending))
    }

    /// The report of a step whose loss and norm are known.
    pub(super) fn report(
        &self,
        step: u64,
        Measured { loss, grad_norm }: Measured,
        tally: Tally,
        records: Vec<Record>,
    ) -> Result<StepReport, TrainError> {
        let all = tally.0.wait()?;
        let values = all.as_slice::<f64>().map_err(Error::from)?;
        let world = self.rank.world().size() as f64;
        let comm_bytes = names().zip(values).map(|(name, bytes)| (name, bytes / world)).collect();
        let [stop, peaks @ ..] = &values[names().count()..] else { unreachable!("sent as many values") };
        Ok(StepReport {
            step,
            loss,
            grad_norm,
            lr: self.learner.borrow().lr(step),
            comm_bytes,
            peak_bytes: peaks.iter().map(|&peak| peak as u64).collect(),
            records,
            stop: *stop > 0.0,
        })
    }
}

impl Sums {
    /// The sum of all losses, and that of all norms. Every rank adds up the same numbers in the same order.
    pub(super) fn wait(self) -> Result<(f64, f64), TrainError> {
        let all = self.all.wait()?;
        debug_assert_eq!(all.dtype(), DType::F64);
        let all = all.as_slice::<f64>().map_err(Error::from)?;
        let sum = |values: &[f64]| tree::sum(values, |a, b| a + b).unwrap_or(0.0);
        Ok((sum(&all[..self.samples]), sum(&all[self.samples..])))
    }

    /// The mean loss over so many tokens, and the norm.
    pub(super) fn measure(self, tokens: i64) -> Result<Measured, TrainError> {
        let (loss, norm_squared) = self.wait()?;
        Ok(Measured { loss: loss / tokens as f64, grad_norm: norm_squared.sqrt() })
    }
}

/// Groups whose bytes are reported.
fn names() -> impl Iterator<Item = &'static str> + Clone {
    Axis::ALL.map(Axis::name).into_iter().chain([TIES, WORLD])
}
