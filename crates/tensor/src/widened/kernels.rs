//! The kernels of [`Widened`] that need more than the [table of kernels](crate::kernel) can say: each method widens,
//! calls the inner device, and rounds.

use super::{Widened, are_alike};
use crate::error::Result;
use crate::kernel::*;
use crate::tape::RowBlocks;
use meshwork_compress::{Fold, Scheme, Shape};
use meshwork_core::{Buffer, DType};
use meshwork_optim::{Rule, Update};
use std::ops::Range;

impl Widened {
    /// `x · wᵀ`, rounded. Operations fused with it read the rounded product, because backward recomputes them from
    /// that.
    fn product(&self, [m, n, k]: [usize; 3], x: &Buffer, w: &Buffer) -> Result<Buffer> {
        let mut product = self.inner.alloc(w.dtype(), m * n)?;
        self.gemm(Gemm::linear(m, n, k), x, w, &mut product, 0)?;
        Ok(product)
    }

    // Products that allocate their result need weights in f32, because the result has the type of the weights.

    pub(crate) fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer, start: usize) -> Result<()> {
        let operand = |x| if spec.exact { self.wide(x) } else { self.factor(x) };
        let (a, b) = (operand(a)?, operand(b)?);
        self.inner.matmul()?.gemm(spec, &a, &b, c, start)
    }

    pub(crate) fn gemm_sum(
        &self,
        specs: [Gemm; 2],
        a: [&Buffer; 2],
        b: [&Buffer; 2],
        c: &mut Buffer,
        start: usize,
    ) -> Result<()> {
        let operand = |x| if specs.iter().any(|spec| spec.exact) { self.wide(x) } else { self.factor(x) };
        let ([a0, a1], [b0, b1]) = (a.map(operand), b.map(operand));
        self.inner.matmul()?.gemm_sum(specs, [&a0?, &a1?], [&b0?, &b1?], c, start)
    }

    pub(crate) fn linear_bias(&self, mnk: [usize; 3], x: &Buffer, w: &Buffer, bias: &Buffer) -> Result<Buffer> {
        let wide = if are_alike(&[w, bias]) { bias.clone() } else { self.wide(bias)? };
        let y = self.inner.matmul()?.linear_bias(mnk, &self.factor(x)?, &self.factor(w)?, &wide)?;
        self.rounded(y, w.dtype())
    }

    pub(crate) fn linear_bias_gelu(
        &self,
        mnk: [usize; 3],
        x: &Buffer,
        w: &Buffer,
        bias: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        if !w.dtype().is_half() {
            return self.inner.matmul()?.linear_bias_gelu(mnk, &self.factor(x)?, w, &self.wide(bias)?, stored);
        }
        let product = self.product(mnk, x, w)?;
        let gelu = self.bias_gelu(&product, bias, stored)?;
        Ok((product, gelu))
    }

    pub(crate) fn linear_swiglu(
        &self,
        mnk: [usize; 3],
        x: &Buffer,
        w: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        if !w.dtype().is_half() {
            return self.inner.matmul()?.linear_swiglu(mnk, &self.factor(x)?, w, stored);
        }
        let product = self.product(mnk, x, w)?;
        let gated = self.swiglu(&product, stored)?;
        Ok((product, gated))
    }

    pub(crate) fn add_assign(&self, a: &mut Buffer, at: usize, b: &Buffer) -> Result<()> {
        if are_alike(&[a, b]) {
            return self.inner.pointwise()?.add_assign(a, at, b);
        }
        let b = self.wide(b)?;
        self.write(a, at..at + b.count(), true, |a, at| self.inner.pointwise()?.add_assign(a, at, &b))
    }

    pub(crate) fn tree_sum(&self, x: &mut Buffer, start: usize, count: usize, n: usize, to: usize) -> Result<()> {
        self.write(x, to..start + count * n, true, |x, at| {
            self.inner.pointwise()?.tree_sum(x, at + start - to, count, n, at)
        })
    }

    pub(crate) fn bias_gelu_grad(
        &self,
        dy: &mut Buffer,
        x: &Buffer,
        bias: &Buffer,
        blocks: RowBlocks,
    ) -> Result<Buffer> {
        if are_alike(&[dy, x, bias]) {
            return self.inner.pointwise()?.bias_gelu_grad(dy, x, bias, blocks);
        }
        let (x, bias) = (self.wide(x)?, self.wide(bias)?);
        self.write(dy, 0..dy.count(), true, |dy, _| self.inner.pointwise()?.bias_gelu_grad(dy, &x, &bias, blocks))
    }

    pub(crate) fn swiglu_grad(&self, dy: &Buffer, x: &mut Buffer) -> Result<()> {
        if are_alike(&[dy, x]) {
            return self.inner.pointwise()?.swiglu_grad(dy, x);
        }
        let dy = self.wide(dy)?;
        self.write(x, 0..x.count(), true, |x, _| self.inner.pointwise()?.swiglu_grad(&dy, x))
    }

    pub(crate) fn cast(&self, x: &Buffer, to: DType) -> Result<Buffer> {
        match to.is_half() {
            true => self.inner.pointwise()?.cast(&self.wide(x)?, to),
            false => self.inner.pointwise()?.cast(x, to),
        }
    }

    pub(crate) fn cast_into(&self, x: &Buffer, out: &mut Buffer, at: usize) -> Result<()> {
        let x = if out.dtype().is_half() { self.wide(x)? } else { x.clone() };
        self.inner.pointwise()?.cast_into(&x, out, at)
    }

    pub(crate) fn host_map(&self, inputs: &[&Buffer], f: &HostFn<'_>) -> Result<Option<Buffer>> {
        let wide = inputs.iter().map(|x| self.wide(x)).collect::<Result<Vec<_>>>()?;
        let y = self.inner.elementwise()?.host_map(&wide.iter().collect::<Vec<_>>(), f)?;
        y.map(|y| self.rounded(y, inputs.first().map_or(DType::F32, |x| x.dtype()))).transpose()
    }

    pub(crate) fn normalise(
        &self,
        groups: Groups,
        x: &Buffer,
        by: MeanVariance<'_>,
        affine: [&Buffer; 2],
    ) -> Result<Buffer> {
        let (mean, variance, gamma, beta) =
            (self.wide(by.mean)?, self.wide(by.variance)?, self.wide(affine[0])?, self.wide(affine[1])?);
        let by = MeanVariance { mean: &mean, variance: &variance, ..by };
        let y = self.inner.channel_norm()?.normalise(groups, &self.wide(x)?, by, [&gamma, &beta])?;
        self.rounded(y, x.dtype())
    }

    pub(crate) fn normalise_grad(
        &self,
        groups: Groups,
        dy: &Buffer,
        x: &Buffer,
        by: MeanVariance<'_>,
        statistics: Statistics,
        gamma: &Buffer,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let (dtype, dy, x, gamma) = (x.dtype(), self.wide(dy)?, self.wide(x)?, self.wide(gamma)?);
        let (mean, variance) = (self.wide(by.mean)?, self.wide(by.variance)?);
        let by = MeanVariance { mean: &mean, variance: &variance, ..by };
        let (dx, dgamma, dbeta) = self.inner.channel_norm()?.normalise_grad(groups, &dy, &x, by, statistics, &gamma)?;
        Ok((self.rounded(dx, dtype)?, dgamma, dbeta))
    }

    pub(crate) fn decode(&self, shape: GroupedShape, q: &Buffer, kv: &Buffer, cache: &mut Buffer) -> Result<Buffer> {
        let (wide_q, kv) = (self.wide(q)?, self.wide(kv)?);
        let out = self.write(cache, 0..cache.count(), true, |cache, _| {
            self.inner.attention()?.decode(shape, &wide_q, &kv, cache)
        })?;
        self.rounded(out, q.dtype())
    }

    #[expect(clippy::too_many_arguments, reason = "those of the kernel")]
    pub(crate) fn grouped_grad(
        &self,
        shape: GroupedShape,
        dout: &Buffer,
        q: &Buffer,
        kv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        let (dtypes, [dout, q, kv, out]) = ([q, kv].map(Buffer::dtype), self.alike([dout, q, kv, out])?);
        let (dq, dkv) = self.inner.attention()?.grouped_grad(shape, &dout, &q, &kv, &out, lse, masks)?;
        Ok((self.rounded(dq, dtypes[0])?, self.rounded(dkv, dtypes[1])?))
    }

    pub(crate) fn lookup_grad(
        &self,
        ids: &Buffer,
        dout: &Buffer,
        rows: Range<usize>,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        self.write_table(dtable, width, |dtable| self.inner.embedding()?.lookup_grad(ids, dout, rows, width, dtable))
    }

    pub(crate) fn positions_grad(
        &self,
        dout: &Buffer,
        first: usize,
        seq: usize,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        self.write_table(dtable, width, |dtable| {
            self.inner.embedding()?.positions_grad(dout, first, seq, width, dtable)
        })
    }

    /// Writes the gradient of a table with rows of `width`.
    fn write_table(
        &self,
        table: TableGrad<'_>,
        width: usize,
        write: impl FnOnce(TableGrad<'_>) -> Result<()>,
    ) -> Result<()> {
        let TableGrad { buffer, start, rows, accumulate, blocks } = table;
        self.write(buffer, start..start + rows * width, accumulate, |buffer, start| {
            write(TableGrad { buffer, start, rows, accumulate, blocks })
        })
    }

    pub(crate) fn unpack(
        &self,
        scheme: &Scheme,
        shape: Shape,
        message: &Buffer,
        fold: Fold,
        out: &mut Buffer,
        at: usize,
    ) -> Result<()> {
        self.write(out, at..at + shape.rows() * shape.cols(), fold == Fold::Add, |out, at| {
            self.inner.compression()?.unpack(scheme, shape, message, fold, out, at)
        })
    }

    // Weights are the optimizer's f32 weights; gradients may have 16 bits.

    pub(crate) fn sum_of_squares(&self, vectors: &[Buffer], sums: &mut Buffer, at: usize) -> Result<()> {
        let optim = self.inner.optim()?;
        self.wide_in_turn(vectors, |vectors| optim.sum_of_squares(vectors, sums, at))
    }

    pub(crate) fn exact_sum_of_squares(&self, vectors: &[Buffer], digits: &mut Buffer, at: usize) -> Result<()> {
        let optim = self.inner.optim()?;
        self.wide_in_turn(vectors, |vectors| optim.exact_sum_of_squares(vectors, digits, at))
    }

    pub(crate) fn update(&self, rule: &Rule, update: Update, flats: &mut [FlatParts<'_>]) -> Result<()> {
        let optim = self.inner.optim()?;
        if flats.iter().all(|flat| !flat.grads.dtype().is_half()) {
            return optim.update(rule, update, flats);
        }
        // One vector after the other, so that only one vector of gradients exists in f32 at a time.
        flats.iter_mut().try_for_each(|FlatParts { weights, grads, states, ranges }| {
            let grads = &self.wide(grads)?;
            optim.update(rule, update, &mut [FlatParts { weights, grads, states, ranges }])
        })
    }

    pub(crate) fn measure(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        weights: &Buffer,
        vectors: WholeVectors<'_>,
        into: Option<Measured<'_>>,
    ) -> Result<()> {
        let grads = self.wide(vectors.grads)?;
        self.inner.optim()?.measure(part, pass, weights, WholeVectors { grads: &grads, ..vectors }, into)
    }

    pub(crate) fn update_whole(
        &self,
        part: &WholePart<'_>,
        weights: &mut Buffer,
        vectors: WholeVectors<'_>,
    ) -> Result<()> {
        let grads = self.wide(vectors.grads)?;
        self.inner.optim()?.update_whole(part, weights, WholeVectors { grads: &grads, ..vectors })
    }

    pub(crate) fn grouped_linear(&self, spec: GroupedGemm<'_>, x: &Buffer, w: &Buffer) -> Result<Buffer> {
        let y = self.inner.grouped_matmul()?.grouped_linear(spec, &self.factor(x)?, &self.factor(w)?)?;
        self.rounded(y, w.dtype())
    }

    pub(crate) fn grouped_linear_swiglu(
        &self,
        spec: GroupedGemm<'_>,
        x: &Buffer,
        w: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        if !w.dtype().is_half() {
            return self.inner.grouped_matmul()?.grouped_linear_swiglu(spec, &self.factor(x)?, w, stored);
        }
        let product = self.grouped_linear(spec, x, w)?;
        let gated = self.swiglu(&product, stored)?;
        Ok((product, gated))
    }

    pub(crate) fn grouped_input_grad(&self, spec: GroupedGemm<'_>, dy: &Buffer, w: &Buffer) -> Result<Buffer> {
        let dx = self.inner.grouped_matmul()?.grouped_input_grad(spec, &self.factor(dy)?, &self.factor(w)?)?;
        self.rounded(dx, dy.dtype())
    }

    pub(crate) fn grouped_weight_grad(
        &self,
        spec: GroupedGemm<'_>,
        blocks: &GroupBlocks,
        dy: &Buffer,
        x: &Buffer,
        dw: GroupedGrad<'_>,
    ) -> Result<()> {
        let (dy, x, count) = (self.factor(dy)?, self.factor(x)?, spec.rows.len() * spec.n * spec.k);
        self.write_groups(dw, count, |dw| self.inner.grouped_matmul()?.grouped_weight_grad(spec, blocks, &dy, &x, dw))
    }

    pub(crate) fn grouped_bias_grad(
        &self,
        blocks: &GroupBlocks,
        n: usize,
        dy: &Buffer,
        db: GroupedGrad<'_>,
    ) -> Result<()> {
        let dy = self.wide(dy)?;
        self.write_groups(db, blocks.len() * n, |db| self.inner.grouped_matmul()?.grouped_bias_grad(blocks, n, &dy, db))
    }

    /// Writes `count` elements of the gradients of groups.
    fn write_groups(
        &self,
        grad: GroupedGrad<'_>,
        count: usize,
        write: impl FnOnce(GroupedGrad<'_>) -> Result<()>,
    ) -> Result<()> {
        let GroupedGrad { buffer, start, accumulate } = grad;
        self.write(buffer, start..start + count, accumulate, |buffer, start| {
            write(GroupedGrad { buffer, start, accumulate })
        })
    }

    pub(crate) fn combine(
        &self,
        rows: &Buffer,
        choices: Choices<'_>,
        weights: Option<&Buffer>,
        width: usize,
    ) -> Result<Buffer> {
        let weights = weights.map(|weights| self.wide(weights)).transpose()?;
        let sums = self.inner.permutation()?.combine(&self.wide(rows)?, choices, weights.as_ref(), width)?;
        self.rounded(sums, rows.dtype())
    }

    pub(crate) fn combine_grad(
        &self,
        dout: &Buffer,
        rows: &Buffer,
        choices: Choices<'_>,
        order: &Buffer,
        weights: &Buffer,
        width: usize,
    ) -> Result<(Buffer, Buffer)> {
        let (dout, wide, by) = (self.wide(dout)?, self.wide(rows)?, self.wide(weights)?);
        let (drows, dweights) = self.inner.permutation()?.combine_grad(&dout, &wide, choices, order, &by, width)?;
        Ok((self.rounded(drows, rows.dtype())?, self.rounded(dweights, weights.dtype())?))
    }

    pub(crate) fn select(
        &self,
        scores: &Buffer,
        bias: Option<&Buffer>,
        of: &Selection,
        pick: Pick,
    ) -> Result<Selected> {
        let bias = bias.map(|bias| self.wide(bias)).transpose()?;
        let selected = self.inner.routing()?.select(&self.wide(scores)?, bias.as_ref(), of, pick)?;
        Ok(Selected { weights: self.rounded(selected.weights, scores.dtype())?, ..selected })
    }

    pub(crate) fn balance_grad(
        &self,
        dout: &Buffer,
        counts: &Buffer,
        tokens: usize,
        experts: usize,
        scale: f64,
        dtype: DType,
    ) -> Result<Buffer> {
        let wide = if dtype.is_half() { DType::F32 } else { dtype };
        self.rounded(self.inner.routing()?.balance_grad(dout, counts, tokens, experts, scale, wide)?, dtype)
    }
}
