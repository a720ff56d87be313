//! A model of pairs: of two answers to a prompt, it learns to prefer one, by direct preference optimisation (Rafailov
//! et al. 2023, arXiv:2305.18290):
//!
//! ```text
//! l = -ln σ(margin)    margin = β · [(ln p(chosen) - ln p_ref(chosen)) - (ln p(rejected) - ln p_ref(rejected))]
//! ```
//!
//! A sample is a pair, `[2, ..]` in each field of the model that it wraps: the chosen answer with its prompt, and the
//! rejected one with the same prompt. In every value of a pass they are two rows that follow each other, so that no
//! rank and no micro-batch has half of a pair. ln p is the negative loss of the wrapped model. The reference, p_ref, is
//! the frozen model: the same weights without adapters, in a pass before.

use crate::{Activation, Adapted, Batch, Field, Metric, Model, Per, Stage, StageSpec};
use meshwork_core::{DType, Mesh};
use meshwork_tensor::kernel::{PairNumber, Preference};
use meshwork_tensor::{Declarations, Result, Shape, Tape, Var};
use std::ops::Range;
use std::sync::Arc;

/// The field of the losses of the frozen model, of the chosen and of the rejected answer: `[2]` for each pair.
pub const REFERENCE: &str = "reference";

/// The metrics of pairs, with the numbers that they are the means of.
const METRICS: [(&str, PairNumber); 4] = [
    ("rewards_chosen", PairNumber::Chosen),
    ("rewards_rejected", PairNumber::Rejected),
    ("rewards_margin", PairNumber::Margin),
    ("rewards_accuracy", PairNumber::Correct),
];

/// A model with adapters that learns from pairs of answers. Without adapters there would be no frozen model to compare
/// it with.
#[derive(Clone, Debug)]
pub struct Preferring {
    model: Adapted,
    of: Preference,
}

impl Preferring {
    /// The model that learns from pairs. Its losses must be summed over terms, as every [`Stage::loss`] is, and its
    /// stages must leave neither auxiliary losses nor metrics: those would be of single answers.
    pub fn new(model: Adapted, of: Preference) -> Self {
        Self { model, of }
    }
}

/// The answers of a batch of pairs, as samples. A batch without a reference, as for a prediction, has single sequences.
fn answers(batch: &Batch) -> Batch {
    if batch.dims(REFERENCE).is_ok() { batch.rows(2) } else { batch.clone() }
}

impl Model for Preferring {
    fn num_layers(&self) -> usize {
        self.model.num_layers()
    }

    fn fields(&self) -> Vec<Field> {
        let pair = |field: Field| Field { dims: Shape::new(&[&[2], &field.dims[..]].concat()), ..field };
        self.model.fields().into_iter().map(pair).chain(self.reference()).collect()
    }

    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        Ok(Box::new(OfPairs { stage: self.model.stage(params, mesh, part)?, of: self.of }))
    }

    fn activation(&self, mesh: &Mesh, at: usize, batch: &Batch) -> Result<Activation> {
        self.model.activation(mesh, at, &answers(batch))
    }

    /// Pairs. One without a token to learn in either answer counts too: its loss is a constant.
    fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64> {
        _ = batch;
        Ok(samples.len() as u64)
    }

    fn decoding(&self) -> Option<Arc<dyn Model>> {
        Some(self.model.decoding().unwrap_or_else(|| Arc::new(self.model.clone())))
    }

    fn rows(&self) -> usize {
        2 * self.model.rows()
    }

    fn reference(&self) -> Option<Field> {
        Some(Field::new(REFERENCE, DType::F64, [2]))
    }

    fn metrics(&self) -> Vec<Metric> {
        METRICS.into_iter().map(|(name, _)| Metric { name, per: Per::Sample }).collect()
    }
}

/// A stage of a model of pairs.
#[derive(Debug)]
struct OfPairs {
    stage: Box<dyn Stage>,
    of: Preference,
}

impl Stage for OfPairs {
    fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var> {
        self.stage.forward(tape, &answers(batch), input)
    }

    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        let (losses, reference) = (self.reference(tape, batch, output)?, batch.var(tape, REFERENCE)?);
        for (name, number) in METRICS {
            tape.report(name, &losses.preference(&reference, self.of, number)?)?;
        }
        losses.preference_loss(&reference, self.of)
    }

    /// The loss of each answer, `[2 pairs]`.
    fn reference(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        self.stage.loss(tape, &answers(batch), output)
    }

    fn predict(&self, output: &Var) -> Result<Var> {
        self.stage.predict(output)
    }
}
