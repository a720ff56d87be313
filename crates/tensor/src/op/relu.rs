//! `y = max(x, 0)`.

use super::whole::require_whole;
use crate::error::Result;
use crate::tape::{Backward, Forward, Op, Padded, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::{SpmdError, Types};

#[derive(Debug)]
struct Relu;

impl Var {
    /// ReLU, the rectifier. Not linear: refuses `Partial`.
    pub fn relu(&self) -> Result<Var> {
        require_whole(Relu.name(), &[self])?;
        self.tape().apply(Relu, &[self])
    }
}

fn relu(x: &Tensor) -> Result<Tensor> {
    Tensor::from_buffer(x.device(), x.device().pointwise()?.relu(x.buffer())?, x.shape())
}

impl Op for Relu {
    fn name(&self) -> &'static str {
        "relu"
    }

    fn operands(&self) -> &'static [&'static str] {
        &["x"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::pointwise(self.name(), operands[0])
    }

    fn padded(&self) -> Padded {
        Padded::Zeros
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        cx.save_input(0)?;
        cx.recipe(|saved| relu(&saved[0].restore()?));
        relu(inputs[0])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) {
            return Ok(vec![None]);
        }
        let dx = grad.device().pointwise()?.relu_grad(grad.buffer(), cx.saved(0)?.buffer())?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dx, grad.shape())?)])
    }
}
