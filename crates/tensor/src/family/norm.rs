//! Layer norm over the last `n` elements of each row: `y = (x - mean) · rstd · gamma + beta`.

use crate::error::Result;
use meshwork_core::Buffer;
use std::fmt::Debug;

/// Layer norm and its gradients, over `rows = x.count() / n`.
pub trait Norm: Debug {
    /// (y, mean `[rows]`, rstd `[rows]`).
    fn layer_norm(&self, x: &Buffer, gamma: &Buffer, beta: &Buffer, eps: f64) -> Result<(Buffer, Buffer, Buffer)>;

    /// (dx, dgamma `[n]`, dbeta `[n]`); the sums over rows go by leaves of 64 rows in order, and then over the leaves in order.
    /// Given a `sum`, dx is added to it, in place: (sum + dx, dgamma, dbeta).
    fn layer_norm_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        gamma: &Buffer,
        mean: &Buffer,
        rstd: &Buffer,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer, Buffer)>;
}
