//! The layout of activations between tensor-parallel blocks, and entering and leaving a block.

use meshwork_core::{Axis, Ty};
use meshwork_tensor::{Result, Var};

/// The dim of `[batch, seq, hidden]` that sequence parallelism cuts.
const SEQ: usize = 1;

/// The layout of activations between tensor-parallel blocks, where norms, dropout and residual sums are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// Every rank of tp holds all tokens and does the same work.
    Invariant,
    /// Sequence parallel: each rank of tp holds its slice of the sequence. The same bytes are communicated, and the
    /// region's activations shrink by the degree.
    SequenceParallel,
}

impl Region {
    /// The region for the boolean of the configuration.
    pub fn new(sequence_parallel: bool) -> Self {
        if sequence_parallel { Self::SequenceParallel } else { Self::Invariant }
    }

    /// The type of an activation in this region on tp.
    pub fn ty(self) -> Ty {
        match self {
            Self::Invariant => Ty::Invariant,
            Self::SequenceParallel => Ty::Shard(SEQ),
        }
    }

    /// The number of tokens of a sequence of `seq` that each of `degree` ranks holds in this region.
    pub fn local_seq(self, seq: usize, degree: usize) -> usize {
        match self {
            Self::Invariant => seq,
            Self::SequenceParallel => seq / degree,
        }
    }

    /// Enters a block: gives every rank all tokens, to be used differently (Megatron's f, or g with sequence
    /// parallelism).
    pub fn enter(self, x: &Var) -> Result<Var> {
        match self {
            Self::Invariant => x.copy(Axis::Tp),
            Self::SequenceParallel => x.all_gather(Axis::Tp, SEQ),
        }
    }

    /// Leaves a block: sums its Partial output (Megatron's g, or its conjugate with sequence parallelism), and rounds
    /// the sum where values are [stored](Var::stored) in 16 bits.
    pub fn leave(self, y: &Var) -> Result<Var> {
        let sum = match self {
            Self::Invariant => y.all_reduce(Axis::Tp),
            Self::SequenceParallel => y.reduce_scatter(Axis::Tp, SEQ),
        };
        sum?.stored()
    }
}
