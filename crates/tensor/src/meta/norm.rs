use super::Meta;
use crate::cpu::leaves_len;
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

    fn layer_norm_grad(
        &self,
        _dy: &Buffer,
        x: &Buffer,
        gamma: &Buffer,
        mean: &Buffer,
        _rstd: &Buffer,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let n = gamma.count();
        let _leaves = self.alloc(x.dtype(), 2 * leaves_len(mean.count(), n))?;
        let dx = sum.map_or_else(|| self.alloc(x.dtype(), x.count()), Ok)?;
        Ok((dx, self.alloc(x.dtype(), n)?, self.alloc(x.dtype(), n)?))
    }
}
