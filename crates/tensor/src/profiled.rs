//! A device that records the work of another one: one [`Span`] per call of a kernel.
//!
//! FLOPs are counted by the wrapped device's meter during the call. Bytes are the minimum that must move: each input
//! read once and each output written once. Every method of a kernel trait must be passed on here, provided methods
//! included: otherwise the default would run instead of the device's own method.
//!
//! While it records, each call of a device that queues its work waits for it: spans hold that work, and the step takes longer than without a profile.
//!
//! More than 400 lines: every method of every kernel trait, one after the other, and nothing else.

use crate::device::{Device, Meter};
use crate::error::Result;
use crate::kernel::*;
use crate::later::{Download, Upload};
use crate::launches::Launches;
use crate::pinned::Pinned;
use crate::tape::{RowBlocks, Terms};
use meshwork_compress::feedback::Sender;
use meshwork_compress::{Draws, Feedback, Fold, PowerSgd, Scheme, Shape, Sparse};
use meshwork_core::profile::{Class, Detail, Recorder, Span};
use meshwork_core::{Buffer, DType};
use meshwork_optim::{Rule, Update};
use std::ops::Range;
use std::sync::Arc;

/// See the [module](self).
#[derive(Debug)]
pub struct Profiled {
    inner: Arc<dyn Device>,
    recorder: Recorder,
}

impl Profiled {
    /// `inner`, recorded.
    pub fn device(inner: Arc<dyn Device>, recorder: Recorder) -> Arc<dyn Device> {
        Arc::new(Self { inner, recorder })
    }

    /// Runs `work` as a span that reads `reads` and writes the result.
    fn span<T: Written>(
        &self,
        class: Class,
        name: &'static str,
        reads: &[&Buffer],
        work: impl FnOnce(&dyn Device) -> Result<T>,
    ) -> Result<T> {
        let what = What { class, name, detail: Detail::None, dtype: dtype(reads), bytes: bytes(reads) };
        self.record(what, work)
    }

    /// Runs `work` as a span that touches `what.bytes` and writes the result.
    fn record<T: Written>(&self, what: What, work: impl FnOnce(&dyn Device) -> Result<T>) -> Result<T> {
        if !self.recorder.is_on() {
            return work(&*self.inner);
        }
        let What { class, name, detail, dtype, bytes } = what;
        self.inner.synchronize()?; // collectives that are queued on a device are none of this call's work
        let (before, start) = (self.inner.meter().total_flops(), self.recorder.now());
        let result = work(&*self.inner)?;
        self.inner.synchronize()?;
        let (end, flops) = (self.recorder.now(), self.inner.meter().total_flops() - before);
        let bytes = bytes + result.bytes();
        self.recorder.record(Span { class, name, detail, dtype, start, end, flops, bytes });
        Ok(result)
    }
}

/// The description of a call, before it runs.
struct What {
    class: Class,
    name: &'static str,
    detail: Detail,
    dtype: Option<DType>,
    bytes: u64,
}

impl What {
    /// A product in the type of its result, whatever its operands are stored in.
    fn product(name: &'static str, mnk: [usize; 3], dtype: DType, reads: &[&Buffer]) -> What {
        What { class: Class::Product, name, detail: Detail::Product(mnk), dtype: Some(dtype), bytes: bytes(reads) }
    }

    /// A pass of an optimizer over these.
    fn optimizer(name: &'static str, vectors: &[Buffer]) -> What {
        let vectors: Vec<&Buffer> = vectors.iter().collect();
        let (detail, dtype, bytes) = (Detail::None, dtype(&vectors), bytes(&vectors));
        What { class: Class::Optimizer, name, detail, dtype, bytes }
    }

    /// Compression, which reads and writes these.
    fn compression(name: &'static str, touches: &[&Buffer]) -> What {
        What { class: Class::Compression, name, detail: Detail::None, dtype: Some(DType::F32), bytes: bytes(touches) }
    }
}

/// The type that an operation computes in: that of its first operand of floats.
fn dtype(reads: &[&Buffer]) -> Option<DType> {
    reads.iter().map(|buffer| buffer.dtype()).find(|dtype| dtype.is_float())
}

fn bytes(buffers: &[&Buffer]) -> u64 {
    buffers.iter().map(|buffer| buffer.bytes() as u64).sum()
}

/// Bytes of the result of an operation.
trait Written {
    fn bytes(&self) -> u64;
}

impl Written for () {
    fn bytes(&self) -> u64 {
        0
    }
}

impl Written for Buffer {
    fn bytes(&self) -> u64 {
        Buffer::bytes(self) as u64
    }
}

impl Written for [Buffer; 2] {
    fn bytes(&self) -> u64 {
        bytes(&[&self[0], &self[1]])
    }
}

impl<T: Written> Written for Option<T> {
    fn bytes(&self) -> u64 {
        self.as_ref().map_or(0, Written::bytes)
    }
}

impl Written for (Buffer, Buffer) {
    fn bytes(&self) -> u64 {
        bytes(&[&self.0, &self.1])
    }
}

impl Written for (Buffer, Buffer, Buffer) {
    fn bytes(&self) -> u64 {
        bytes(&[&self.0, &self.1, &self.2])
    }
}

impl Written for Selected {
    fn bytes(&self) -> u64 {
        bytes(&[&self.chosen, &self.routed, &self.kept, &self.weights])
    }
}

