//! Norms over features: layer norm (Ba et al., 2016) and root mean square norm (Zhang and Sennrich, 2019).

use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// The end of a norm, `· weight + bias` per feature or channel, the bias optional. Both are replicated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Affine {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl Affine {
    /// Declares `{name}.weight` (ones) and, with a bias, `{name}.bias` (zeros).
    pub(crate) fn new(params: &mut Declarations, name: &str, features: usize, bias: bool) -> Result<Self> {
        let mut vector = |part: &str, init| {
            params.declare(format!("{name}.{part}"), &[features], Placement::replicated(), Role::Norm, init)
        };
        let weight = vector("weight", Init::Ones)?;
        Ok(Self { weight, bias: bias.then(|| vector("bias", Init::Zeros)).transpose()? })
    }

    /// Weight and bias.
    pub(crate) fn read(&self, tape: &Tape) -> Result<(Var, Option<Var>)> {
        Ok((tape.param(self.weight)?, self.bias.map(|bias| tape.param(bias)).transpose()?))
    }
}

/// `y = (x - mean) / √(var + eps) · weight + bias` over the last dim, the bias optional.
///
/// Its parameters are replicated. Where the rest of the input is sharded (sequence parallel, data parallel) their reads
/// are `Replicate` and their gradients `Partial`, so the reducer sums them without code here.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    affine: Affine,
    eps: f64,
}

impl LayerNorm {
    /// The epsilon of GPT-2.
    pub const EPS: f64 = 1e-5;

    /// Declares `{name}.weight` (ones) and, with a bias, `{name}.bias` (zeros).
    pub fn new(params: &mut Declarations, name: &str, features: usize, bias: bool) -> Result<Self> {
        Ok(Self { affine: Affine::new(params, name, features, bias)?, eps: Self::EPS })
    }

    /// The same with another epsilon.
    #[must_use]
    pub fn with_eps(self, eps: f64) -> Self {
        Self { eps, ..self }
    }

    /// `x [.., features] → [.., features]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let (weight, bias) = self.affine.read(tape)?;
        x.layer_norm(&weight, bias.as_ref(), self.eps)
    }

    /// The same, for matrix products only: an [operand](Var::layer_norm_operand).
    pub fn operand(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let (weight, bias) = self.affine.read(tape)?;
        x.layer_norm_operand(&weight, bias.as_ref(), self.eps)
    }
}

/// `y = x / √(mean of x² + eps) · weight` over the last dim. Its parameter is replicated, like the parameters of a
/// [`LayerNorm`].
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    weight: ParamId,
    eps: f64,
}

impl RmsNorm {
    /// Declares `{name}.weight` (ones).
    pub fn new(params: &mut Declarations, name: &str, features: usize, eps: f64) -> Result<Self> {
        let (name, whole) = (format!("{name}.weight"), Placement::replicated());
        Ok(Self { weight: params.declare(name, &[features], whole, Role::Norm, Init::Ones)?, eps })
    }

    /// `x [.., features] → [.., features]`.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        x.rms_norm(&tape.param(self.weight)?, self.eps)
    }

    /// The same, for matrix products only: an [operand](Var::rms_norm_operand).
    pub fn operand(&self, tape: &Tape, x: &Var) -> Result<Var> {
        x.rms_norm_operand(&tape.param(self.weight)?, self.eps)
    }
}
