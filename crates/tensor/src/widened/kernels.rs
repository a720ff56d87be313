//! The kernels of [`Widened`]: each method widens, calls the inner device, and rounds; or hands the operands on, where every device reads and
//! writes them as they are.
//!
//! More than 400 lines: every method of every kernel trait, one after the other, and nothing else.

use super::{Widened, are_alike};
use crate::error::Result;
use crate::kernel::*;
use crate::tape::{RowBlocks, Terms};
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse};
use meshwork_core::{Buffer, DType};
use meshwork_optim::{Rule, Update};
use std::ops::Range;

impl Widened {
    /// `x · wᵀ`, rounded. What follows it in one pass is computed from the rounded product, as backward computes it again.
    fn product(&self, [m, n, k]: [usize; 3], x: &Buffer, w: &Buffer) -> Result<Buffer> {
        let mut product = self.inner.alloc(w.dtype(), m * n)?;
        self.gemm(Gemm::linear(m, n, k), x, w, &mut product, 0)?;
        Ok(product)
    }
}

/// Products that allocate their result take weights in f32: they give the result in the type of the weights.
impl Matmul for Widened {
    fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer, start: usize) -> Result<()> {
        let operand = |x| if spec.exact { self.wide(x) } else { self.factor(x) };
        let (a, b) = (operand(a)?, operand(b)?);
        self.inner.matmul()?.gemm(spec, &a, &b, c, start)
    }

    fn gemm_sum(&self, specs: [Gemm; 2], a: [&Buffer; 2], b: [&Buffer; 2], c: &mut Buffer, start: usize) -> Result<()> {
        let operand = |x| if specs.iter().any(|spec| spec.exact) { self.wide(x) } else { self.factor(x) };
        let ([a0, a1], [b0, b1]) = (a.map(operand), b.map(operand));
        self.inner.matmul()?.gemm_sum(specs, [&a0?, &a1?], [&b0?, &b1?], c, start)
    }

    fn linear_bias(&self, mnk: [usize; 3], x: &Buffer, w: &Buffer, bias: &Buffer) -> Result<Buffer> {
        let wide = if are_alike(&[w, bias]) { bias.clone() } else { self.wide(bias)? };
        let y = self.inner.matmul()?.linear_bias(mnk, &self.factor(x)?, &self.factor(w)?, &wide)?;
        self.rounded(y, w.dtype())
    }

    fn linear_bias_gelu(
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

    fn linear_swiglu(&self, mnk: [usize; 3], x: &Buffer, w: &Buffer, stored: DType) -> Result<(Buffer, Buffer)> {
        if !w.dtype().is_half() {
            return self.inner.matmul()?.linear_swiglu(mnk, &self.factor(x)?, w, stored);
        }
        let product = self.product(mnk, x, w)?;
        let gated = self.swiglu(&product, stored)?;
        Ok((product, gated))
    }
}

impl Pointwise for Widened {
    fn add(&self, a: &Buffer, b: &Buffer) -> Result<Buffer> {
        let [a_read, b] = self.alike([a, b])?;
        self.rounded(self.inner.pointwise()?.add(&a_read, &b)?, a.dtype())
    }

    fn add_assign(&self, a: &mut Buffer, at: usize, b: &Buffer) -> Result<()> {
        if are_alike(&[a, b]) {
            return self.inner.pointwise()?.add_assign(a, at, b);
        }
        let b = self.wide(b)?;
        self.write(a, at..at + b.count(), true, |a, at| self.inner.pointwise()?.add_assign(a, at, &b))
    }

    fn tree_sum(&self, x: &mut Buffer, start: usize, count: usize, n: usize, to: usize) -> Result<()> {
        self.write(x, to..start + count * n, true, |x, at| {
            self.inner.pointwise()?.tree_sum(x, at + start - to, count, n, at)
        })
    }

    fn bias(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        let [x_read, bias] = self.alike([x, bias])?;
        self.rounded(self.inner.pointwise()?.bias(&x_read, &bias)?, x.dtype())
    }