impl Device for Profiled {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn operand_dtype(&self, dtype: DType) -> DType {
        self.inner.operand_dtype(dtype)
    }

    // Not recorded: these calls are too many and too short.
    fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer> {
        self.inner.alloc(dtype, count)
    }

    fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer> {
        self.span(Class::Memory, "zeros", &[], |device| device.zeros(dtype, count))
    }

    fn upload(&self, host: &Buffer) -> Result<Buffer> {
        self.span(Class::Memory, "upload", &[host], |device| device.upload(host))
    }

    fn upload_into(&self, host: &Buffer, dst: &mut Buffer, at: usize) -> Result<()> {
        // Read and written.
        self.span(Class::Memory, "upload", &[host, host], |device| device.upload_into(host, dst, at))
    }

    fn has_values(&self) -> bool {
        self.inner.has_values()
    }

    fn download(&self, buffer: &Buffer) -> Result<Buffer> {
        self.span(Class::Memory, "download", &[buffer], |device| device.download(buffer))
    }

    fn download_later(&self, buffer: &Buffer) -> Result<Download> {
        self.inner.download_later(buffer)
    }

    fn upload_later(&self, into: Buffer) -> Result<Upload> {
        self.inner.upload_later(into)
    }

    fn synchronize(&self) -> Result<()> {
        self.inner.synchronize()
    }

    fn pinned(&self) -> Option<&dyn Pinned> {
        self.inner.pinned()
    }

    fn meter(&self) -> &Meter {
        self.inner.meter()
    }

    fn launches(&self) -> Option<Launches> {
        self.inner.launches()
    }

    fn matmul(&self) -> Result<&dyn Matmul> {
        self.inner.matmul().map(|_| self as _)
    }

    fn pointwise(&self) -> Result<&dyn Pointwise> {
        self.inner.pointwise().map(|_| self as _)
    }

    fn elementwise(&self) -> Result<&dyn Elementwise> {
        self.inner.elementwise().map(|_| self as _)
    }

    fn reduction(&self) -> Result<&dyn Reduction> {
        self.inner.reduction().map(|_| self as _)
    }

    fn norm(&self) -> Result<&dyn Norm> {
        self.inner.norm().map(|_| self as _)
    }

    fn channel_norm(&self) -> Result<&dyn ChannelNorm> {
        self.inner.channel_norm().map(|_| self as _)
    }

    fn window(&self) -> Result<&dyn Window> {
        self.inner.window().map(|_| self as _)
    }

    fn attention(&self) -> Result<&dyn Attention> {
        self.inner.attention().map(|_| self as _)
    }

    fn embedding(&self) -> Result<&dyn Embedding> {
        self.inner.embedding().map(|_| self as _)
    }

    fn loss(&self) -> Result<&dyn Loss> {
        self.inner.loss().map(|_| self as _)
    }

    fn grouped_matmul(&self) -> Result<&dyn Grouped> {
        self.inner.grouped_matmul().map(|_| self as _)
    }

    fn permutation(&self) -> Result<&dyn Permutation> {
        self.inner.permutation().map(|_| self as _)
    }

    fn routing(&self) -> Result<&dyn Routing> {
        self.inner.routing().map(|_| self as _)
    }

    fn layout(&self) -> Result<&dyn Layout> {
        self.inner.layout().map(|_| self as _)
    }

    fn optim(&self) -> Result<&dyn Optim> {
        self.inner.optim().map(|_| self as _)
    }

    fn compression(&self) -> Result<&dyn Compression> {
        self.inner.compression().map(|_| self as _)
    }
}

impl Matmul for Profiled {
    fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer, start: usize) -> Result<()> {
        let Gemm { m, n, k, a_transposed, b_transposed, accumulate, .. } = spec;
        let name = match (a_transposed, b_transposed, accumulate) {
            (false, false, false) => "gemm nn",
            (false, true, false) => "gemm nt",
            (true, false, false) => "gemm tn",
            (true, true, false) => "gemm tt",
            (false, false, true) => "gemm nn +=",
            (false, true, true) => "gemm nt +=",
            (true, false, true) => "gemm tn +=",
            (true, true, true) => "gemm tt +=",
        };
        let result = (m * n * c.dtype().size() * if accumulate { 2 } else { 1 }) as u64;
        let mut what = What::product(name, [m, n, k], c.dtype(), &[a, b]);
        what.bytes += result;
        self.record(what, |device| device.matmul()?.gemm(spec, a, b, c, start))
    }

    fn gemm_sum(&self, specs: [Gemm; 2], a: [&Buffer; 2], b: [&Buffer; 2], c: &mut Buffer, start: usize) -> Result<()> {
        // As one product with longer sums.
        let [Gemm { m, n, k, .. }, second] = specs;
        let mut what = What::product("gemm nn, two", [m, n, k + second.k], c.dtype(), &[a[0], a[1], b[0], b[1]]);
        what.bytes += (m * n * c.dtype().size()) as u64;
        self.record(what, |device| device.matmul()?.gemm_sum(specs, a, b, c, start))
    }

    fn linear_bias(&self, mnk: [usize; 3], x: &Buffer, w: &Buffer, bias: &Buffer) -> Result<Buffer> {
        let what = What::product("gemm nt + bias", mnk, w.dtype(), &[x, w, bias]);
        self.record(what, |device| device.matmul()?.linear_bias(mnk, x, w, bias))
    }

    fn linear_bias_gelu(
        &self,
        mnk: [usize; 3],
        x: &Buffer,
        w: &Buffer,
        bias: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        let what = What::product("gemm nt + bias, gelu", mnk, w.dtype(), &[x, w, bias]);
        self.record(what, |device| device.matmul()?.linear_bias_gelu(mnk, x, w, bias, stored))
    }

    fn linear_swiglu(&self, mnk: [usize; 3], x: &Buffer, w: &Buffer, stored: DType) -> Result<(Buffer, Buffer)> {
        let what = What::product("gemm nt, swiglu", mnk, w.dtype(), &[x, w]);
        self.record(what, |device| device.matmul()?.linear_swiglu(mnk, x, w, stored))
    }
}

