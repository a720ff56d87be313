//! Root mean square norm over the last dim: `y = x / √(mean of x² + eps) · weight`.

use super::prelude::*;
use crate::tape::RowBlocks;
use meshwork_core::DType;

#[derive(Debug)]
struct RmsNorm {
    eps: f64,
    tokens: Tokens,
    /// The type of the result.
    stored: DType,
}

impl Var {
    /// Root mean square norm over the last dim (Zhang and Sennrich, 2019), which must be whole on this rank, as must
    /// `weight`.
    pub fn rms_norm(&self, weight: &Var, eps: f64) -> Result<Var> {
        let tokens = Tokens::of(self, 1);
        self.tape().apply(RmsNorm { eps, tokens, stored: self.tensor().dtype() }, &[self, weight])
    }

    /// The same as a [matmul operand](crate::Device::operand_dtype), for values that only matrix products and
    /// collectives read; other operations refuse its type.
    pub fn rms_norm_operand(&self, weight: &Var, eps: f64) -> Result<Var> {
        let (tokens, stored) = (Tokens::of(self, 1), self.tape().device().operand_dtype(self.tensor().dtype()));
        self.tape().apply(RmsNorm { eps, tokens, stored }, &[self, weight])
    }
}

impl Op for RmsNorm {
    stated! { "rms_norm": x, weight; reads_values }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::along_dim(self.name(), operands[0], operands[0].ndim.saturating_sub(1), &operands[1..])
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        vec![("eps", self.eps)]
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, weight) = (inputs[0], inputs[1]);
        cx.require(
            weight.shape().len() == 1 && x.shape().ends_with(&weight.shape()),
            || "weight is a vector over the last dim of x".to_owned(),
            inputs,
        )?;
        let (eps, stored) = (self.eps, self.stored);
        let (y, rstd) = x.device().norm()?.rms_norm(x.buffer(), weight.buffer(), eps, stored)?;
        cx.save_input(0)?;
        cx.save_input(1)?;
        let rows = rstd.count();
        cx.save_exact(&Tensor::from_buffer(x.device(), rstd, [rows])?)?;
        cx.recipe(move |saved| {
            let (x, weight) = (saved[0].restore()?, saved[1].restore()?);
            let (y, _) = x.device().norm()?.rms_norm(x.buffer(), weight.buffer(), eps, stored)?;
            Tensor::from_buffer(x.device(), y, x.shape())
        });
        Tensor::from_buffer(x.device(), y, x.shape())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (x, weight, rstd) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?);
        let blocks = if cx.needs(1) { cx.row_blocks(1, self.tokens) } else { RowBlocks::WHOLE };
        let norm = grad.device().norm()?;
        let sum = cx.take_sum(0).map(Tensor::into_buffer);
        let (dx, dweight) =
            norm.rms_norm_grad(grad.buffer(), x.buffer(), weight.buffer(), rstd.buffer(), blocks, sum)?;
        let dx = Some(Tensor::from_buffer(grad.device(), dx, x.shape())?).filter(|_| cx.needs(0));
        let dweight = match cx.needs(1) {
            true => cx.sum_blocks(1, dweight, weight.shape(), self.tokens, blocks)?,
            false => None,
        };
        Ok(vec![dx, dweight])
    }
}
