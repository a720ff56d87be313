//! The layout of the sequence: which axes cut it, and entering and leaving a tensor-parallel block.

use meshwork_core::{Axes, Axis, Mesh, Ty, Types};
use meshwork_tensor::{Error, Result, Tape, Var};

/// The dim of `[batch, seq, hidden]` that is cut.
const SEQ: usize = 1;

/// The layout of activations `[batch, seq, hidden]` between tensor-parallel blocks, where norms, dropout and residual
/// sums are computed: the axes that cut the sequence. The others hold the same tokens and do the same work.
///
/// | cut over | between blocks | in a block, and where tokens come from a batch |
/// |---|---|---|
/// | nothing | each rank has all tokens | the same |
/// | tp (sequence parallelism) | each rank of tp has its slice: the same bytes are communicated, and activations shrink | each rank of tp has all |
/// | other axes, such as cp | each rank has its slice | the same: attention gathers keys and values |
///
/// Over several axes the cuts nest, tp innermost.
///
/// ```
/// use meshwork_core::{Axis, Ty};
/// use meshwork_tensor_parallel::Region;
///
/// let region = Region::over([Axis::Tp, Axis::Cp]);
/// let mesh = "dp=2,tp=2,cp=2".parse()?;
/// assert_eq!((region.ty(Axis::Tp), region.ty(Axis::Dp)), (Ty::Shard(1), Ty::Shard(0)));
/// assert_eq!(region.local_seq(128, &mesh)?, 32);
/// assert_eq!(*region.of_tokens(), [Axis::Cp]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    cut_over: Axes,
}

impl Region {
    /// No axis cuts the sequence.
    pub const INVARIANT: Self = Self { cut_over: Axes::NONE };

    /// tp cuts the sequence between blocks.
    pub const SEQUENCE_PARALLEL: Self = Self { cut_over: Axes::one(Axis::Tp) };

    /// The region for the boolean of the configuration.
    pub fn new(sequence_parallel: bool) -> Self {
        if sequence_parallel { Self::SEQUENCE_PARALLEL } else { Self::INVARIANT }
    }

    /// These axes cut the sequence.
    pub fn over(axes: impl Into<Axes>) -> Self {
        Self { cut_over: axes.into() }
    }

    /// The same, where these axes cut the sequence or do not.
    #[must_use]
    pub fn with(self, axes: impl Into<Axes>, cuts: bool) -> Self {
        let axes = axes.into();
        let others = self.cut_over.iter().filter(|other| !axes.contains(other));
        Self { cut_over: others.chain(axes.iter().filter(|_| cuts)).copied().collect() }
    }

    /// The type of an activation in this region on an axis.
    pub fn ty(self, axis: Axis) -> Ty {
        match axis.is_data() {
            true => Ty::Shard(0),
            false if self.cut_over.contains(&axis) => Ty::Shard(SEQ),
            false => Ty::Invariant,
        }
    }

    /// The types of an activation in this region.
    pub fn types(self, mesh: &Mesh) -> Types {
        mesh.value_axes().fold(Types::NONE, |types, axis| types.with(axis, self.ty(axis)))
    }

    /// The axes that cut the sequence in blocks too, and so the tokens of a batch.
    pub fn of_tokens(self) -> Axes {
        self.cut_over.iter().copied().filter(|axis| *axis != Axis::Tp).collect()
    }

    /// The number of tokens of a sequence of `seq` that each rank holds in this region.
    ///
    /// # Errors
    /// Tokens that the ranks do not divide.
    pub fn local_seq(self, seq: usize, mesh: &Mesh) -> Result<usize> {
        let degree = self.cut_over.iter().map(|&axis| mesh.degree(axis)).product();
        match self.cut_over.last().filter(|_| !seq.is_multiple_of(degree)) {
            None => Ok(seq / degree),
            Some(&axis) => Err(Error::uneven("sequence", SEQ, seq, axis, degree)),
        }
    }

    /// Enters a block: gives every rank of tp the tokens of all, to be used differently (Megatron's f, or g with
    /// sequence parallelism).
    pub fn enter(self, x: &Var) -> Result<Var> {
        if matches!(self.ty(Axis::Tp), Ty::Shard(_)) { x.all_gather(Axis::Tp, SEQ) } else { x.copy(Axis::Tp) }
    }

    /// Leaves a block: sums its Partial output (Megatron's g, or its conjugate with sequence parallelism), and rounds
    /// the sum where values are [stored](Var::stored) in 16 bits.
    pub fn leave(self, y: &Var) -> Result<Var> {
        let sum = match self.ty(Axis::Tp) {
            Ty::Shard(_) => y.reduce_scatter(Axis::Tp, SEQ),
            _ => y.all_reduce(Axis::Tp),
        };
        sum?.stored()
    }

    /// An activation of this region in another one, where tp cuts the sequence or does not.
    pub(crate) fn moved(self, to: Self, x: &Var) -> Result<Var> {
        match (self.ty(Axis::Tp), to.ty(Axis::Tp)) {
            (Ty::Shard(_), Ty::Invariant) => x.all_gather_invariant(Axis::Tp, SEQ),
            (Ty::Invariant, Ty::Shard(_)) => x.split(Axis::Tp, SEQ),
            _ => Ok(x.clone()),
        }
    }

    /// Where a layer whose weights are whole on every rank of tp computes: in this region, or in canonical numerics on
    /// the tokens of all of tp, because the gradient of such a weight would be a sum over slices of the sequence.
    pub(crate) fn for_whole_weights(self, tape: &Tape) -> Self {
        if tape.reduction_blocks().is_some() { self.with(Axis::Tp, false) } else { self }
    }

    /// Keys and values `[batch, seq, ..]` of all tokens, of those that this rank has in a block.
    pub(crate) fn whole_keys(self, kv: &Var) -> Result<Var> {
        let over = self.of_tokens();
        if over.is_empty() { Ok(kv.clone()) } else { kv.all_gather(over, SEQ) }
    }
}
