//! `y = gelu(x) = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.

use super::prelude::*;
use super::whole::require_whole;

#[derive(Debug)]
struct Gelu;

impl Var {
    /// GELU, tanh form. Not linear: refuses `Partial`.
    pub fn gelu(&self) -> Result<Var> {
        require_whole(Gelu.name(), &[self])?;
        self.tape().apply(Gelu, &[self])
    }
}

fn gelu(x: &Tensor) -> Result<Tensor> {
    Tensor::from_buffer(x.device(), x.device().pointwise()?.gelu(x.buffer())?, x.shape())
}

impl Op for Gelu {
    stated! { "gelu": x; reads_values, padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::pointwise(self.name(), operands[0])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        cx.save_input(0)?;
        cx.recipe(|saved| gelu(&saved[0].restore()?));
        gelu(inputs[0])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let dx = grad.device().pointwise()?.gelu_grad(grad.buffer(), cx.saved(0)?.buffer())?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dx, grad.shape())?)])
    }
}
