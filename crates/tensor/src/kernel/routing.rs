//! Routers of a mixture of experts: which experts a token goes to, with which weights, and how evenly.
//!
//! Scores are `[tokens, experts]`; the tokens of a sample follow each other, and all samples have the same number.
//! Choices are described in [`permutation`](super::Permutation).

use super::DropoutMask;
use super::table::*;
use crate::random::Key;
use meshwork_core::{Buffer, DType};

/// How a token chooses its experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Selection {
    /// Samples, each with a capacity of its own.
    pub samples: usize,
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub k: usize,
    /// Groups of consecutive experts; 1 where groups do not limit the choice.
    pub groups: usize,
    /// Groups among whose experts a token chooses.
    pub top_groups: usize,
    /// A group's score is the sum of so many of its largest scores: 2 in DeepSeek-V3, 1 in the device-limited routing
    /// of V2.
    pub group_best: usize,
    /// Tokens of a sample that an expert takes; `None`: all.
    pub capacity: Option<usize>,
    /// What becomes of a choice that finds its expert full.
    pub overflow: Overflow,
    /// GShard's second choice: it is used with probability `2 g₂`, the weights of both being normalised.
    pub second: Option<Draw>,
}

impl Selection {
    /// Experts of a token in the order of its preference that a selection looks at: the `k` that it chooses, and all
    /// that it may choose among where a choice can go to another expert.
    pub fn ranked(&self) -> usize {
        match (self.overflow, self.capacity) {
            (Overflow::Reroute, Some(_)) => self.experts / self.groups * self.top_groups,
            _ => self.k,
        }
    }
}

/// What becomes of a choice that finds its expert full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Overflow {
    /// It is not used.
    #[default]
    Drop,
    /// It goes to the best expert with room among those that the token did not choose. It is not used if there is none.
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

/// What a [selection](Routing::select) makes, all `[tokens, k]`, the experts of a token in ascending order.
#[derive(Clone, Debug)]
pub struct Selected {
    /// The experts with the largest `scores + bias`, in i32.
    pub chosen: Buffer,
    /// The same with other experts in place of those that [overflow](Overflow), in i32.
    pub routed: Buffer,
    /// Those of `routed` that are used, in i32: a choice that the draw passes over, or that finds no room, is -1.
    pub kept: Buffer,
    /// The weights of `routed`, in the type of the scores: what [`pick`](Routing::pick) makes of them.
    pub weights: Buffer,
}

kernels! {
    /// The kernels of routers. Of equal scores, that of the lower expert is larger.
    pub trait Routing at routing {
        /// The choices of each token, and their weights as `pick` says, which has the selection's experts and k. First
        /// choices come before second ones, and among them tokens in order (GShard, algorithm 1).
        fn select(&self, scores: &Buffer, bias: Option<&Buffer>, selection: &Selection, pick: Pick) -> Result<Selected>
            | profile(Pointwise: scores), halves(own);

        /// Expert choice: in each of `samples` samples every expert takes the `capacity` tokens with the largest
        /// scores, of equal ones the earlier. `[tokens, experts]`: expert or -1.
        fn select_tokens(&self, scores: &Buffer, samples: usize, experts: usize, capacity: usize) -> Result<Buffer>
            | profile(= Traffic::of(Class::Pointwise, "select", &[scores])), halves(wide scores);

        /// The scores of `k` choices of each token, 0 for -1, or without choices of all experts; times `scale`, and if
        /// `normalise` over their sum.
        fn pick(&self, scores: &Buffer, choices: Option<&Buffer>, pick: Pick) -> Result<Buffer>
            | profile(Pointwise: scores), halves(wide scores -> scores);

        /// Its gradient with respect to the scores.
        fn pick_grad(&self, scores: &Buffer, choices: Option<&Buffer>, dout: &Buffer, pick: Pick) -> Result<Buffer>
            | profile(Pointwise: scores, dout), halves(wide scores, dout -> scores);

        /// Per sample an f64: `scale · Σ_e counts[e] · Σ_t scores[t, e]`, the counts being i32 of each sample, or the
        /// same for all.
        fn balance(&self, scores: &Buffer, counts: &Buffer, samples: usize, experts: usize, scale: f64) -> Result<Buffer>
            | profile(Pointwise: scores, counts), halves(wide scores);

        /// Its gradient with respect to the scores, where `dout` has an f64 per sample and they are of type `dtype`.
        fn balance_grad(
            &self,
            dout: &Buffer,
            counts: &Buffer,
            tokens: usize,
            experts: usize,
            scale: f64,
            dtype: DType,
        ) -> Result<Buffer>
            | profile(Pointwise: dout, counts), halves(own);

        /// Per sample an f64: the mean over its tokens of `ln(Σ_e e^logit)²`.
        fn z_loss(&self, logits: &Buffer, samples: usize, experts: usize) -> Result<Buffer>
            | profile(Pointwise: logits), halves(wide logits);

        /// Its gradient with respect to the logits, where `dout` has an f64 per sample.
        fn z_loss_grad(&self, logits: &Buffer, dout: &Buffer, experts: usize) -> Result<Buffer>
            | profile(Pointwise: logits, dout), halves(wide logits -> logits);

        /// Per sample an f64: the mean over its tokens of `-Σ_e p ln p`, where p are the scores over their sum.
        fn entropy(&self, scores: &Buffer, samples: usize, experts: usize) -> Result<Buffer>
            | profile(Pointwise: scores), halves(wide scores);

        /// Per sample an f64: the share of its choices that are not used.
        fn unused(&self, kept: &Buffer, samples: usize) -> Result<Buffer>
            | profile(Pointwise: kept), halves(as_is);

        /// The number of choices of each expert, `[experts]` in f32, for a [note](crate::Tape::note).
        fn loads(&self, choices: &Buffer, experts: usize) -> Result<Buffer>
            | profile(Pointwise: choices), halves(as_is);

        /// `x · (1 + p (2u - 1))`, u uniform in [0, 1) by global position: Switch's jitter of the input of a router.
        fn jitter(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer>
            | profile(Pointwise: x), halves(wide x -> x);
    }
}

/// How weights are made of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pick {
    /// Experts.
    pub experts: usize,
    /// Choices of a token.
    pub k: usize,
    /// Whether weights are divided by their sum.
    pub normalise: bool,
    /// A factor.
    pub scale: f64,
}
