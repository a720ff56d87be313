//! The walks over the tape of a segment.

/// A walk over the tape of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Walk {
    /// Forward, up to the loss on the last stage.
    Forward,
    /// All gradients.
    Backward,
    /// The gradients of values, where those of weights are deferred.
    Inputs,
    /// Those of weights.
    Weights,
}
