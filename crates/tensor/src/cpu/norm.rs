use super::kernels::norm;
use super::{Cpu, for_float};
use crate::error::Result;
use crate::family::Norm;
use meshwork_core::Buffer;

impl Norm for Cpu {
    fn layer_norm(&self, x: &Buffer, gamma: &Buffer, beta: &Buffer, eps: f64) -> Result<(Buffer, Buffer, Buffer)> {
        for_float!(self, "layer_norm", x, T => {
            let rows = x.count() / gamma.count();
            let (x, gamma, beta) = (x.as_slice::<T>()?, gamma.as_slice::<T>()?, beta.as_slice::<T>()?);
            let mut mean = self.output::<T>(rows, |_| {})?;
            let mut rstd = self.output::<T>(rows, |_| {})?;
            let (means, rstds) = (mean.as_mut_slice::<T>()?, rstd.as_mut_slice::<T>()?);
            let y = self.output::<T>(x.len(), |y| norm::forward(x, gamma, beta, eps as T, y, means, rstds))?;
            Ok((y, mean, rstd))
        })
    }

    fn layer_norm_input_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        gamma: &Buffer,
        mean: &Buffer,
        rstd: &Buffer,
    ) -> Result<Buffer> {
        for_float!(self, "layer_norm", x, T => {
            let (dy, x, gamma) = (dy.as_slice::<T>()?, x.as_slice::<T>()?, gamma.as_slice::<T>()?);
            let (mean, rstd) = (mean.as_slice::<T>()?, rstd.as_slice::<T>()?);
            self.output::<T>(x.len(), |dx| norm::backward_input(dy, x, gamma, mean, rstd, dx))
        })
    }

    fn layer_norm_weight_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        mean: &Buffer,
        rstd: &Buffer,
        n: usize,
    ) -> Result<(Buffer, Buffer)> {
        for_float!(self, "layer_norm", x, T => {
            let (dy, x) = (dy.as_slice::<T>()?, x.as_slice::<T>()?);
            let (mean, rstd) = (mean.as_slice::<T>()?, rstd.as_slice::<T>()?);
            let mut dbeta = self.sum::<T>(n, |_| {})?;
            let shift = dbeta.as_mut_slice::<T>()?;
            let dgamma = self.sum::<T>(n, |dgamma| norm::backward_params(dy, x, mean, rstd, dgamma, shift))?;
            Ok((dgamma, dbeta))
        })
    }
}
