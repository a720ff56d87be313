//! Routers of a mixture of experts: which experts a token goes to, with which weights, and how evenly.
//!
//! Scores are `[tokens, experts]`; the tokens of a sample are consecutive, and all samples have the same number of
//! tokens. Choices are described in [`permutation`](super::Permutation).

use super::DropoutMask;
use super::table::*;
use crate::random::Key;
use meshwork_core::{Buffer, DType};

/// How a token chooses its experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Selection {
    /// Samples, each with its own capacity.
    pub samples: usize,
    /// Experts.
    pub experts: usize,
    /// Experts per token.
    pub k: usize,
    /// Groups of consecutive experts; 1 if groups do not limit the choice.
    pub groups: usize,
    /// Groups from which a token may choose experts.
    pub top_groups: usize,
    /// The score of a group is the sum of this many of its largest scores: 2 in DeepSeek-V3, 1 in the device-limited
    /// routing of V2.
    pub group_best: usize,
    /// Tokens per sample that an expert takes at most; `None`: no limit.
    pub capacity: Option<usize>,
    /// The fate of a choice whose expert is full.
    pub overflow: Overflow,
    /// GShard's second choice: it is used with probability `2 g₂`, with the weights of both choices normalised.
    pub second: Option<Draw>,
}

impl Selection {
    /// How many experts of a token are ranked: `k`, or all experts that the token may use if a choice can be rerouted.
    pub fn ranked(&self) -> usize {
        match (self.overflow, self.capacity) {
            (Overflow::Reroute, Some(_)) => self.experts / self.groups * self.top_groups,
            _ => self.k,
        }
    }
}

/// The fate of a choice whose expert is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Overflow {
    /// The choice is dropped.
    #[default]
    Drop,
    /// The choice goes to the best expert with room that the token did not choose, and is dropped if there is none.
    Reroute,
}

/// Random numbers by global position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// The stream.
    pub key: Key,
    /// Global index of the first token.
    pub first: u64,
}

/// Result of a [selection](Routing::select): each buffer is `[tokens, k]`, with the experts of a token in ascending
/// order.
#[derive(Clone, Debug)]
pub struct Selected {
    /// The experts with the largest `scores + bias`, in i32.
    pub chosen: Buffer,
    /// The same after rerouting the choices that [overflow](Overflow), in i32.
    pub routed: Buffer,
    /// `routed` with dropped choices replaced by -1 (not drawn, or without room), in i32.
    pub kept: Buffer,
    /// The weights of `routed`, in the type of the scores, as computed by [`pick`](Routing::pick).
    pub weights: Buffer,
}

kernels! {
    /// The kernels of routers. Ties between scores go to the lower expert.
    pub trait Routing at routing {
        /// The choices of each token, and their weights as in `pick`, whose experts and k are the selection's. Capacity
        /// is given to all first choices before second choices, and to tokens in order (GShard, algorithm 1).
        fn select(&self, scores: &Buffer, bias: Option<&Buffer>, selection: &Selection, pick: Pick) -> Result<Selected>
            | profile(Pointwise: scores), halves({
                  let bias = bias.map(|bias| self.wide(bias)).transpose()?;
                  let selected = self.inner.routing()?.select(&self.wide(scores)?, bias.as_ref(), selection, pick)?;
                  self.rounded(selected, scores.dtype())
              }), meta(= self.selected(scores, selection, pick));

        /// Expert choice: in each of `samples` samples every expert takes the `capacity` tokens with the largest
        /// scores; ties go to the earlier token. Result `[tokens, experts]`: expert or -1.
        fn select_tokens(&self, scores: &Buffer, samples: usize, experts: usize, capacity: usize) -> Result<Buffer>
            | profile(= Traffic::call(Class::Pointwise, "select", &[scores])), halves(wide scores),
              meta(I32 => scores.count());

        /// The scores of the `k` choices of each token (0 for -1), or of all experts if `choices` is `None`; times
        /// `scale`, and divided by their sum if `normalise`.
        fn pick(&self, scores: &Buffer, choices: Option<&Buffer>, pick: Pick) -> Result<Buffer>
            | profile(Pointwise: scores), halves(wide scores -> scores),
              meta(scores => scores.count() / pick.experts * pick.k);

        /// Its gradient with respect to the scores.
        fn pick_grad(&self, scores: &Buffer, choices: Option<&Buffer>, dout: &Buffer, pick: Pick) -> Result<Buffer>
            | profile(Pointwise: scores, dout), halves(wide scores, dout -> scores), meta(like scores);

        /// An f64 per sample: `scale · Σ_e counts[e] · Σ_t scores[t, e]`. The counts are i32, per sample or one set for
        /// all samples.
        fn balance(&self, scores: &Buffer, counts: &Buffer, samples: usize, experts: usize, scale: f64) -> Result<Buffer>
            | profile(Pointwise: scores, counts), halves(wide scores), meta(F64 => samples);

        /// Its gradient with respect to the scores, `dims` of tokens and experts of type `dtype`, where `dout` has an
        /// f64 per sample.
        fn balance_grad(&self, dout: &Buffer, counts: &Buffer, dims: [usize; 2], scale: f64, dtype: DType) -> Result<Buffer>
            | profile(Pointwise: dout, counts), halves({
                  let (routing, wide) = (self.inner.routing()?, dtype.widened());
                  self.rounded(routing.balance_grad(dout, counts, dims, scale, wide)?, dtype)
              }), meta(dtype => dims[0] * dims[1]);

        /// An f64 per sample: the mean over its tokens of `ln(Σ_e e^logit)²`.
        fn z_loss(&self, logits: &Buffer, samples: usize, experts: usize) -> Result<Buffer>
            | profile(Pointwise: logits), halves(wide logits), meta(F64 => samples);

        /// Its gradient with respect to the logits, where `dout` has an f64 per sample.
        fn z_loss_grad(&self, logits: &Buffer, dout: &Buffer, experts: usize) -> Result<Buffer>
            | profile(Pointwise: logits, dout), halves(wide logits -> logits), meta(like logits);

        /// An f64 per sample: the mean over its tokens of `-Σ_e p ln p`, where p are the scores divided by their sum.
        fn entropy(&self, scores: &Buffer, samples: usize, experts: usize) -> Result<Buffer>
            | profile(Pointwise: scores), halves(wide scores), meta(F64 => samples);

        /// An f64 per sample: the fraction of its choices that are dropped.
        fn unused(&self, kept: &Buffer, samples: usize) -> Result<Buffer>
            | profile(Pointwise: kept), halves(as_is), meta(F64 => samples);

        /// The number of choices of each expert, `[experts]` in f32, for a [note](crate::Tape::note).
        fn loads(&self, choices: &Buffer, experts: usize) -> Result<Buffer>
            | profile(Pointwise: choices), halves(as_is), meta(F32 => experts);

        /// `x · (1 + p (2u - 1))`, u uniform in [0, 1) by global position: the input jitter of the Switch router.
        fn jitter(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer>
            | profile(Pointwise: x), halves(wide x -> x), meta(like x);
    }
}

/// How weights are computed from scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pick {
    /// Experts.
    pub experts: usize,
    /// Choices per token.
    pub k: usize,
    /// Whether weights are divided by their sum.
    pub normalise: bool,
    /// Factor of the weights.
    pub scale: f64,
}
