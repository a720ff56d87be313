//! Low-rank adapters of the linear layers of a block (LoRA; Hu et al., 2021): `y ← y + B · (s · A · dropout(x))` beside
//! `y = x · Wᵀ`, with A and B cut [as W is](meshwork_tensor::param::AdapterSpec).
//!
//! | W | A | A x | to all ranks | B | result |
//! |---|---|---|---|---|---|
//! | column-parallel | whole | in the region, as x in front of the block | `region.enter`, of `rank` features | rows | `Shard`, as y |
//! | row-parallel | columns | `Partial`, as y before it is summed | `region.leave`, of `rank` features | whole | in the region, as y behind the block |
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

    /// `y + B · s · A · dropout(x)` of a column-parallel layer: `y` is `Shard`, `x` the input in front of the block.
    pub fn add_column(&self, tape: &Tape, y: Var, x: &Var, region: Region) -> Result<Var> {
        if !self.is_on(tape) {
            return Ok(y);
        }
        let within = region.for_whole_weights(tape);
        let x = region.moved(within, x)?; // [b, s, in]
        let delta = |adapter: &Adapter| {
            let inner = self.inner(tape, adapter, &x)?.scale(self.scale)?; // [b, s, rank]
            within.enter(&inner)?.linear(&tape.param(adapter.b)?, 1) // [b, s, out/tp], Shard
        };
        y.add(&self.deltas(&y, delta)?)
    }

    /// The same of a row-parallel layer: `y` is the sum behind the block, `x` its input, `Shard`, of which the last
    /// `contract` dims are summed over.
    pub fn add_row(&self, tape: &Tape, y: Var, x: &Var, region: Region) -> Result<Var> {
        if !self.is_on(tape) {
            return Ok(y);
        }
        let within = region.for_whole_weights(tape);
        let delta = |adapter: &Adapter| {
            let inner = within.leave(&self.inner(tape, adapter, x)?)?.scale(self.scale)?; // [b, s, rank], Σ_tp
            within.moved(region, &inner.linear(&tape.param(adapter.b)?, 1)?) // [b, s, out]
        };
        y.add(&self.deltas(&y, delta)?)
    }

    /// `A · dropout(x)`, `[b, s, rank]`.
    fn inner(&self, tape: &Tape, adapter: &Adapter, x: &Var) -> Result<Var> {
        let a = tape.param(adapter.a)?; // [rank, in..]
        x.dropout(self.dropout, &adapter.name)?.linear(&a, a.shape().len() - 1)
    }

    /// The results of all adapters, in the dims of y: of one for all matrices of the weight, or of one for each, with
    /// zeros for a matrix that has none.
    fn deltas(&self, y: &Var, delta: impl Fn(&Adapter) -> Result<Var>) -> Result<Var> {
        let (adapters, tape) = (&self.adapters, y.tape());
        let Some(MatrixOf { dim, count, .. }) = adapters[0].matrix else { return delta(&adapters[0]) };
        // B has as many dims as the outputs: the rank in place of the dim that numbers matrices.
        let dim = y.shape().len() - tape.params().shape(adapters[0].b).len() + dim;
        let of = |index: usize| adapters.iter().find(|of| of.matrix.is_some_and(|matrix| matrix.index == index));
        let part = |index: usize| match of(index) {
            Some(adapter) => delta(adapter)?.unsqueeze(dim),
            None => {
                let zeros = Tensor::zeros(tape.device(), y.tensor().dtype(), y.shape().with(dim, 1))?;
                let zeros = tape.constant(zeros, y.types());
                y.padding().iter().try_fold(zeros, |zeros, (axis, extent)| zeros.padded(axis, extent))
            }
        };
        (1..count).try_fold(part(0)?, |all, index| all.concat(&part(index)?, dim))
    }
}
