//! Layer norm over the last dim: `y = (x - mean) / √(var + eps) · gamma + beta`.

use super::bias::or_zeros;
use super::prelude::*;
use crate::tape::RowBlocks;
use meshwork_core::DType;

#[derive(Debug)]
struct LayerNorm {
    eps: f64,
    tokens: Tokens,
    /// The type of the result.
    stored: DType,
    /// Whether there is a beta.
    shifted: bool,
}

impl Var {
    /// Layer norm over the last dim, which must be whole on this rank, as must `gamma` and `beta`. `beta` may be
    /// `None`, which means zero.
    pub fn layer_norm<'a>(&self, gamma: &Var, beta: impl Into<Option<&'a Var>>, eps: f64) -> Result<Var> {
        self.layer_norm_as(gamma, beta.into(), eps, self.tensor().dtype())
    }

    /// The same as a [matmul operand](crate::Device::operand_dtype), for values that only matrix products and
    /// collectives read; other operations refuse its type.
    pub fn layer_norm_operand<'a>(&self, gamma: &Var, beta: impl Into<Option<&'a Var>>, eps: f64) -> Result<Var> {
        self.layer_norm_as(gamma, beta.into(), eps, self.tape().device().operand_dtype(self.tensor().dtype()))
    }

    fn layer_norm_as(&self, gamma: &Var, beta: Option<&Var>, eps: f64, stored: DType) -> Result<Var> {
        let op = LayerNorm { eps, tokens: Tokens::of(self, 1), stored, shifted: beta.is_some() };
        match beta {
            Some(beta) => self.tape().apply(op, &[self, gamma, beta]),
            None => self.tape().apply(op, &[self, gamma]),
        }
    }
}

impl Op for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn reads_values(&self) -> bool {
        true
    }

    fn operands(&self) -> &'static [&'static str] {
        if self.shifted { &["x", "gamma", "beta"] } else { &["x", "gamma"] }
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::along_dim(self.name(), operands[0], operands[0].ndim.saturating_sub(1), &operands[1..])
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        vec![("eps", self.eps)]
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, gamma) = (inputs[0], inputs[1]);
        let beta = or_zeros(inputs.get(2).map(|&beta| beta.clone()), gamma, gamma.shape())?;
        cx.require(
            x.shape().ends_with(&gamma.shape()) && gamma.shape().len() == 1 && beta.shape() == gamma.shape(),
            || "gamma and beta are vectors over the last dim of x".to_owned(),
            inputs,
        )?;
        let (eps, stored) = (self.eps, self.stored);
        let norm = x.device().norm()?;
        let (y, mean, rstd) = norm.layer_norm(x.buffer(), [gamma.buffer(), beta.buffer()], eps, stored)?;
        cx.save_input(0)?;
        cx.save_input(1)?;
        for statistic in [mean, rstd] {
            let rows = statistic.count();
            cx.save_exact(&Tensor::from_buffer(x.device(), statistic, [rows])?)?;
        }
        if self.shifted {
            cx.save_input(2)?;
        }
        cx.recipe(move |saved| {
            let (x, gamma) = (saved[0].restore()?, saved[1].restore()?);
            let beta = or_zeros(saved.get(4).map(|beta| beta.restore()).transpose()?, &gamma, gamma.shape())?;
            let norm = x.device().norm()?;
            let (y, ..) = norm.layer_norm(x.buffer(), [gamma.buffer(), beta.buffer()], eps, stored)?;
            Tensor::from_buffer(x.device(), y, x.shape())
        });
        Tensor::from_buffer(x.device(), y, x.shape())
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (x, gamma) = (cx.saved(0)?, cx.saved(1)?);
        let (mean, rstd) = (cx.saved(2)?, cx.saved(3)?);
        // Gamma or beta may be frozen: both sums have the blocks of the trained one.
        let trained = (1..=1 + usize::from(self.shifted)).find(|&i| cx.needs(i));
        let blocks = trained.map_or(RowBlocks::WHOLE, |i| cx.row_blocks(i, self.tokens));
        let norm = grad.device().norm()?;
        let sum = cx.take_sum(0).map(Tensor::into_buffer);
        let (dx, dgamma, dbeta) = norm.layer_norm_grad(
            grad.buffer(),
            x.buffer(),
            gamma.buffer(),
            [mean.buffer(), rstd.buffer()],
            blocks,
            sum,
        )?;
        let mut all = vec![Some(Tensor::from_buffer(grad.device(), dx, x.shape())?).filter(|_| cx.needs(0))];
        for (i, sums) in [(1, dgamma), (2, dbeta)].into_iter().take(1 + usize::from(self.shifted)) {
            all.push(match cx.needs(i) {
                true => cx.sum_blocks(i, sums, gamma.shape(), self.tokens, blocks)?,
                false => None,
            });
        }
        Ok(all)
    }
}
