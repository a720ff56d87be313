//! `y = x + b` and, in one pass, `y = gelu(x + b)`: `b` is repeated over the leading dims of `x`.

use crate::error::Result;
use crate::shape::Shape;
use crate::tape::{Backward, Forward, Op, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::{SpmdError, Types};

#[derive(Debug)]
struct Bias {
    bias_shape: Shape,
    gelu: bool,
}

impl Var {
    /// `x + b`. A bias added to a `Partial` value would be counted once per rank: refused.
    pub fn bias(&self, bias: &Var) -> Result<Var> {
        self.tape().apply(Bias { bias_shape: bias.shape(), gelu: false }, &[self, bias])
    }

    /// `gelu(x + b)`, tanh form.
    pub fn bias_gelu(&self, bias: &Var) -> Result<Var> {
        self.tape().apply(Bias { bias_shape: bias.shape(), gelu: true }, &[self, bias])
    }
}

impl Op for Bias {
    fn name(&self) -> &'static str {
        if self.gelu { "bias_gelu" } else { "bias" }
    }

    fn operands(&self) -> &'static [&'static str] {
        &["x", "bias"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let sum = rules::add(self.name(), operands[0], operands[1])?;
        match self.gelu {
            true => rules::pointwise(self.name(), Operand::value("x + bias", sum, operands[0].ndim)),
            false => Ok(sum),
        }
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, b) = (inputs[0], inputs[1]);
        cx.require(
            x.shape().ends_with(&b.shape()),
            || "the trailing dims of x must be those of bias".to_owned(),
            inputs,
        )?;
        let pointwise = x.device().pointwise()?;
        let y = match self.gelu {
            true => {
                cx.save(x)?;
                cx.save(b)?;
                pointwise.bias_gelu(x.buffer(), b.buffer())?
            }
            false => pointwise.bias(x.buffer(), b.buffer())?,
        };
        Tensor::from_buffer(x.device(), y, x.shape())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !self.gelu {
            let db = cx.needs(1).then(|| bias_grad(&grad, self.bias_shape)).transpose()?;
            return Ok(vec![cx.needs(0).then_some(grad), db]);
        }
        let (x, b) = (cx.saved(0)?, cx.saved(1)?);
        let (dx, db) = grad.device().pointwise()?.bias_gelu_grad(grad.buffer(), x.buffer(), b.buffer())?;
        let dx = Tensor::from_buffer(grad.device(), dx, grad.shape())?;
        let db = Tensor::from_buffer(grad.device(), db, self.bias_shape)?;
        Ok(vec![cx.needs(0).then_some(dx), cx.needs(1).then_some(db)])
    }
}

/// The gradient of a bias: the sum of the rows of `grad`.
pub(super) fn bias_grad(grad: &Tensor, bias_shape: Shape) -> Result<Tensor> {
    let sum = grad.device().pointwise()?.bias_grad(grad.buffer(), bias_shape.count())?;
    Tensor::from_buffer(grad.device(), sum, bias_shape)
}
