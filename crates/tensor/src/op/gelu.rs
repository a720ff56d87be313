//! `y = gelu(x) = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`.

use super::whole::require_whole;
use crate::error::Result;
use crate::tape::{Backward, Forward, Op, Padded, Var};
use crate::tensor::Tensor;
use meshwork_core::rules::{self, Operand};
use meshwork_core::{SpmdError, Types};

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
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn reads_values(&self) -> bool {
        true
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::pointwise(self.name(), operands[0])
    }

    fn padded(&self) -> Padded {
        Padded::Zeros
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        cx.save_input(0)?;
        cx.recipe(|saved| gelu(&saved[0].restore()?));
        gelu(inputs[0])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        if !cx.needs(0) {
            return Ok(vec![None]);
        }
        let dx = grad.device().pointwise()?.gelu_grad(grad.buffer(), cx.saved(0)?.buffer())?;
        Ok(vec![Some(Tensor::from_buffer(grad.device(), dx, grad.shape())?)])
    }
}
