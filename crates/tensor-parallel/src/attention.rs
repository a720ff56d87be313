//! Self-attention with the heads cut over tp.

use crate::{ColumnLinear, Region, RowLinear};
use meshwork_core::Mesh;
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};

/// `x + dropout(concat_heads(softmax(QKᵀ/√d) V) · Woᵀ + bo)`, where `[Q, K, V] = x̂ · Wqkvᵀ + bqkv` and each rank of tp has
/// heads/tp of the heads. x̂ is the normed input.
#[derive(Clone, Debug)]
pub struct ParallelAttention {
    name: String,
    qkv: ColumnLinear,
    out: RowLinear,
}

impl ParallelAttention {
    /// Declares `{name}.qkv` [3, heads, head_dim, hidden] cut along heads and `{name}.out` [hidden, heads, head_dim] likewise.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        hidden: usize,
        heads: usize,
        init: Init,
        out_init: Init,
    ) -> Result<Self> {
        let head_dim = hidden / heads;
        Ok(Self {
            name: name.to_owned(),
            qkv: ColumnLinear::new(params, mesh, &format!("{name}.qkv"), hidden, &[3, heads, head_dim], 1, init)?,
            out: RowLinear::new(params, mesh, &format!("{name}.out"), &[heads, head_dim], 0, hidden, out_init)?,
        })
    }

    /// `normed`, `residual` `[b, s, hidden]` in the region → the same.
    pub fn forward(&self, tape: &Tape, normed: &Var, region: Region, residual: &Var, dropout: f32) -> Result<Var> {
        let x = region.enter(normed)?; // [b, s, hidden], Replicate
        let qkv = self.qkv.forward(tape, &x)?; // [b, s, 3, heads/tp, d], Shard(heads)
        let mixed = qkv.causal_attention(Some((dropout, &self.name)))?; // [b, s, heads/tp, d], Shard(heads)
        self.out.forward(tape, &mixed, region, residual, dropout) // Σ_tp, + b, + residual
    }
}
