//! The feed-forward block with its inner features cut over tp.

use crate::{ColumnLinear, Region, RowLinear};
use meshwork_core::Mesh;
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};

/// `x + dropout(gelu(x̂ · Wupᵀ + bup) · Wdownᵀ + bdown)`; each rank of tp has ffn/tp of the inner features. x̂ is the normed
/// input.
#[derive(Clone, Debug)]
pub struct ParallelMlp {
    up: ColumnLinear,
    down: RowLinear,
}

impl ParallelMlp {
    /// Declares `{name}.up` [ffn, hidden] cut along ffn and `{name}.down` [hidden, ffn] likewise.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        hidden: usize,
        ffn: usize,
        init: Init,
        down_init: Init,
    ) -> Result<Self> {
        Ok(Self {
            up: ColumnLinear::new(params, mesh, &format!("{name}.up"), hidden, &[ffn], 0, init)?,
            down: RowLinear::new(params, mesh, &format!("{name}.down"), &[ffn], 0, hidden, down_init)?,
        })
    }

    /// `normed`, `residual` `[b, s, hidden]` in the region → the same.
    pub fn forward(&self, tape: &Tape, normed: &Var, region: Region, residual: &Var, dropout: f32) -> Result<Var> {
        let x = region.enter(normed)?; // [b, s, hidden], Replicate
        let inner = self.up.forward_gelu(tape, &x)?; // [b, s, ffn/tp], Shard(2)
        self.down.forward(tape, &inner, region, residual, dropout) // Σ_tp, + b, + residual
    }
}
