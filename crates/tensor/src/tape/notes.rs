//! Notes of layers on a tape, besides their outputs: auxiliary losses, metrics, and statistics.
//!
//! A layer deep inside a stage needs no extra argument for them. The caller of the tape takes the notes after the
//! forward pass, runs backward from the auxiliary losses together with the output, and adds the numbers up over the
//! step. [`Tape::backward_from_loss`] trains the auxiliary losses that nobody took, where it knows what their mean is.
//! Any other backward pass refuses notes that would be lost: auxiliary losses and statistics. Metrics change no number,
//! and stay where they are.

use super::prelude::*;
use super::{Normaliser, Seed};
use crate::param::StatisticId;
use std::collections::BTreeSet;

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
    mixes_samples: bool,
    decides: bool,
}

/// All notes of a tape.
#[derive(Clone, Debug, Default)]
pub struct Notes {
    /// Auxiliary losses and metrics.
    pub per_sample: Vec<PerSample>,
    /// Notes of statistics.
    pub statistics: Vec<StatisticNote>,
    /// Whether numbers of a sample [depend on others](Tape::mixes_samples) by design.
    pub mixes_samples: bool,
    /// Whether a layer [decided](Tape::decide) something from values, where a rounding may decide otherwise.
    pub decides: bool,
}

impl Tape {
    /// Adds an auxiliary loss: training minimises the mean loss plus `coefficient` times the mean of `value` over the
    /// samples of the batch. `value` is one f64 for each sample, typed as a loss is. It is reported under `name` like a
    /// [metric](Self::report); in evaluation it is only reported.
    ///
    /// A trainer does so. So does [`backward_from_loss`](Self::backward_from_loss) in a loop of your own, if the tape's
    /// [position](super::Position::rank_samples) says how many samples the batch has:
    ///
    /// ```
    /// # use meshwork_core::{Axis, Mesh, Rank, Ty, Types};
    /// # use meshwork_cpu::Cpu;
    /// # use meshwork_tensor::{Declarations, Error, Init, Params, Placement, Role, Tape, Tensor};
    /// # use meshwork_tensor::{param::Gradients, tape::{Mode, Normaliser, Position, Weights}};
    /// # use std::sync::Arc;
    /// # let rank = Arc::new(Rank::recording(&Mesh::new([(Axis::Dp, 1)])?, 0)?);
    /// # let (device, mut all) = (Cpu::device(), Declarations::new());
    /// # let w = all.declare("w", &[1, 2], Placement::replicated(), Role::Weight, Init::Ones)?;
    /// # let params = Arc::new(Params::new(Arc::new(all), rank.mesh(), rank.coords(), &device, &[vec![w]], 0)?);
    /// # let data = |tape: &Tape, values: &[f32], shape: [usize; 2]| {
    /// #     Tensor::from_slice(tape.device(), values, shape).map(|data| tape.constant(data, Types::new(&[(Axis::Dp, Ty::Shard(0))])))
    /// # };
    /// // Two samples a step on each data-parallel rank, here on one tape.
    /// let position = Position { rank_samples: 2, ..Position::default() };
    /// let tape = Tape::new(rank, params, device, Mode::Train, position);
    /// let (x, t) = (data(&tape, &[1.0, 0.0, 0.0, 1.0], [2, 2])?, data(&tape, &[0.0, 0.0], [2, 1])?);
    /// let y = x.linear(&tape.param(w)?, 1)?;
    /// tape.add_loss("penalty", 0.5, &y.mean_squared_error(&data(&tape, &[3.0, 3.0], [2, 1])?)?)?;
    /// let mut gradients = Gradients::default();
    /// tape.backward_from_loss(&y.mean_squared_error(&t)?, Normaliser::LocalTerms(2), Weights::Now, &mut gradients)?;
    /// // Of each weight 2·1/2 from the loss, and 0.5·2·(1 - 3)/2 from the penalty.
    /// assert_eq!(gradients.get(w).unwrap().to_vec::<f32>()?, [0.0, 0.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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

    /// Notes the statistics of this tape's samples in training: see
    /// [`Declarations::declare_statistic`](crate::Declarations::declare_statistic). Evaluation notes nothing.
    pub fn note(&self, id: StatisticId, weight: f64, values: &[&Tensor]) {
        if self.mode() == Mode::Train {
            let values = values.iter().map(|&value| value.clone()).collect();
            self.inner.notes.borrow_mut().statistics.push(StatisticNote { id, weight, values });
        }
    }

