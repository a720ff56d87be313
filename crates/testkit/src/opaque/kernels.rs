//! Runs each kernel of the inner device on the host memory behind opaque buffers. A new method of a kernel trait must
//! be added here too.
//!
//! More than 400 lines: every method of every kernel trait, one after the other, and nothing else.

use super::Opaque;
use super::memory::{give_back, hide, host, into_host, take, with_host};
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse};
use meshwork_core::{Buffer, DType};
use meshwork_optim::{Rule, Update};
use meshwork_tensor::kernel::*;
use meshwork_tensor::tape::{RowBlocks, Terms};
use meshwork_tensor::{Device, Error, Result};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Results that are hidden from the host.
trait Hide {
    fn hide(self) -> Self;
}

impl Hide for Buffer {
    fn hide(self) -> Self {
        hide(self)
    }
}

impl Hide for [Buffer; 2] {
    fn hide(self) -> Self {
        self.map(Hide::hide)
    }
}

impl<T: Hide> Hide for Option<T> {
    fn hide(self) -> Self {
        self.map(Hide::hide)
    }
}

impl Hide for (Buffer, Buffer) {
    fn hide(self) -> Self {
        (hide(self.0), hide(self.1))
    }
}

impl Hide for (Buffer, Buffer, Buffer) {
    fn hide(self) -> Self {
        (hide(self.0), hide(self.1), hide(self.2))
    }
}

impl Hide for Selected {
    fn hide(self) -> Self {
        let Self { chosen, routed, kept, weights } = self;
        Self { chosen: hide(chosen), routed: hide(routed), kept: hide(kept), weights: hide(weights) }
    }
}

fn hidden<T: Hide>(result: Result<T>) -> Result<T> {
    Ok(result?.hide())
}

impl Matmul for Opaque {
    fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer, start: usize) -> Result<()> {
        with_host(c, |c| self.inner.matmul()?.gemm(spec, &host(a), &host(b), c, start))
    }

    fn linear_bias(&self, mnk: [usize; 3], x: &Buffer, w: &Buffer, bias: &Buffer) -> Result<Buffer> {
        hidden(self.inner.matmul()?.linear_bias(mnk, &host(x), &host(w), &host(bias)))
    }

    fn linear_bias_gelu(
        &self,
        mnk: [usize; 3],
        x: &Buffer,
        w: &Buffer,
        bias: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        hidden(self.inner.matmul()?.linear_bias_gelu(mnk, &host(x), &host(w), &host(bias), stored))
    }

    fn gemm_sum(&self, specs: [Gemm; 2], a: [&Buffer; 2], b: [&Buffer; 2], c: &mut Buffer, start: usize) -> Result<()> {
        let ([a, more_a], [b, more_b]) = (a.map(host), b.map(host));
        with_host(c, |c| self.inner.matmul()?.gemm_sum(specs, [&a, &more_a], [&b, &more_b], c, start))
    }

    fn linear_swiglu(&self, mnk: [usize; 3], x: &Buffer, w: &Buffer, stored: DType) -> Result<(Buffer, Buffer)> {
        hidden(self.inner.matmul()?.linear_swiglu(mnk, &host(x), &host(w), stored))
    }
}

