//! The walks over the tape of a segment.

/// A walk over the tape of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Walk {
    /// Forward, up to the loss on the last stage.
    Forward,
    /// All gradients.
    Backward,
    /// The gradients of values, where the gradients of weights are deferred.
    Inputs,
    /// The gradients of weights.
    Weights,
}
