//! Softmax cross entropy in separate steps, so that reductions over ranks can run between them if the vocabulary is
//! sharded.

use super::table::*;
use meshwork_core::Buffer;

/// A part of the vocabulary in this rank's logits `[rows, pitch]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabShard {
    /// First id of the shard.
    pub first: usize,
    /// Number of ids; columns from `valid` to `width` are padding and never enter a sum.
    pub valid: usize,
    /// Columns of the shard.
    pub width: usize,
    /// Columns of the logits before the shard.
    pub skipped: usize,
    /// Columns of the logits in total.
    pub pitch: usize,
    /// Number of ids over all ranks. A target beyond it is an error, which no single shard could detect without this
    /// number.
    pub vocab: usize,
}

impl VocabShard {
    /// A whole vocabulary without padding.
    pub fn whole(vocab: usize) -> Self {
        Self { first: 0, valid: vocab, width: vocab, skipped: 0, pitch: vocab, vocab }
    }

    /// `count` equal parts of this shard; boundaries are rounded down.
    pub fn parts(self, count: usize) -> impl Iterator<Item = Self> {
        (0..count).map(move |part| {
            let (from, to) = (self.width * part / count, self.width * (part + 1) / count);
            let valid = self.valid.clamp(from, to) - from;
            let first = self.first + from.min(self.valid);
            Self { first, valid, width: to - from, skipped: self.skipped + from, ..self }
        })
    }
}

kernels! {
    /// Cross entropy of logits `[rows, pitch]`, f32 or 16 bits, against i32 targets `[rows]`; a negative target is
    /// masked.
    pub trait Loss at loss {
        /// (max `[rows]`: the largest valid logit of each row, -inf where the shard is empty; sums `[2, rows]`: the sum
        /// of exp(logit - max) over the shard, then the target's logit if the shard holds it, else 0), in one pass.
        fn row_stats(&self, logits: &Buffer, targets: &Buffer, shard: VocabShard) -> Result<(Buffer, Buffer)>
            | profile(= Traffic::row_stats(logits, targets, shard)), halves(as_is),
              meta(logits.dtype().widened() => targets.count(), logits.dtype().widened() => 2 * targets.count());

        /// Elementwise maximum of `max` and `other`, in `max`.
        fn larger(&self, max: &mut Buffer, other: &Buffer) -> Result<()>
            | profile(Loss: other, other, other), halves(as_is), meta(nothing);

        /// Rescales the sums of exp from the maxima of this shard to the maxima over all shards. Then they can be
        /// summed over the shards, like the logits of the targets.
        fn rescale(&self, sums: &mut Buffer, local: &Buffer, global: &Buffer) -> Result<()>
            | profile(Loss: sums, sums, local, global), halves(as_is), meta(nothing);

        /// (an f64 per sample: Σ (lse - target logit) over its unmasked rows, in order; lse `[rows]`), where lse = max
        /// + ln(sum of exp).
        fn total(&self, max: &Buffer, sums: &Buffer, targets: &Buffer, samples: usize) -> Result<(Buffer, Buffer)>
            | profile(Loss: max, sums, targets), halves(as_is), meta(F64 => samples, max => max.count());

        /// Turns logits into their gradient, in place: (exp(logit - lse) - onehot) · scale, 0 for masked rows and
        /// padding. `ids` are the targets, `scale` has an f64 per sample: the gradient of the sample's total.
        fn grad(&self, logits: &mut Buffer, ids: &Buffer, lse: &Buffer, scale: &Buffer, shard: VocabShard) -> Result<()>
            | profile(Loss: logits, logits, ids, lse), halves(as_is), meta(nothing);

        /// An f64 per sample: the number of rows of logits `[rows, width]` whose target has the largest logit. Of equal
        /// logits, the first counts as the largest. Masked rows do not count.
        fn correct(&self, logits: &Buffer, targets: &Buffer, width: usize, samples: usize) -> Result<Buffer>
            | profile(Loss: logits, targets), halves(as_is), meta(F64 => samples);
    }
}
