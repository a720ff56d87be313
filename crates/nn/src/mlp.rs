//! Feed-forward blocks on one rank.

use crate::Linear;
use meshwork_tensor::op::MlpKind;
use meshwork_tensor::param::Matrices;
use meshwork_tensor::{Declarations, Init, Result, Tape, Var};

/// `y = gelu(x · Wupᵀ + bup) · Wdownᵀ + bdown`, or [gated](MlpKind::SwiGlu)
/// `y = (silu(x · Wgateᵀ + bgate) · (x · Wupᵀ + bup)) · Wdownᵀ + bdown`; the biases optional.
#[derive(Clone, Copy, Debug)]
pub struct Mlp {
    kind: MlpKind,
    up: Linear,
    down: Linear,
}

impl Mlp {
    /// Declares `{name}.up` [ffn, hidden], or of a gated one `{name}.gate_up` [ffn, 2, hidden], with the gate and up
    /// weights of each inner feature next to each other; and `{name}.down` [hidden, ffn]. `init` has the initial
    /// values of each.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        kind: MlpKind,
        [hidden, ffn]: [usize; 2],
        bias: bool,
        [init, down_init]: [impl Into<Init>; 2],
    ) -> Result<Self> {
        let up = if kind.is_gated() {
            let (name, pairs) = (format!("{name}.gate_up"), Matrices::new(0, 1).interleaved(1));
            Linear::of_matrices(params, &name, &[hidden], &[ffn, 2], bias, init, pairs)?
        } else {
            Linear::new(params, &format!("{name}.up"), hidden, ffn, bias, init)?
        };
        Ok(Self { kind, up, down: Linear::new(params, &format!("{name}.down"), ffn, hidden, bias, down_init)? })
    }

    /// `x [.., hidden] → [.., hidden]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        self.down.forward(tape, &self.kind.apply(&self.up.forward(tape, x)?)?)
    }
}
