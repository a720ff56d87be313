//! What a trainer needs of a part of a language model.

use meshwork_core::Types;
use meshwork_tensor::{Result, Shape, Tape, Var};
use std::fmt::Debug;

/// What travels between two stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// Extents on one rank.
    pub shape: Shape,
    /// SPMD types of the hidden state; its gradient has their duals.
    pub types: Types,
}

/// One contiguous part of a model. The first one takes token ids, the others the hidden state of the one before; the last
/// one gives logits, the others a hidden state.
pub trait Stage: Debug {
    /// `input` is token ids `[batch, seq]` for the first stage, else a hidden state.
    fn forward(&self, tape: &Tape, input: &Var) -> Result<Var>;

    /// The summed loss of the last stage's logits (one f64) against targets `[batch, seq]`, negative ones masked.
    fn loss(&self, logits: &Var, targets: &Var) -> Result<Var>;

    /// The whole logits `[batch, seq, vocab]` on every rank, for sampling; padding, if any, at the end.
    fn gather_logits(&self, logits: &Var) -> Result<Var>;

    /// The hidden state between stages, for micro-batches of `batch` sequences of `seq` tokens.
    fn boundary(&self, batch: usize, seq: usize) -> Boundary;
}
