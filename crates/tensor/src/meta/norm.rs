use super::Meta;
use crate::cpu::RowSums;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::Norm;
use crate::tape::RowBlocks;
use meshwork_core::{Buffer, DType};

impl Norm for Meta {
    fn layer_norm(
        &self,
        x: &Buffer,
        gamma: &Buffer,
        _beta: &Buffer,
        _eps: f64,
        stored: DType,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let rows = x.count() / gamma.count();
        let (mean, rstd) = (self.alloc(x.dtype(), rows)?, self.alloc(x.dtype(), rows)?);
        Ok((self.alloc(stored, x.count())?, mean, rstd))
    }

    fn layer_norm_grad(
        &self,
        _dy: &Buffer,
        x: &Buffer,
        gamma: &Buffer,
        _stats: [&Buffer; 2],
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let n = gamma.count();
        let _parts = self.alloc(x.dtype(), 2 * n * RowSums::new(x.count() / n, blocks).parts())?;
        let dx = sum.map_or_else(|| self.alloc(x.dtype(), x.count()), Ok)?;
        let vectors = n * blocks.count();
        Ok((dx, self.alloc(x.dtype(), vectors)?, self.alloc(x.dtype(), vectors)?))
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, _eps: f64, stored: DType) -> Result<(Buffer, Buffer)> {
        let rstd = self.alloc(x.dtype(), x.count() / weight.count())?;
        Ok((self.alloc(stored, x.count())?, rstd))
    }

    fn rms_norm_grad(
        &self,
        _dy: &Buffer,
        x: &Buffer,
        weight: &Buffer,
        _rstd: &Buffer,
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer)> {
        let n = weight.count();
        let _parts = self.alloc(x.dtype(), n * RowSums::new(x.count() / n, blocks).parts())?;
        let dx = sum.map_or_else(|| self.alloc(x.dtype(), x.count()), Ok)?;
        Ok((dx, self.alloc(x.dtype(), n * blocks.count())?))
    }
}
