use super::Meta;
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
        let of = x.dtype().widened();
        let (mean, rstd) = (self.alloc(of, rows)?, self.alloc(of, rows)?);
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
        let (n, of) = (gamma.count(), x.dtype().widened());
        let _parts = self.alloc(of, 2 * n * blocks.parts(x.count() / n))?;
        let dx = sum.map_or_else(|| self.alloc(x.dtype(), x.count()), Ok)?;
        let vectors = n * blocks.count();
        Ok((dx, self.alloc(of, vectors)?, self.alloc(of, vectors)?))
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, _eps: f64, stored: DType) -> Result<(Buffer, Buffer)> {
        let rstd = self.alloc(x.dtype().widened(), x.count() / weight.count())?;
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
        let (n, of) = (weight.count(), x.dtype().widened());
        let _parts = self.alloc(of, n * blocks.parts(x.count() / n))?;
        let dx = sum.map_or_else(|| self.alloc(x.dtype(), x.count()), Ok)?;
        Ok((dx, self.alloc(of, n * blocks.count())?))
    }
}