impl Pointwise for Opaque {
    fn add(&self, a: &Buffer, b: &Buffer) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.add(&host(a), &host(b)))
    }

    fn add_assign(&self, a: &mut Buffer, at: usize, b: &Buffer) -> Result<()> {
        with_host(a, |a| self.inner.pointwise()?.add_assign(a, at, &host(b)))
    }

    fn tree_sum(&self, x: &mut Buffer, start: usize, count: usize, n: usize, to: usize) -> Result<()> {
        with_host(x, |x| self.inner.pointwise()?.tree_sum(x, start, count, n, to))
    }

    fn bias(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.bias(&host(x), &host(bias)))
    }

    fn bias_grad(&self, dy: &Buffer, n: usize, blocks: RowBlocks) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.bias_grad(&host(dy), n, blocks))
    }

    fn bias_residual(&self, x: &Buffer, bias: &Buffer, residual: &Buffer) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.bias_residual(&host(x), &host(bias), &host(residual)))
    }

    fn bias_gelu(&self, x: &Buffer, bias: &Buffer, stored: DType) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.bias_gelu(&host(x), &host(bias), stored))
    }

    fn bias_gelu_grad(&self, dy: &mut Buffer, x: &Buffer, bias: &Buffer, blocks: RowBlocks) -> Result<Buffer> {
        hidden(with_host(dy, |dy| self.inner.pointwise()?.bias_gelu_grad(dy, &host(x), &host(bias), blocks)))
    }

    fn gelu(&self, x: &Buffer) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.gelu(&host(x)))
    }

    fn gelu_grad(&self, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.gelu_grad(&host(dy), &host(x)))
    }

    fn relu(&self, x: &Buffer) -> Result<(Buffer, Buffer)> {
        hidden(self.inner.pointwise()?.relu(&host(x)))
    }

    fn relu_grad(&self, dy: &Buffer, above: &Buffer) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.relu_grad(&host(dy), &host(above)))
    }

    fn cast(&self, x: &Buffer, to: DType) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.cast(&host(x), to))
    }

    fn cast_into(&self, x: &Buffer, out: &mut Buffer, at: usize) -> Result<()> {
        with_host(out, |out| self.inner.pointwise()?.cast_into(&host(x), out, at))
    }

    fn dropout(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.dropout(&host(x), mask))
    }

    fn swiglu(&self, x: &Buffer, stored: DType) -> Result<Buffer> {
        hidden(self.inner.pointwise()?.swiglu(&host(x), stored))
    }

    fn swiglu_grad(&self, dy: &Buffer, x: &mut Buffer) -> Result<()> {
        with_host(x, |x| self.inner.pointwise()?.swiglu_grad(&host(dy), x))
    }
}

impl Norm for Opaque {
    fn layer_norm(
        &self,
        x: &Buffer,
        gamma: &Buffer,
        beta: &Buffer,
        eps: f64,
        stored: DType,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        hidden(self.inner.norm()?.layer_norm(&host(x), &host(gamma), &host(beta), eps, stored))
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
        let [mean, rstd] = stats.map(host);
        let (dy, x, gamma) = (host(dy), host(x), host(gamma));
        hidden(self.inner.norm()?.layer_norm_grad(&dy, &x, &gamma, [&mean, &rstd], blocks, sum.map(into_host)))
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f64, stored: DType) -> Result<(Buffer, Buffer)> {
        hidden(self.inner.norm()?.rms_norm(&host(x), &host(weight), eps, stored))
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
        let [dy, x, weight, rstd] = [dy, x, weight, rstd].map(host);
        hidden(self.inner.norm()?.rms_norm_grad(&dy, &x, &weight, &rstd, blocks, sum.map(into_host)))
    }
}

/// Statistics on the host memory behind them.
fn by_host<T>(by: MeanVariance<'_>, work: impl FnOnce(MeanVariance<'_>) -> T) -> T {
    work(MeanVariance { mean: &host(by.mean), variance: &host(by.variance), eps: by.eps })
}

impl ChannelNorm for Opaque {
    fn moments(&self, groups: Groups, x: &Buffer) -> Result<(Buffer, Buffer)> {
        hidden(self.inner.channel_norm()?.moments(groups, &host(x)))
    }

    fn normalise(&self, groups: Groups, x: &Buffer, by: MeanVariance<'_>, affine: [&Buffer; 2]) -> Result<Buffer> {
        let (norm, [gamma, beta]) = (self.inner.channel_norm()?, affine.map(host));
        hidden(by_host(by, |by| norm.normalise(groups, &host(x), by, [&gamma, &beta])))
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
        let norm = self.inner.channel_norm()?;
        hidden(by_host(by, |by| norm.normalise_grad(groups, &host(dy), &host(x), by, statistics, &host(gamma))))
    }
}

