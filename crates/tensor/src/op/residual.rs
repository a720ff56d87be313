//! `y = x + r`, and in one pass `y = x + b + r`: the end of a residual branch.

use super::bias::bias_grad;
use super::prelude::*;
use super::whole::require_whole_values;
use std::cmp::Ordering;

#[derive(Debug)]
struct Add;

#[derive(Debug)]
struct BiasResidual {
    bias_shape: Shape,
    tokens: Tokens,
}

impl Var {
    /// `self + other`; whichever has fewer dims is repeated over the leading dims of the other one, as a
    /// [`bias`](Self::bias) is.
    pub(super) fn plus(&self, other: &Var) -> Result<Var> {
        match self.shape().len().cmp(&other.shape().len()) {
            Ordering::Less => other.bias(self),
            Ordering::Equal => {
                require_whole_values(Add.name(), &[self, other])?;
                self.tape().apply(Add, &[self, other])
            }
            Ordering::Greater => self.bias(other),
        }
    }

    /// `self + bias + residual` in one pass.
    pub fn bias_residual(&self, bias: &Var, residual: &Var) -> Result<Var> {
        require_whole_values("bias_residual", &[self, residual])?;
        let tokens = Tokens::new(self, bias.shape().len());
        self.tape().apply(BiasResidual { bias_shape: bias.shape(), tokens }, &[self, bias, residual])
    }
}

impl Op for Add {
    stated! { "add": x, y; reads_values, padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::add(self.name(), operands[0], operands[1])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, y) = (inputs[0], inputs[1]);
        cx.require(x.shape() == y.shape(), "a sum of different shapes")?;
        Tensor::from_buffer(x.device(), x.device().pointwise()?.add(x.buffer(), y.buffer())?, x.shape())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![cx.needs(0).then(|| grad.clone()), cx.needs(1).then_some(grad)])
    }
}

impl Op for BiasResidual {
    stated! { "bias_residual": x, bias, residual; reads_values, padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        let sum = rules::add(self.name(), operands[0], operands[1])?;
        rules::add(self.name(), Operand::value("x + bias", sum, operands[0].ndim), operands[2])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, b, r) = (inputs[0], inputs[1], inputs[2]);
        cx.require(
            x.shape() == r.shape() && x.shape().ends_with(&b.shape()),
            "residual has the shape of x, and bias its trailing dims",
        )?;
        let y = x.device().pointwise()?.bias_residual(x.buffer(), b.buffer(), r.buffer())?;
        Tensor::from_buffer(x.device(), y, x.shape())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let db = bias_grad(cx, 1, &grad, self.bias_shape, self.tokens)?;
        Ok(vec![cx.needs(0).then(|| grad.clone()), db, cx.needs(2).then_some(grad)])
    }
}
