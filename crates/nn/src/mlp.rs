//! Feed-forward blocks on one rank: with GELU, and gated.

use crate::Linear;
use meshwork_tensor::param::Matrices;
use meshwork_tensor::{Declarations, Result, Tape, Var};

/// `y = gelu(x · Wupᵀ + bup) · Wdownᵀ + bdown`, the biases optional.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// Declares `{name}.up` [ffn, hidden] and `{name}.down` [hidden, ffn], with biases or without.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        hidden: usize,
        ffn: usize,
        bias: bool,
        std: f32,
        down_std: f32,
    ) -> Result<Self> {
        Ok(Self {
            up: Linear::new(params, &format!("{name}.up"), hidden, ffn, bias, std)?,
            down: Linear::new(params, &format!("{name}.down"), ffn, hidden, bias, down_std)?,
        })
    }

    /// `x [.., hidden] → [.., hidden]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        self.down.forward(tape, &self.up.forward(tape, x)?.gelu()?)
    }
}

/// `y = (silu(x · Wgateᵀ + bgate) · (x · Wupᵀ + bup)) · Wdownᵀ + bdown` (Shazeer, 2020), the biases optional.
#[derive(Clone, Copy, Debug)]
pub struct SwiGlu {
    gate_up: Linear,
    down: Linear,
}

impl SwiGlu {
    /// Declares `{name}.gate_up` [ffn, 2, hidden], with the gate and up weights of each inner feature next to each
    /// other, and `{name}.down` [hidden, ffn], with biases or without.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        hidden: usize,
        ffn: usize,
        bias: bool,
        std: f32,
        down_std: f32,
    ) -> Result<Self> {
        let pairs = Matrices::new(0, 1).interleaved(1);
        Ok(Self {
            gate_up: Linear::of_matrices(params, &format!("{name}.gate_up"), &[hidden], &[ffn, 2], bias, std, pairs)?,
            down: Linear::new(params, &format!("{name}.down"), ffn, hidden, bias, down_std)?,
        })
    }

    /// `x [.., hidden] → [.., hidden]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        self.down.forward(tape, &self.gate_up.forward(tape, x)?.swiglu()?)
    }
}
