//! The [cross entropy](super::loss) of the logits `x · wᵀ` without the logits: they exist for a chunk of tokens at a
//! time, and backward computes them once more (`torch.nn.functional.linear_cross_entropy`; Hsu et al., Liger Kernel,
//! arXiv:2410.10989).
//!
//! Beside a chunk's logits it keeps x and a number for each token, where `linear` and `cross_entropy` keep all logits.
//! It computes the product of the head four times instead of three. A chunk has tokens of one sample, and of one
//! reduction block of a sequence that cp cuts, so that how a gradient is summed does not depend on the mesh. Losses and
//! the gradient of x have the bits of `linear` and `cross_entropy`; the gradient of w is summed chunk by chunk.

use super::loss::{Targets, VocabLoss};
use super::prelude::*;
use crate::device::Device;
use crate::kernel::Gemm;
use crate::tape::{BlockSlot, Terms, Tokens};
use meshwork_core::tree::Counter;
use meshwork_core::{Axis, Buffer, DType};
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
struct LinearLoss {
    loss: VocabLoss,
    /// Tokens of a chunk.
    chunk: usize,
    /// Samples, tokens of each, and features.
    input: [usize; 3],
    /// The tokens over which the gradient of the weight is summed.
    tokens: Tokens,
    weight_shape: Shape,
    /// How the sums of the product, and the sums of the gradient of x, are cut.
    terms: [Terms; 2],
}

/// Tokens of one sample, by their rows among those of all samples.
struct Chunk {
    rows: Range<usize>,
}

impl Var {
    /// `x.linear(w, 1)?.cross_entropy(targets)` of x `[samples, .., features]` and w `[vocab, features]`, with the
    /// logits of at most `chunk` tokens at a time: the loss of each sample, `[samples]` in f64, or of each of its
    /// groups of tokens, `[samples, groups]`, against i32 targets `[samples, ..]`, negative ones masked.
    ///
    /// # Errors The errors of `linear` and `cross_entropy`; a chunk of no tokens. An id outside of the vocabulary is
    /// counted from the first token of its chunk.
    pub fn linear_cross_entropy<'a>(
        &'a self,
        weight: &'a Var,
        targets: impl Into<Targets<'a>>,
        chunk: usize,
    ) -> Result<Var> {
        let (width, targets) = (weight.shape().first().copied().unwrap_or(0), targets.into());
        let loss = VocabLoss::whole(width, targets);
        self.tape().apply(LinearLoss::new(self, weight, loss, chunk), &targets.behind(&[self, weight]))
    }

    /// The same for a weight whose first dim, `vocab` over all ranks, is cut over `axis`: the loss of
    /// [`vocab_parallel_cross_entropy`](Self::vocab_parallel_cross_entropy).
    pub fn vocab_parallel_linear_cross_entropy<'a>(
        &'a self,
        weight: &'a Var,
        targets: impl Into<Targets<'a>>,
        axis: Axis,
        vocab: usize,
        chunk: usize,
    ) -> Result<Var> {
        let (width, targets) = (weight.shape().first().copied().unwrap_or(0), targets.into());
        let loss = VocabLoss::cut(self, axis, width, vocab, targets);
        self.tape().apply(LinearLoss::new(self, weight, loss, chunk), &targets.behind(&[self, weight]))
    }
}

impl LinearLoss {
    fn new(x: &Var, weight: &Var, loss: VocabLoss, chunk: usize) -> Self {
        let shape = x.shape();
        let (rows, features) = shape.rows_columns(1);
        let samples = shape.first().copied().unwrap_or(1);
        let terms = [1..2, 0..1].map(|dims| x.tape().terms(weight, dims));
        let input = [samples, rows / samples.max(1), features];
        Self { loss, chunk, input, tokens: Tokens::new(x, 1), weight_shape: weight.shape(), terms }
    }

    /// The chunks of some samples, or of one of the slices of each.
    fn chunks(&self, samples: Range<usize>, (slice, slices): (usize, usize)) -> impl Iterator<Item = Chunk> {
        let (tokens, chunk) = (self.input[1], self.chunk);
        samples.flat_map(move |sample| {
            let all = sample * tokens + tokens * slice / slices..sample * tokens + tokens * (slice + 1) / slices;
            all.clone().step_by(chunk).map(move |row| Chunk { rows: row..all.end.min(row + chunk) })
        })
    }

