//! Which keys a query sees, and what is added to their scores.

use super::dropout::random_scalars;
use crate::error::{Error, Result};
use crate::kernel::{AttentionDropout, AttentionMasks, DocumentPositions, Pattern};
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

/// Which keys a query sees, and the scores of pairs, `cap(q·k/√d) - slope·|distance| + bias`. By default it sees its
/// own token and all before it.
///
/// ```
/// use meshwork_tensor::op::{Mask, Pattern};
///
/// let encoder = Mask { pattern: Pattern::Bidirectional, ..Mask::default() };
/// let alibi = Mask { slopes: Some(&[0.5, 0.25]), ..Mask::default() }; // two heads
/// # _ = (encoder, alibi);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Mask<'a> {
    /// Which keys, by their places: those up to the query's own, all of the sequence, or those of another sequence.
    pub pattern: Pattern,
    /// The documents of each sequence; without them, a sequence is one document.
    pub documents: Option<&'a Documents>,
    /// A sliding window: a query sees only tokens nearer than this many. In causal attention these are at most as many,
    /// its own and the last before it (Beltagy et al., arXiv:2004.05150; Mistral 7B, arXiv:2310.06825).
    pub window: Option<usize>,
    /// The number of keys of each sequence, `[b]` in i32: the keys behind, which fill the sequence up, are hidden from
    /// all queries.
    pub lengths: Option<&'a Var>,
    /// The soft cap of scores, `cap · tanh(score/cap)`: a finite number above zero.
    pub cap: Option<f64>,
    /// The slope of each head over all ranks, by which its scores fall with the distance of query and key (ALiBi, Press
    /// et al., arXiv:2108.12409).
    pub slopes: Option<&'a [f32]>,
    /// What is added to the score of each pair of a query and a key, `[heads, queries, keys]`, with its gradient: as
    /// the relative positions of T5 (Raffel et al., arXiv:1910.10683). Its heads are cut as those of the queries.
    pub bias: Option<&'a Var>,
}

impl Mask<'_> {
    /// All tokens of a sequence see each other.
    pub const BIDIRECTIONAL: Self = Self::of(Pattern::Bidirectional);

    /// All queries see all keys of another sequence.
    pub const CROSS: Self = Self::of(Pattern::Cross);

    const fn of(pattern: Pattern) -> Self {
        Self { pattern, documents: None, window: None, lengths: None, cap: None, slopes: None, bias: None }
    }
}

impl<'a> From<Option<&'a Documents>> for Mask<'a> {
    fn from(documents: Option<&'a Documents>) -> Self {
        Self { documents, ..Self::default() }
    }
}

/// What decides, in an attention, which pairs of tokens count.
#[derive(Clone, Debug)]
pub(super) struct Masking {
    pattern: Pattern,
    dropout: Option<AttentionDropout>,
    /// Of documents: whether they are apart.
    apart: Option<bool>,
    window: Option<usize>,
    cap: Option<f64>,
    /// Of the heads here.
    slopes: Option<Vec<f32>>,
    has_lengths: bool,
    has_bias: bool,
}

/// The operands of an attention on `$of`: with positions, lengths and bias or without, each a bit of the index.
macro_rules! masked_operands {
    ($($of:literal),+) => {
        [
            &[$($of),+],
            &[$($of),+, "positions"],
            &[$($of),+, "lengths"],
            &[$($of),+, "positions", "lengths"],
            &[$($of),+, "bias"],
            &[$($of),+, "positions", "bias"],
            &[$($of),+, "lengths", "bias"],
            &[$($of),+, "positions", "lengths", "bias"],
        ]
    };
}
pub(super) use masked_operands;

/// The names of the operands of an attention, by what its mask has.
pub(super) type MaskedOperands = [&'static [&'static str]; 8];

