//! Sums over a dim, softmax, and the squared error of samples.

use super::table::*;
use crate::tape::Terms;
use meshwork_core::Buffer;

kernels! {
    /// Sums along dims. Terms are summed in order, in f64, and the sum is rounded once.
    pub trait Reduction at reduction {
        /// `scale` times the sums over the middle dim of x, one for each of `blocks` slices of that dim:
        /// `[outer, extent, inner] → [blocks, outer, inner]`. Boundaries between slices are rounded down.
        fn sum(&self, x: &Buffer, shape: [usize; 3], blocks: usize, scale: f64) -> Result<Buffer>
            | profile(Pointwise: x), halves(wide x -> x), meta(x => blocks * shape[0] * shape[2]);
        /// `scale` times dy, repeated over the middle dim: `[outer, inner] → [outer, extent, inner]`.
        fn spread(&self, dy: &Buffer, shape: [usize; 3], scale: f64) -> Result<Buffer>
            | profile(Pointwise: dy), halves(wide dy -> dy), meta(dy => shape.iter().product());
        /// `e^x` over its sum, along rows of `n`.
        fn softmax(&self, x: &Buffer, n: usize) -> Result<Buffer>
            | profile(Pointwise: x), halves(wide x -> x), meta(like x);
        /// y · (dy - Σ dy · y), along rows of `n`, where y is the softmax.
        fn softmax_grad(&self, dy: &Buffer, y: &Buffer, n: usize) -> Result<Buffer>
            | profile(Pointwise: dy, y), halves(wide dy, y -> y), meta(like dy);
        /// `scale` times the sum of (x - target)² over the elements of each sample, one sum for each reduction block:
        /// `[blocks, samples]` in f64.
        fn squared_error(&self, x: &Buffer, targets: &Buffer, samples: usize, terms: Terms, scale: f64) -> Result<Buffer>
            | profile(Loss: x, targets), halves(wide x, targets), meta(F64 => terms.blocks * samples);
        /// Its gradient with respect to x, 2 · scale · (x - target) · dloss, where `dloss` has an f64 per sample.
        fn squared_error_grad(&self, x: &Buffer, targets: &Buffer, dloss: &Buffer, scale: f64) -> Result<Buffer>
            | profile(Loss: x, targets, dloss), halves(wide x, targets -> x), meta(like x);
    }
}