impl Pointwise for Profiled {
    fn add(&self, a: &Buffer, b: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "add", &[a, b], |device| device.pointwise()?.add(a, b))
    }

    fn add_assign(&self, a: &mut Buffer, at: usize, b: &Buffer) -> Result<()> {
        let added = &[b, b, b]; // b, and as much of a read and written
        self.span(Class::Pointwise, "add_assign", added, |device| device.pointwise()?.add_assign(a, at, b))
    }

    fn bias(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "bias", &[x, bias], |device| device.pointwise()?.bias(x, bias))
    }

    fn tree_sum(&self, x: &mut Buffer, start: usize, count: usize, n: usize, to: usize) -> Result<()> {
        let bytes = ((count + 1) * n * x.dtype().size()) as u64;
        let what = What { class: Class::Pointwise, name: "tree_sum", detail: Detail::None, dtype: dtype(&[x]), bytes };
        self.record(what, |device| device.pointwise()?.tree_sum(x, start, count, n, to))
    }

    fn bias_grad(&self, dy: &Buffer, n: usize, blocks: RowBlocks) -> Result<Buffer> {
        self.span(Class::Pointwise, "bias_grad", &[dy], |device| device.pointwise()?.bias_grad(dy, n, blocks))
    }

    fn bias_residual(&self, x: &Buffer, bias: &Buffer, residual: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "bias_residual", &[x, bias, residual], |device| {
            device.pointwise()?.bias_residual(x, bias, residual)
        })
    }

    fn bias_gelu(&self, x: &Buffer, bias: &Buffer, stored: DType) -> Result<Buffer> {
        self.span(Class::Pointwise, "bias_gelu", &[x, bias], |device| device.pointwise()?.bias_gelu(x, bias, stored))
    }

    fn bias_gelu_grad(&self, dy: &mut Buffer, x: &Buffer, bias: &Buffer, blocks: RowBlocks) -> Result<Buffer> {
        let touched = &[x, x, x, bias]; // x, and as much of dy read and written
        self.span(Class::Pointwise, "bias_gelu_grad", touched, |device| {
            device.pointwise()?.bias_gelu_grad(dy, x, bias, blocks)
        })
    }

    fn gelu(&self, x: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "gelu", &[x], |device| device.pointwise()?.gelu(x))
    }

    fn gelu_grad(&self, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "gelu_grad", &[dy, x], |device| device.pointwise()?.gelu_grad(dy, x))
    }

    fn swiglu(&self, x: &Buffer, stored: DType) -> Result<Buffer> {
        self.span(Class::Pointwise, "swiglu", &[x], |device| device.pointwise()?.swiglu(x, stored))
    }

    fn swiglu_grad(&self, dy: &Buffer, x: &mut Buffer) -> Result<()> {
        let bytes = bytes(&[dy, x, x]); // x is read and written
        let (name, detail, dtype) = ("swiglu_grad", Detail::None, dtype(&[dy]));
        let what = What { class: Class::Pointwise, name, detail, dtype, bytes };
        self.record(what, |device| device.pointwise()?.swiglu_grad(dy, x))
    }

    fn relu(&self, x: &Buffer) -> Result<(Buffer, Buffer)> {
        self.span(Class::Pointwise, "relu", &[x], |device| device.pointwise()?.relu(x))
    }

    fn relu_grad(&self, dy: &Buffer, above: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "relu_grad", &[dy, above], |device| device.pointwise()?.relu_grad(dy, above))
    }

    fn cast(&self, x: &Buffer, to: DType) -> Result<Buffer> {
        self.span(Class::Pointwise, "cast", &[x], |device| device.pointwise()?.cast(x, to))
    }

    fn cast_into(&self, x: &Buffer, out: &mut Buffer, at: usize) -> Result<()> {
        let bytes = bytes(&[x]) + (x.count() * out.dtype().size()) as u64;
        let what = What { class: Class::Pointwise, name: "cast", detail: Detail::None, dtype: dtype(&[x]), bytes };
        self.record(what, |device| device.pointwise()?.cast_into(x, out, at))
    }

    fn dropout(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        self.span(Class::Pointwise, "dropout", &[x], |device| device.pointwise()?.dropout(x, mask))
    }
}

impl Elementwise for Profiled {
    fn map(&self, f: Map, x: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "map", &[x], |device| device.elementwise()?.map(f, x))
    }

    fn map_grad(&self, f: Map, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "map_grad", &[dy, x], |device| device.elementwise()?.map_grad(f, dy, x))
    }

    fn zip(&self, f: Zip, x: &Buffer, y: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "zip", &[x, y], |device| device.elementwise()?.zip(f, x, y))
    }

    fn host_map(&self, inputs: &[&Buffer], f: &HostFn<'_>) -> Result<Option<Buffer>> {
        self.span(Class::Pointwise, "host_map", inputs, |device| device.elementwise()?.host_map(inputs, f))
    }
}

