//! Documents that follow each other in a sequence, as an operand of attention.

use crate::kernel::DocumentPositions;
use crate::tape::Var;
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::{SpmdError, Ty};

/// Documents that follow each other in a sequence.
#[derive(Clone, Debug)]
pub struct Documents {
    /// The position of each token in its document, `[b, s]` in i32, whole along the sequence: 0 begins a document, and
    /// each other position is one more than the one before. A sequence may begin at any position below `s`.
    pub positions: Var,
    /// Whether tokens see only those of their own document. In any case rotations follow the positions.
    pub apart: bool,
}

/// What an attention keeps of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Apart(pub bool);

impl Apart {
    /// For the kernel.
    pub(super) fn with(self, positions: &Tensor) -> DocumentPositions<'_> {
        DocumentPositions { positions: positions.buffer(), apart: self.0 }
    }
}

/// Refuses positions that do not have the samples of the queries, whole sequences of them.
pub(super) fn infer(op: &str, of: Operand<'_>, positions: Operand<'_>) -> Result<(), SpmdError> {
    rules::along_dim(op, positions, 1, &[])?;
    rules::per_axis(op, &[of, positions], |_, types| match (types[0], types[1]) {
        (Ty::Shard(0), Ty::Shard(0)) | (Ty::Varying, Ty::Varying) => Ok(types[0]),
        (x, Ty::Invariant | Ty::Replicate) if x != Ty::Shard(0) => Ok(x),
        (x, p) => Err((
            format!("{} is {x} and positions are {p}: they do not hold the same tokens", of.name),
            format!("give positions the samples of {}", of.name),
        )),
    })?;
    Ok(())
}
