//! How the elements of several ranks become one.

use serde::{Deserialize, Serialize};

/// How the elements of several ranks are reduced to one.
///
/// NaN and the order of sums are as described here on communicators whose order is
/// [`BalancedTree`](super::ReductionOrder::BalancedTree); other backends may ignore a NaN in `Max` and `Min`, as NCCL
/// does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// Their sum; integers wrap around.
    Sum,
    /// The largest of them; NaN if any is NaN.
    Max,
    /// The smallest of them; NaN if any is NaN.
    Min,
}

impl ReduceOp {
    /// Every operation.
    pub const ALL: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

    /// Its name in programs and messages: `sum`, `max`, `min`.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        }
    }
}