impl Reduction for Profiled {
    fn sum(&self, x: &Buffer, shape: [usize; 3], blocks: usize, scale: f64) -> Result<Buffer> {
        self.span(Class::Pointwise, "sum", &[x], |device| device.reduction()?.sum(x, shape, blocks, scale))
    }

    fn spread(&self, dy: &Buffer, shape: [usize; 3], scale: f64) -> Result<Buffer> {
        self.span(Class::Pointwise, "spread", &[dy], |device| device.reduction()?.spread(dy, shape, scale))
    }

    fn softmax(&self, x: &Buffer, n: usize) -> Result<Buffer> {
        self.span(Class::Pointwise, "softmax", &[x], |device| device.reduction()?.softmax(x, n))
    }

    fn softmax_grad(&self, dy: &Buffer, y: &Buffer, n: usize) -> Result<Buffer> {
        self.span(Class::Pointwise, "softmax_grad", &[dy, y], |device| device.reduction()?.softmax_grad(dy, y, n))
    }

    fn squared_error(&self, x: &Buffer, targets: &Buffer, samples: usize, terms: Terms, scale: f64) -> Result<Buffer> {
        self.span(Class::Loss, "squared_error", &[x, targets], |device| {
            device.reduction()?.squared_error(x, targets, samples, terms, scale)
        })
    }

    fn squared_error_grad(&self, x: &Buffer, targets: &Buffer, dloss: &Buffer, scale: f64) -> Result<Buffer> {
        self.span(Class::Loss, "squared_error_grad", &[x, targets, dloss], |device| {
            device.reduction()?.squared_error_grad(x, targets, dloss, scale)
        })
    }
}

impl Norm for Profiled {
    fn layer_norm(
        &self,
        x: &Buffer,
        gamma: &Buffer,
        beta: &Buffer,
        eps: f64,
        stored: DType,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let reads = &[x, gamma, beta];
        self.span(Class::Norm, "layer_norm", reads, |device| device.norm()?.layer_norm(x, gamma, beta, eps, stored))
    }

    fn layer_norm_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        gamma: &Buffer,
        [mean, rstd]: [&Buffer; 2],
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        // A sum has the size of x and is read like it.
        let reads = &[dy, x, gamma, mean, rstd, x][..5 + usize::from(sum.is_some())];
        self.span(Class::Norm, "layer_norm_grad", reads, |device| {
            device.norm()?.layer_norm_grad(dy, x, gamma, [mean, rstd], blocks, sum)
        })
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f64, stored: DType) -> Result<(Buffer, Buffer)> {
        self.span(Class::Norm, "rms_norm", &[x, weight], |device| device.norm()?.rms_norm(x, weight, eps, stored))
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
        let reads = &[dy, x, weight, rstd, x][..4 + usize::from(sum.is_some())];
        self.span(Class::Norm, "rms_norm_grad", reads, |device| {
            device.norm()?.rms_norm_grad(dy, x, weight, rstd, blocks, sum)
        })
    }
}

impl ChannelNorm for Profiled {
    fn moments(&self, groups: Groups, x: &Buffer) -> Result<(Buffer, Buffer)> {
        self.span(Class::Norm, "moments", &[x], |device| device.channel_norm()?.moments(groups, x))
    }

    fn normalise(&self, groups: Groups, x: &Buffer, by: MeanVariance<'_>, affine: [&Buffer; 2]) -> Result<Buffer> {
        self.span(Class::Norm, "normalise", &[x, by.mean, by.variance, affine[0], affine[1]], |device| {
            device.channel_norm()?.normalise(groups, x, by, affine)
        })
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
        self.span(Class::Norm, "normalise_grad", &[dy, x, by.mean, by.variance, gamma], |device| {
            device.channel_norm()?.normalise_grad(groups, dy, x, by, statistics, gamma)
        })
    }
}

impl Window for Profiled {
    fn patches(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        self.span(Class::Memory, "patches", &[x], |device| device.window()?.patches(windows, x))
    }

    fn patches_grad(&self, windows: Windows, dpatches: &Buffer) -> Result<Buffer> {
        self.span(Class::Memory, "patches_grad", &[dpatches], |device| device.window()?.patches_grad(windows, dpatches))
    }

    fn max_pool(&self, windows: Windows, x: &Buffer) -> Result<(Buffer, Buffer)> {
        self.span(Class::Pointwise, "max_pool", &[x], |device| device.window()?.max_pool(windows, x))
    }

    fn max_pool_grad(&self, windows: Windows, dy: &Buffer, places: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "max_pool_grad", &[dy, places], |device| {
            device.window()?.max_pool_grad(windows, dy, places)
        })
    }

    fn average_pool(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "average_pool", &[x], |device| device.window()?.average_pool(windows, x))
    }

    fn average_pool_grad(&self, windows: Windows, dy: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "average_pool_grad", &[dy], |device| {
            device.window()?.average_pool_grad(windows, dy)
        })
    }
}

