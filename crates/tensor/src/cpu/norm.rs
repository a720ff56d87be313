use super::kernels::matmul::Update;
use super::kernels::{norm, rms_norm};
use super::{Cpu, RowSums, for_float, row_piece};
use crate::device::Device;
use crate::error::Result;
use crate::kernel::Norm;
use crate::tape::RowBlocks;
use meshwork_core::pool::share;
use meshwork_core::{Buffer, DType, Element};

impl Norm for Cpu {
    fn layer_norm(
        &self,
        x: &Buffer,
        gamma: &Buffer,
        beta: &Buffer,
        eps: f64,
        stored: DType,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        for_float!(self, "layer_norm", x, T => {
            let (x, gamma, beta) = (x.as_slice::<T>()?, gamma.as_slice::<T>()?, beta.as_slice::<T>()?);
            let n = gamma.len();
            let mut mean = self.output::<T>(x.len() / n, |_| {})?;
            let mut rstd = self.output::<T>(x.len() / n, |_| {})?;
            let (means, rstds) = (mean.as_mut_slice::<T>()?, rstd.as_mut_slice::<T>()?);
            let (piece, rows) = (row_piece(n), row_piece(n) / n);
            let y = self.stored::<T>("layer_norm", stored, x.len(), |y| {
                let stats = means.chunks_mut(rows).zip(rstds.chunks_mut(rows));
                share(y.chunks(piece).zip(x.chunks(piece)).zip(stats), |((y, x), (mean, rstd))| {
                    norm::forward(x, gamma, beta, eps as T, y, mean, rstd);
                });
                Ok(())
            })?;
            Ok((y, mean, rstd))
        })
    }

    fn layer_norm_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        gamma: &Buffer,
        [mean, rstd]: [&Buffer; 2],
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        for_float!(self, "layer_norm", x, T => {
            let (dy, x, gamma) = (dy.as_slice::<T>()?, x.as_slice::<T>()?, gamma.as_slice::<T>()?);
            let (mean, rstd) = (mean.as_slice::<T>()?, rstd.as_slice::<T>()?);
            let n = gamma.len();
            let rows = RowSums::new(mean.len(), blocks);
            let count = n * rows.parts();
            let mut parts = self.output::<T>(2 * count, |_| {})?;
            let (dgammas, dbetas) = parts.as_mut_slice::<T>()?.split_at_mut(count);
            let update = if sum.is_some() { Update::Accumulate } else { Update::Overwrite };
            let mut dx = sum.map_or_else(|| self.alloc(T::DTYPE, x.len()), Ok)?;
            let stats = rows.cut(mean, 1).zip(rows.cut(rstd, 1));
            let cut = rows.cut_mut(dx.as_mut_slice::<T>()?, n).zip(rows.cut(dy, n)).zip(rows.cut(x, n)).zip(stats);
            let sums = dgammas.chunks_mut(n).zip(dbetas.chunks_mut(n));
            share(cut.zip(sums), |((((dx, dy), x), (mean, rstd)), (dgamma, dbeta))| {
                dgamma.fill(0.0);
                dbeta.fill(0.0);
                norm::backward(norm::Saved { dy, x, mean, rstd }, gamma, (dx, update), dgamma, dbeta);
            });
            let (dgammas, dbetas) = parts.as_slice::<T>()?.split_at(count);
            Ok((dx, rows.finish(self, dgammas, n)?, rows.finish(self, dbetas, n)?))
        })
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f64, stored: DType) -> Result<(Buffer, Buffer)> {
        for_float!(self, "rms_norm", x, T => {
            let (x, weight) = (x.as_slice::<T>()?, weight.as_slice::<T>()?);
            let n = weight.len();
            let mut rstd = self.output::<T>(x.len() / n, |_| {})?;
            let rstds = rstd.as_mut_slice::<T>()?;
            let (piece, rows) = (row_piece(n), row_piece(n) / n);
            let y = self.stored::<T>("rms_norm", stored, x.len(), |y| {
                share(y.chunks(piece).zip(x.chunks(piece)).zip(rstds.chunks_mut(rows)), |((y, x), rstd)| {
                    rms_norm::forward(x, weight, eps as T, y, rstd);
                });
                Ok(())
            })?;
            Ok((y, rstd))
        })
    }

    fn rms_norm_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        weight: &Buffer,
        rstd: &Buffer,
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer)> {
        for_float!(self, "rms_norm", x, T => {
            let (dy, x, weight) = (dy.as_slice::<T>()?, x.as_slice::<T>()?, weight.as_slice::<T>()?);
            let (rstd, n) = (rstd.as_slice::<T>()?, weight.len());
            let rows = RowSums::new(rstd.len(), blocks);
            let mut parts = self.output::<T>(n * rows.parts(), |_| {})?;
            let update = if sum.is_some() { Update::Accumulate } else { Update::Overwrite };
            let mut dx = sum.map_or_else(|| self.alloc(T::DTYPE, x.len()), Ok)?;
            let cut = rows.cut_mut(dx.as_mut_slice::<T>()?, n).zip(rows.cut(dy, n)).zip(rows.cut(x, n));
            let cut = cut.zip(rows.cut(rstd, 1)).zip(parts.as_mut_slice::<T>()?.chunks_mut(n));
            share(cut, |((((dx, dy), x), rstd), dweight)| {
                dweight.fill(0.0);
                rms_norm::backward(rms_norm::Saved { dy, x, rstd }, weight, (dx, update), dweight);
            });
            Ok((dx, rows.finish(self, parts.as_slice::<T>()?, n)?))
        })
    }
}
