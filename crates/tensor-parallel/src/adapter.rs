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
use meshwork_tensor::op::LowRank;
use meshwork_tensor::{Result, Tape, Var};

/// The adapters of a weight of a block.
pub(crate) trait InBlock {
    /// `s · A · dropout(x)` of each adapter of a column-parallel layer, `[b, s, rank]` as B reads it; nothing without
    /// adapters. `x` `[b, s, in]` is the input in front of the block.
    fn of_column(&self, tape: &Tape, x: &Var, region: Region) -> Result<Vec<Var>>;

    /// The same of a row-parallel layer: `x` is its input, `Shard`.
    fn of_row(&self, tape: &Tape, x: &Var, region: Region) -> Result<Vec<Var>>;

    /// The same of a layer that is whole on every rank: `x` is its input.
    fn of_whole(&self, tape: &Tape, x: &Var) -> Result<Vec<Var>>;

    /// `y + B · inner` of a column-parallel layer: `y` is `Shard`, `inner` [that of the layer](Self::of_column).
    fn add_column(&self, y: Var, inner: &[Var]) -> Result<Var>;

    /// The same of a row-parallel layer: `y` is the sum behind the block.
    fn add_row(&self, tape: &Tape, y: Var, inner: &[Var], region: Region) -> Result<Var>;
}

/// `A · x`, `[b, s, rank]`, for A `[rank, in..]`.
fn inner(x: &Var, a: &Var) -> Result<Var> {
    x.linear(a, a.shape().len() - 1)
}

impl InBlock for LowRank {
    fn of_column(&self, tape: &Tape, x: &Var, region: Region) -> Result<Vec<Var>> {
        let within = region.for_whole_weights(tape);
        self.inner(tape, || region.moved(within, x), |x, a| within.enter(&inner(x, a)?.scale(self.scale())?))
    }

    fn of_row(&self, tape: &Tape, x: &Var, region: Region) -> Result<Vec<Var>> {
        let within = region.for_whole_weights(tape);
        self.inner(tape, || Ok(x.clone()), |x, a| within.leave(&inner(x, a)?)?.scale(self.scale())) // Σ_tp
    }

    fn of_whole(&self, tape: &Tape, x: &Var) -> Result<Vec<Var>> {
        self.inner(tape, || Ok(x.clone()), |x, a| inner(x, a)?.scale(self.scale()))
    }

    fn add_column(&self, y: Var, inner: &[Var]) -> Result<Var> {
        self.add(y, inner, |inner, b| inner.linear(b, 1)) // [b, s, out/tp], Shard
    }

    fn add_row(&self, tape: &Tape, y: Var, inner: &[Var], region: Region) -> Result<Var> {
        let within = region.for_whole_weights(tape);
        self.add(y, inner, |inner, b| within.moved(region, &inner.linear(b, 1)?)) // [b, s, out]
    }
}
