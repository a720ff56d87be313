//! `y = e^x / Σ e^x` along the last dim.

use super::prelude::*;
use super::whole::require_whole;

#[derive(Debug)]
struct Softmax;

impl Var {
    /// Softmax along the last dim, which must be whole on this rank. Refuses `Partial`.
    pub fn softmax(&self) -> Result<Var> {
        require_whole(Softmax.name(), &[self])?;
        self.tape().apply(Softmax, &[self])
    }
}

impl Op for Softmax {
    stated! { "softmax": x }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::along_dim(self.name(), operands[0], operands[0].ndim.saturating_sub(1), &[])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let x = inputs[0];
        cx.require(!x.shape().is_empty(), "x has at least one dim")?;
        let y = x.device().reduction()?.softmax(x.buffer(), x.shape()[x.shape().len() - 1])?;
        let y = Tensor::from_buffer(x.device(), y, x.shape())?;
        cx.save(&y)?;
        Ok(y)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let n = grad.shape()[grad.shape().len() - 1];
        let dx = grad.device().reduction()?.softmax_grad(grad.buffer(), cx.saved(0)?.buffer(), n)?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dx, grad.shape())?)])
    }
}
