//! Low-rank adapters of the linear layers of a block (LoRA; Hu et al., 2021): `y ← y + B · (s · A · dropout(x))` beside
//! `y = x · Wᵀ`, with A and B cut [as W is](meshwork_tensor::param::AdapterSpec).
//!
//! | W | A | A x | to all ranks | B | result |
//! |---|---|---|---|---|---|
//! | column-parallel | whole | in the region, as x in front of the block | `region.enter`, of `rank` features | rows | `Shard`, as y |
//! | whole | whole | in the region, as x | | whole | in the region, as y |
//! | row-parallel | columns | `Partial`, as y before it is summed | `region.leave`, of `rank` features | whole | in the region, as y behind the block |
//!
//! A x is computed before the product with W, so that in backward its gradient is added to that of the other product
//! where it lies; and a column-parallel layer adds B's product to W's where that one lies.
//!
//! So an adapter's result has the types of the product beside it, and what has other types cannot be added. The
//! gradients of a whole A or B follow from its read: with sequence parallelism each rank of tp reads it for its slice
//! of the sequence, the gradient is `Partial`, and the reducer sums it.

use crate::Region;
use meshwork_tensor::param::{Adapter, MatrixOf};
use meshwork_tensor::{Declarations, ParamId, Result, Tape, Tensor, Var};

/// The adapters of one weight; none if it has none.
#[derive(Clone, Debug)]
pub(crate) struct LowRank {
    scale: f64,
    dropout: f32,
    adapters: Vec<Adapter>,
}

impl LowRank {
    /// Declares the adapters of a weight.
    pub fn new(params: &mut Declarations, weight: ParamId) -> Result<Self> {
        let (scale, dropout, adapters) = params.adapters_of(weight)?;
        Ok(Self { scale, dropout, adapters })
    }

    /// Whether there is something to add.
    pub fn is_on(&self, tape: &Tape) -> bool {
        !self.adapters.is_empty() && tape.has_adapters()
    }

    /// `s · A · dropout(x)` of each adapter of a column-parallel layer, `[b, s, rank]` as B reads it; nothing without
    /// adapters. `x` `[b, s, in]` is the input in front of the block.
    pub fn of_column(&self, tape: &Tape, x: &Var, region: Region) -> Result<Vec<Var>> {
        let within = region.for_whole_weights(tape);
        self.of(tape, || region.moved(within, x), |inner| within.enter(&inner.scale(self.scale)?))
    }

    /// The same of a row-parallel layer: `x` is its input, `Shard`.
    pub fn of_row(&self, tape: &Tape, x: &Var, region: Region) -> Result<Vec<Var>> {
        let within = region.for_whole_weights(tape);
        self.of(tape, || Ok(x.clone()), |inner| within.leave(inner)?.scale(self.scale)) // Σ_tp
    }

    /// The same of a layer that is whole on every rank: `x` is its input.
    pub fn of_whole(&self, tape: &Tape, x: &Var) -> Result<Vec<Var>> {
        self.of(tape, || Ok(x.clone()), |inner| inner.scale(self.scale))
    }

    fn of(&self, tape: &Tape, x: impl Fn() -> Result<Var>, to_all: impl Fn(&Var) -> Result<Var>) -> Result<Vec<Var>> {
        if !self.is_on(tape) {
            return Ok(Vec::new());
        }
        // Each adapter moves x by itself, so that the gradient of x gets theirs one by one, as where nothing is moved.
        self.adapters.iter().map(|adapter| to_all(&self.inner(tape, adapter, &x()?)?)).collect()
    }

    /// B of the adapter, if there is one for all matrices of the weight.
    pub fn whole(&self) -> Option<ParamId> {
        self.adapters.first().filter(|adapter| adapter.matrix.is_none()).map(|adapter| adapter.b)
    }

    /// `y + B · inner` of a column-parallel layer: `y` is `Shard`, `inner` [that of the layer](Self::of_column).
    pub fn add_column(&self, tape: &Tape, y: Var, inner: &[Var]) -> Result<Var> {
        self.add(y, inner, |adapter, inner| inner.linear(&tape.param(adapter.b)?, 1)) // [b, s, out/tp], Shard
    }

    /// The same of a row-parallel layer: `y` is the sum behind the block.
    pub fn add_row(&self, tape: &Tape, y: Var, inner: &[Var], region: Region) -> Result<Var> {
        let within = region.for_whole_weights(tape);
        self.add(y, inner, |adapter, inner| within.moved(region, &inner.linear(&tape.param(adapter.b)?, 1)?)) // [b, s, out]
    }

    /// `A · dropout(x)`, `[b, s, rank]`.
    fn inner(&self, tape: &Tape, adapter: &Adapter, x: &Var) -> Result<Var> {
        let a = tape.param(adapter.a)?; // [rank, in..]
        x.dropout(self.dropout, &adapter.name)?.linear(&a, a.shape().len() - 1)
    }

    /// `y` and the results of all adapters, in the dims of y: of one for all matrices of the weight, or of one for
    /// each, with zeros for a matrix that has none.
    fn add(&self, y: Var, inner: &[Var], delta: impl Fn(&Adapter, &Var) -> Result<Var>) -> Result<Var> {
        let (adapters, tape) = (|| self.adapters.iter().zip(inner), y.tape());
        let Some((first, of_first)) = adapters().next() else { return Ok(y) };
        let Some(MatrixOf { dim, count, .. }) = first.matrix else { return y.add(&delta(first, of_first)?) };
        // B has as many dims as the outputs: the rank in place of the dim that numbers matrices.
        let dim = y.shape().len() - tape.params().shape(first.b).len() + dim;
        let of = |index: usize| adapters().find(|(of, _)| of.matrix.is_some_and(|matrix| matrix.index == index));
        let part = |index: usize| match of(index) {
            Some((adapter, inner)) => delta(adapter, inner)?.unsqueeze(dim),
            None => {
                let zeros = Tensor::zeros(tape.device(), y.tensor().dtype(), y.shape().with(dim, 1))?;
                let zeros = tape.constant(zeros, y.types());
                y.padding().iter().try_fold(zeros, |zeros, (axis, extent)| zeros.padded(axis, extent))
            }
        };
        let deltas = (1..count).try_fold(part(0)?, |all, index| all.concat(&part(index)?, dim))?;
        y.add(&deltas)
    }
}