    fn bias_grad(&self, dy: &Buffer, n: usize, blocks: RowBlocks) -> Result<Buffer> {
        self.inner.pointwise()?.bias_grad(dy, n, blocks)
    }

    fn bias_residual(&self, x: &Buffer, bias: &Buffer, residual: &Buffer) -> Result<Buffer> {
        let [x_read, bias, residual] = self.alike([x, bias, residual])?;
        self.rounded(self.inner.pointwise()?.bias_residual(&x_read, &bias, &residual)?, x.dtype())
    }

    fn bias_gelu(&self, x: &Buffer, bias: &Buffer, stored: DType) -> Result<Buffer> {
        let [x, bias] = self.alike([x, bias])?;
        self.rounded(self.inner.pointwise()?.bias_gelu(&x, &bias, self.stored(x.dtype(), stored))?, stored)
    }

    fn bias_gelu_grad(&self, dy: &mut Buffer, x: &Buffer, bias: &Buffer, blocks: RowBlocks) -> Result<Buffer> {
        if are_alike(&[dy, x, bias]) {
            return self.inner.pointwise()?.bias_gelu_grad(dy, x, bias, blocks);
        }
        let (x, bias) = (self.wide(x)?, self.wide(bias)?);
        self.write(dy, 0..dy.count(), true, |dy, _| self.inner.pointwise()?.bias_gelu_grad(dy, &x, &bias, blocks))
    }

    fn gelu(&self, x: &Buffer) -> Result<Buffer> {
        self.inner.pointwise()?.gelu(x)
    }

    fn gelu_grad(&self, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        let [dy, x_read] = self.alike([dy, x])?;
        self.rounded(self.inner.pointwise()?.gelu_grad(&dy, &x_read)?, x.dtype())
    }

    fn swiglu(&self, x: &Buffer, stored: DType) -> Result<Buffer> {
        self.rounded(self.inner.pointwise()?.swiglu(x, self.stored(x.dtype(), stored))?, stored)
    }

    fn swiglu_grad(&self, dy: &Buffer, x: &mut Buffer) -> Result<()> {
        if are_alike(&[dy, x]) {
            return self.inner.pointwise()?.swiglu_grad(dy, x);
        }
        let dy = self.wide(dy)?;
        self.write(x, 0..x.count(), true, |x, _| self.inner.pointwise()?.swiglu_grad(&dy, x))
    }

    fn relu(&self, x: &Buffer) -> Result<(Buffer, Buffer)> {
        let (y, above) = self.inner.pointwise()?.relu(&self.wide(x)?)?;
        Ok((self.rounded(y, x.dtype())?, above))
    }

    fn relu_grad(&self, dy: &Buffer, above: &Buffer) -> Result<Buffer> {
        self.rounded(self.inner.pointwise()?.relu_grad(&self.wide(dy)?, above)?, dy.dtype())
    }

    fn cast(&self, x: &Buffer, to: DType) -> Result<Buffer> {
        match to.is_half() {
            true => self.inner.pointwise()?.cast(&self.wide(x)?, to),
            false => self.inner.pointwise()?.cast(x, to),
        }
    }

    fn cast_into(&self, x: &Buffer, out: &mut Buffer, at: usize) -> Result<()> {
        let x = if out.dtype().is_half() { self.wide(x)? } else { x.clone() };
        self.inner.pointwise()?.cast_into(&x, out, at)
    }

    fn dropout(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        self.inner.pointwise()?.dropout(x, mask)
    }
}

impl Elementwise for Widened {
    fn map(&self, f: Map, x: &Buffer) -> Result<Buffer> {
        self.rounded(self.inner.elementwise()?.map(f, &self.wide(x)?)?, x.dtype())
    }

    fn map_grad(&self, f: Map, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        self.rounded(self.inner.elementwise()?.map_grad(f, &self.wide(dy)?, &self.wide(x)?)?, x.dtype())
    }

