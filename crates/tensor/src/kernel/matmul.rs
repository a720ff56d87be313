//! Matrix products.

use super::Pointwise;
use super::table::*;
use crate::tape::Terms;
use meshwork_core::{Buffer, DType};

/// A product with at most so many terms that is added to C has the bits of the product by itself, added afterwards.
pub const FEW_TERMS: usize = 256;

/// `C[m, n] = op(A) · op(B)` or `C += ..`, all row-major and contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gemm {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// A is stored as [k, m] instead of [m, k].
    pub a_transposed: bool,
    /// B is stored as [n, k] instead of [k, n].
    pub b_transposed: bool,
    /// Add to C instead of overwriting it. Only for sums with one reduction block.
    pub accumulate: bool,
    /// How the sums are cut into reduction blocks.
    pub terms: Terms,
    /// Compute in the type of C even on a device that would round the operands. Neither operand is stored rounded.
    pub exact: bool,
}

impl Gemm {
    /// The forward of a linear layer: `Y[m, n] = X[m, k] · W[n, k]ᵀ`.
    pub fn linear(m: usize, n: usize, k: usize) -> Self {
        Self { m, n, k, a_transposed: false, b_transposed: true, accumulate: false, terms: Terms::WHOLE, exact: false }
    }

    /// Its input gradient: `dX[m, k] = dY[m, n] · W[n, k]`, for the m, n, k of the forward.
    pub fn linear_input_grad(m: usize, n: usize, k: usize) -> Self {
        Self {
            m,
            n: k,
            k: n,
            a_transposed: false,
            b_transposed: false,
            accumulate: false,
            terms: Terms::WHOLE,
            exact: false,
        }
    }

    /// Its weight gradient: `dW[n, k] = dY[m, n]ᵀ · X[m, k]`, for the m, n, k of the forward.
    pub fn linear_weight_grad(m: usize, n: usize, k: usize) -> Self {
        Self {
            m: n,
            n: k,
            k: m,
            a_transposed: true,
            b_transposed: false,
            accumulate: false,
            terms: Terms::WHOLE,
            exact: false,
        }
    }

    /// The same, added to the old contents if `accumulate`.
    pub fn accumulating(self, accumulate: bool) -> Self {
        Self { accumulate, ..self }
    }

    /// The same, with the sums cut into the blocks of `terms`.
    pub fn over(self, terms: Terms) -> Self {
        Self { terms, ..self }
    }

    /// The same, without rounding its operands.
    pub fn exact(self, exact: bool) -> Self {
        Self { exact, ..self }
    }

    /// Floating point operations: a multiplication and an addition per term.
    pub fn flops(&self) -> u64 {
        product_flops([self.m, self.n, self.k])
    }
}

/// A multiplication and an addition per term.
fn product_flops(mnk: [usize; 3]) -> u64 {
    2 * mnk.iter().map(|&extent| extent as u64).product::<u64>()
}

