//! `L_s = 1/n Σ_i (x_si - t_si)²` over the n elements of each sample: the loss of a regression.

use super::prelude::*;
use super::whole::require_whole;
use crate::kernel::Map;
use crate::tape::Terms;

#[derive(Debug)]
struct SquaredError {
    terms: Terms,
    scale: f64,
}

impl Var {
    /// The mean squared error of each sample, `[samples]` in f64, of predictions `[samples, ..]` against targets of the
    /// same shape, over all elements of the sample on all ranks. With the seed 1 / samples of
    /// [`backward_from_loss`](crate::Tape::backward_from_loss) it is the mean over everything. Targets get a gradient
    /// if they need one. `Partial` on an axis that cuts elements of a sample.
    pub fn mean_squared_error(&self, targets: &Var) -> Result<Var> {
        require_whole("mean_squared_error", &[self, targets])?;
        let ndim = self.shape().len();
        let elements: usize = (1..ndim).map(|dim| self.shape()[dim] * self.degree_of(dim)).product();
        let scale = 1.0 / elements.max(1) as f64;
        self.tape().apply(SquaredError { terms: self.sample_terms()?, scale }, &[self, targets])
    }

    /// How the sum over the elements of a sample is cut. In canonical numerics it has blocks along the dim that is cut,
    /// or else along dim 1, the sequence, which another mesh may cut.
    fn sample_terms(&self) -> Result<Terms> {
        let (Some(blocks), ndim) = (self.tape().reduction_blocks(), self.shape().len()) else {
            return Ok(Terms::WHOLE);
        };
        if ndim < 2 {
            return Ok(Terms::WHOLE);
        }
        let dim = self.types().iter().find_map(|(_, ty)| ty.dim().filter(|&dim| dim > 0)).unwrap_or(1);
        let segments = self.shape()[1..dim].iter().product();
        Ok(Terms { segments, blocks: self.blocks_of("mean_squared_error", dim, blocks)? })
    }
}

impl Op for SquaredError {
    stated! { "mean_squared_error": x, targets }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        rules::sample_loss(self.name(), operands[0], operands[1])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let (x, targets) = (inputs[0], inputs[1]);
        let fits = x.shape() == targets.shape() && !x.shape().is_empty();
        cx.require(fits, "targets have the shape of x, [samples, ..]")?;
        let (device, samples) = (x.device(), x.shape()[0]);
        let loss = device.reduction()?.squared_error(x.buffer(), targets.buffer(), samples, self.terms, self.scale)?;
        let loss = match self.terms.blocks {
            1 => loss,
            blocks => {
                let mut block_sums = loss;
                device.pointwise()?.tree_sum(&mut block_sums, 0, blocks, samples, 0)?;
                block_sums.slice(0..samples)?
            }
        };
        cx.save_input(0)?;
        cx.save_input(1)?;
        Tensor::from_buffer(device, loss, [samples])
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let (x, targets, device) = (cx.saved(0)?, cx.saved(1)?, grad.device());
        let dx = device.reduction()?.squared_error_grad(x.buffer(), targets.buffer(), grad.buffer(), self.scale)?;
        let dtargets = match cx.needs(1) {
            true => Some(Tensor::from_buffer(device, device.elementwise()?.map(Map::Scale(-1.0), &dx)?, x.shape())?),
            false => None,
        };
        let dx = cx.needs(0).then(|| Tensor::from_buffer(device, dx, x.shape())).transpose()?;
        Ok(vec![dx, dtargets])
    }
}