    fn logits(&self, chunk: &Chunk, x: &Tensor, w: &Tensor) -> Result<Buffer> {
        let (n, k) = (self.loss.shard.width, self.input[2]);
        let mut logits = w.device().alloc(w.dtype(), chunk.rows.len() * n)?;
        let spec = Gemm::linear(chunk.rows.len(), n, k).over(self.terms[0]);
        w.device().matmul()?.gemm(spec, &chunk.rows_of(x, k)?, w.buffer(), &mut logits, 0)?;
        Ok(logits)
    }
}

impl Chunk {
    /// Its part of a tensor of `width` elements a token.
    fn rows_of(&self, x: &Tensor, width: usize) -> Result<Buffer> {
        Ok(x.buffer().slice(self.rows.start * width..self.rows.end * width)?)
    }
}

/// What backward reads, and the gradient of x if it is needed.
struct Pass<'a> {
    op: &'a LinearLoss,
    device: &'a Arc<dyn Device>,
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    lse: Tensor,
    /// The gradient of each sample's loss, or of each token's.
    scale: Tensor,
    dx: Option<Buffer>,
}

impl Pass<'_> {
    /// Takes the chunks of a slice of some samples in turn: writes the gradient of their x, and adds the gradient of
    /// the weight over all of them to `to`: a buffer, the first element in it, and whether to add to its old contents.
    fn run(
        &mut self,
        samples: Range<usize>,
        slice: (usize, usize),
        mut to: Option<(&mut Buffer, usize, bool)>,
    ) -> Result<()> {
        let ([_, _, k], n) = (self.op.input, self.op.loss.shard.width);
        let (loss, matmul) = (self.device.loss()?, self.device.matmul()?);
        for chunk in self.op.chunks(samples, slice) {
            let (rows, each) = (chunk.rows.len(), self.targets.count() / self.scale.count());
            let scale = self.scale.buffer().slice(chunk.rows.start / each..chunk.rows.end.div_ceil(each))?;
            let mut grad = self.op.logits(&chunk, &self.x, &self.w)?;
            let (targets, lse) = (chunk.rows_of(&self.targets, 1)?, chunk.rows_of(&self.lse, 1)?);
            loss.grad(&mut grad, &targets, &lse, &scale, self.op.loss.shard)?;
            if let Some((buffer, start, accumulate)) = &mut to {
                let spec = Gemm::linear_weight_grad(rows, n, k).accumulating(*accumulate);
                matmul.gemm(spec, &grad, &chunk.rows_of(&self.x, k)?, buffer, *start)?;
                *accumulate = true;
            }
            if let Some(dx) = &mut self.dx {
                let spec = Gemm::linear_input_grad(rows, n, k).over(self.op.terms[1]);
                matmul.gemm(spec, &grad, self.w.buffer(), dx, chunk.rows.start * k)?;
            }
        }
        match to {
            Some((buffer, start, false)) => self.device.optim()?.zero(buffer, start..start + n * k), // no tokens
            _ => Ok(()),
        }
    }

    /// The same for a share of the gradient of the weight: in the memory of the share; or first in other memory, where
    /// samples are summed one by one or a sum would be rounded after every chunk.
    fn share(&mut self, room: BlockSlot<'_>) -> Result<()> {
        let BlockSlot { buffer, start, accumulate, samples, blocks, slice } = room;
        if blocks == 1 && !buffer.dtype().is_half() {
            return self.run(samples, slice, Some((buffer, start, accumulate)));
        }
        let (device, count) = (self.device, self.op.weight_shape.count());
        let dtype = if buffer.dtype().is_half() { DType::F32 } else { buffer.dtype() };
        let join = |left: Result<Buffer>, right: Result<Buffer>| {
            let mut left = left?;
            device.pointwise()?.add_assign(&mut left, 0, &right?)?;
            Ok(left)
        };
        let each = samples.len() / blocks.max(1);
        let mut tree = Counter::default();
        for first in samples.step_by(each.max(1)) {
            let mut sum = device.alloc(dtype, count)?;
            self.run(first..first + each, slice, Some((&mut sum, 0, false)))?;
            tree.push(1, Ok(sum), join);
        }
        let sum = tree.finish(join).unwrap_or_else(|| device.alloc(dtype, 0))?;
        let sum = Tensor::from_buffer(device, sum, [count])?.cast(buffer.dtype())?;
        match accumulate {
            true => device.pointwise()?.add_assign(buffer, start, sum.buffer()),
            false => device.layout()?.copy_into(sum.buffer(), 0..count, buffer, start),
        }
    }
}

