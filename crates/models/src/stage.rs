//! What a trainer needs of a part of a language model.

use meshwork_core::Types;
use meshwork_tensor::{Result, Shape, Tape, Var};
use std::fmt::Debug;
use std::ops::Range;

/// What travels between two stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// Extents on one rank.
    pub shape: Shape,
    /// SPMD types of the hidden state; its gradient has their duals.
    pub types: Types,
}

/// What of a model a stage is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its layers; there may be none.
    pub layers: Range<usize>,
    /// Whether it begins with the embedding.
    pub first: bool,
    /// Whether it ends with the head.
    pub last: bool,
}

impl Part {
    /// The parts of a model cut into one stage per entry, which is its number of layers.
    ///
    /// ```
    /// use meshwork_models::Part;
    ///
    /// // All layers on the first stage; the last one is the head alone.
    /// let parts = Part::cut(&[6, 0]);
    /// assert_eq!(parts[0], Part { layers: 0..6, first: true, last: false });
    /// assert_eq!(parts[1], Part { layers: 6..6, first: false, last: true });
    /// ```
    pub fn cut(layers: &[usize]) -> Vec<Self> {
        let mut start = 0;
        let part = |(stage, &count): (usize, &usize)| {
            let held = start..start + count;
            start = held.end;
            Self { layers: held, first: stage == 0, last: stage + 1 == layers.len() }
        };
        layers.iter().enumerate().map(part).collect()
    }
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
