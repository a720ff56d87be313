//! What activations look like between tensor-parallel blocks, and how a block is entered and left.

use meshwork_core::{Axis, Ty};
use meshwork_tensor::{Result, Var};

/// The dim of `[batch, seq, hidden]` that sequence parallelism cuts.
const SEQ: usize = 1;

/// The region between tensor-parallel blocks, where norms, dropout and residual sums live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// Every rank of tp holds all tokens and does the same work.
    Invariant,
    /// Sequence parallel: each rank of tp holds its slice of the sequence. The same bytes are communicated, and the
    /// region's activations shrink by the degree.
    SequenceParallel,
}

impl Region {
    /// From the boolean of the configuration.
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

    /// The tokens of a sequence of `seq` that one of `degree` ranks holds in this region.
    pub fn local_seq(self, seq: usize, degree: usize) -> usize {
        match self {
            Self::Invariant => seq,
            Self::SequenceParallel => seq / degree,
        }
    }

    /// Into a block: all tokens on every rank, to be used differently (Megatron's f, or g with sequence parallelism).
    pub fn enter(self, x: &Var) -> Result<Var> {
        match self {
            Self::Invariant => x.copy(Axis::Tp),
            Self::SequenceParallel => x.all_gather(Axis::Tp, SEQ),
        }
    }

    /// Out of a block: takes the sum of its Partial output (Megatron's g, or its conjugate with sequence parallelism).
    pub fn leave(self, y: &Var) -> Result<Var> {
        match self {
            Self::Invariant => y.all_reduce(Axis::Tp),
            Self::SequenceParallel => y.reduce_scatter(Axis::Tp, SEQ),
        }
    }
}