impl Window for Opaque {
    fn patches(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        hidden(self.inner.window()?.patches(windows, &host(x)))
    }

    fn patches_grad(&self, windows: Windows, dpatches: &Buffer) -> Result<Buffer> {
        hidden(self.inner.window()?.patches_grad(windows, &host(dpatches)))
    }

    fn max_pool(&self, windows: Windows, x: &Buffer) -> Result<(Buffer, Buffer)> {
        hidden(self.inner.window()?.max_pool(windows, &host(x)))
    }

    fn max_pool_grad(&self, windows: Windows, dy: &Buffer, places: &Buffer) -> Result<Buffer> {
        hidden(self.inner.window()?.max_pool_grad(windows, &host(dy), &host(places)))
    }

    fn average_pool(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        hidden(self.inner.window()?.average_pool(windows, &host(x)))
    }

    fn average_pool_grad(&self, windows: Windows, dy: &Buffer) -> Result<Buffer> {
        hidden(self.inner.window()?.average_pool_grad(windows, &host(dy)))
    }
}

/// Masks with the positions of documents in the host memory behind them.
fn with_masks<T>(masks: AttentionMasks<'_>, work: impl FnOnce(AttentionMasks<'_>) -> T) -> T {
    let positions = masks.documents.map(|documents| host(documents.positions));
    let documents = masks.documents.zip(positions.as_ref());
    let documents = documents.map(|(documents, positions)| DocumentPositions { positions, ..documents });
    work(AttentionMasks { documents, ..masks })
}

impl Attention for Opaque {
    fn causal(&self, shape: AttentionShape, qkv: &Buffer, masks: AttentionMasks<'_>) -> Result<(Buffer, Buffer)> {
        hidden(with_masks(masks, |masks| self.inner.attention()?.causal(shape, &host(qkv), masks)))
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
        let [dout, qkv, out, lse] = [dout, qkv, out, lse].map(host);
        hidden(with_masks(masks, |masks| self.inner.attention()?.causal_grad(shape, &dout, &qkv, &out, &lse, masks)))
    }

    fn grouped(
        &self,
        shape: GroupedShape,
        q: &Buffer,
        kv: &Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        hidden(with_masks(masks, |masks| self.inner.attention()?.grouped(shape, &host(q), &host(kv), masks)))
    }

    fn decode(&self, shape: DecodeShape, q: &Buffer, kv: &Buffer, cache: &mut Buffer) -> Result<Buffer> {
        let attention = self.inner.attention()?;
        hidden(with_host(cache, |cache| attention.decode(shape, &host(q), &host(kv), cache)))
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
        let [dout, q, kv, out, lse] = [dout, q, kv, out, lse].map(host);
        hidden(with_masks(masks, |masks| {
            self.inner.attention()?.grouped_grad(shape, &dout, &q, &kv, &out, &lse, masks)
        }))
    }
}

/// The gradient of a table in the host memory behind it.
fn lend_table<T>(dtable: TableGrad<'_>, work: impl FnOnce(TableGrad<'_>) -> T) -> T {
    let TableGrad { buffer, start, rows, accumulate, blocks } = dtable;
    with_host(buffer, |buffer| work(TableGrad { buffer, start, rows, accumulate, blocks }))
}

impl Embedding for Opaque {
    fn lookup(&self, ids: &Buffer, table: &Buffer, rows: Range<usize>, vocab: usize, width: usize) -> Result<Buffer> {
        hidden(self.inner.embedding()?.lookup(&host(ids), &host(table), rows, vocab, width))
    }

