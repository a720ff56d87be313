//! `y = max(x, 0)`. Backward keeps a bit of each element, and the element itself only if others recompute y from it.

use super::prelude::*;
use super::whole::require_whole;

#[derive(Debug)]
struct Relu;

impl Var {
    /// ReLU, the rectifier. Not linear: refuses `Partial`.
    pub fn relu(&self) -> Result<Var> {
        require_whole(Relu.name(), &[self])?;
        self.tape().apply(Relu, &[self])
    }
}

/// The result, and its bits for backward.
fn relu(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let (y, above) = x.device().pointwise()?.relu(x.buffer())?;
    let bytes = above.count();
    Ok((Tensor::from_buffer(x.device(), y, x.shape())?, Tensor::from_buffer(x.device(), above, [bytes])?))
}

impl Op for Relu {
    stated! { "relu": x; padded Zeros }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::pointwise(self.name(), operands[0])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (y, above) = relu(inputs[0])?;
        cx.save(&above)?;
        if cx.recomputes() {
            cx.save_input(0)?;
            cx.recipe(|saved| Ok(relu(&saved[1].restore()?)?.0));
        }
        Ok(y)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let dx = grad.device().pointwise()?.relu_grad(grad.buffer(), cx.saved(0)?.buffer())?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dx, grad.shape())?)])
    }
}
