//! Norms over the last `n` elements of each row: layer norm, `y = (x - mean) · rstd · gamma + beta`, and root mean
//! square norm, `y = x · rstd · weight`.

use super::table::*;
use crate::tape::RowBlocks;
use meshwork_core::{Buffer, DType};

kernels! {
    /// Norms and their gradients, over `rows = x.count() / n`. They take 16 bits.
    pub trait Norm at norm {
        /// (y of type `stored`, mean `[rows]`, rstd `[rows]`); `affine` are gamma and beta. `stored` is the type of x
        /// or its [operand type](crate::Device::operand_dtype).
        fn layer_norm(&self, x: &Buffer, affine: [&Buffer; 2], eps: f64, stored: DType) -> Result<(Buffer, Buffer, Buffer)>
            | profile(Norm: x, affine[0], affine[1]), halves({
                  let [x, gamma, beta] = &self.alike([x, affine[0], affine[1]])?;
                  let inner = self.stored(x.dtype(), stored);
                  self.rounded(self.inner.norm()?.layer_norm(x, [gamma, beta], eps, inner)?, stored)
              }),
              meta(stored => x.count(), x.dtype().widened() => x.count() / affine[0].count(),
                   x.dtype().widened() => x.count() / affine[0].count());

        /// (dx, dgamma and dbeta, each `[blocks, n]`); in each block, rows are summed in order in parts of 64, then the
        /// parts in order. `stats` are mean and rstd. Given a `sum`, dx is added to it, in place: (sum + dx, dgamma,
        /// dbeta).
        fn layer_norm_grad(
            &self,
            dy: &Buffer,
            x: &Buffer,
            gamma: &Buffer,
            stats: [&Buffer; 2],
            blocks: RowBlocks,
            sum: Option<Buffer>,
        ) -> Result<(Buffer, Buffer, Buffer)>
            | profile(Norm: dy, x, gamma, stats[0], stats[1]; sum), halves(alike dy, x, gamma; sum -> x),
              meta(= self.norm_grad(x, gamma.count(), blocks, sum).map(|(dx, [dgamma, dbeta])| (dx, dgamma, dbeta)));

        /// (y of type `stored`, rstd `[rows]`), where `rstd = 1/√(mean of x² + eps)`. `stored` is the type of x or its
        /// [operand type](crate::Device::operand_dtype).
        fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f64, stored: DType) -> Result<(Buffer, Buffer)>
            | profile(Norm: x, weight), halves(alike x, weight => stored),
              meta(stored => x.count(), x.dtype().widened() => x.count() / weight.count());

        /// (dx, dweight `[blocks, n]`), with sums and `sum` as in [`layer_norm_grad`](Self::layer_norm_grad).
        fn rms_norm_grad(
            &self,
            dy: &Buffer,
            x: &Buffer,
            weight: &Buffer,
            rstd: &Buffer,
            blocks: RowBlocks,
            sum: Option<Buffer>,
        ) -> Result<(Buffer, Buffer)>
            | profile(Norm: dy, x, weight, rstd; sum), halves(alike dy, x, weight; sum -> x),
              meta(= self.norm_grad(x, weight.count(), blocks, sum).map(|(dx, [dweight])| (dx, dweight)));
    }
}
