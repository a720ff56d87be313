//! The exchange between ranks that each hold a part of a sequence, around and within an attention.

use super::order::Order;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{AttentionMasks, GroupedShape};
use crate::tape::Tape;
use crate::tensor::Tensor;
use meshwork_core::Axes;
use std::fmt::Debug;
use std::sync::Arc;

/// An attention whose sequence an axis cuts: what its ranks send each other, and which kernels they call. The types,
/// the masks and the place on the tape are those of [`Var::exchanged_attention`](crate::Var::exchanged_attention).
pub trait Exchange: Debug + Send + Sync {
    /// The name of the operation.
    fn name(&self) -> &'static str;

    /// The axes that cut the sequence.
    fn axes(&self) -> Axes;

    /// The output for the queries of this rank, and what [`gradients`](Self::gradients) reads: queries, keys with
    /// values, output, and log-sum-exp.
    ///
    /// # Errors
    /// Heads that the ranks cannot share out; those of collectives and kernels.
    fn attend(&self, call: &Exchanged<'_>, q: &Tensor, kv: &Tensor) -> Result<(Tensor, [Tensor; 4])>;

    /// The gradients of the queries, and of the keys and values, of this rank.
    fn gradients(&self, call: &Exchanged<'_>, dout: &Tensor, saved: [Tensor; 4]) -> Result<(Tensor, Tensor)>;
}

/// One call of an [`Exchange`].
#[derive(Clone, Copy, Debug)]
pub struct Exchanged<'a> {
    /// The tape, with the groups of ranks.
    pub tape: &'a Tape,
    /// The device.
    pub device: &'a Arc<dyn Device>,
    /// The queries, keys and values of this rank: equally many tokens of each.
    pub shape: GroupedShape,
    /// The masks. Positions of documents are those of all tokens, in the order of the sequence.
    pub masks: AttentionMasks<'a>,
    /// The order in which the tokens of all ranks lie.
    pub order: &'a Order,
}
