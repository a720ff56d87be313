//! Operations that touch each element once: sums, biases, activations, dropout.

use super::table::*;
use crate::random::Key;
use crate::shape::MAX_DIMS;
use crate::tape::RowBlocks;
use meshwork_core::{Buffer, DType};

/// The elements that dropout keeps: a function of the global position of an element, so that it does not depend on the
/// mesh.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutMask {
    /// Probability of dropping an element, in [0, 1).
    pub p: f32,
    /// The stream of randomness: seed, step and layer.
    pub key: Key,
    /// Number of dims in use below.
    pub ndim: usize,
    /// Extents of the local tensor.
    pub local: [usize; MAX_DIMS],
    /// Global position of the local element 0, per dim.
    pub offset: [u64; MAX_DIMS],
    /// Extents of the global tensor (dim 0 is never used: samples are numbered without end).
    pub global: [u64; MAX_DIMS],
}

kernels! {
    /// Element-wise operations. A `bias` is repeated over rows of its length. All but `tree_sum` and `relu` take 16
    /// bits.
    pub trait Pointwise at pointwise {
        /// a + b.
        fn add(&self, a: &Buffer, b: &Buffer) -> Result<Buffer>
            | profile(Pointwise: a, b), halves(alike a, b -> a), meta(like a);
        /// `a[at..at + b.count()] += b`.
        fn add_assign(&self, a: &mut Buffer, at: usize, b: &Buffer) -> Result<()>
            | profile(Pointwise: b, b, b), halves(alike a, b else {
                  let b = self.wide(b)?;
                  self.write(a, at..at + b.count(), true, |a, at| self.inner.pointwise()?.add_assign(a, at, &b))
              }), meta(nothing);
        /// The sum of `count` vectors of `n` elements that lie in `x` from `start` on, in the
        /// [tree](meshwork_core::tree): written to `x[to..to + n]`, where `to <= start`. The vectors are overwritten.
        fn tree_sum(&self, x: &mut Buffer, start: usize, count: usize, n: usize, to: usize) -> Result<()>
            | profile(= Traffic::moved(Class::Pointwise, "tree_sum", x, (count + 1) * n)), halves({
                  self.write(x, to..start + count * n, true, |x, at| {
                      self.inner.pointwise()?.tree_sum(x, at + start - to, count, n, at)
                  })
              }), meta(nothing);
        /// x + bias.
        fn bias(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer>
            | profile(Pointwise: x, bias), halves(alike x, bias -> x), meta(like x);
        /// Gradient of a bias of `n` elements: for each block the sum of its rows of dy, in order in parts of 64, then
        /// over the parts in order.
        fn bias_grad(&self, dy: &Buffer, n: usize, blocks: RowBlocks) -> Result<Buffer>
            | profile(Pointwise: dy), halves(as_is),
              meta(scratch dy.dtype().widened() => n * blocks.parts(dy.count() / n);
                   dy.dtype().widened() => n * blocks.count());
        /// x + bias + residual.
        fn bias_residual(&self, x: &Buffer, bias: &Buffer, residual: &Buffer) -> Result<Buffer>
            | profile(Pointwise: x, bias, residual), halves(alike x, bias, residual -> x), meta(like x);
        /// gelu(x + bias) of type `stored`, tanh form, bitwise equal to the two calls in sequence. `stored` is the type
        /// of x or its [operand type](crate::Device::operand_dtype).
        fn bias_gelu(&self, x: &Buffer, bias: &Buffer, stored: DType) -> Result<Buffer>
            | profile(Pointwise: x, bias), halves(alike x, bias => stored), meta(stored => x.count());
        /// Gradients of gelu(x + bias) in [`linear_bias_gelu`](super::Matmul::linear_bias_gelu): overwrites dy with dx
        /// = dy · gelu'(x + bias), and returns the gradient of the bias as [`bias_grad`](Self::bias_grad) does.
        fn bias_gelu_grad(&self, dy: &mut Buffer, x: &Buffer, bias: &Buffer, blocks: RowBlocks) -> Result<Buffer>
            | profile(Pointwise: x, dy, dy, bias), halves(alike dy, x, bias else {
                  let (x, bias) = (self.wide(x)?, self.wide(bias)?);
                  self.write(dy, 0..dy.count(), true, |dy, _| {
                      self.inner.pointwise()?.bias_gelu_grad(dy, &x, &bias, blocks)
                  })
              }),
              meta(scratch x.dtype().widened() => bias.count() * blocks.parts(x.count() / bias.count());
                   x.dtype().widened() => bias.count() * blocks.count());
        /// gelu(x), tanh form.
        fn gelu(&self, x: &Buffer) -> Result<Buffer>
            | profile(Pointwise: x), halves(as_is), meta(like x);
        /// dy · gelu'(x).
        fn gelu_grad(&self, dy: &Buffer, x: &Buffer) -> Result<Buffer>
            | profile(Pointwise: dy, x), halves(alike dy, x -> x), meta(like x);
        /// silu(gate) · up of the pairs (gate, up) in x, `[.., 2] → [..]`, of type `stored`: the type of x or its
        /// [operand type](crate::Device::operand_dtype).
        fn swiglu(&self, x: &Buffer, stored: DType) -> Result<Buffer>
            | profile(Pointwise: x), halves(alike x => stored), meta(stored => x.count() / 2);
        /// Overwrites the pairs in x with their gradient.
        fn swiglu_grad(&self, dy: &Buffer, x: &mut Buffer) -> Result<()>
            | profile(Pointwise: dy, x, x), halves(alike dy, x else {
                  let dy = self.wide(dy)?;
                  self.write(x, 0..x.count(), true, |x, _| self.inner.pointwise()?.swiglu_grad(&dy, x))
              }), meta(nothing);
        /// (max(x, 0), one bit per element: whether it is above 0). NaN stays NaN. The bits are packed in bytes, the
        /// first element in the lowest bit of the first byte.
        fn relu(&self, x: &Buffer) -> Result<(Buffer, Buffer)>
            | profile(Pointwise: x), halves(wide x -> x), meta(x => x.count(), U8 => x.count().div_ceil(8));
        /// dy where the bit is set, else 0.
        fn relu_grad(&self, dy: &Buffer, above: &Buffer) -> Result<Buffer>
            | profile(Pointwise: dy, above), halves(wide dy -> dy), meta(like dy);
        /// x as `to`, each element rounded to the nearest, ties to even: from f32 to bf16 (subnormals become zeros) or
        /// f16, and back.
        fn cast(&self, x: &Buffer, to: DType) -> Result<Buffer>
            | profile(Pointwise: x), halves({
                  self.inner.pointwise()?.cast(&self.castable(x, to)?, to)
              }), meta(to => x.count());

        /// The same in the type of `out`, written to its elements from `at` on.
        ///
        /// # Errors
        /// As [`cast`](Self::cast), and when there is no room or `out` is shared.
        fn cast_into(&self, x: &Buffer, out: &mut Buffer, at: usize) -> Result<()>
            | profile(= Traffic::cast_into(x, out)), halves({
                  self.inner.pointwise()?.cast_into(&self.castable(x, out.dtype())?, out, at)
              }), meta(nothing);
        /// x / (1 - p) where the mask keeps the element, else 0. The gradient is the same call on dy.
        fn dropout(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer>
            | profile(Pointwise: x), halves(as_is), meta(like x);
    }
}
