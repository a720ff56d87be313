//! The one trait of an update rule, and what a call of it carries.

use thiserror::Error;

/// What one step asks of an update rule, the same for all elements of the segment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Number of this step, counted from 1.
    pub step: u64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Factor on every gradient, applied on the fly (see [`clip_factor`](crate::clip_factor)); 1 = none.
    pub grad_scale: f32,
    /// Whether weight decay applies to this segment: to weights, not to biases and norms.
    pub decay: bool,
}

/// An update rule on flat slices.
///
/// Every element is updated from its own weight, gradient and state only, so the bits of the result do not
/// depend on how a parameter is cut into segments: segments that differ in `decay`, or that lie on different
/// ranks, are separate calls, and so may be the pieces that different threads update.
pub trait Optimizer: Send + Sync {
    /// Number of `f32` values of state per weight: [`update`](Self::update) takes as many arrays, all zero
    /// before the first step.
    fn state_slots(&self) -> usize;

    /// Updates `weights` and `state` in one pass over them.
    ///
    /// # Errors
    /// When the step is 0 or the slices do not fit together; nothing has been written then.
    fn update(
        &self,
        update: Update,
        weights: &mut [f32],
        grads: &[f32],
        state: &mut [&mut [f32]],
    ) -> Result<(), OptimError>;
}

/// A call that an update rule refuses.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum OptimError {
    /// Steps are counted from 1.
    #[error("step 0: steps are counted from 1")]
    StepZero,
    /// Gradients and weights differ in length.
    #[error("{grads} gradients for {weights} weights: the lengths must be equal")]
    Grads {
        /// Number of gradients given.
        grads: usize,
        /// Number of weights given.
        weights: usize,
    },
    /// Wrong number of state arrays.
    #[error("{given} state arrays given: {rule} takes {expected}")]
    Slots {
        /// Name of the update rule.
        rule: &'static str,
        /// Number of arrays given.
        given: usize,
        /// Number of arrays that the rule takes.
        expected: usize,
    },
    /// A state array and the weights differ in length.
    #[error("state array {slot} has {len} values for {weights} weights: the lengths must be equal")]
    State {
        /// Index of the state array.
        slot: usize,
        /// Its length.
        len: usize,
        /// Number of weights given.
        weights: usize,
    },
}

/// Checks what every rule demands of a call, and hands out the state arrays by name.
pub(crate) fn checked<'a, 'b, const SLOTS: usize>(
    rule: &'static str,
    step: u64,
    weights: usize,
    grads: usize,
    state: &'a mut [&'b mut [f32]],
) -> Result<&'a mut [&'b mut [f32]; SLOTS], OptimError> {
    if step == 0 {
        return Err(OptimError::StepZero);
    }
    if grads != weights {
        return Err(OptimError::Grads { grads, weights });
    }
    let given = state.len();
    let state: &mut [_; SLOTS] = state.try_into().map_err(|_| OptimError::Slots { rule, given, expected: SLOTS })?;
    for (slot, array) in state.iter().enumerate() {
        if array.len() != weights {
            return Err(OptimError::State { slot, len: array.len(), weights });
        }
    }
    Ok(state)
}
