//! Feed-forward blocks with their inner features cut over tp: with GELU, and gated.

use crate::{ColumnLinear, Region, RowLinear};
use meshwork_core::Mesh;
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};

/// `x + dropout(gelu(x̂ · Wupᵀ + bup) · Wdownᵀ + bdown)`; each rank of tp has ffn/tp of the inner features. x̂ is the
/// normed input. Biases and residual are optional.
#[derive(Clone, Debug)]
pub struct ParallelMlp {
    up: ColumnLinear,
    down: RowLinear,
}

impl ParallelMlp {
    /// Declares `{name}.up` [ffn, hidden] cut along ffn and `{name}.down` [hidden, ffn] likewise, with biases or
    /// without. `init` has the initial values of each.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        hidden: usize,
        ffn: usize,
        bias: bool,
        [up, down]: [Init; 2],
    ) -> Result<Self> {
        Ok(Self {
            up: ColumnLinear::new(params, mesh, &format!("{name}.up"), hidden, (&[ffn], 0), bias, up)?,
            down: RowLinear::new(params, mesh, &format!("{name}.down"), (&[ffn], 0), hidden, bias, down)?,
        })
    }

    /// `normed`, `residual` `[b, s, hidden]` in the region → the same.
    pub fn forward(
        &self,
        tape: &Tape,
        normed: &Var,
        region: Region,
        residual: Option<&Var>,
        dropout: f32,
    ) -> Result<Var> {
        let x = region.enter(normed)?; // [b, s, hidden], Replicate
        let inner = self.up.forward_gelu(tape, &x)?; // [b, s, ffn/tp], Shard(2)
        self.down.forward(tape, &inner, region, residual, dropout) // Σ_tp, + b, + residual
    }
}

/// `x + dropout((silu(x̂ · Wgateᵀ) · (x̂ · Wupᵀ)) · Wdownᵀ)` (Shazeer, 2020), likewise; biases are optional here too.
#[derive(Clone, Debug)]
pub struct ParallelSwiGlu {
    gate_up: ColumnLinear,
    down: RowLinear,
}

impl ParallelSwiGlu {
    /// Declares `{name}.gate_up` [ffn, 2, hidden], with the gate and up weights of each inner feature next to each
    /// other, cut along ffn, and `{name}.down` [hidden, ffn] likewise, with biases or without. `init` has the initial
    /// values of each.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        hidden: usize,
        ffn: usize,
        bias: bool,
        [gate_up, down]: [Init; 2],
    ) -> Result<Self> {
        let (up_name, down_name) = (format!("{name}.gate_up"), format!("{name}.down"));
        Ok(Self {
            gate_up: ColumnLinear::pairs(params, mesh, &up_name, hidden, ffn, bias, gate_up)?,
            down: RowLinear::new(params, mesh, &down_name, (&[ffn], 0), hidden, bias, down)?,
        })
    }

    /// `normed`, `residual` `[b, s, hidden]` in the region → the same.
    pub fn forward(
        &self,
        tape: &Tape,
        normed: &Var,
        region: Region,
        residual: Option<&Var>,
        dropout: f32,
    ) -> Result<Var> {
        let x = region.enter(normed)?; // [b, s, hidden], Replicate
        let inner = self.gate_up.forward_swiglu(tape, &x)?; // [b, s, ffn/tp], Shard(2)
        self.down.forward(tape, &inner, region, residual, dropout) // Σ_tp, + residual
    }
}
