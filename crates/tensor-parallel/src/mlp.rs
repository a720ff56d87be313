//! Feed-forward blocks with their inner features cut over tp.

use crate::{ColumnLinear, Region, RowLinear};
use meshwork_core::Mesh;
use meshwork_tensor::op::MlpKind;
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};

/// `x + dropout(gelu(x̂ · Wupᵀ + bup) · Wdownᵀ + bdown)`, or [gated](MlpKind::SwiGlu)
/// `x + dropout((silu(x̂ · Wgateᵀ + bgate) · (x̂ · Wupᵀ + bup)) · Wdownᵀ + bdown)`; each rank of tp has ffn/tp of the
/// inner features. x̂ is the normed input. Biases and residual are optional.
#[derive(Clone, Debug)]
pub struct ParallelMlp {
    kind: MlpKind,
    up: ColumnLinear,
    down: RowLinear,
}

impl ParallelMlp {
    /// Declares `{name}.up` [ffn, hidden], or of a gated one `{name}.gate_up` [ffn, 2, hidden], with the gate and up
    /// weights of each inner feature next to each other, cut along ffn; and `{name}.down` [hidden, ffn] likewise; with
    /// biases or without. `init` has the initial values of each.
    pub fn new(
        params: &mut Declarations,
        mesh: &Mesh,
        name: &str,
        kind: MlpKind,
        [hidden, ffn]: [usize; 2],
        bias: bool,
        [up, down]: [Init; 2],
    ) -> Result<Self> {
        let up = if kind.is_gated() {
            ColumnLinear::pairs(params, mesh, &format!("{name}.gate_up"), hidden, ffn, bias, up)?
        } else {
            ColumnLinear::new(params, mesh, &format!("{name}.up"), hidden, (&[ffn], 0), bias, up)?
        };
        let down = RowLinear::new(params, mesh, &format!("{name}.down"), (&[ffn], 0), hidden, bias, down)?;
        Ok(Self { kind, up, down })
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
        let inner = match self.kind {
            MlpKind::Gelu if !self.up.is_adapted(tape) => self.up.forward_gelu(tape, &x)?,
            MlpKind::SwiGlu if !self.up.is_adapted(tape) => self.up.forward_swiglu(tape, &x)?,
            other => other.apply(&self.up.forward_adapted(tape, &x, normed, region)?)?,
        }; // [b, s, ffn/tp], Shard(2)
        self.down.forward(tape, &inner, region, residual, dropout) // Σ_tp, + b, + residual
    }
}
