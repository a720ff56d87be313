//! `y = x · Wᵀ + b`, the bias optional.

use meshwork_tensor::param::ParamGroup;
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// `y[.., out] = x[.., in] · W[out, in]ᵀ + b[out]`, the bias optional.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
    contract: usize,
}

impl Linear {
    /// Declares `{name}.weight`, normal with the given standard deviation, and, with a bias, `{name}.bias`, zero.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        input: usize,
        output: usize,
        bias: bool,
        std: f32,
    ) -> Result<Self> {
        Self::structural(params, name, &[input], &[output], bias, std)
    }

    /// The same, as the last layer of a model: its weight is no matrix of a [hidden](ParamGroup::hidden) layer.
    pub fn head(
        params: &mut Declarations,
        name: &str,
        input: usize,
        output: usize,
        bias: bool,
        std: f32,
    ) -> Result<Self> {
        Self::declare(params, name, &[input], &[output], bias, std, ParamGroup::of(Role::Weight))
    }

    /// The same over structural dims: `{name}.weight` `[output.., input..]`, `{name}.bias` `[output..]`.
    pub fn structural(
        params: &mut Declarations,
        name: &str,
        input: &[usize],
        output: &[usize],
        bias: bool,
        std: f32,
    ) -> Result<Self> {
        Self::declare(params, name, input, output, bias, std, ParamGroup::hidden(0, input.len()))
    }

    fn declare(
        params: &mut Declarations,
        name: &str,
        input: &[usize],
        output: &[usize],
        bias: bool,
        std: f32,
        group: ParamGroup,
    ) -> Result<Self> {
        let (whole, dims) = (Placement::replicated, [output, input].concat());
        let init = Init::Normal { std };
        let weight = params.declare_in(format!("{name}.weight"), &dims, whole(), Role::Weight, init, group)?;
        let bias = match bias {
            true => Some(params.declare(format!("{name}.bias"), output, whole(), Role::Bias, Init::Zeros)?),
            false => None,
        };
        Ok(Self { weight, bias, contract: input.len() })
    }

    /// `x [.., in..] → [.., out..]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let weight = tape.param(self.weight)?;
        match self.bias {
            Some(bias) => x.linear_bias(&weight, &tape.param(bias)?, self.contract),
            None => x.linear(&weight, self.contract),
        }
    }
}