// Widened products that allocate their result have weights in f32, because the result has the type of the weights.
// Operations fused with a product in 16 bits read the rounded product, because backward recomputes them from that.
kernels! {
    /// Matrix products. The bits of a result depend only on k and its reduction blocks, never on m, n, layout or thread
    /// count. Either operand may be stored in the device's type for [operands](crate::Device::operand_dtype), with the
    /// same bits; and in bf16 on any device, in products of f32, with the bits of a widened copy, unless the product is
    /// [exact](Gemm::exact). The results of `gemm`, `gemm_sum` and `linear_bias`, and the bias, may have 16 bits.
    pub trait Matmul at matmul {
        /// Computes `spec` into the elements of `c` from `start` on.
        fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer, start: usize) -> Result<()>
            | profile(= Traffic::gemm(spec, [a, b], c)), halves({
                  let operand = |x| if spec.exact { self.wide(x) } else { self.factor(x) };
                  self.inner.matmul()?.gemm(spec, &operand(a)?, &operand(b)?, c, start)
              }), meta(flops Matmul: spec.flops(); nothing);
        /// Computes the sum of two products with the same rows, columns and number of blocks, into the elements of `c`
        /// from `start` on. Each block sums the terms of the first product, then those of the second.
        fn gemm_sum(&self, specs: [Gemm; 2], a: [&Buffer; 2], b: [&Buffer; 2], c: &mut Buffer, start: usize) -> Result<()>
            | profile(= Traffic::gemm_sum(specs, a, b, c)), halves({
                  let operand = |x| if specs.iter().any(|spec| spec.exact) { self.wide(x) } else { self.factor(x) };
                  let ([a0, a1], [b0, b1]) = (a.map(operand), b.map(operand));
                  self.inner.matmul()?.gemm_sum(specs, [&a0?, &a1?], [&b0?, &b1?], c, start)
              }),
              meta(flops Matmul: specs[0].flops() + specs[1].flops(); nothing);
        /// `X[m, k] · W[n, k]ᵀ + bias[n]`, of the type of the bias, bitwise equal to the product followed by
        /// [`bias`](super::Pointwise::bias).
        fn linear_bias(&self, mnk: [usize; 3], x: &Buffer, w: &Buffer, bias: &Buffer) -> Result<Buffer>
            | profile(= Traffic::product("gemm nt + bias", mnk, bias.dtype(), &[x, w, bias])), halves({
                  let bias = if are_alike(&[w, bias]) { bias.clone() } else { self.wide(bias)? };
                  let y = self.inner.matmul()?.linear_bias(mnk, &self.factor(x)?, &self.factor(w)?, &bias)?;
                  self.rounded(y, w.dtype())
              }),
              meta(flops Matmul: product_flops(mnk); bias => mnk[0] * mnk[1]);
        /// (`Y = X[m, k] · W[n, k]ᵀ`, `gelu(Y + bias[n])` of type `stored`), tanh form, bitwise equal to the product,
        /// then [`bias`](super::Pointwise::bias), then [`gelu`](super::Pointwise::gelu). Y is an input of
        /// [`bias_gelu_grad`](super::Pointwise::bias_gelu_grad); `stored` is the type of Y or its
        /// [operand type](crate::Device::operand_dtype).
        fn linear_bias_gelu(
            &self,
            mnk: [usize; 3],
            x: &Buffer,
            w: &Buffer,
            bias: &Buffer,
            stored: DType,
        ) -> Result<(Buffer, Buffer)>
            | profile(= Traffic::product("gemm nt + bias, gelu", mnk, bias.dtype(), &[x, w, bias])), halves({
                  if !w.dtype().is_half() {
                      return self.inner.matmul()?.linear_bias_gelu(mnk, &self.factor(x)?, w, &self.wide(bias)?, stored);
                  }
                  let product = self.product(mnk, x, w)?;
                  let gelu = self.bias_gelu(&product, bias, stored)?;
                  Ok((product, gelu))
              }),
              meta(flops Matmul: product_flops(mnk); bias => mnk[0] * mnk[1], stored => mnk[0] * mnk[1]);
        /// (`Y = X[m, k] · W[n, k]ᵀ`, [`swiglu`](super::Pointwise::swiglu) of Y's pairs `[m, n / 2]` of type `stored`),
        /// bitwise equal to the two calls in sequence.
        fn linear_swiglu(&self, mnk: [usize; 3], x: &Buffer, w: &Buffer, stored: DType) -> Result<(Buffer, Buffer)>
            | profile(= Traffic::product("gemm nt, swiglu", mnk, w.dtype().widened(), &[x, w])), halves({
                  if !w.dtype().is_half() {
                      return self.inner.matmul()?.linear_swiglu(mnk, &self.factor(x)?, w, stored);
                  }
                  let product = self.product(mnk, x, w)?;
                  let gated = self.swiglu(&product, stored)?;
                  Ok((product, gated))
              }),
              meta(flops Matmul: product_flops(mnk);
                   w.dtype().widened() => mnk[0] * mnk[1], stored => mnk[0] * mnk[1] / 2);
    }
}
