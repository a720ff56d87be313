//! A model of pairs: of two answers to a prompt, it learns to prefer one, by direct preference optimisation (Rafailov
//! et al. 2023, arXiv:2305.18290):
//!
//! ```text
//! l = -ln σ(margin)    margin = β · [(ln p(chosen) - ln p_ref(chosen)) - (ln p(rejected) - ln p_ref(rejected))]
//! ```
//!
//! A sample has some pairs, whose answers, each behind its prompt, are documents of one sequence: no rank and no
//! micro-batch has half of a pair. A field, `answers`, says of which answer each target is: 0 and 1 are the chosen and
//! the rejected answer of the first pair, 2 and 3 those of the second. ln p is the negative loss of the wrapped model,
//! [by answers](Stage::grouped_loss). The reference, p_ref, is the frozen model: the same weights without adapters, in
//! a pass before.

use crate::{Activation, Adapted, Batch, Field, Metric, Model, Per, Stage, StageSpec};
use meshwork_core::{DType, Mesh, pass_on};
use meshwork_tensor::kernel::{PairNumber, Preference};
use meshwork_tensor::{Declarations, Result, Tape, Var};
use std::ops::Range;
use std::sync::Arc;

/// The field of the losses of the frozen model, of each answer that a sample has room for.
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
    answers: Field,
    of: Preference,
}

impl Preferring {
    /// The model that learns from pairs. `answers` is the field of the answer that each target is of, from 0 to the
    /// number that a sample has room for, which is even; negative where it is of none. Where a sample has answers, they
    /// are the first ones.
    pub fn new(model: Adapted, answers: Field, of: Preference) -> Self {
        Self { model, answers, of }
    }
}

/// The number of pairs of each sample.
fn pairs(answers: &Field, batch: &Batch) -> Result<Vec<i32>> {
    let each = answers.dims.count().max(1);
    let last = |answers: &[i32]| answers.iter().copied().max().unwrap_or(-1).max(-1);
    Ok(batch.values::<i32>(answers.name)?.chunks(each).map(|sample| (last(sample) + 2) / 2).collect())
}

impl Model for Preferring {
    pass_on! {
        self.model =>
        fn num_layers(&self) -> usize;
        fn activation(&self, mesh: &Mesh, at: usize, batch: &Batch) -> Result<Activation>;
    }

    fn fields(&self) -> Vec<Field> {
        self.model.fields().into_iter().chain([self.answers.clone()]).chain(self.reference()).collect()
    }

    fn stage(&self, params: &mut Declarations, mesh: &Mesh, part: &StageSpec) -> Result<Box<dyn Stage>> {
        let stage = self.model.stage(params, mesh, part)?;
        Ok(Box::new(OfPairs { stage, answers: self.answers.clone(), of: self.of }))
    }

    /// Pairs.
    fn loss_terms(&self, batch: &Batch, samples: Range<usize>) -> Result<u64> {
        Ok(pairs(&self.answers, &batch.part(samples)?)?.into_iter().map(|pairs| pairs as u64).sum())
    }

    fn decoding(&self) -> Option<Arc<dyn Model>> {
        Some(self.model.decoding().unwrap_or_else(|| Arc::new(self.model.clone())))
    }

    fn reference(&self) -> Option<Field> {
        Some(Field::new(REFERENCE, DType::F64, [self.answers.id_count()]))
    }

    fn metrics(&self) -> Vec<Metric> {
        let of_pairs = METRICS.into_iter().map(|(name, _)| Metric { name, per: Per::Term });
        of_pairs.chain(self.model.metrics()).collect()
    }
}

/// A stage of a model of pairs.
#[derive(Debug)]
struct OfPairs {
    stage: Box<dyn Stage>,
    answers: Field,
    of: Preference,
}

impl Stage for OfPairs {
    pass_on! {
        self.stage =>
        fn forward(&self, tape: &Tape, batch: &Batch, input: Option<&Var>) -> Result<Var>;
        fn predict(&self, output: &Var) -> Result<Var>;
    }

    fn loss(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        let (losses, reference) = (self.reference(tape, batch, output)?, batch.var(tape, REFERENCE)?);
        let pairs = Batch::new(batch.samples()).with("pairs", [], pairs(&self.answers, batch)?)?.var(tape, "pairs")?;
        for (name, number) in METRICS {
            tape.report(name, &losses.preference(&reference, &pairs, self.of, number)?)?;
        }
        losses.preference_loss(&reference, &pairs, self.of)
    }

    /// The loss of each answer, `[samples, answers]`.
    fn reference(&self, tape: &Tape, batch: &Batch, output: &Var) -> Result<Var> {
        self.stage.grouped_loss(tape, batch, output, &self.answers)
    }
}
