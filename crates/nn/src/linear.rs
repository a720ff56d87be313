//! `y = x · Wᵀ + b`.

use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// `y[.., out] = x[.., in] · W[out, in]ᵀ + b[out]`.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl Linear {
    /// Declares `{name}.weight`, normal with the given standard deviation, and `{name}.bias`, zero.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        input: usize,
        output: usize,
        bias: bool,
        std: f32,
    ) -> Result<Self> {
        let whole = Placement::replicated;
        let weight =
            params.declare(format!("{name}.weight"), &[output, input], whole(), Role::Weight, Init::Normal { std })?;
        let bias = match bias {
            true => Some(params.declare(format!("{name}.bias"), &[output], whole(), Role::Bias, Init::Zeros)?),
            false => None,
        };
        Ok(Self { weight, bias })
    }

    /// `x [.., in] → [.., out]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let weight = tape.param(self.weight)?;
        match self.bias {
            Some(bias) => x.linear_bias(&weight, &tape.param(bias)?, 1),
            None => x.linear(&weight, 1),
        }
    }
}