impl Masking {
    /// Of queries whose heads are dim `heads`, at their place among all samples and heads.
    pub(super) fn new(queries: &Var, heads: usize, mask: Mask<'_>, dropout: Option<(f32, &str)>) -> Result<Self> {
        let (offset, global) = queries.global_position();
        let (first_head, held) = (offset[heads] as usize, queries.shape().get(heads).copied().unwrap_or(0));
        mask.check(global[heads] as usize)?;
        let training = queries.tape().mode() == Mode::Train;
        let dropout = dropout.filter(|(p, _)| *p > 0.0 && training).map(|(p, name)| {
            let key = queries.tape().random_key(name)?;
            let (first_sample, first_head, global_heads) = (offset[0], offset[heads], global[heads]);
            Ok::<_, Error>(AttentionDropout { p, key, first_sample, first_head, global_heads })
        });
        Ok(Self {
            pattern: mask.pattern,
            dropout: dropout.transpose()?,
            apart: mask.documents.map(|documents| documents.apart),
            window: mask.window,
            cap: mask.cap,
            slopes: mask.slopes.map(|slopes| slopes[first_head..first_head + held].to_vec()),
            has_lengths: mask.lengths.is_some(),
            has_bias: mask.bias.is_some(),
        })
    }

    /// Whether the attention takes positions.
    pub(super) fn has_positions(&self) -> bool {
        self.apart.is_some()
    }

    /// Whether it adds a bias to each pair, its last operand.
    pub(super) fn has_bias(&self) -> bool {
        self.has_bias
    }