impl Attention for Profiled {
    fn causal(&self, shape: AttentionShape, qkv: &Buffer, masks: AttentionMasks<'_>) -> Result<(Buffer, Buffer)> {
        self.span(Class::Attention, "causal", &[qkv], |device| device.attention()?.causal(shape, qkv, masks))
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
        self.span(Class::Attention, "causal_grad", &[dout, qkv, out, lse], |device| {
            device.attention()?.causal_grad(shape, dout, qkv, out, lse, masks)
        })
    }

    fn grouped(
        &self,
        shape: GroupedShape,
        q: &Buffer,
        kv: &Buffer,
        masks: AttentionMasks<'_>,
    ) -> Result<(Buffer, Buffer)> {
        self.span(Class::Attention, "grouped", &[q, kv], |device| device.attention()?.grouped(shape, q, kv, masks))
    }

    fn decode(&self, shape: DecodeShape, q: &Buffer, kv: &Buffer, cache: &mut Buffer) -> Result<Buffer> {
        self.span(Class::Attention, "decode", &[q, kv], |device| device.attention()?.decode(shape, q, kv, cache))
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
        self.span(Class::Attention, "grouped_grad", &[dout, q, kv, out, lse], |device| {
            device.attention()?.grouped_grad(shape, dout, q, kv, out, lse, masks)
        })
    }
}

impl Embedding for Profiled {
    fn lookup(&self, ids: &Buffer, table: &Buffer, rows: Range<usize>, vocab: usize, width: usize) -> Result<Buffer> {
        // Only the requested rows of the table are read: as many as are written.
        let read = (ids.count() * width * table.dtype().size()) as u64;
        let bytes = bytes(&[ids]) + read;
        let what =
            What { class: Class::Embedding, name: "lookup", detail: Detail::None, dtype: dtype(&[table]), bytes };
        self.record(what, |device| device.embedding()?.lookup(ids, table, rows, vocab, width))
    }

    fn lookup_grad(
        &self,
        ids: &Buffer,
        dout: &Buffer,
        rows: Range<usize>,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        // Each row of dout is added to a row that is read and written; all other rows are written if the gradient is
        // overwritten.
        let whole = if dtable.accumulate { 0 } else { dtable.rows * width * dout.dtype().size() };
        let bytes = bytes(&[ids, dout, dout, dout]) + whole as u64;
        let (name, detail, dtype) = ("lookup_grad", Detail::None, dtype(&[dout]));
        let what = What { class: Class::Embedding, name, detail, dtype, bytes };
        self.record(what, |device| device.embedding()?.lookup_grad(ids, dout, rows, width, dtable))
    }

    fn positions(&self, x: &Buffer, table: &Buffer, first: usize, seq: usize, width: usize) -> Result<Buffer> {
        self.span(Class::Embedding, "positions", &[x, table], |device| {
            device.embedding()?.positions(x, table, first, seq, width)
        })
    }

    fn positions_grad(
        &self,
        dout: &Buffer,
        first: usize,
        seq: usize,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        let table = dtable.rows * width * if dtable.accumulate { 2 } else { 1 };
        let bytes = bytes(&[dout]) + (table * dout.dtype().size()) as u64;
        let (name, detail, dtype) = ("positions_grad", Detail::None, dtype(&[dout]));
        let what = What { class: Class::Embedding, name, detail, dtype, bytes };
        self.record(what, |device| device.embedding()?.positions_grad(dout, first, seq, width, dtable))
    }
}

impl Loss for Profiled {
    fn row_stats(&self, logits: &Buffer, targets: &Buffer, shard: VocabShard) -> Result<(Buffer, Buffer)> {
        // Only the requested columns of the logits are read.
        let bytes = bytes(&[targets]) + (targets.count() * shard.width * logits.dtype().size()) as u64;
        let what = What { class: Class::Loss, name: "row_stats", detail: Detail::None, dtype: dtype(&[logits]), bytes };
        self.record(what, |device| device.loss()?.row_stats(logits, targets, shard))
    }

    fn larger(&self, max: &mut Buffer, other: &Buffer) -> Result<()> {
        self.span(Class::Loss, "larger", &[other, other, other], |device| device.loss()?.larger(max, other))
    }

    fn rescale(&self, sums: &mut Buffer, local: &Buffer, global: &Buffer) -> Result<()> {
        let bytes = 2 * sums.bytes() as u64 + bytes(&[local, global]);
        let what = What { class: Class::Loss, name: "rescale", detail: Detail::None, dtype: dtype(&[sums]), bytes };
        self.record(what, |device| device.loss()?.rescale(sums, local, global))
    }

    fn total(&self, max: &Buffer, sums: &Buffer, targets: &Buffer, samples: usize) -> Result<(Buffer, Buffer)> {
        self.span(Class::Loss, "total", &[max, sums, targets], |device| {
            device.loss()?.total(max, sums, targets, samples)
        })
    }

    fn grad(
        &self,
        logits: &mut Buffer,
        targets: &Buffer,
        lse: &Buffer,
        scale: &Buffer,
        shard: VocabShard,
    ) -> Result<()> {
        let bytes = 2 * logits.bytes() as u64 + bytes(&[targets, lse]);
        let what = What { class: Class::Loss, name: "grad", detail: Detail::None, dtype: dtype(&[logits]), bytes };
        self.record(what, |device| device.loss()?.grad(logits, targets, lse, scale, shard))
    }

