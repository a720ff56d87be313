//! Softmax cross entropy in pieces, so that a vocabulary cut over ranks can put its reductions between them.

use crate::error::Result;
use meshwork_core::Buffer;
use std::fmt::Debug;

/// The part of the vocabulary that this rank's logits `[rows, width]` cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabShard {
    /// First id.
    pub first: usize,
    /// Ids held; columns from here to `width` are padding and never enter a sum.
    pub valid: usize,
    /// Columns of the logits.
    pub width: usize,
    /// Ids over all ranks: a target beyond is an error, since no single shard could tell.
    pub vocab: usize,
}

/// Cross entropy of logits `[rows, width]` against i32 targets `[rows]`; a negative target is masked.
pub trait Loss: Debug {
    /// (max `[rows]`: the largest valid logit of each row, -inf where the shard is empty; sums `[2, rows]`: the sum of
    /// exp(logit - max) over the shard, then the target's logit if the shard holds it, else 0), in one pass.
    fn row_stats(&self, logits: &Buffer, targets: &Buffer, shard: VocabShard) -> Result<(Buffer, Buffer)>;

    /// Takes the sums of exp against the maxima over all shards instead of this one's own: they become fit to be summed
    /// over the shards, as are the targets' logits.
    fn rescale(&self, sums: &mut Buffer, local: &Buffer, global: &Buffer) -> Result<()>;

    /// (one f64: the sum over unmasked rows of lse - target logit; lse `[rows]`), where lse = max + ln(sum of exp).
    fn total(&self, max: &Buffer, sums: &Buffer, targets: &Buffer) -> Result<(Buffer, Buffer)>;

    /// Turns logits into their gradient, in place: (exp(logit - lse) - onehot) · scale, 0 for masked rows and padding.
    /// `scale` is one f64, the gradient of the total.
    fn grad(
        &self,
        logits: &mut Buffer,
        targets: &Buffer,
        lse: &Buffer,
        scale: &Buffer,
        shard: VocabShard,
    ) -> Result<()>;
}