    fn zip(&self, f: Zip, x: &Buffer, y: &Buffer) -> Result<Buffer> {
        self.rounded(self.inner.elementwise()?.zip(f, &self.wide(x)?, &self.wide(y)?)?, x.dtype())
    }

    fn host_map(&self, inputs: &[&Buffer], f: &HostFn<'_>) -> Result<Option<Buffer>> {
        let wide = inputs.iter().map(|x| self.wide(x)).collect::<Result<Vec<_>>>()?;
        let y = self.inner.elementwise()?.host_map(&wide.iter().collect::<Vec<_>>(), f)?;
        y.map(|y| self.rounded(y, inputs.first().map_or(DType::F32, |x| x.dtype()))).transpose()
    }
}

impl Reduction for Widened {
    fn sum(&self, x: &Buffer, shape: [usize; 3], blocks: usize, scale: f64) -> Result<Buffer> {
        self.rounded(self.inner.reduction()?.sum(&self.wide(x)?, shape, blocks, scale)?, x.dtype())
    }

    fn spread(&self, dy: &Buffer, shape: [usize; 3], scale: f64) -> Result<Buffer> {
        self.rounded(self.inner.reduction()?.spread(&self.wide(dy)?, shape, scale)?, dy.dtype())
    }

    fn softmax(&self, x: &Buffer, n: usize) -> Result<Buffer> {
        self.rounded(self.inner.reduction()?.softmax(&self.wide(x)?, n)?, x.dtype())
    }

    fn softmax_grad(&self, dy: &Buffer, y: &Buffer, n: usize) -> Result<Buffer> {
        self.rounded(self.inner.reduction()?.softmax_grad(&self.wide(dy)?, &self.wide(y)?, n)?, y.dtype())
    }

    fn squared_error(&self, x: &Buffer, targets: &Buffer, samples: usize, terms: Terms, scale: f64) -> Result<Buffer> {
        self.inner.reduction()?.squared_error(&self.wide(x)?, &self.wide(targets)?, samples, terms, scale)
    }

    fn squared_error_grad(&self, x: &Buffer, targets: &Buffer, dloss: &Buffer, scale: f64) -> Result<Buffer> {
        let dx = self.inner.reduction()?.squared_error_grad(&self.wide(x)?, &self.wide(targets)?, dloss, scale)?;
        self.rounded(dx, x.dtype())
    }
}

impl Norm for Widened {
    fn layer_norm(
        &self,
        x: &Buffer,
        gamma: &Buffer,
        beta: &Buffer,
        eps: f64,
        stored: DType,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let [x, gamma, beta] = self.alike([x, gamma, beta])?;
        let to = self.stored(x.dtype(), stored);
        let (y, mean, rstd) = self.inner.norm()?.layer_norm(&x, &gamma, &beta, eps, to)?;
        Ok((self.rounded(y, stored)?, mean, rstd))
    }

    fn layer_norm_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        gamma: &Buffer,
        stats: [&Buffer; 2],
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let dtype = x.dtype();
        let ([dy, x, gamma], sum) = self.alike_with([dy, x, gamma], sum)?;
        let (dx, dgamma, dbeta) = self.inner.norm()?.layer_norm_grad(&dy, &x, &gamma, stats, blocks, sum)?;
        Ok((self.rounded(dx, dtype)?, dgamma, dbeta))
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f64, stored: DType) -> Result<(Buffer, Buffer)> {
        let [x, weight] = self.alike([x, weight])?;
        let (y, rstd) = self.inner.norm()?.rms_norm(&x, &weight, eps, self.stored(x.dtype(), stored))?;
        Ok((self.rounded(y, stored)?, rstd))
    }

    fn rms_norm_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        weight: &Buffer,
        rstd: &Buffer,
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer)> {
        let dtype = x.dtype();
        let ([dy, x, weight], sum) = self.alike_with([dy, x, weight], sum)?;
        let (dx, dweight) = self.inner.norm()?.rms_norm_grad(&dy, &x, &weight, rstd, blocks, sum)?;
        Ok((self.rounded(dx, dtype)?, dweight))
    }
}

