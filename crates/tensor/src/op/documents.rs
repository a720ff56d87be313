//! Documents that follow each other in a sequence, as an operand of attention.

use super::dropout::random_scalars;
use crate::error::{Error, Result};
use crate::kernel::{AttentionDropout, AttentionMasks, DocumentPositions};
use crate::tape::{Mode, Var};
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

/// What decides, in an attention, which pairs of tokens count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Masking {
    dropout: Option<AttentionDropout>,
    /// Of documents: whether they are apart.
    apart: Option<bool>,
}

impl Masking {
    /// Of queries whose heads are dim `heads`, at their place among all samples and heads.
    pub(super) fn new(
        queries: &Var,
        heads: usize,
        documents: Option<&Documents>,
        dropout: Option<(f32, &str)>,
    ) -> Result<Self> {
        let (offset, global) = queries.global_position();
        let training = queries.tape().mode() == Mode::Train;
        let dropout = dropout.filter(|(p, _)| *p > 0.0 && training).map(|(p, name)| {
            let key = queries.tape().random_key(name)?;
            let (first_sample, first_head, global_heads) = (offset[0], offset[heads], global[heads]);
            Ok::<_, Error>(AttentionDropout { p, key, first_sample, first_head, global_heads })
        });
        Ok(Self { dropout: dropout.transpose()?, apart: documents.map(|documents| documents.apart) })
    }

    /// Whether the attention takes positions.
    pub(super) fn has_positions(&self) -> bool {
        self.apart.is_some()
    }

    /// For the kernel.
    pub(super) fn with<'a>(&'a self, positions: Option<&'a Tensor>) -> AttentionMasks<'a> {
        let documents = self.apart.zip(positions.map(Tensor::buffer));
        let documents = documents.map(|(apart, positions)| DocumentPositions { positions, apart });
        AttentionMasks { dropout: self.dropout.as_ref(), documents }
    }

    pub(super) fn scalars(&self) -> Vec<(&'static str, f64)> {
        self.dropout.map_or(Vec::new(), |dropout| random_scalars(dropout.p, dropout.key))
    }
}

/// Refuses positions that do not have the samples of the queries, whole sequences of them.
pub(super) fn infer(op: &str, of: Operand<'_>, positions: Operand<'_>) -> std::result::Result<(), SpmdError> {
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
