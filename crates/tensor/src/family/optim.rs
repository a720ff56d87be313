//! What an optimizer step does to flat vectors. The rules themselves live with the optimizers.

use crate::error::Result;
use meshwork_core::Buffer;
use std::fmt::Debug;
use std::ops::Range;

/// An update rule, element by element: w, g, state → w, state. A device may call it on pieces, from several threads.
pub trait UpdateRule: Sync {
    /// The rule on host slices of equal length; `states` has as many as the optimizer keeps per element.
    fn apply(&self, weights: &mut [f32], grads: &[f32], states: &mut [&mut [f32]]) -> Result<()>;
}

/// Flat vectors of weights, gradients and optimizer states.
pub trait Optim: Debug {
    /// A range of elements to zero.
    fn zero(&self, x: &mut Buffer, range: Range<usize>) -> Result<()>;

    /// Σ x² over `blocks` ranges one after another, each `pitch` behind the one before, accumulated in f64 in an order that
    /// depends on their number and length alone.
    fn sum_of_squares(&self, x: &Buffer, range: Range<usize>, blocks: usize, pitch: usize) -> Result<f64>;

    /// Applies `rule` to a range of f32 vectors.
    fn update(
        &self,
        rule: &dyn UpdateRule,
        weights: &mut Buffer,
        grads: &Buffer,
        states: &mut [Buffer],
        range: Range<usize>,
    ) -> Result<()>;
}