impl Op for LinearLoss {
    fn name(&self) -> &'static str {
        if self.loss.cut_over.is_some() { "vocab_parallel_linear_cross_entropy" } else { "linear_cross_entropy" }
    }

    fn operands(&self) -> &'static [&'static str] {
        self.loss.operands(&["x", "weight", "targets", "groups"])
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let (x, weight) = (operands[0], operands[1]);
        let logits = Operand::value("logits", rules::contract(self.name(), x, weight, 1)?, x.ndim + weight.ndim - 2);
        self.loss.types(self.name(), logits, &operands[2..])
    }

    fn padded(&self) -> Padded {
        self.loss.padding()
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, w, targets) = (inputs[0], inputs[1], inputs[2]);
        let (xs, ws) = (x.shape(), w.shape());
        cx.require(
            ws.len() == 2
                && xs.len() > 1
                && xs.last() == ws.last()
                && inputs[2..].iter().all(|of| of.shape()[..] == xs[..xs.len() - 1]),
            "x is [samples, .., features], weight [vocab, features], and targets have the shape of x without the \
             features",
        )?;
        cx.require(self.chunk > 0 && targets.count() > 0, "there is a token in each chunk")?;
        let (device, [samples, ..], rows) = (x.device(), self.input, targets.count());
        let (loss, layout) = (device.loss()?, device.layout()?);
        let mut parts: Vec<(Buffer, Buffer)> = Vec::new();
        for chunk in self.chunks(0..samples, (0, 1)) {
            let (logits, ids) = (self.logits(&chunk, x, w)?, chunk.rows_of(targets, 1)?);
            let (at, count) = (chunk.rows.start, chunk.rows.len());
            for (i, part) in self.loss.parts(cx.tape()).enumerate() {
                let (max, sums) = loss.row_stats(&logits, &ids, part)?;
                if at == 0 {
                    parts.push((device.alloc(max.dtype(), rows)?, device.alloc(sums.dtype(), 2 * rows)?));
                }
                let (all_max, all_sums) = &mut parts[i];
                layout.copy_into(&max, 0..count, all_max, at)?;
                layout.copy_into(&sums, 0..count, all_sums, at)?;
                layout.copy_into(&sums, count..2 * count, all_sums, rows + at)?;
            }
        }
        let (total, lse) = self.loss.total(cx, parts, &inputs[2..], samples)?;
        cx.save_input(0)?;
        cx.save_input(1)?;
        cx.save_exact(&Tensor::from_buffer(device, lse, [rows])?)?;
        inputs[2..].iter().try_for_each(|targets| cx.save(targets))?;
        Ok(total)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let device = grad.device().clone();
        let (x, w, lse) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?);
        let mut targets = (2..self.operands().len()).map(|at| cx.saved(1 + at)).collect::<Result<Vec<_>>>()?;
        let scale = self.loss.scale(grad, &targets)?;
        let targets = targets.swap_remove(0);
        let ([samples, tokens, k], dtype) = (self.input, w.dtype());
        let shape = x.shape();
        let dx = cx.needs(0).then(|| device.alloc(cx.tape().share_dtype(dtype), samples * tokens * k)).transpose()?;
        let mut pass = Pass { op: self, device: &device, x, w, targets, lse, scale, dx };
        let mut dw = None;
        if cx.needs(1) {
            dw = cx.write_grad(1, dtype, self.weight_shape, self.tokens, |room| pass.share(room))?;
        } else {
            pass.run(0..samples, (0, 1), None)?;
        }
        let dx = pass.dx.map(|dx| Tensor::from_buffer(&device, dx, shape)).transpose()?;
        Ok([dx, dw].into_iter().chain(self.operands()[2..].iter().map(|_| None)).collect())
    }
}
