//! Operations of an optimizer step on flat vectors. The rules themselves are in `meshwork-optim`.

use crate::error::Result;
use meshwork_core::Buffer;
use meshwork_optim::{Rule, Update};
use std::fmt::Debug;
use std::ops::Range;

/// Flat vectors of weights, gradients and optimizer states.
pub trait Optim: Debug {
    /// Sets a range of elements to zero.
    fn zero(&self, x: &mut Buffer, range: Range<usize>) -> Result<()>;

    /// Adds Σ x² to element `at` of the f64 vector `sums`, over `segments` ranges one after another, each `pitch` behind the one
    /// before. The sum is accumulated in f64 in an order that depends on the number and length of the ranges alone, then added.
    /// It stays on the device, so nothing waits for it.
    fn sum_of_squares(
        &self,
        x: &Buffer,
        range: Range<usize>,
        segments: usize,
        pitch: usize,
        sums: &mut Buffer,
        at: usize,
    ) -> Result<()>;

    /// Applies an update rule to a range of f32 vectors. `states` has one vector for each of the rule's
    /// [names](Rule::state_names).
    ///
    /// A device whose memory the host cannot read matches on `rule` and runs its own kernel. For [`Rule::Custom`], and
    /// for a rule without a kernel, it returns [`Error::UpdateRule`](crate::Error::UpdateRule).
    fn update(
        &self,
        rule: &Rule,
        update: Update,
        weights: &mut Buffer,
        grads: &Buffer,
        states: &mut [Buffer],
        range: Range<usize>,
    ) -> Result<()>;
}
