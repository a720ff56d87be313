//! Layer norm over the last `n` elements of each row: `y = (x - mean) · rstd · gamma + beta`.

use crate::error::Result;
use crate::tape::RowLeaves;
use meshwork_core::Buffer;
use std::fmt::Debug;

/// Layer norm and its gradients, over `rows = x.count() / n`.
pub trait Norm: Debug {
    /// (y, mean `[rows]`, rstd `[rows]`).
    fn layer_norm(&self, x: &Buffer, gamma: &Buffer, beta: &Buffer, eps: f64) -> Result<(Buffer, Buffer, Buffer)>;

    /// (dx, dgamma and dbeta, each `[leaves, n]`); for each leaf its rows are summed by 64 of them in order, and then those in
    /// order.
    fn layer_norm_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        gamma: &Buffer,
        mean: &Buffer,
        rstd: &Buffer,
        leaves: RowLeaves,
    ) -> Result<(Buffer, Buffer, Buffer)>;
}
