//! Two-dimensional convolution.

use meshwork_tensor::param::{Matrices, ParamGroup};
use meshwork_tensor::{Declarations, Init, ParamId, Placement, Result, Role, Tape, Var};

/// `y[n, i, j, o] = Σ_{k, l, c} x[n, i·stride + k - padding, j·stride + l - padding, c] · W[o, k, l, c] (+ b[o])`: a
/// square kernel over images whose channels come last, zero beyond the edges.
#[derive(Clone, Copy, Debug)]
pub struct Conv2d {
    weight: ParamId,
    bias: Option<ParamId>,
    stride: usize,
    padding: usize,
}

impl Conv2d {
    /// Declares `{name}.weight` `[features, kernel, kernel, channels]` with these initial values (before a rectifier,
    /// [`Init::kaiming_normal`] of `kernel² · channels`), and `{name}.bias` `[features]`, zero. An odd kernel is padded
    /// so that stride 1 keeps height and width.
    pub fn new(
        params: &mut Declarations,
        name: &str,
        [channels, features]: [usize; 2],
        [kernel, stride]: [usize; 2],
        bias: bool,
        init: impl Into<Init>,
    ) -> Result<Self> {
        let (whole, dims) = (Placement::replicated, [features, kernel, kernel, channels]);
        let group = ParamGroup::hidden(Matrices::new(0, 3));
        let weight = params.declare_in(format!("{name}.weight"), &dims, whole(), Role::Weight, init.into(), group)?;
        let declare = || params.declare(format!("{name}.bias"), &[features], whole(), Role::Bias, Init::Zeros);
        let bias = bias.then(declare).transpose()?;
        Ok(Self { weight, bias, stride, padding: kernel.saturating_sub(1) / 2 })
    }

    /// `x [n, h, w, channels] → [n, h', w', features]`, `h' = ⌈h / stride⌉` for an odd kernel, and w' likewise.
    pub fn forward(&self, tape: &Tape, x: &Var) -> Result<Var> {
        let bias = self.bias.map(|bias| tape.param(bias)).transpose()?;
        x.conv2d(&tape.param(self.weight)?, bias.as_ref(), self.stride, self.padding)
    }
}