impl ChannelNorm for Widened {
    fn moments(&self, groups: Groups, x: &Buffer) -> Result<(Buffer, Buffer)> {
        self.inner.channel_norm()?.moments(groups, &self.wide(x)?)
    }

    fn normalise(&self, groups: Groups, x: &Buffer, by: MeanVariance<'_>, affine: [&Buffer; 2]) -> Result<Buffer> {
        let (mean, variance, gamma, beta) =
            (self.wide(by.mean)?, self.wide(by.variance)?, self.wide(affine[0])?, self.wide(affine[1])?);
        let by = MeanVariance { mean: &mean, variance: &variance, ..by };
        let y = self.inner.channel_norm()?.normalise(groups, &self.wide(x)?, by, [&gamma, &beta])?;
        self.rounded(y, x.dtype())
    }

    fn normalise_grad(
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
}

impl Window for Widened {
    fn patches(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        self.rounded(self.inner.window()?.patches(windows, &self.wide(x)?)?, x.dtype())
    }

    fn patches_grad(&self, windows: Windows, dpatches: &Buffer) -> Result<Buffer> {
        self.rounded(self.inner.window()?.patches_grad(windows, &self.wide(dpatches)?)?, dpatches.dtype())
    }

    fn max_pool(&self, windows: Windows, x: &Buffer) -> Result<(Buffer, Buffer)> {
        let (y, places) = self.inner.window()?.max_pool(windows, &self.wide(x)?)?;
        Ok((self.rounded(y, x.dtype())?, places))
    }

    fn max_pool_grad(&self, windows: Windows, dy: &Buffer, places: &Buffer) -> Result<Buffer> {
        self.rounded(self.inner.window()?.max_pool_grad(windows, &self.wide(dy)?, places)?, dy.dtype())
    }

    fn average_pool(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        self.rounded(self.inner.window()?.average_pool(windows, &self.wide(x)?)?, x.dtype())
    }

    fn average_pool_grad(&self, windows: Windows, dy: &Buffer) -> Result<Buffer> {
        self.rounded(self.inner.window()?.average_pool_grad(windows, &self.wide(dy)?)?, dy.dtype())
    }
}

impl Attention for Widened {
    fn causal(&self, shape: AttentionShape, qkv: &Buffer, masks: AttentionMasks<'_>) -> Result<(Buffer, Buffer)> {
        self.inner.attention()?.causal(shape, qkv, masks)
    }