    fn correct(&self, logits: &Buffer, targets: &Buffer, width: usize, samples: usize) -> Result<Buffer> {
        self.span(Class::Loss, "correct", &[logits, targets], |device| {
            device.loss()?.correct(logits, targets, width, samples)
        })
    }
}

impl Layout for Profiled {
    fn swap_blocks(&self, x: &Buffer, a: usize, b: usize, inner: usize) -> Result<Buffer> {
        self.span(Class::Memory, "swap_blocks", &[x], |device| device.layout()?.swap_blocks(x, a, b, inner))
    }

    fn narrow(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        let bytes = (outer * range.len() * inner * x.dtype().size()) as u64; // no more of x than is written
        let what = What { class: Class::Memory, name: "narrow", detail: Detail::None, dtype: dtype(&[x]), bytes };
        self.record(what, |device| device.layout()?.narrow(x, outer, extent, inner, range))
    }

    fn widen(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        self.span(Class::Memory, "widen", &[x], |device| device.layout()?.widen(x, outer, extent, inner, range))
    }

    fn copy(&self, x: &Buffer) -> Result<Buffer> {
        self.span(Class::Memory, "copy", &[x], |device| device.layout()?.copy(x))
    }

    fn pack_nonzeros(&self, x: &Buffer) -> Result<Option<[Buffer; 2]>> {
        self.span(Class::Memory, "pack_nonzeros", &[x], |device| device.layout()?.pack_nonzeros(x))
    }

    fn unpack_nonzeros(&self, bits: &Buffer, values: &Buffer, count: usize) -> Result<Buffer> {
        self.span(Class::Memory, "unpack_nonzeros", &[bits, values], |device| {
            device.layout()?.unpack_nonzeros(bits, values, count)
        })
    }

    fn copy_into(&self, src: &Buffer, range: Range<usize>, dst: &mut Buffer, at: usize) -> Result<()> {
        let bytes = 2 * (range.len() * src.dtype().size()) as u64;
        let what = What { class: Class::Memory, name: "copy_into", detail: Detail::None, dtype: dtype(&[src]), bytes };
        self.record(what, |device| device.layout()?.copy_into(src, range, dst, at))
    }
}

impl Compression for Profiled {
    fn pack(
        &self,
        scheme: &Scheme,
        shape: Shape,
        draws: Draws,
        x: &Buffer,
        message: &mut Buffer,
        at: usize,
    ) -> Result<()> {
        let what = What::compression("pack", &[x, message]);
        self.record(what, |device| device.compression()?.pack(scheme, shape, draws, x, message, at))
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
        let what = What::compression("unpack", &[message, out]);
        self.record(what, |device| device.compression()?.unpack(scheme, shape, message, fold, out, at))
    }

    fn take(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, x: &Buffer) -> Result<Buffer> {
        let what = What::compression("take", &[indices]);
        self.record(what, |device| device.compression()?.take(sparse, shape, indices, x))
    }

    fn put(&self, sparse: &Sparse, shape: Shape, indices: &Buffer, values: &Buffer) -> Result<Buffer> {
        let what = What::compression("put", &[indices, values]);
        self.record(what, |device| device.compression()?.put(sparse, shape, indices, values))
    }

    fn outgoing(&self, feedback: Feedback, x: &Buffer, first: bool, sender: &mut Sender<Buffer>) -> Result<Buffer> {
        let what = What::compression("outgoing", &[x, x]);
        self.record(what, |device| device.compression()?.outgoing(feedback, x, first, sender))
    }

    fn sent(&self, feedback: Feedback, target: &Buffer, sent: &Buffer, sender: &mut Sender<Buffer>) -> Result<()> {
        let what = What::compression("sent", &[target, sent, target]);
        self.record(what, |device| device.compression()?.sent(feedback, target, sent, sender))
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
        let what = What::compression("left_factor", &[m, q, p]);
        self.record(what, |device| device.compression()?.left_factor(of, shape, draws, m, q, p))
    }

    fn right_factor(&self, of: PowerSgd, shape: Shape, m: &Buffer, p: &mut Buffer, q: &mut Buffer) -> Result<()> {
        let what = What::compression("right_factor", &[m, p, q]);
        self.record(what, |device| device.compression()?.right_factor(of, shape, m, p, q))
    }

    fn join(&self, of: PowerSgd, shape: Shape, factors: &[Buffer; 2], among: usize, out: &mut Buffer) -> Result<()> {
        let what = What::compression("join", &[&factors[0], &factors[1], out]);
        self.record(what, |device| device.compression()?.join(of, shape, factors, among, out))
    }
}

impl Optim for Profiled {
    fn zero(&self, x: &mut Buffer, range: Range<usize>) -> Result<()> {
        let bytes = (range.len() * x.dtype().size()) as u64;
        let what = What { class: Class::Optimizer, name: "zero", detail: Detail::None, dtype: dtype(&[x]), bytes };
        self.record(what, |device| device.optim()?.zero(x, range))
    }

    fn sum_of_squares(&self, vectors: &[Buffer], sums: &mut Buffer, at: usize) -> Result<()> {
        let what = What::optimizer("sum_of_squares", vectors);
        self.record(what, |device| device.optim()?.sum_of_squares(vectors, sums, at))
    }

    fn exact_sum_of_squares(&self, vectors: &[Buffer], digits: &mut Buffer, at: usize) -> Result<()> {
        let what = What::optimizer("exact_sum_of_squares", vectors);
        self.record(what, |device| device.optim()?.exact_sum_of_squares(vectors, digits, at))
    }

