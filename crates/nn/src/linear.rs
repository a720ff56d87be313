//! `y = x · Wᵀ + b`, the bias optional.

use meshwork_tensor::param::{Matrices, ParamGroup};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// `y[.., out] = x[.., in] · W[out, in]ᵀ + b[out]`, the bias optional.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
    contract: usize,
}

impl Linear {
    /// Declares `{name}.weight`, with these initial values (a number: normal ones of that
    /// standard deviation), and, with a bias, `{name}.bias`, zero.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        input: usize,
        output: usize,
        bias: bool,
        init: impl Into<Init>,
    ) -> Result<Self> {
        Self::structural(params, name, &[input], &[output], bias, init)
    }

    /// The same, as the last layer of a model: its weight is no matrix of a [hidden](ParamGroup::hidden) layer.
    pub fn head(
        params: &mut Declarations,
        name: &str,
        input: usize,
        output: usize,
        bias: bool,
        init: impl Into<Init>,
    ) -> Result<Self> {
        let [group, of_bias] = [Role::Weight, Role::Bias].map(ParamGroup::for_role);
        Self::declare(params, name, &[input], &[output], bias.then_some(of_bias), init, group)
    }

    /// The same over structural dims: `{name}.weight` `[output.., input..]`, `{name}.bias` `[output..]`.
    pub fn structural(
        params: &mut Declarations,
        name: &str,
        input: &[usize],
        output: &[usize],
        bias: bool,
        init: impl Into<Init>,
    ) -> Result<Self> {
        Self::of_matrices(params, name, input, output, bias, init, Matrices::new(0, input.len()))
    }

    /// The same for several projections in one: `matrices` says which dims of `{name}.weight` number them.
    pub fn of_matrices(
        params: &mut Declarations,
        name: &str,
        input: &[usize],
        output: &[usize],
        bias: bool,
        init: impl Into<Init>,
        matrices: Matrices,
    ) -> Result<Self> {
        let bias = bias.then_some(ParamGroup::bias(matrices));
        Self::declare(params, name, input, output, bias, init, ParamGroup::hidden(matrices))
    }

    fn declare(
        params: &mut Declarations,
        name: &str,
        input: &[usize],
        output: &[usize],
        bias: Option<ParamGroup>,
        init: impl Into<Init>,
        group: ParamGroup,
    ) -> Result<Self> {
        let (whole, dims) = (Placement::replicated, [output, input].concat());
        let weight = params.declare_in(format!("{name}.weight"), &dims, whole(), Role::Weight, init.into(), group)?;
        let declare =
            |group| params.declare_in(format!("{name}.bias"), output, whole(), Role::Bias, Init::Zeros, group);
        let bias = bias.map(declare).transpose()?;
        Ok(Self { weight, bias, contract: input.len() })
    }

    /// `x [.., in..] → [.., out..]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let weight = tape.matrix(self.weight)?;
        match self.bias {
            Some(bias) => x.linear_bias(&weight, &tape.param(bias)?, self.contract),
            None => x.linear(&weight, self.contract),
        }
    }
}