    fn causal_grad(
        &self,
        shape: AttentionShape,
        dout: &Buffer,
        qkv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<Buffer> {
        let (dtype, [dout, qkv, out]) = (qkv.dtype(), self.alike([dout, qkv, out])?);
        self.rounded(self.inner.attention()?.causal_grad(shape, &dout, &qkv, &out, lse, masks)?, dtype)
    }

    fn grouped(
        &self,
        shape: GroupedShape,
        q: &Buffer,
        kv: &Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        let [q_read, kv] = self.alike([q, kv])?;
        let (out, lse) = self.inner.attention()?.grouped(shape, &q_read, &kv, masks)?;
        Ok((self.rounded(out, q.dtype())?, lse))
    }

    fn decode(&self, shape: DecodeShape, q: &Buffer, kv: &Buffer, cache: &mut Buffer) -> Result<Buffer> {
        let (wide_q, kv) = (self.wide(q)?, self.wide(kv)?);
        let out = self.write(cache, 0..cache.count(), true, |cache, _| {
            self.inner.attention()?.decode(shape, &wide_q, &kv, cache)
        })?;
        self.rounded(out, q.dtype())
    }

    fn grouped_grad(
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
}

impl Embedding for Widened {
    fn lookup(&self, ids: &Buffer, table: &Buffer, rows: Range<usize>, vocab: usize, width: usize) -> Result<Buffer> {
        self.inner.embedding()?.lookup(ids, table, rows, vocab, width)
    }

    fn lookup_grad(
        &self,
        ids: &Buffer,
        dout: &Buffer,
        rows: Range<usize>,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        self.write_table(dtable, width, |dtable| self.inner.embedding()?.lookup_grad(ids, dout, rows, width, dtable))
    }

    fn positions(&self, x: &Buffer, table: &Buffer, first: usize, seq: usize, width: usize) -> Result<Buffer> {
        let [x_read, table] = self.alike([x, table])?;
        self.rounded(self.inner.embedding()?.positions(&x_read, &table, first, seq, width)?, x.dtype())
    }

    fn positions_grad(
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
}

impl Widened {
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
}

impl Loss for Widened {
    fn row_stats(&self, logits: &Buffer, targets: &Buffer, shard: VocabShard) -> Result<(Buffer, Buffer)> {
        self.inner.loss()?.row_stats(logits, targets, shard)
    }

    fn larger(&self, max: &mut Buffer, other: &Buffer) -> Result<()> {
        self.inner.loss()?.larger(max, other)
    }

    fn rescale(&self, sums: &mut Buffer, local: &Buffer, global: &Buffer) -> Result<()> {
        self.inner.loss()?.rescale(sums, local, global)
    }

    fn total(&self, max: &Buffer, sums: &Buffer, targets: &Buffer, samples: usize) -> Result<(Buffer, Buffer)> {
        self.inner.loss()?.total(max, sums, targets, samples)
    }

    fn grad(
        &self,
        logits: &mut Buffer,
        targets: &Buffer,
        lse: &Buffer,
        scale: &Buffer,
        shard: VocabShard,
    ) -> Result<()> {
        self.inner.loss()?.grad(logits, targets, lse, scale, shard)
    }

    fn correct(&self, logits: &Buffer, targets: &Buffer, width: usize, samples: usize) -> Result<Buffer> {
        self.inner.loss()?.correct(logits, targets, width, samples)
    }
}

impl Compression for Widened {
    fn pack(
        &self,
        scheme: &Scheme,
        shape: Shape,
        draws: Draws,
        x: &Buffer,
        message: &mut Buffer,
        at: usize,
    ) -> Result<()> {
        self.inner.compression()?.pack(scheme, shape, draws, &self.wide(x)?, message, at)
    }

    fn unpack(
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

    fn take(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, x: &Buffer) -> Result<Buffer> {
        self.inner.compression()?.take(sparse, shape, indices, &self.wide(x)?)
    }

    fn put(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, values: &Buffer) -> Result<Buffer> {
        self.inner.compression()?.put(sparse, shape, indices, &self.wide(values)?)
    }

    fn outgoing(&self, feedback: Feedback, x: &Buffer, first: bool, sender: &mut Sender<Buffer>) -> Result<Buffer> {
        self.inner.compression()?.outgoing(feedback, &self.wide(x)?, first, sender)
    }

    fn sent(&self, feedback: Feedback, target: &Buffer, sent: &Buffer, sender: &mut Sender<Buffer>) -> Result<()> {
        self.inner.compression()?.sent(feedback, &self.wide(target)?, &self.wide(sent)?, sender)
    }

    fn left_factor(
        &self,
        of: PowerSgd,
        shape: Shape,
        draws: Draws,
        m: &Buffer,
        q: &mut Buffer,
        p: &mut Buffer,
    ) -> Result<()> {
        self.inner.compression()?.left_factor(of, shape, draws, &self.wide(m)?, q, p)
    }

    fn right_factor(&self, of: PowerSgd, shape: Shape, m: &Buffer, p: &mut Buffer, q: &mut Buffer) -> Result<()> {
        self.inner.compression()?.right_factor(of, shape, &self.wide(m)?, p, q)
    }

    fn join(&self, of: PowerSgd, shape: Shape, factors: &[Buffer; 2], among: usize, out: &mut Buffer) -> Result<()> {
        self.inner.compression()?.join(of, shape, factors, among, out)
    }
}

/// Weights are the f32 ones that an optimizer keeps; gradients may have 16 bits.
impl Optim for Widened {
    fn zero(&self, x: &mut Buffer, range: Range<usize>) -> Result<()> {
        self.inner.optim()?.zero(x, range)
    }

    fn sum_of_squares(&self, vectors: &[Buffer], sums: &mut Buffer, at: usize) -> Result<()> {
        let optim = self.inner.optim()?;
        self.wide_in_turn(vectors, |vectors| optim.sum_of_squares(vectors, sums, at))
    }

    fn exact_sum_of_squares(&self, vectors: &[Buffer], digits: &mut Buffer, at: usize) -> Result<()> {
        let optim = self.inner.optim()?;
        self.wide_in_turn(vectors, |vectors| optim.exact_sum_of_squares(vectors, digits, at))
    }

    fn update(&self, rule: &Rule, update: Update, flats: &mut [FlatParts<'_>]) -> Result<()> {
        let optim = self.inner.optim()?;
        if flats.iter().all(|flat| !flat.grads.dtype().is_half()) {
            return optim.update(rule, update, flats);
        }
        // One after the other, so that of one the gradients are there in f32.
        flats.iter_mut().try_for_each(|FlatParts { weights, grads, states, ranges }| {
            let grads = &self.wide(grads)?;
            optim.update(rule, update, &mut [FlatParts { weights, grads, states, ranges }])
        })
    }

    fn measure(
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

    fn divide_by_root(&self, x: &mut Buffer, squares: &Buffer, least: f64) -> Result<()> {
        self.inner.optim()?.divide_by_root(x, squares, least)
    }

    fn exact_sums(&self, digits: &Buffer) -> Result<Buffer> {
        self.inner.optim()?.exact_sums(digits)
    }

    fn settle(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        totals: &mut Buffer,
        at: usize,
        sets: &mut [Buffer],
    ) -> Result<()> {
        self.inner.optim()?.settle(part, pass, totals, at, sets)
    }

    fn update_whole(&self, part: &WholePart<'_>, weights: &mut Buffer, vectors: WholeVectors<'_>) -> Result<()> {
        let grads = self.wide(vectors.grads)?;
        self.inner.optim()?.update_whole(part, weights, WholeVectors { grads: &grads, ..vectors })
    }
}

impl Grouped for Widened {
    fn grouped_linear(&self, spec: GroupedGemm<'_>, x: &Buffer, w: &Buffer) -> Result<Buffer> {
        let y = self.inner.grouped_matmul()?.grouped_linear(spec, &self.factor(x)?, &self.factor(w)?)?;
        self.rounded(y, w.dtype())
    }

    fn grouped_linear_swiglu(
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

    fn grouped_input_grad(&self, spec: GroupedGemm<'_>, dy: &Buffer, w: &Buffer) -> Result<Buffer> {
        let dx = self.inner.grouped_matmul()?.grouped_input_grad(spec, &self.factor(dy)?, &self.factor(w)?)?;
        self.rounded(dx, dy.dtype())
    }

    fn grouped_weight_grad(
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

    fn grouped_bias(&self, rows: &[usize], x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        let y = self.inner.grouped_matmul()?.grouped_bias(rows, &self.wide(x)?, &self.wide(bias)?)?;
        self.rounded(y, x.dtype())
    }

    fn grouped_bias_grad(&self, blocks: &GroupBlocks, n: usize, dy: &Buffer, db: GroupedGrad<'_>) -> Result<()> {
        let dy = self.wide(dy)?;
        self.write_groups(db, blocks.len() * n, |db| self.inner.grouped_matmul()?.grouped_bias_grad(blocks, n, &dy, db))
    }
}

impl Widened {
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
}

impl Permutation for Widened {
    fn counts(&self, choices: &Buffer, samples: usize, ids: Range<usize>) -> Result<Buffer> {
        self.inner.permutation()?.counts(choices, samples, ids)
    }

    fn sort(&self, choices: &Buffer, ids: Range<usize>, total: usize) -> Result<(Buffer, Buffer)> {
        self.inner.permutation()?.sort(choices, ids, total)
    }

    fn invert(&self, order: &Buffer, n: usize) -> Result<Buffer> {
        self.inner.permutation()?.invert(order, n)
    }

    fn group_ids(&self, choices: &Buffer, k: usize, size: usize, once: bool) -> Result<Buffer> {
        self.inner.permutation()?.group_ids(choices, k, size, once)
    }

    fn gather(&self, x: &Buffer, index: &Buffer, per: usize, width: usize) -> Result<Buffer> {
        self.inner.permutation()?.gather(x, index, per, width)
    }

    fn combine(&self, rows: &Buffer, choices: Choices<'_>, weights: Option<&Buffer>, width: usize) -> Result<Buffer> {
        let weights = weights.map(|weights| self.wide(weights)).transpose()?;
        let sums = self.inner.permutation()?.combine(&self.wide(rows)?, choices, weights.as_ref(), width)?;
        self.rounded(sums, rows.dtype())
    }

    fn combine_grad(
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
}

impl Routing for Widened {
    fn select(&self, scores: &Buffer, bias: Option<&Buffer>, of: &Selection, pick: Pick) -> Result<Selected> {
        let bias = bias.map(|bias| self.wide(bias)).transpose()?;
        let selected = self.inner.routing()?.select(&self.wide(scores)?, bias.as_ref(), of, pick)?;
        Ok(Selected { weights: self.rounded(selected.weights, scores.dtype())?, ..selected })
    }

    fn select_tokens(&self, scores: &Buffer, samples: usize, experts: usize, capacity: usize) -> Result<Buffer> {
        self.inner.routing()?.select_tokens(&self.wide(scores)?, samples, experts, capacity)
    }

    fn pick(&self, scores: &Buffer, choices: Option<&Buffer>, of: Pick) -> Result<Buffer> {
        self.rounded(self.inner.routing()?.pick(&self.wide(scores)?, choices, of)?, scores.dtype())
    }

    fn pick_grad(&self, scores: &Buffer, choices: Option<&Buffer>, dout: &Buffer, of: Pick) -> Result<Buffer> {
        let grad = self.inner.routing()?.pick_grad(&self.wide(scores)?, choices, &self.wide(dout)?, of)?;
        self.rounded(grad, scores.dtype())
    }

    fn balance(&self, scores: &Buffer, counts: &Buffer, samples: usize, experts: usize, scale: f64) -> Result<Buffer> {
        self.inner.routing()?.balance(&self.wide(scores)?, counts, samples, experts, scale)
    }

    fn balance_grad(
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

    fn z_loss(&self, logits: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        self.inner.routing()?.z_loss(&self.wide(logits)?, samples, experts)
    }

    fn z_loss_grad(&self, logits: &Buffer, dout: &Buffer, experts: usize) -> Result<Buffer> {
        self.rounded(self.inner.routing()?.z_loss_grad(&self.wide(logits)?, dout, experts)?, logits.dtype())
    }

    fn entropy(&self, scores: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        self.inner.routing()?.entropy(&self.wide(scores)?, samples, experts)
    }

    fn unused(&self, kept: &Buffer, samples: usize) -> Result<Buffer> {
        self.inner.routing()?.unused(kept, samples)
    }

    fn loads(&self, choices: &Buffer, experts: usize) -> Result<Buffer> {
        self.inner.routing()?.loads(choices, experts)
    }

    fn jitter(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        self.rounded(self.inner.routing()?.jitter(&self.wide(x)?, mask)?, x.dtype())
    }
}
