//! The trait of an update rule that needs to know more of a parameter than one element.

use crate::{OptimError, ParamShape, Pass, Result, State, Update};
use std::fmt::Debug;

/// Consecutive elements of a parameter, counted matrix by matrix, with their gradients, states and measures.
#[derive(Debug)]
pub struct Run<'r, 'a> {
    /// The step.
    pub update: Update,
    /// The parameter.
    pub shape: ParamShape,
    /// The first element, counted in the whole parameter: one matrix after the other, each row-major.
    pub first: usize,
    /// Gradients, not yet scaled.
    pub grads: &'r [f32],
    /// The states of elements, in the order of [`WholeOptimizer::states`].
    pub states: &'r mut [&'a mut [f32]],
    /// The states in bytes, likewise.
    pub codes: &'r mut [&'a mut [u8]],
    /// The states of sets, likewise, each whole.
    pub sets: &'r [&'a [f32]],
    /// What earlier passes measured of the whole parameter, measure by measure, as
    /// [`finish_pass`](WholeOptimizer::finish_pass) left it.
    pub totals: &'r [&'a [f64]],
    /// The elements of the [transformed](Transform) matrices, if the rule gathers them.
    pub gathered: &'r [f32],
}

/// The totals of a pass over a whole parameter.
#[derive(Debug)]
pub struct PassTotals<'r, 'a> {
    /// The pass, from 0.
    pub pass: usize,
    /// The step.
    pub update: &'r Update,
    /// The parameter.
    pub shape: &'r ParamShape,
    /// A vector for each measure of the pass. A rule may replace totals by what later passes and the update need.
    pub totals: &'r mut [&'a mut [f64]],
    /// The states of sets, in the order of [`WholeOptimizer::states`].
    pub sets: &'r mut [&'a mut [f32]],
}

/// A function of whole matrices that a rule needs, and that the device computes.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Transform {
    /// The matrices themselves.
    Identity,
    /// Of each matrix `U·S·Vᵀ` about `U·Vᵀ`: X is divided by its norm and then replaced so many times by a·X + (b·A +
    /// c·A²)·X, where A = X·Xᵀ (Newton-Schulz), in f32.
    Orthogonal {
        /// a, b and c.
        coefficients: [f64; 3],
        /// How often.
        iterations: usize,
    },
}

/// An update rule whose step of an element depends on the whole matrix: on sums or maxima over its elements, rows,
/// columns or blocks, or on the matrix itself. A parameter that holds several matrices ([`ParamShape`]) is as many to
/// the rule, and may be cut over ranks in any way. A rule of your own implements this and becomes a
/// [`Rule::Whole`](crate::Rule::Whole).
///
/// A step takes the [passes](Self::passes) in order. In each, [`measure`](Self::measure) gives numbers for the
/// elements, which are summed over ranks, and then [`finish_pass`](Self::finish_pass) brings the states of sets up to
/// date. Last, [`update`](Self::update) changes the weights. `measure` and `update` are given elements in runs, which
/// threads and ranks cut as they like: the result of an element must not depend on the run.
pub trait WholeOptimizer: Debug + Send + Sync {
    /// The rule's name, for messages and checkpoints: `lamb`.
    fn name(&self) -> &str;

    /// Its states of a parameter.
    fn states(&self, shape: &ParamShape) -> Vec<State>;

    /// Its passes of measures over a parameter.
    fn passes(&self, shape: &ParamShape) -> Vec<Pass>;

    /// The function of whole matrices that the update reads, if it does. They are brought together from the numbers
    /// that `measure` gives in a call after the passes, whose `pass` is the number of passes: one for each element.
    fn gathers(&self, _shape: &ParamShape) -> Option<Transform> {
        None
    }

    /// Writes a number for each element of the run into each of `out`: one for each measure of the pass. May change the
    /// states of elements.
    ///
    /// # Errors
    /// A call that the rule refuses.
    fn measure(&self, pass: usize, weights: &[f32], run: &mut Run<'_, '_>, out: &mut [&mut [f32]]) -> Result<()>;

    /// Reads the totals of a pass, and updates the states of sets.
    ///
    /// # Errors
    /// A call that the rule refuses.
    fn finish_pass(&self, _: PassTotals<'_, '_>) -> Result<()> {
        Ok(())
    }

    /// Updates the weights of the run.
    ///
    /// # Errors
    /// A call that the rule refuses.
    fn update(&self, weights: &mut [f32], run: &mut Run<'_, '_>) -> Result<()>;
}

/// The checks that every rule makes first.
impl<'a> Run<'_, 'a> {
    /// The states of elements, as an array.
    ///
    /// # Errors
    /// Another number of them than the rule has, or lengths that differ from the weights'.
    pub fn states<const STATES: usize>(&mut self, rule: &str, weights: usize) -> Result<&mut [&'a mut [f32]; STATES]> {
        if self.grads.len() != weights {
            return Err(OptimError::Grads { grads: self.grads.len(), weights });
        }
        if let Some((state, values)) = self.states.iter().enumerate().find(|(_, values)| values.len() != weights) {
            return Err(OptimError::State { state, len: values.len(), weights });
        }
        let given = self.states.len();
        let wrong = |_| OptimError::States { rule: rule.to_owned(), given, expected: STATES };
        (&mut *self.states).try_into().map_err(wrong)
    }

    /// The places for the measures of a pass, as an array.
    ///
    /// # Errors
    /// Another number of them than the pass has.
    pub fn out<'o, 'b, const MEASURES: usize>(
        rule: &str,
        out: &'o mut [&'b mut [f32]],
    ) -> Result<&'o mut [&'b mut [f32]; MEASURES]> {
        let given = out.len();
        out.try_into().map_err(|_| Self::wrong(rule, "measures", given, MEASURES))
    }

    /// The error of a call with another number of vectors than a rule takes.
    pub(crate) fn wrong(rule: &str, what: &str, given: usize, expected: usize) -> OptimError {
        OptimError::Custom { rule: rule.to_owned(), problem: format!("{given} {what} given, it takes {expected}") }
    }
}
