//! Where gradients of parameters go.

use super::prelude::*;

/// A shard of a parameter's gradient: the sum over some samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradShard {
    /// The parameter.
    pub id: ParamId,
    /// Types of the gradient on this rank: `Partial` on the axes over which it is still to be summed.
    pub types: Types,
    /// Numbers of the samples that it sums, within the batch. In canonical numerics a whole subtree of them.
    pub samples: Range<u64>,
    /// The copies of the gradient that it belongs to; they are one after the other in the share.
    pub copies: Range<usize>,
    /// Number of copies of the gradient: 1 in fast numerics, and also in canonical ones unless the tree ends above the
    /// samples.
    pub of: usize,
}

/// The destination of a share of a parameter's gradient.
#[derive(Debug)]
pub struct GradSlot<'a> {
    /// Memory for it.
    pub buffer: &'a mut Buffer,
    /// Its first element there.
    pub start: usize,
    /// Whether the share overwrites the old contents or is added to them. In canonical numerics it always overwrites,
    /// and the sink adds up.
    pub first: bool,
}

/// The destination of parameter gradients.
pub trait GradSink {
    /// Adds a share to the gradient of a parameter. Shares of several uses and micro-batches add up.
    fn accumulate(&mut self, share: &GradShard, grad: Tensor) -> Result<()>;

    /// Memory to which an operation must write or add its share itself. The share then needs no memory of its own and
    /// no extra pass. `None` if there is no such memory.
    fn place(&mut self, _share: &GradShard) -> Result<Option<GradSlot<'_>>> {
        Ok(None)
    }

    /// Called when every use of the parameter on this tape has added its share.
    fn ready(&mut self, id: ParamId) -> Result<()>;
}
