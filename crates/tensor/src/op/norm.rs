//! Norms over the last dim: layer norm, `y = (x - mean) / √(var + eps) · gamma + beta`, and root mean square norm,
//! `y = x / √(mean of x² + eps) · weight`.

use super::bias::or_zeros;
use super::prelude::*;
use crate::tape::RowBlocks;
use meshwork_core::{Buffer, DType};

#[derive(Debug)]
struct Norm {
    form: Form,
    eps: f64,
    tokens: Tokens,
    /// The type of the result.
    stored: DType,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Layer {
        /// Whether there is a beta.
        shifted: bool,
    },
    Rms,
}

impl Var {
    /// Layer norm over the last dim, which must be whole on this rank, as must `gamma` and `beta`. `beta` may be
    /// `None`, which means zero.
    pub fn layer_norm<'a>(&self, gamma: &Var, beta: impl Into<Option<&'a Var>>, eps: f64) -> Result<Var> {
        self.normed(gamma, Some(beta.into()), eps, self.tensor().dtype())
    }

    /// The same as a [matmul operand](crate::Device::operand_dtype), for values that only matrix products and
    /// collectives read; other operations refuse its type.
    pub fn layer_norm_operand<'a>(&self, gamma: &Var, beta: impl Into<Option<&'a Var>>, eps: f64) -> Result<Var> {
        self.normed(gamma, Some(beta.into()), eps, self.tape().device().operand_dtype(self.tensor().dtype()))
    }

    /// Root mean square norm over the last dim (Zhang and Sennrich, 2019), which must be whole on this rank, as must
    /// `weight`.
    pub fn rms_norm(&self, weight: &Var, eps: f64) -> Result<Var> {
        self.normed(weight, None, eps, self.tensor().dtype())
    }

    /// The same as a [matmul operand](crate::Device::operand_dtype), for values that only matrix products and
    /// collectives read; other operations refuse its type.
    pub fn rms_norm_operand(&self, weight: &Var, eps: f64) -> Result<Var> {
        self.normed(weight, None, eps, self.tape().device().operand_dtype(self.tensor().dtype()))
    }

    /// The layer norm with this beta or none; without `layer` the root mean square norm.
    fn normed(&self, gain: &Var, layer: Option<Option<&Var>>, eps: f64, stored: DType) -> Result<Var> {
        let form = layer.map_or(Form::Rms, |beta| Form::Layer { shifted: beta.is_some() });
        let inputs: Vec<&Var> = [self, gain].into_iter().chain(layer.flatten()).collect();
        self.tape().apply(Norm { form, eps, tokens: Tokens::new(self, 1), stored }, &inputs)
    }
}

impl Norm {
    /// The result, and the statistics of rows.
    fn run(
        (form, eps, stored): (Form, f64, DType),
        x: &Tensor,
        gain: &Tensor,
        beta: Option<Tensor>,
    ) -> Result<(Tensor, Vec<Buffer>)> {
        let norm = x.device().norm()?;
        let (y, statistics) = match form {
            Form::Layer { .. } => {
                let beta = or_zeros(beta, gain, gain.shape())?;
                let (y, mean, rstd) = norm.layer_norm(x.buffer(), [gain.buffer(), beta.buffer()], eps, stored)?;
                (y, vec![mean, rstd])
            }
            Form::Rms => {
                let (y, rstd) = norm.rms_norm(x.buffer(), gain.buffer(), eps, stored)?;
                (y, vec![rstd])
            }
        };
        Ok((Tensor::from_buffer(x.device(), y, x.shape())?, statistics))
    }
}

impl Op for Norm {
    fn name(&self) -> &'static str {
        match self.form {
            Form::Layer { .. } => "layer_norm",
            Form::Rms => "rms_norm",
        }
    }

    fn reads_values(&self) -> bool {
        true
    }

    fn operands(&self) -> &'static [&'static str] {
        match self.form {
            Form::Layer { shifted: true } => &["x", "gamma", "beta"],
            Form::Layer { shifted: false } => &["x", "gamma"],
            Form::Rms => &["x", "weight"],
        }
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::along_dim(self.name(), operands[0], operands[0].ndim.saturating_sub(1), &operands[1..])
    }

    fn scalars(&self) -> Vec<(&'static str, f64)> {
        vec![("eps", self.eps)]
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, gain, params) = (inputs[0], inputs[1].shape(), &inputs[1..]);
        let fits = x.shape().ends_with(&gain) && gain.len() == 1 && params.iter().all(|param| param.shape() == gain);
        let problem = match self.form {
            Form::Layer { .. } => "gamma and beta are vectors over the last dim of x",
            Form::Rms => "weight is a vector over the last dim of x",
        };
        cx.require(fits, problem)?;
        let how = (self.form, self.eps, self.stored);
        let (y, statistics) = Self::run(how, x, inputs[1], inputs.get(2).map(|&beta| beta.clone()))?;
        cx.save_input(0)?;
        cx.save_input(1)?;
        for statistic in statistics {
            let rows = statistic.count();
            cx.save_exact(&Tensor::from_buffer(x.device(), statistic, [rows])?)?;
        }
        (2..inputs.len()).try_for_each(|beta| cx.save_input(beta))?;
        cx.recipe(move |saved| {
            let beta = saved.get(4).map(|beta| beta.restore()).transpose()?;
            Ok(Self::run(how, &saved[0].restore()?, &saved[1].restore()?, beta)?.0)
        });
        Ok(y)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (x, gain, first, operands) = (cx.saved(0)?, cx.saved(1)?, cx.saved(2)?, self.operands().len());
        // Gamma or beta may be frozen: both sums have the blocks of the trained one.
        let trained = (1..operands).find(|&i| cx.needs(i));
        let blocks = trained.map_or(RowBlocks::WHOLE, |i| cx.row_blocks(i, self.tokens));
        let (norm, sum) = (grad.device().norm()?, cx.take_sum(0).map(Tensor::into_buffer));
        let [dy, xs, gains, first] = [&grad, &x, &gain, &first].map(Tensor::buffer);
        let (dx, sums) = match self.form {
            Form::Layer { .. } => {
                let rstd = cx.saved(3)?;
                let (dx, dgamma, dbeta) = norm.layer_norm_grad(dy, xs, gains, [first, rstd.buffer()], blocks, sum)?;
                (dx, vec![dgamma, dbeta])
            }
            Form::Rms => {
                let (dx, dweight) = norm.rms_norm_grad(dy, xs, gains, first, blocks, sum)?;
                (dx, vec![dweight])
            }
        };
        let mut all = vec![Some(Tensor::from_buffer(grad.device(), dx, x.shape())?).filter(|_| cx.needs(0))];
        for (i, sums) in (1..operands).zip(sums) {
            all.push(if cx.needs(i) { cx.sum_blocks(i, sums, gain.shape(), self.tokens, blocks)? } else { None });
        }
        Ok(all)
    }
}
