//! `y[.., i] = silu(x[.., i, 0]) · x[.., i, 1]`: pairs of a gate and the value that it scales.

use super::prelude::*;

/// The function between the two products of a feed-forward network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// [GELU](Var::gelu), tanh form.
    Gelu,
    /// [GELU](Var::exact_gelu), as defined.
    ExactGelu,
    /// [SwiGLU](Var::swiglu): the network is gated.
    SwiGlu,
    /// GELU, tanh form, of the gate instead (GeGLU).
    GeGlu,
}

impl MlpKind {
    /// Whether the first product gives pairs of a gate and the value that it scales.
    pub fn is_gated(self) -> bool {
        matches!(self, Self::SwiGlu | Self::GeGlu)
    }

    /// The function of the result of the first product: of pairs `[.., features, 2]` in a gated network.
    pub fn apply(self, x: &Var) -> Result<Var> {
        match self {
            Self::Gelu => x.gelu(),
            Self::ExactGelu => x.exact_gelu(),
            Self::SwiGlu => x.swiglu(),
            Self::GeGlu => {
                let pair = x.shape().len().saturating_sub(1);
                let of = |at: usize| x.narrow(pair, at..at + 1)?.squeeze(pair);
                of(0)?.gelu()?.mul(&of(1)?)
            }
        }
    }
}

#[derive(Debug)]
struct Swiglu;

impl Var {
    /// SwiGLU (Shazeer, 2020): `[.., features, 2] → [.., features]`, of pairs (gate, up). Not linear: refuses
    /// `Partial`.
    pub fn swiglu(&self) -> Result<Var> {
        self.tape().apply(Swiglu, &[self])
    }
}

/// The types of the result of pairs.
pub(super) fn infer(name: &str, pairs: Operand<'_>) -> std::result::Result<Types, SpmdError> {
    rules::along_dim(name, pairs, pairs.ndim.saturating_sub(1), &[])
}

/// The shape without the last dim, if that dim has pairs.
pub(super) fn gated(pairs: &[usize]) -> Option<Shape> {
    pairs.split_last().filter(|(two, _)| **two == 2).map(|(_, shape)| Shape::new(shape))
}

/// The gradient of pairs from the gradient of their result. It overwrites the pairs if nothing else holds them.
pub(super) fn gradient(grad: &Tensor, pairs: Tensor) -> Result<Tensor> {
    let (device, shape) = (grad.device(), pairs.shape());
    let mut pairs = pairs.into_buffer();
    if !pairs.is_unique() {
        pairs = device.layout()?.copy(&pairs)?;
    }
    device.pointwise()?.swiglu_grad(grad.buffer(), &mut pairs)?;
    Tensor::from_buffer(device, pairs, shape)
}

impl Op for Swiglu {
    stated! { "swiglu": x; reads_values, padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        infer(self.name(), operands[0])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let x = inputs[0];
        let gated = gated(&x.shape());
        cx.require(gated.is_some(), "x is [.., features, 2], pairs of gate and up")?;
        let shape = gated.unwrap_or_default();
        cx.save_input(0)?;
        let make = move |x: &Tensor| {
            Tensor::from_buffer(x.device(), x.device().pointwise()?.swiglu(x.buffer(), x.dtype())?, shape)
        };
        cx.recipe(move |saved| make(&saved[0].restore()?));
        make(x)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(gradient(&grad, cx.take_saved(0)?)?)])
    }
}
