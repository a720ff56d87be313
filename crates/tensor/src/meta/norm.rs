use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::family::Norm;
use meshwork_core::Buffer;

impl Norm for Meta {
    fn layer_norm(&self, x: &Buffer, gamma: &Buffer, _beta: &Buffer, _eps: f64) -> Result<(Buffer, Buffer, Buffer)> {
        let rows = x.count() / gamma.count();
        let (mean, rstd) = (self.alloc(x.dtype(), rows)?, self.alloc(x.dtype(), rows)?);
        Ok((self.alloc(x.dtype(), x.count())?, mean, rstd))
    }

    fn layer_norm_input_grad(
        &self,
        _dy: &Buffer,
        x: &Buffer,
        _gamma: &Buffer,
        _mean: &Buffer,
        _rstd: &Buffer,
    ) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }

    fn layer_norm_weight_grad(
        &self,
        _dy: &Buffer,
        x: &Buffer,
        _mean: &Buffer,
        _rstd: &Buffer,
        n: usize,
    ) -> Result<(Buffer, Buffer)> {
        Ok((self.alloc(x.dtype(), n)?, self.alloc(x.dtype(), n)?))
    }
}