    fn update(&self, rule: &Rule, update: Update, flats: &mut [FlatParts<'_>]) -> Result<()> {
        // Weights and states are read and written, gradients read.
        let of = |flat: &FlatParts<'_>| {
            let states: usize = flat.states.iter().map(|state| 2 * state.dtype().size()).sum();
            let elements: usize = flat.ranges.iter().map(Range::len).sum();
            (elements * (2 * flat.weights.dtype().size() + flat.grads.dtype().size() + states)) as u64
        };
        let (detail, dtype) = (Detail::None, flats.first().and_then(|flat| dtype(&[&*flat.weights])));
        let bytes = flats.iter().map(of).sum();
        let what = What { class: Class::Optimizer, name: "update", detail, dtype, bytes };
        self.record(what, |device| device.optim()?.update(rule, update, flats))
    }

    fn measure(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        weights: &Buffer,
        vectors: WholeVectors<'_>,
        into: Option<Measured<'_>>,
    ) -> Result<()> {
        // Weights and gradients are read, states read and written.
        let what = whole(part, "measure", weights, &vectors);
        self.record(what, |device| device.optim()?.measure(part, pass, weights, vectors, into))
    }

    fn divide_by_root(&self, x: &mut Buffer, squares: &Buffer, least: f64) -> Result<()> {
        let bytes = 2 * x.bytes() as u64;
        let what =
            What { class: Class::Optimizer, name: "divide_by_root", detail: Detail::None, dtype: dtype(&[x]), bytes };
        self.record(what, |device| device.optim()?.divide_by_root(x, squares, least))
    }

    fn exact_sums(&self, digits: &Buffer) -> Result<Buffer> {
        self.span(Class::Optimizer, "exact_sums", &[digits], |device| device.optim()?.exact_sums(digits))
    }

    fn settle(
        &self,
        part: &WholePart<'_>,
        pass: usize,
        totals: &mut Buffer,
        at: usize,
        sets: &mut [Buffer],
    ) -> Result<()> {
        let bytes = sets.iter().map(|set| 2 * set.bytes() as u64).sum();
        let (detail, dtype) = (Detail::None, dtype(&[totals]));
        let what = What { class: Class::Optimizer, name: "settle", detail, dtype, bytes };
        self.record(what, |device| device.optim()?.settle(part, pass, totals, at, sets))
    }

    fn update_whole(&self, part: &WholePart<'_>, weights: &mut Buffer, vectors: WholeVectors<'_>) -> Result<()> {
        let what = whole(part, "update", weights, &vectors);
        self.record(what, |device| device.optim()?.update_whole(part, weights, vectors))
    }
}

/// A pass over elements of a parameter with their gradients and states.
fn whole(part: &WholePart<'_>, name: &'static str, weights: &Buffer, vectors: &WholeVectors<'_>) -> What {
    let states: usize = vectors.states.iter().map(|state| 2 * state.dtype().size()).sum();
    let per_element = 2 * weights.dtype().size() + vectors.grads.dtype().size() + states;
    let (detail, dtype) = (Detail::None, dtype(&[weights]));
    What { class: Class::Optimizer, name, detail, dtype, bytes: (part.part.len() * per_element) as u64 }
}

impl Grouped for Profiled {
    fn grouped_linear(&self, spec: GroupedGemm<'_>, x: &Buffer, w: &Buffer) -> Result<Buffer> {
        self.record(grouped("grouped gemm nt", spec, w.dtype(), &[x, w]), |device| {
            device.grouped_matmul()?.grouped_linear(spec, x, w)
        })
    }

    fn grouped_linear_swiglu(
        &self,
        spec: GroupedGemm<'_>,
        x: &Buffer,
        w: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        self.record(grouped("grouped gemm nt, swiglu", spec, w.dtype(), &[x, w]), |device| {
            device.grouped_matmul()?.grouped_linear_swiglu(spec, x, w, stored)
        })
    }

    fn grouped_input_grad(&self, spec: GroupedGemm<'_>, dy: &Buffer, w: &Buffer) -> Result<Buffer> {
        self.record(grouped("grouped gemm nn", spec, w.dtype(), &[dy, w]), |device| {
            device.grouped_matmul()?.grouped_input_grad(spec, dy, w)
        })
    }

    fn grouped_weight_grad(
        &self,
        spec: GroupedGemm<'_>,
        blocks: &GroupBlocks,
        dy: &Buffer,
        x: &Buffer,
        dw: GroupedGrad<'_>,
    ) -> Result<()> {
        let mut what = grouped("grouped gemm tn", spec, dw.buffer.dtype(), &[dy, x]);
        what.bytes +=
            (blocks.len() * spec.n * spec.k * dw.buffer.dtype().size() * if dw.accumulate { 2 } else { 1 }) as u64;
        self.record(what, |device| device.grouped_matmul()?.grouped_weight_grad(spec, blocks, dy, x, dw))
    }

    fn grouped_bias(&self, rows: &[usize], x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        self.span(Class::Pointwise, "grouped_bias", &[x, bias], |device| {
            device.grouped_matmul()?.grouped_bias(rows, x, bias)
        })
    }