    /// The auxiliary losses that nobody took, with the gradients from which backward starts, as they are averaged over
    /// the samples of the batch.
    ///
    /// # Errors
    /// Losses whose mean is not known.
    pub(super) fn auxiliary_roots(&self, normaliser: Normaliser) -> Result<Vec<(Var, Seed)>> {
        let known = self.rank_samples() > 0 && !matches!(normaliser, Normaliser::Scale(_));
        if !known {
            self.require_taken()?;
        }
        let samples = self.rank_samples() * self.rank().mesh().data_degree() as u64;
        let notes = self.inner.notes.borrow();
        let auxiliary = notes.per_sample.iter().filter_map(|(name, coefficient, tensor, types, source)| {
            Some((name, (*coefficient)?, self.value(tensor.clone(), *types, *source)))
        });
        let root = |(name, coefficient, value): (&&'static str, f64, Var)| {
            if value.shape()[0] as u64 > self.rank_samples() {
                let problem = format!(
                    "{name} has a number for each of {} samples, and the tape's position says that each rank has {} in a step: set \
                     Position::rank_samples to those of all its micro-batches",
                    value.shape()[0],
                    self.rank_samples()
                );
                return Err(Error::Shape { op: "backward_from_loss", problem, shapes: vec![value.shape().to_vec()] });
            }
            let seed = self.loss_seed(&value, Normaliser::Scale(coefficient / samples as f64))?;
            Ok((value, seed))
        };
        auxiliary.map(root).collect()
    }

    /// Refuses a backward pass that would lose auxiliary losses.
    pub(super) fn require_taken(&self) -> Result<()> {
        let notes = self.inner.notes.borrow();
        let auxiliary = notes.per_sample.iter().filter(|(_, coefficient, ..)| coefficient.is_some());
        let names: Vec<&str> = auxiliary.map(|(name, ..)| *name).collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(Error::Untaken {
            what: format!("the auxiliary losses {names:?}"),
            valid: "backward_from_loss trains them on a tape whose Position::rank_samples is set, with Normaliser::LocalTerms; or \
                    take them with Tape::take_notes and give each to backward_from, its seed the coefficient / samples of the batch",
        })
    }

    /// Refuses a backward pass that would lose statistics.
    pub(super) fn require_taken_statistics(&self) -> Result<()> {
        let notes = self.inner.notes.borrow();
        let declarations = self.params().declarations();
        let buffer = |note: &StatisticNote| {
            let buffers = &declarations.statistics()[note.id.index()].buffers;
            buffers.first().map_or("no buffer", |&id| &declarations.spec(id).name).to_owned()
        };
        let buffers: BTreeSet<String> = notes.statistics.iter().map(buffer).collect();
        if buffers.is_empty() {
            return Ok(());
        }
        Err(Error::Untaken {
            what: format!("the statistics of {}", buffers.into_iter().collect::<Vec<_>>().join(", ")),
            valid: "take them with Tape::take_notes, and update the buffers by the rule of each statistic \
                    (Declarations::statistics) from the sums over the ranks that have other samples, as a trainer does; or take and drop them",
        })
    }

    /// Says that what this tape computes of a sample depends on the samples beside it by design: a contrastive loss,
    /// statistics of the batch. A trainer compares the losses of a micro-batch with the losses of its samples one by
    /// one, unless a layer says so. Operations of meshwork that do so ([`Var::batch_norm`], samples gathered over a
    /// data axis) say it themselves.
    pub fn mixes_samples(&self) {
        self.inner.notes.borrow_mut().mixes_samples = true;
    }

    pub(super) fn note_decision(&self) {
        self.inner.notes.borrow_mut().decides = true;
    }

    /// Takes all notes from the tape.
    pub fn take_notes(&self) -> Notes {
        let Kept { per_sample, statistics, mixes_samples, decides } = self.inner.notes.take();
        let with_tape = |(name, coefficient, tensor, types, source)| {
            let value = self.value(tensor, types, source);
            PerSample { name, value, coefficient }
        };
        Notes { per_sample: per_sample.into_iter().map(with_tape).collect(), statistics, mixes_samples, decides }
    }
}
