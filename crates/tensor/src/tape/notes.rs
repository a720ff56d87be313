//! Notes of layers on a tape, besides their outputs: auxiliary losses, metrics, and statistics.
//!
//! A layer deep inside a stage needs no extra argument for them. The caller of the tape takes the notes after the
//! forward pass, runs backward from the auxiliary losses together with the output, and adds the numbers up over the
//! step.

use super::{Mode, Source, Tape, Var};
use crate::error::{Error, Result};
use crate::param::StatisticId;
use crate::tensor::Tensor;
use meshwork_core::{DType, SpmdError, Ty, Types};

/// A number for each sample, under a name.
#[derive(Clone, Debug)]
pub struct PerSample {
    /// The metric that it belongs to.
    pub name: &'static str,
    /// `[samples]` in f64. Values of several layers under one name add up.
    pub value: Var,
    /// The factor of an auxiliary loss in the loss that training minimises. `None` for a metric, which is only
    /// reported.
    pub coefficient: Option<f64>,
}

/// The note of a micro-batch for a statistic.
#[derive(Clone, Debug)]
pub struct StatisticNote {
    /// The statistic.
    pub id: StatisticId,
    /// Passed to the rule with the values: a number of elements.
    pub weight: f64,
    /// The values, f32, one tensor after another.
    pub values: Vec<Tensor>,
}

/// The notes as the tape itself keeps them: values without their tape, because the tape would otherwise keep itself
/// alive.
#[derive(Debug, Default)]
pub(super) struct Kept {
    per_sample: Vec<(&'static str, Option<f64>, Tensor, Types, Source)>,
    statistics: Vec<StatisticNote>,
}

/// All notes of a tape.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    /// Auxiliary losses and metrics.
    pub per_sample: Vec<PerSample>,
    /// Notes of statistics.
    pub statistics: Vec<StatisticNote>,
}

impl Tape {
    /// Adds an auxiliary loss: training minimises the mean loss plus `coefficient` times the mean of `value` over the
    /// samples of the batch. `value` is one f64 for each sample, typed as a loss is. It is reported under `name` like a
    /// [metric](Self::report); in evaluation it is only reported.
    ///
    /// # Errors
    /// A value that is not one f64 for each sample, or one that is `Replicate` on an axis, because each rank would add
    /// its own gradient.
    pub fn add_loss(&self, name: &'static str, coefficient: f64, value: &Var) -> Result<()> {
        if let Some((axis, ty)) = value.types().iter().find(|(_, ty)| matches!(ty, Ty::Replicate | Ty::Varying)) {
            return Err(SpmdError {
                op: format!("add_loss {name}"),
                axis,
                problem: format!("the auxiliary loss is {ty}: each rank would add a gradient of its own"),
                fix: "make it Invariant, Partial or Shard(0)".to_owned(),
            }
            .into());
        }
        self.note_per_sample(name, value, Some(coefficient))
    }

    /// Reports a metric: one f64 for each sample. The mean over the batch is reported under `name`, which the model
    /// must declare.
    ///
    /// # Errors
    /// A value that is not one f64 for each sample.
    pub fn report(&self, name: &'static str, value: &Var) -> Result<()> {
        self.note_per_sample(name, value, None)
    }

    fn note_per_sample(&self, name: &'static str, value: &Var, coefficient: Option<f64>) -> Result<()> {
        if value.shape().len() != 1 || value.tensor().dtype() != DType::F64 {
            return Err(Error::Shape {
                op: "report",
                problem: format!(
                    "{name} is {} of {} dims: an auxiliary loss or metric is one f64 for each sample",
                    value.tensor().dtype(),
                    value.shape().len()
                ),
                shapes: vec![value.shape().to_vec()],
            });
        }
        let note = (name, coefficient, value.tensor().clone(), value.types(), value.source());
        self.inner.notes.borrow_mut().per_sample.push(note);
        Ok(())
    }

    /// Notes the statistics of this tape's samples in training: see [`Declarations::declare_statistic`](crate::Declarations::declare_statistic).
    /// Evaluation notes nothing.
    pub fn note(&self, id: StatisticId, weight: f64, values: &[&Tensor]) {
        if self.mode() == Mode::Train {
            let values = values.iter().map(|&value| value.clone()).collect();
            self.inner.notes.borrow_mut().statistics.push(StatisticNote { id, weight, values });
        }
    }

    /// Takes all notes from the tape.
    pub fn take_notes(&self) -> Notes {
        let Kept { per_sample, statistics } = self.inner.notes.take();
        let with_tape = |(name, coefficient, tensor, types, source)| {
            let value = self.value(tensor, types, source);
            PerSample { name, value, coefficient }
        };
        Notes { per_sample: per_sample.into_iter().map(with_tape).collect(), statistics }
    }
}
