//! Layer norm (Ba et al., 2016).

use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// `y = (x - mean) / √(var + eps) · weight + bias` over the last dim.
///
/// Its parameters are replicated. Where the rest of the input is sharded (sequence parallel, data parallel) their reads
/// are `Replicate` and their gradients `Partial`, so the reducer sums them: nothing here has to ask for it.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    weight: ParamId,
    bias: ParamId,
    eps: f64,
}

impl LayerNorm {
    /// GPT-2's.
    pub const EPS: f64 = 1e-5;

    /// Declares `{name}.weight` (ones) and `{name}.bias` (zeros).
    pub fn new(params: &mut Declarations, name: &str, features: usize) -> Result<Self> {
        let whole = Placement::replicated;
        Ok(Self {
            weight: params.declare(format!("{name}.weight"), &[features], whole(), Role::Norm, Init::Ones)?,
            bias: params.declare(format!("{name}.bias"), &[features], whole(), Role::Norm, Init::Zeros)?,
            eps: Self::EPS,
        })
    }

    /// `x [.., features] → [.., features]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        x.layer_norm(&tape.param(self.weight)?, &tape.param(self.bias)?, self.eps)
    }

    /// The same, for matrix products alone: a [factor](Var::layer_norm_factor).
    pub fn factor(&self, tape: &Tape, x: &Var) -> Result<Var> {
        x.layer_norm_factor(&tape.param(self.weight)?, &tape.param(self.bias)?, self.eps)
    }
}
