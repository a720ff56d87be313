//! The feed-forward block on one rank.

use crate::Linear;
use meshwork_tensor::{Declarations, Result, Tape, Var};

/// `y = gelu(x · Wupᵀ + bup) · Wdownᵀ + bdown`.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// Declares `{name}.up` [ffn, hidden] and `{name}.down` [hidden, ffn] with biases.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        hidden: usize,
        ffn: usize,
        std: f32,
        down_std: f32,
    ) -> Result<Self> {
        Ok(Self {
            up: Linear::new(params, &format!("{name}.up"), hidden, ffn, true, std)?,
            down: Linear::new(params, &format!("{name}.down"), ffn, hidden, true, down_std)?,
        })
    }

    /// `x [.., hidden] → [.., hidden]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        self.down.forward(tape, &self.up.forward(tape, x)?.gelu()?)
    }
}
