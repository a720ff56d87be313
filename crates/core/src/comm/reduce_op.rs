//! How the elements of several ranks become one.

use serde::{Deserialize, Serialize};

crate::named! {
    /// How the elements of several ranks are reduced to one.
    ///
    /// NaN and the order of sums are as described here on communicators whose order is
    /// [`BalancedTree`](super::ReductionOrder::BalancedTree); other backends may ignore a NaN in `Max` and `Min`, as
    /// NCCL does.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    pub enum ReduceOp {
        /// Their sum; integers wrap around.
        Sum = "sum",
        /// The largest of them; NaN if any is NaN.
        Max = "max",
        /// The smallest of them; NaN if any is NaN.
        Min = "min",
    }
    name: "Its name in programs and messages: `sum`, `max`, `min`.", ALL: "Every operation."
}
