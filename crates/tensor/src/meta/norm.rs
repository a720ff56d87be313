use super::Meta;
use crate::cpu::RowSums;
use crate::device::Device;
use crate::error::Result;
use crate::family::Norm;
use crate::tape::RowLeaves;
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
        leaves: RowLeaves,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let n = gamma.count();
        let _parts = self.alloc(x.dtype(), 2 * n * RowSums::new(mean.count(), leaves).parts())?;
        let vectors = n * leaves.count();
        Ok((self.alloc(x.dtype(), x.count())?, self.alloc(x.dtype(), vectors)?, self.alloc(x.dtype(), vectors)?))
    }
}
