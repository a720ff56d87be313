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

/// The loss of direct preference optimisation (DPO; Rafailov et al. 2023, arXiv:2305.18290) of pairs of a chosen and a
/// rejected answer. With the loss `l = -ln p(answer)` of each answer, and `l_ref` of the reference:
///
/// ```text
/// reward = beta · (l_ref - l)      margin = reward of chosen - reward of rejected
/// loss   = -(1 - s) · ln σ(margin) - s · ln σ(-margin)
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preference {
    /// How much a deviation from the reference weighs: β of the paper, above 0.
    pub beta: f64,
    /// s: the share of pairs whose answers are taken to be the wrong way round (conservative DPO; Mitchell 2023), from
    /// 0 to below 0.5.
    pub label_smoothing: f64,
}

/// A number of a pair of answers; of several pairs their sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairNumber {
    /// The loss.
    Loss,
    /// The reward of the chosen answer.
    Chosen,
    /// The reward of the rejected answer.
    Rejected,
    /// The first less the second.
    Margin,
    /// 1 if the margin is above 0, else 0.
    Correct,
}

/// What each answer of pairs loses, and how many pairs there are.
#[derive(Clone, Copy, Debug)]
pub struct PairLosses<'a> {
    /// `[samples, answers]`, an f64 for the chosen answer of each pair, and one for the rejected answer behind it.
    pub losses: &'a Buffer,
    /// The same of the reference.
    pub reference: &'a Buffer,
    /// An i32 for each sample: its number of pairs. Answers behind them count for nothing.
    pub pairs: &'a Buffer,
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

        /// An f64 for each of the `groups` groups of each sample: the sum of those f64 of `values` `[samples, places]`
        /// whose place has the group's number in `ids`, i32, in their order. A negative id is of no group.
        fn group_sums(&self, values: &Buffer, ids: &Buffer, samples: usize, groups: usize) -> Result<Buffer>
            | profile(Loss: values, ids), halves(as_is), meta(F64 => samples * groups);

        /// The gradient of the values, from an f64 for each group of each sample: of each place its group's, or 0.
        fn group_sums_grad(&self, dsums: &Buffer, ids: &Buffer, samples: usize) -> Result<Buffer>
            | profile(Loss: dsums, ids), halves(as_is), meta(F64 => ids.count());

        /// A number of the pairs of each sample, summed over them in f64.
        fn preference(&self, of: Preference, number: PairNumber, answers: PairLosses<'_>) -> Result<Buffer>
            | profile(Loss: answers.losses, answers.reference, answers.pairs), halves(as_is),
              meta(F64 => answers.pairs.count());

        /// The gradients of the losses of answers, from an f64 per sample: the gradient of the loss of its pairs.
        fn preference_grad(&self, of: Preference, answers: PairLosses<'_>, dloss: &Buffer) -> Result<Buffer>
            | profile(Loss: answers.losses, answers.reference, answers.pairs, dloss), halves(as_is),
              meta(F64 => answers.losses.count());
    }
}