    /// Which of `names` are its operands.
    pub(super) fn operands(&self, names: &'static MaskedOperands) -> &'static [&'static str] {
        let bits = [self.has_positions(), self.has_lengths, self.has_bias];
        names[bits.iter().rev().fold(0, |index, &bit| 2 * index + usize::from(bit))]
    }

    /// Refuses a mask that hides more than the keys behind a query: what continues or cuts sequences knows no other.
    pub(super) fn require_plain(&self, op: &'static str, why: &str) -> Result<()> {
        match self.with(&[]).is_plain() && !self.has_lengths && !self.has_bias {
            true => Ok(()),
            false => refuse_in(op, format!("{why}: it takes no other pattern than causal, no lengths, slopes or bias")),
        }
    }

    /// For the kernel; `tensors` are the operands that the mask has, in their order.
    pub(super) fn with<'a>(&'a self, tensors: &[&'a Tensor]) -> AttentionMasks<'a> {
        let mut rest = tensors.iter().map(|tensor| tensor.buffer());
        let mut taken = |has: bool| if has { rest.next() } else { None };
        let [positions, lengths, bias] = [self.has_positions(), self.has_lengths, self.has_bias].map(&mut taken);
        let documents = self.apart.zip(positions).map(|(apart, positions)| DocumentPositions { positions, apart });
        AttentionMasks {
            pattern: self.pattern,
            dropout: self.dropout.as_ref(),
            documents,
            window: self.window,
            lengths,
            runs: None,
            cap: self.cap,
            slopes: self.slopes.as_deref(),
            bias,
        }
    }

    pub(super) fn scalars(&self) -> Vec<(&'static str, f64)> {
        let dropout = self.dropout.map_or(Vec::new(), |dropout| random_scalars(dropout.p, dropout.key));
        let pattern = match self.pattern {
            Pattern::Causal => None,
            Pattern::Bidirectional => Some(("bidirectional", 1.0)),
            Pattern::Cross => Some(("cross", 1.0)),
        };
        let window = self.window.map(|window| ("window", window as f64));
        dropout.into_iter().chain(pattern).chain(window).chain(self.cap.map(|cap| ("cap", cap))).collect()
    }

    /// Refuses masks that do not have the samples of the queries, whole sequences of them, and a bias whose heads are
    /// not those of the queries, which are dim `heads`. `masks` are the operands that the mask has.
    pub(super) fn infer(
        &self,
        op: &str,
        (of, heads): (Operand<'_>, usize),
        masks: &[Operand<'_>],
    ) -> std::result::Result<(), SpmdError> {
        let (bias, of_samples) =
            masks.split_last().filter(|_| self.has_bias).map_or((None, masks), |(b, m)| (Some(b), m));
        of_samples.iter().try_for_each(|mask| infer_samples(op, of, *mask))?;
        bias.map_or(Ok(()), |bias| infer_bias(op, of, heads, *bias))
    }
}

impl Mask<'_> {
    /// Whether it hides keys from causal queries by their documents or a window alone, and shifts no scores.
    pub fn is_plain(&self) -> bool {
        let shifted = self.slopes.is_some() || self.bias.is_some();
        self.pattern == Pattern::Causal && self.lengths.is_none() && !shifted
    }

    /// The operands that it adds to an attention.
    pub(super) fn vars(&self) -> impl Iterator<Item = &Var> {
        self.documents.map(|documents| &documents.positions).into_iter().chain(self.lengths).chain(self.bias)
    }

    /// Refuses what is no mask of so many heads.
    fn check(&self, heads: usize) -> Result<()> {
        if self.window == Some(0) {
            return refuse("a sliding window of 0 tokens: a query sees at least itself".to_owned());
        }
        if let Some(cap) = self.cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return refuse(format!("a cap of {cap} is none: use a finite number above zero"));
        }
        if let Some(slopes) = self.slopes.filter(|slopes| slopes.len() != heads) {
            return refuse(format!("{} slopes of {heads} heads: each head over all ranks has one", slopes.len()));
        }
        let by_distance = [
            ("documents", self.documents.is_some()),
            ("a sliding window", self.window.is_some()),
            ("slopes", self.slopes.is_some()),
        ];
        match by_distance.into_iter().find(|(_, given)| *given && self.pattern == Pattern::Cross) {
            None => Ok(()),
            Some((what, _)) => refuse(format!("{what} in cross attention: tokens of two sequences have no distance")),
        }
    }
}

fn refuse<T>(problem: String) -> Result<T> {
    refuse_in("attention", problem)
}

fn refuse_in<T>(op: &'static str, problem: String) -> Result<T> {
    Err(Error::Shape { op, problem, shapes: Vec::new() })
}

/// Refuses positions or lengths that do not have the samples of the queries, whole sequences of them.
fn infer_samples(op: &str, of: Operand<'_>, mask: Operand<'_>) -> std::result::Result<(), SpmdError> {
    rules::along_dim(op, mask, 1, &[])?;
    rules::per_axis(op, &[of, mask], |_, types| match (types[0], types[1]) {
        (Ty::Shard(0), Ty::Shard(0)) | (Ty::Varying, Ty::Varying) => Ok(types[0]),
        (x, Ty::Invariant | Ty::Replicate) if x != Ty::Shard(0) => Ok(x),
        (x, p) => Err((
            format!("{} is {x} and {} are {p}: they do not hold the same tokens", of.name, mask.name),
            format!("give {} the samples of {}", mask.name, of.name),
        )),
    })?;
    Ok(())
}

/// Refuses a bias that does not have the heads of the queries, or whose gradient would miss other ranks' samples.
fn infer_bias(op: &str, of: Operand<'_>, heads: usize, bias: Operand<'_>) -> std::result::Result<(), SpmdError> {
    for whole in [1, 2] {
        rules::along_dim(op, bias, whole, &[])?;
    }
    rules::along_dim(op, of, 1, &[])?;
    rules::per_axis(op, &[of, bias], |axis, types| match (types[0], types[1]) {
        (Ty::Shard(dim), Ty::Shard(0)) if dim == heads => Ok(types[0]),
        (Ty::Shard(0), Ty::Replicate) => Ok(types[0]),
        (x, y) if x == y && !matches!(x, Ty::Shard(_)) => Ok(x),
        (x, Ty::Invariant) => Err((
            format!("{} is {x} and bias is Invariant: the gradient of bias would miss the other ranks' share", of.name),
            if x == Ty::Shard(heads) { "split bias along dim 0" } else { "copy(I→R) bias first" }.to_owned(),
        )),
        (x, y) => Err((
            format!("{} is {x} and bias is {y}: they do not hold the same heads", of.name),
            format!("cut the heads of both over {axis}, or of none"),
        )),
    })?;
    Ok(())
}
