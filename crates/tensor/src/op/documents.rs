//! What hides keys from queries, besides the causal mask: documents that follow each other in a sequence, and a window.

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

/// Which of the tokens before a query, and itself, it sees: all, unless this says otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mask<'a> {
    /// The documents of each sequence; without them, a sequence is one document.
    pub documents: Option<&'a Documents>,
    /// A sliding window: a query sees at most this many tokens, its own and the last before it (Beltagy et al.,
    /// arXiv:2004.05150; Mistral 7B, arXiv:2310.06825).
    pub window: Option<usize>,
    /// The soft cap of scores, `cap · tanh(score/cap)`: a finite number above zero.
    pub cap: Option<f64>,
}

impl<'a> From<Option<&'a Documents>> for Mask<'a> {
    fn from(documents: Option<&'a Documents>) -> Self {
        Self { documents, ..Self::default() }
    }
}

/// What decides, in an attention, which pairs of tokens count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Masking {
    dropout: Option<AttentionDropout>,
    /// Of documents: whether they are apart.
    apart: Option<bool>,
    window: Option<usize>,
    cap: Option<f64>,
}

impl Masking {
    /// Of queries whose heads are dim `heads`, at their place among all samples and heads.
    pub(super) fn new(queries: &Var, heads: usize, mask: Mask<'_>, dropout: Option<(f32, &str)>) -> Result<Self> {
        if mask.window == Some(0) {
            let problem = "a sliding window of 0 tokens: a query sees at least itself".to_owned();
            return Err(Error::Shape { op: "attention", problem, shapes: Vec::new() });
        }
        if let Some(cap) = mask.cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            let problem = format!("a cap of {cap} is none: use a finite number above zero");
            return Err(Error::Shape { op: "attention", problem, shapes: Vec::new() });
        }
        let (offset, global) = queries.global_position();
        let training = queries.tape().mode() == Mode::Train;
        let dropout = dropout.filter(|(p, _)| *p > 0.0 && training).map(|(p, name)| {
            let key = queries.tape().random_key(name)?;
            let (first_sample, first_head, global_heads) = (offset[0], offset[heads], global[heads]);
            Ok::<_, Error>(AttentionDropout { p, key, first_sample, first_head, global_heads })
        });
        let apart = mask.documents.map(|documents| documents.apart);
        Ok(Self { dropout: dropout.transpose()?, apart, window: mask.window, cap: mask.cap })
    }

    /// Whether the attention takes positions.
    pub(super) fn has_positions(&self) -> bool {
        self.apart.is_some()
    }

    /// For the kernel.
    pub(super) fn with<'a>(&'a self, positions: Option<&'a Tensor>) -> AttentionMasks<'a> {
        let documents = self.apart.zip(positions.map(Tensor::buffer));
        let documents = documents.map(|(apart, positions)| DocumentPositions { positions, apart });
        AttentionMasks { dropout: self.dropout.as_ref(), documents, window: self.window, runs: None, cap: self.cap }
    }

    pub(super) fn scalars(&self) -> Vec<(&'static str, f64)> {
        let dropout = self.dropout.map_or(Vec::new(), |dropout| random_scalars(dropout.p, dropout.key));
        let window = self.window.map(|window| ("window", window as f64));
        dropout.into_iter().chain(window).chain(self.cap.map(|cap| ("cap", cap))).collect()
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