    fn grouped_bias_grad(&self, blocks: &GroupBlocks, n: usize, dy: &Buffer, db: GroupedGrad<'_>) -> Result<()> {
        self.span(Class::Pointwise, "grouped_bias_grad", &[dy], |device| {
            device.grouped_matmul()?.grouped_bias_grad(blocks, n, dy, db)
        })
    }
}

/// The products of all groups as one.
fn grouped(name: &'static str, spec: GroupedGemm<'_>, dtype: DType, reads: &[&Buffer]) -> What {
    What::product(name, [spec.rows.iter().sum(), spec.n, spec.k], dtype, reads)
}

impl Permutation for Profiled {
    fn counts(&self, choices: &Buffer, samples: usize, ids: Range<usize>) -> Result<Buffer> {
        self.span(Class::Memory, "counts", &[choices], |device| device.permutation()?.counts(choices, samples, ids))
    }

    fn sort(&self, choices: &Buffer, ids: Range<usize>, total: usize) -> Result<(Buffer, Buffer)> {
        self.span(Class::Memory, "sort", &[choices], |device| device.permutation()?.sort(choices, ids, total))
    }

    fn invert(&self, order: &Buffer, n: usize) -> Result<Buffer> {
        self.span(Class::Memory, "invert", &[order], |device| device.permutation()?.invert(order, n))
    }

    fn group_ids(&self, choices: &Buffer, k: usize, size: usize, once: bool) -> Result<Buffer> {
        self.span(Class::Memory, "group_ids", &[choices], |device| {
            device.permutation()?.group_ids(choices, k, size, once)
        })
    }

    fn gather(&self, x: &Buffer, index: &Buffer, per: usize, width: usize) -> Result<Buffer> {
        // As much is read as is written.
        let bytes = (index.bytes() + index.count() * width * x.dtype().size()) as u64;
        let what = What { class: Class::Memory, name: "gather", detail: Detail::None, dtype: dtype(&[x]), bytes };
        self.record(what, |device| device.permutation()?.gather(x, index, per, width))
    }

    fn combine(&self, rows: &Buffer, choices: Choices<'_>, weights: Option<&Buffer>, width: usize) -> Result<Buffer> {
        self.span(Class::Memory, "combine", &[rows, choices.ids, choices.slots], |device| {
            device.permutation()?.combine(rows, choices, weights, width)
        })
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
        self.span(Class::Memory, "combine_grad", &[dout, rows, choices.slots, order, weights], |device| {
            device.permutation()?.combine_grad(dout, rows, choices, order, weights, width)
        })
    }
}

impl Routing for Profiled {
    fn select(&self, scores: &Buffer, bias: Option<&Buffer>, of: &Selection, pick: Pick) -> Result<Selected> {
        self.span(Class::Pointwise, "select", &[scores], |device| device.routing()?.select(scores, bias, of, pick))
    }

    fn select_tokens(&self, scores: &Buffer, samples: usize, experts: usize, capacity: usize) -> Result<Buffer> {
        self.span(Class::Pointwise, "select", &[scores], |device| {
            device.routing()?.select_tokens(scores, samples, experts, capacity)
        })
    }

    fn pick(&self, scores: &Buffer, choices: Option<&Buffer>, of: Pick) -> Result<Buffer> {
        self.span(Class::Pointwise, "pick", &[scores], |device| device.routing()?.pick(scores, choices, of))
    }

    fn pick_grad(&self, scores: &Buffer, choices: Option<&Buffer>, dout: &Buffer, of: Pick) -> Result<Buffer> {
        self.span(Class::Pointwise, "pick_grad", &[scores, dout], |device| {
            device.routing()?.pick_grad(scores, choices, dout, of)
        })
    }

    fn balance(&self, scores: &Buffer, counts: &Buffer, samples: usize, experts: usize, scale: f64) -> Result<Buffer> {
        self.span(Class::Pointwise, "balance", &[scores, counts], |device| {
            device.routing()?.balance(scores, counts, samples, experts, scale)
        })
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
        self.span(Class::Pointwise, "balance_grad", &[dout, counts], |device| {
            device.routing()?.balance_grad(dout, counts, tokens, experts, scale, dtype)
        })
    }

    fn z_loss(&self, logits: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        self.span(Class::Pointwise, "z_loss", &[logits], |device| device.routing()?.z_loss(logits, samples, experts))
    }

    fn z_loss_grad(&self, logits: &Buffer, dout: &Buffer, experts: usize) -> Result<Buffer> {
        self.span(Class::Pointwise, "z_loss_grad", &[logits, dout], |device| {
            device.routing()?.z_loss_grad(logits, dout, experts)
        })
    }

    fn entropy(&self, scores: &Buffer, samples: usize, experts: usize) -> Result<Buffer> {
        self.span(Class::Pointwise, "entropy", &[scores], |device| device.routing()?.entropy(scores, samples, experts))
    }

    fn unused(&self, kept: &Buffer, samples: usize) -> Result<Buffer> {
        self.span(Class::Pointwise, "unused", &[kept], |device| device.routing()?.unused(kept, samples))
    }

    fn loads(&self, choices: &Buffer, experts: usize) -> Result<Buffer> {
        self.span(Class::Pointwise, "loads", &[choices], |device| device.routing()?.loads(choices, experts))
    }

    fn jitter(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        self.span(Class::Pointwise, "jitter", &[x], |device| device.routing()?.jitter(x, mask))
    }
}
