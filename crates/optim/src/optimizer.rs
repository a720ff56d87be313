//! The trait of an update rule, and the arguments of one call.

use std::fmt::Debug;
use thiserror::Error;

/// The arguments of one update, the same for all elements of the segment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    /// Number of this step, counted from 1.
    pub step: u64,
    /// Learning rate of this step, times the factor of the segment's parameter group.
    pub lr: f64,
    /// Factor on every gradient, applied on the fly (see [`clip_factor`](crate::clip_factor)); 1 = none.
    pub grad_scale: f32,
    /// Factor on the rule's weight decay: 1 for weights, 0 for biases and norms, or the factor of a parameter group.
    pub decay_factor: f64,
}

impl Update {
    /// 1 - lr·decay, by which decoupled weight decay multiplies a weight.
    pub(crate) fn keep(&self, weight_decay: f64) -> f32 {
        (1.0 - self.lr * (weight_decay * self.decay_factor)) as f32
    }

    /// Checks the requirements of every rule, and returns the state vectors as an array. Every rule should call it
    /// first.
    ///
    /// # Errors
    /// When the step is 0, when the number of state vectors is not `STATES`, or when the lengths differ.
    pub fn check<'a, 'b, const STATES: usize>(
        &self,
        rule: &str,
        weights: &[f32],
        grads: &[f32],
        states: &'a mut [&'b mut [f32]],
    ) -> Result<&'a mut [&'b mut [f32]; STATES]> {
        if self.step == 0 {
            return Err(OptimError::StepZero);
        }
        let weights = weights.len();
        if grads.len() != weights {
            return Err(OptimError::Grads { grads: grads.len(), weights });
        }
        let given = states.len();
        let states: &mut [_; STATES] =
            states.try_into().map_err(|_| OptimError::States { rule: rule.to_owned(), given, expected: STATES })?;
        for (state, values) in states.iter().enumerate() {
            if values.len() != weights {
                return Err(OptimError::State { state, len: values.len(), weights });
            }
        }
        Ok(states)
    }
}

/// An update rule on flat slices of host memory. A rule of your own implements this and becomes a
/// [`Rule::Custom`](crate::Rule::Custom).
///
/// Every element is updated from its own weight, gradient and states only, so the bits of the result do not depend on
/// how a parameter is cut into segments: segments that differ in learning rate or weight decay, or that lie on
/// different ranks, are updated in separate calls. Pieces that different threads update may be separate calls too.
pub trait Optimizer: Debug + Send + Sync {
    /// The rule's name, for messages and checkpoints: `adamw`.
    fn name(&self) -> &str;

    /// Names of the state vectors, in order: [`update`](Self::update) takes one `f32` vector for each, as long as the
    /// weights and all zero before the first step.
    fn state_names(&self) -> &[&'static str];

    /// Updates `weights` and `states` in one pass over them.
    ///
    /// # Errors
    /// When the step is 0 or the lengths of the slices differ; nothing has been written then.
    fn update(&self, update: Update, weights: &mut [f32], grads: &[f32], states: &mut [&mut [f32]]) -> Result<()>;
}

/// The result of a call of an update rule.
pub type Result<T, E = OptimError> = std::result::Result<T, E>;

/// A call that an update rule refuses.
#[derive(Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum OptimError {
    /// Steps are counted from 1.
    #[error("step 0: steps are counted from 1")]
    StepZero,
    /// Gradients and weights differ in length.
    #[error("{grads} gradients for {weights} weights: the lengths must be equal")]
    Grads { grads: usize, weights: usize },
    /// Wrong number of state vectors.
    #[error("{given} state vectors given: {rule} takes {expected}")]
    States { rule: String, given: usize, expected: usize },
    /// A state vector and the weights differ in length.
    #[error("state vector {state} has {len} values for {weights} weights: the lengths must be equal")]
    State { state: usize, len: usize, weights: usize },
    /// A rule that needs whole parameters was given elements.
    #[error("{rule} reads whole parameters: run its passes (WholeOptimizer), or use adamw or sgd on elements")]
    NeedsWhole { rule: String },
    /// A user-written rule refused the call for a reason of its own.
    #[error("{rule}: {problem}")]
    Custom { rule: String, problem: String },
}

meshwork_core::debug_as_display!(OptimError);