    fn lookup_grad(
        &self,
        ids: &Buffer,
        dout: &Buffer,
        rows: Range<usize>,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        let embedding = self.inner.embedding()?;
        lend_table(dtable, |dtable| embedding.lookup_grad(&host(ids), &host(dout), rows, width, dtable))
    }

    fn positions(&self, x: &Buffer, table: &Buffer, first: usize, seq: usize, width: usize) -> Result<Buffer> {
        hidden(self.inner.embedding()?.positions(&host(x), &host(table), first, seq, width))
    }

    fn positions_grad(
        &self,
        dout: &Buffer,
        first: usize,
        seq: usize,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        let embedding = self.inner.embedding()?;
        lend_table(dtable, |dtable| embedding.positions_grad(&host(dout), first, seq, width, dtable))
    }
}

impl Loss for Opaque {
    fn row_stats(&self, logits: &Buffer, targets: &Buffer, shard: VocabShard) -> Result<(Buffer, Buffer)> {
        hidden(self.inner.loss()?.row_stats(&host(logits), &host(targets), shard))
    }

    fn larger(&self, max: &mut Buffer, other: &Buffer) -> Result<()> {
        with_host(max, |max| self.inner.loss()?.larger(max, &host(other)))
    }

    fn rescale(&self, sums: &mut Buffer, local: &Buffer, global: &Buffer) -> Result<()> {
        with_host(sums, |sums| self.inner.loss()?.rescale(sums, &host(local), &host(global)))
    }

    fn total(&self, max: &Buffer, sums: &Buffer, targets: &Buffer, samples: usize) -> Result<(Buffer, Buffer)> {
        hidden(self.inner.loss()?.total(&host(max), &host(sums), &host(targets), samples))
    }

    fn grad(
        &self,
        logits: &mut Buffer,
        targets: &Buffer,
        lse: &Buffer,
        scale: &Buffer,
        shard: VocabShard,
    ) -> Result<()> {
        with_host(logits, |logits| self.inner.loss()?.grad(logits, &host(targets), &host(lse), &host(scale), shard))
    }

    fn correct(&self, logits: &Buffer, targets: &Buffer, width: usize, samples: usize) -> Result<Buffer> {
        hidden(self.inner.loss()?.correct(&host(logits), &host(targets), width, samples))
    }
}

impl Layout for Opaque {
    fn swap_blocks(&self, x: &Buffer, a: usize, b: usize, inner: usize) -> Result<Buffer> {
        hidden(self.inner.layout()?.swap_blocks(&host(x), a, b, inner))
    }

    fn narrow(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        hidden(self.inner.layout()?.narrow(&host(x), outer, extent, inner, range))
    }

    fn widen(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        hidden(self.inner.layout()?.widen(&host(x), outer, extent, inner, range))
    }

    fn copy(&self, x: &Buffer) -> Result<Buffer> {
        hidden(self.inner.layout()?.copy(&host(x)))
    }

    fn pack_nonzeros(&self, x: &Buffer) -> Result<Option<[Buffer; 2]>> {
        hidden(self.inner.layout()?.pack_nonzeros(&host(x)))
    }

    fn unpack_nonzeros(&self, bits: &Buffer, values: &Buffer, count: usize) -> Result<Buffer> {
        hidden(self.inner.layout()?.unpack_nonzeros(&host(bits), &host(values), count))
    }

    fn copy_into(&self, src: &Buffer, range: Range<usize>, dst: &mut Buffer, at: usize) -> Result<()> {
        with_host(dst, |dst| self.inner.layout()?.copy_into(&host(src), range, dst, at))
    }
}

impl Compression for Opaque {
    fn pack(
        &self,
        scheme: &Scheme,
        shape: Shape,
        draws: Draws,
        x: &Buffer,
        message: &mut Buffer,
        at: usize,
    ) -> Result<()> {
        with_host(message, |message| self.inner.compression()?.pack(scheme, shape, draws, &host(x), message, at))
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
        with_host(out, |out| self.inner.compression()?.unpack(scheme, shape, &host(message), fold, out, at))
    }

