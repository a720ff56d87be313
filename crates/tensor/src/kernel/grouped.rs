//! Products of groups of rows, each group with its own matrix: the linear layers of experts.

use super::Pointwise;
use super::table::*;
use crate::tape::Terms;
use meshwork_core::{Buffer, DType};
use std::ops::Range;

/// Groups of consecutive rows, each of any length, and the dims of their products: group g has `W_g[n, k]`.
#[derive(Clone, Copy, Debug)]
pub struct GroupedGemm<'a> {
    /// Rows of each group.
    pub rows: &'a [usize],
    /// Features of the result.
    pub n: usize,
    /// Features that are summed over.
    pub k: usize,
    /// How the sums over features are cut.
    pub terms: Terms,
}

impl GroupedGemm<'_> {
    /// Rows of all groups.
    pub fn all_rows(&self) -> usize {
        self.rows.iter().sum()
    }

    /// Products of other rows with the same matrices.
    pub fn over<'r>(&self, rows: &'r [usize]) -> GroupedGemm<'r> {
        GroupedGemm { rows, n: self.n, k: self.k, terms: self.terms }
    }

    /// Floating point operations: a multiplication and an addition per term.
    pub fn flops(&self) -> u64 {
        2 * self.all_rows() as u64 * self.n as u64 * self.k as u64
    }

    /// The type of the result (Y of X and W, or dX of dY and W): the type of the operands, or f32 if they differ and
    /// one of them has 16 bits.
    pub fn result(x: &Buffer, w: &Buffer) -> DType {
        if x.dtype() == w.dtype() { w.dtype() } else { w.dtype().widened() }
    }
}

/// For each group, the rows over which its gradient is summed, as consecutive blocks. The block sums are added up in
/// the [tree](meshwork_core::tree).
pub type GroupBlocks = [Vec<Range<usize>>];

/// The rows of each group.
pub fn block_rows(blocks: &GroupBlocks) -> Vec<usize> {
    blocks.iter().map(|blocks| blocks.iter().map(ExactSizeIterator::len).sum()).collect()
}

/// The destination of the gradients of all groups' weights, one after the other.
#[derive(Debug)]
pub struct GroupedGrad<'a> {
    /// Memory that holds them.
    pub buffer: &'a mut Buffer,
    /// Index of the first element in `buffer`.
    pub start: usize,
    /// Whether to add to the old contents instead of overwriting them. Only for sums of one block.
    pub accumulate: bool,
}

kernels! {
    /// Products of groups of rows, without padding. The bits of a row depend on that row alone, as in
    /// [`Matmul`](super::Matmul); operands may be stored in the same types. A result has the type of its operands if
    /// they agree, else the type of the sums ([`GroupedGemm::result`]). The threads share all groups, however uneven
    /// they are.
    pub trait Grouped at grouped_matmul {
        /// `Y_g = X_g · W_gᵀ`: `[rows, k]` and `[groups, n, k]` to `[rows, n]`.
        fn grouped_linear(&self, spec: GroupedGemm<'_>, x: &Buffer, w: &Buffer) -> Result<Buffer>
            | profile(= Traffic::grouped("grouped gemm nt", spec, w.dtype(), &[x, w])), halves(factor x, w -> w),
              meta(flops Matmul: spec.flops(); GroupedGemm::result(x, w) => spec.all_rows() * spec.n);

        /// (Y of [`grouped_linear`](Self::grouped_linear), [`swiglu`](super::Pointwise::swiglu) of Y's pairs
        /// `[rows, n / 2]` of type `stored`), bitwise equal to the two calls in sequence. Only for sums of one block.
        fn grouped_linear_swiglu(
            &self,
            spec: GroupedGemm<'_>,
            x: &Buffer,
            w: &Buffer,
            stored: DType,
        ) -> Result<(Buffer, Buffer)>
            | profile(= Traffic::grouped("grouped gemm nt, swiglu", spec, w.dtype(), &[x, w])), halves({
                  if !w.dtype().is_half() {
                      return self.inner.grouped_matmul()?.grouped_linear_swiglu(spec, &self.factor(x)?, w, stored);
                  }
                  let product = self.grouped_linear(spec, x, w)?;
                  let gated = self.swiglu(&product, stored)?;
                  Ok((product, gated))
              }),
              meta(flops Matmul: spec.flops();
                   GroupedGemm::result(x, w) => spec.all_rows() * spec.n, stored => spec.all_rows() * spec.n / 2);
        /// `dX_g = dY_g · W_g`.
        fn grouped_input_grad(&self, spec: GroupedGemm<'_>, dy: &Buffer, w: &Buffer) -> Result<Buffer>
            | profile(= Traffic::grouped("grouped gemm nn", spec, w.dtype(), &[dy, w])), halves(factor dy, w -> dy),
              meta(flops Matmul: spec.flops(); GroupedGemm::result(dy, w) => spec.all_rows() * spec.k);
        /// `dW_g = dY_gᵀ · X_g` over the rows of its blocks.
        fn grouped_weight_grad(
            &self,
            spec: GroupedGemm<'_>,
            blocks: &GroupBlocks,
            dy: &Buffer,
            x: &Buffer,
            dw: GroupedGrad<'_>,
        ) -> Result<()>
            | profile(= Traffic::grouped_weight_grad(spec, [dy, x], &dw)), halves({
                  let (dy, x, count) = (self.factor(dy)?, self.factor(x)?, spec.rows.len() * spec.n * spec.k);
                  self.write_groups(dw, count, |dw| {
                      self.inner.grouped_matmul()?.grouped_weight_grad(spec, blocks, &dy, &x, dw)
                  })
              }),
              meta(flops Matmul: spec.over(&block_rows(blocks)).flops(); nothing);
        /// `Y_g = X_g + b_g`, `[rows, n]` and `[groups, n]`.
        fn grouped_bias(&self, rows: &[usize], x: &Buffer, bias: &Buffer) -> Result<Buffer>
            | profile(Pointwise: x, bias), halves(wide x, bias -> x), meta(like x);
        /// `db_g = Σ dY_g` over the rows of its blocks, in order from zero within each block.
        fn grouped_bias_grad(&self, blocks: &GroupBlocks, n: usize, dy: &Buffer, db: GroupedGrad<'_>) -> Result<()>
            | profile(Pointwise: dy), halves({
                  let dy = self.wide(dy)?;
                  self.write_groups(db, blocks.len() * n, |db| {
                      self.inner.grouped_matmul()?.grouped_bias_grad(blocks, n, &dy, db)
                  })
              }), meta(nothing);
    }
}