    fn take(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, x: &Buffer) -> Result<Buffer> {
        hidden(self.inner.compression()?.take(sparse, shape, &host(indices), &host(x)))
    }

    fn put(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, values: &Buffer) -> Result<Buffer> {
        hidden(self.inner.compression()?.put(sparse, shape, &host(indices), &host(values)))
    }

    fn outgoing(&self, feedback: Feedback, x: &Buffer, first: bool, sender: &mut Sender<Buffer>) -> Result<Buffer> {
        self.with_sender(sender, |kernels, sender| hidden(kernels.outgoing(feedback, &host(x), first, sender)))
    }

    fn sent(&self, feedback: Feedback, target: &Buffer, sent: &Buffer, sender: &mut Sender<Buffer>) -> Result<()> {
        self.with_sender(sender, |kernels, sender| kernels.sent(feedback, &host(target), &host(sent), sender))
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
        let m = host(m);
        with_host(q, |q| with_host(p, |p| self.inner.compression()?.left_factor(of, shape, draws, &m, q, p)))
    }

    fn right_factor(&self, of: PowerSgd, shape: Shape, m: &Buffer, p: &mut Buffer, q: &mut Buffer) -> Result<()> {
        let m = host(m);
        with_host(p, |p| with_host(q, |q| self.inner.compression()?.right_factor(of, shape, &m, p, q)))
    }

    fn join(&self, of: PowerSgd, shape: Shape, factors: &[Buffer; 2], among: usize, out: &mut Buffer) -> Result<()> {
        let factors = factors.each_ref().map(host);
        with_host(out, |out| self.inner.compression()?.join(of, shape, &factors, among, out))
    }
}

impl Opaque {
    /// Runs `work` on the host memory behind the states of a sender.
    fn with_sender<T>(
        &self,
        sender: &mut Sender<Buffer>,
        work: impl FnOnce(&dyn Compression, &mut Sender<Buffer>) -> Result<T>,
    ) -> Result<T> {
        let kernels = self.inner.compression()?;
        let [residual, estimate, momentum] = sender.all_mut().map(take);
        let mut behind = Sender { residual, estimate, momentum };
        let result = work(kernels, &mut behind);
        let Sender { residual, estimate, momentum } = behind;
        sender
            .all_mut()
            .into_iter()
            .zip([residual, estimate, momentum])
            .for_each(|(state, host)| give_back(state, host));
        result
    }
}

impl Optim for Opaque {
    fn zero(&self, x: &mut Buffer, range: Range<usize>) -> Result<()> {
        with_host(x, |x| self.inner.optim()?.zero(x, range))
    }

    fn sum_of_squares(&self, vectors: &[Buffer], sums: &mut Buffer, at: usize) -> Result<()> {
        let vectors: Vec<Buffer> = vectors.iter().map(host).collect();
        with_host(sums, |sums| self.inner.optim()?.sum_of_squares(&vectors, sums, at))
    }

    fn exact_sum_of_squares(&self, vectors: &[Buffer], digits: &mut Buffer, at: usize) -> Result<()> {
        let vectors: Vec<Buffer> = vectors.iter().map(host).collect();
        with_host(digits, |digits| self.inner.optim()?.exact_sum_of_squares(&vectors, digits, at))
    }

    fn update(&self, rule: &Rule, update: Update, flats: &mut [FlatParts<'_>]) -> Result<()> {
        self.require_kernel(rule)?;
        let optim = self.inner.optim()?;
        flats.iter_mut().try_for_each(|FlatParts { weights, grads, states, ranges }| {
            let mut behind: Vec<Buffer> = states.iter_mut().map(take).collect();
            let grads = &host(grads);
            let updated = with_host(weights, |weights| {
                optim.update(rule, update, &mut [FlatParts { weights, grads, states: &mut behind, ranges }])
            });
            states.iter_mut().zip(behind).for_each(|(state, behind)| give_back(state, behind));
            updated
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
        self.require_kernel(part.rule)?;
        self.with_vectors(vectors, |optim, vectors| match into {
            None => optim.measure(part, pass, &host(weights), vectors, None),
            Some(Measured::Sums(into, at)) => with_host(into, |into| {
                optim.measure(part, pass, &host(weights), vectors, Some(Measured::Sums(into, at)))
            }),
            Some(Measured::Digits(into, at)) => with_host(into, |into| {
                optim.measure(part, pass, &host(weights), vectors, Some(Measured::Digits(into, at)))
            }),
            Some(Measured::Values(into)) => {
                with_host(into, |into| optim.measure(part, pass, &host(weights), vectors, Some(Measured::Values(into))))
            }
        })
    }

    fn divide_by_root(&self, x: &mut Buffer, squares: &Buffer, least: f64) -> Result<()> {
        with_host(x, |x| self.inner.optim()?.divide_by_root(x, &host(squares), least))
    }

    fn exact_sums(&self, digits: &Buffer) -> Result<Buffer> {
        hidden(self.inner.optim()?.exact_sums(&host(digits)))
    }

    fn settle(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        totals: &mut Buffer,
        at: usize,
        sets: &mut [Buffer],
    ) -> Result<()> {
        let mut behind: Vec<Buffer> = sets.iter_mut().map(take).collect();
        let settled = with_host(totals, |totals| self.inner.optim()?.settle(part, pass, totals, at, &mut behind));
        sets.iter_mut().zip(behind).for_each(|(set, behind)| give_back(set, behind));
        settled
    }

    fn update_whole(&self, part: &WholePart<'_>, weights: &mut Buffer, vectors: WholeVectors<'_>) -> Result<()> {
        self.require_kernel(part.rule)?;
        with_host(weights, |weights| {
            self.with_vectors(vectors, |optim, vectors| optim.update_whole(part, weights, vectors))
        })
    }
}

impl Opaque {
    /// Like a device that has kernels for our rules and cannot run the host's code.
    fn require_kernel(&self, rule: &Rule) -> Result<()> {
        if rule.is_users() {
            let (device, rule) = (self.name().to_owned(), rule.name().to_owned());
            return Err(Error::UpdateRule { device, rule, valid: "a rule of meshwork-optim" });
        }
        Ok(())
    }

    /// Runs `work` on the host memory behind vectors.
    fn with_vectors<T>(
        &self,
        vectors: WholeVectors<'_>,
        work: impl FnOnce(&dyn Optim, WholeVectors<'_>) -> Result<T>,
    ) -> Result<T> {
        let WholeVectors { grads, states, sets, totals, gathered } = vectors;
        let mut behind: Vec<Buffer> = states.iter_mut().map(take).collect();
        let (sets, totals): (Vec<_>, Vec<_>) = (sets.iter().map(host).collect(), totals.iter().map(host).collect());
        let (grads, gathered) = (host(grads), gathered.map(host));
        let vectors = WholeVectors {
            grads: &grads,
            states: &mut behind,
            sets: &sets,
            totals: &totals,
            gathered: gathered.as_ref(),
        };
        let result = work(self.inner.optim()?, vectors);
        states.iter_mut().zip(behind).for_each(|(state, behind)| give_back(state, behind));
        result
    }
}

/// Without functions of the host, which a device could not call.
impl Elementwise for Opaque {
    fn map(&self, f: Map, x: &Buffer) -> Result<Buffer> {
        hidden(self.inner.elementwise()?.map(f, &host(x)))
    }

    fn map_grad(&self, f: Map, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        hidden(self.inner.elementwise()?.map_grad(f, &host(dy), &host(x)))
    }

    fn zip(&self, f: Zip, x: &Buffer, y: &Buffer) -> Result<Buffer> {
        hidden(self.inner.elementwise()?.zip(f, &host(x), &host(y)))
    }
}

impl Reduction for Opaque {
    fn sum(&self, x: &Buffer, shape: [usize; 3], blocks: usize, scale: f64) -> Result<Buffer> {
        hidden(self.inner.reduction()?.sum(&host(x), shape, blocks, scale))
    }

    fn spread(&self, dy: &Buffer, shape: [usize; 3], scale: f64) -> Result<Buffer> {
        hidden(self.inner.reduction()?.spread(&host(dy), shape, scale))
    }

    fn softmax(&self, x: &Buffer, n: usize) -> Result<Buffer> {
        hidden(self.inner.reduction()?.softmax(&host(x), n))
    }

    fn softmax_grad(&self, dy: &Buffer, y: &Buffer, n: usize) -> Result<Buffer> {
        hidden(self.inner.reduction()?.softmax_grad(&host(dy), &host(y), n))
    }

    fn squared_error(&self, x: &Buffer, targets: &Buffer, samples: usize, terms: Terms, scale: f64) -> Result<Buffer> {
        hidden(self.inner.reduction()?.squared_error(&host(x), &host(targets), samples, terms, scale))
    }

    fn squared_error_grad(&self, x: &Buffer, targets: &Buffer, dloss: &Buffer, scale: f64) -> Result<Buffer> {
        hidden(self.inner.reduction()?.squared_error_grad(&host(x), &host(targets), &host(dloss), scale))
    }
}

impl Grouped for Opaque {
    fn grouped_linear(&self, spec: GroupedGemm<'_>, x: &Buffer, w: &Buffer) -> Result<Buffer> {
        hidden(self.inner.grouped_matmul()?.grouped_linear(spec, &host(x), &host(w)))
    }

    fn grouped_linear_swiglu(
        &self,
        spec: GroupedGemm<'_>,
        x: &Buffer,
        w: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        hidden(self.inner.grouped_matmul()?.grouped_linear_swiglu(spec, &host(x), &host(w), stored))
    }

    fn grouped_input_grad(&self, spec: GroupedGemm<'_>, dy: &Buffer, w: &Buffer) -> Result<Buffer> {
        hidden(self.inner.grouped_matmul()?.grouped_input_grad(spec, &host(dy), &host(w)))
    }

    fn grouped_weight_grad(
        &self,
        spec: GroupedGemm<'_>,
        blocks: &GroupBlocks,
        dy: &Buffer,
        x: &Buffer,
        dw: GroupedGrad<'_>,
    ) -> Result<()> {
        let GroupedGrad { buffer, start, accumulate } = dw;
        with_host(buffer, |buffer| {
            let dw = GroupedGrad { buffer, start, accumulate };
            self.inner.grouped_matmul()?.grouped_weight_grad(spec, blocks, &host(dy), &host(x), dw)
        })
    }

    fn grouped_bias(&self, rows: &[usize], x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        hidden(self.inner.grouped_matmul()?.grouped_bias(rows, &host(x), &host(bias)))
    }

    fn grouped_bias_grad(&self, blocks: &GroupBlocks, n: usize, dy: &Buffer, db: GroupedGrad<'_>) -> Result<()> {
        let GroupedGrad { buffer, start, accumulate } = db;
        with_host(buffer, |buffer| {
            let db = GroupedGrad { buffer, start, accumulate };
            self.inner.grouped_matmul()?.grouped_bias_grad(blocks, n, &host(dy), db)
        })
    }
}

impl Permutation for Opaque {
    fn counts(&self, choices: &Buffer, samples: usize, ids: Range<usize>) -> Result<Buffer> {
        hidden(self.inner.permutation()?.counts(&host(choices), samples, ids))
    }

    fn sort(&self, choices: &Buffer, ids: Range<usize>, total: usize) -> Result<(Buffer, Buffer)> {
        let (order, slots) = self.inner.permutation()?.sort(&host(choices), ids, total)?;
        Ok((hide(order), hide(slots)))
    }

    fn invert(&self, order: &Buffer, n: usize) -> Result<Buffer> {
        hidden(self.inner.permutation()?.invert(&host(order), n))
    }

    fn group_ids(&self, choices: &Buffer, k: usize, size: usize, once: bool) -> Result<Buffer> {
        hidden(self.inner.permutation()?.group_ids(&host(choices), k, size, once))
    }

    fn gather(&self, x: &Buffer, index: &Buffer, per: usize, width: usize) -> Result<Buffer> {
        hidden(self.inner.permutation()?.gather(&host(x), &host(index), per, width))
    }

    fn combine(&self, rows: &Buffer, choices: Choices<'_>, weights: Option<&Buffer>, width: usize) -> Result<Buffer> {
        let (ids, slots, weights) = (host(choices.ids), host(choices.slots), weights.map(host));
        let choices = Choices { ids: &ids, slots: &slots, ..choices };
        hidden(self.inner.permutation()?.combine(&host(rows), choices, weights.as_ref(), width))
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
        let (ids, slots) = (host(choices.ids), host(choices.slots));
        let choices = Choices { ids: &ids, slots: &slots, ..choices };
        let permutation = self.inner.permutation()?;
        hidden(permutation.combine_grad(&host(dout), &host(rows), choices, &host(order), &host(weights), width))
    }
}

impl Routing for Opaque {
    fn select(&self, scores: &Buffer, bias: Option<&Buffer>, of: &Selection, pick: Pick) -> Result<Selected> {
        self.selections.fetch_add(1, Ordering::Relaxed);
        hidden(self.inner.routing()?.select(&host(scores), bias.map(host).as_ref(), of, pick))
    }

    fn select_tokens(&self, scores: &Buffer, samples: usize, experts: usize, capacity: usize) -> Result<Buffer> {
        hidden(self.inner.routing()?.select_tokens(&host(scores), samples, experts, capacity))
    }

    fn pick(&self, scores: &Buffer, choices: Option<&Buffer>, of: Pick) -> Result<Buffer> {
        hidden(self.inner.routing()?.pick(&host(scores), choices.map(host).as_ref(), of))
    }

    fn pick_grad(&self, scores: &Buffer, choices: Option<&Buffer>, dout: &Buffer, of: Pick) -> Result<Buffer> {
        hidden(self.inner.routing()?.pick_grad(&host(scores), choices.map(host).as_ref(), &host(dout), of))
    }

    fn balance(&self, scores: &Buffer, counts: &Buffer, samples: usize, experts: usize, scale: f64) -> Result<Buffer> {
        hidden(self.inner.routing()?.balance(&host(scores), &host(counts), samples, experts, scale))
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
        hidden(self.inner.routing()?.balance_grad(&host(dout), &host(counts), tokens, experts, scale, dtype))
    }

    fn z_loss(&self, logits: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        hidden(self.inner.routing()?.z_loss(&host(logits), samples, experts))
    }

    fn z_loss_grad(&self, logits: &Buffer, dout: &Buffer, experts: usize) -> Result<Buffer> {
        hidden(self.inner.routing()?.z_loss_grad(&host(logits), &host(dout), experts))
    }

    fn entropy(&self, scores: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        hidden(self.inner.routing()?.entropy(&host(scores), samples, experts))
    }

    fn unused(&self, kept: &Buffer, samples: usize) -> Result<Buffer> {
        hidden(self.inner.routing()?.unused(&host(kept), samples))
    }

    fn loads(&self, choices: &Buffer, experts: usize) -> Result<Buffer> {
        hidden(self.inner.routing()?.loads(&host(choices), experts))
    }

    fn jitter(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        hidden(self.inner.routing()?.jitter(&host(x), mask))
    }
}
