use super::kernels::matmul::Update;
use super::kernels::round::read;
use super::kernels::{norm, rms_norm};
use super::{Cpu, RowSums, for_widened, loaded, row_piece_of, rows_at_once, stored};
use meshwork_core::pool::share;
use meshwork_core::{Buffer, DType};
use meshwork_tensor::Result;
use meshwork_tensor::device::Device;
use meshwork_tensor::kernel::Norm;
use meshwork_tensor::tape::RowBlocks;

impl Norm for Cpu {
    fn layer_norm(
        &self,
        x: &Buffer,
        affine: [&Buffer; 2],
        eps: f64,
        stored: DType,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        for_widened!(self, "layer_norm", x, T => {
            let [gamma, beta] = [loaded::<T>(affine[0])?.whole(), loaded::<T>(affine[1])?.whole()];
            let all = loaded::<T>(x)?;
            let n = gamma.len();
            let mut mean = self.output::<T>(all.len() / n, |_| {})?;
            let mut rstd = self.output::<T>(all.len() / n, |_| {})?;
            let (means, rstds) = (mean.as_mut_slice::<T>()?, rstd.as_mut_slice::<T>()?);
            let piece = row_piece_of(x.dtype(), n);
            let y = self.stored::<T>("layer_norm", (x.dtype(), stored), all.len(), |y| {
                let stats = means.chunks_mut(piece / n).zip(rstds.chunks_mut(piece / n));
                share(y.chunks(piece).zip(all.chunks(piece)).zip(stats), |((y, x), (mean, rstd))| {
                    read([x], |[x]| norm::forward(x, &gamma, &beta, eps as T, y, mean, rstd));
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
        for_widened!(self, "layer_norm", x, T => {
            let (dtype, dy, x, gamma) = (x.dtype(), loaded::<T>(dy)?, loaded::<T>(x)?, loaded::<T>(gamma)?.whole());
            let (mean, rstd) = (mean.as_slice::<T>()?, rstd.as_slice::<T>()?);
            let (n, rows) = (gamma.len(), RowSums::new(mean.len(), blocks));
            let (count, at_once) = (n * rows.parts(), rows_at_once(n));
            let mut parts = self.output::<T>(2 * count, |_| {})?;
            let (dgammas, dbetas) = parts.as_mut_slice::<T>()?.split_at_mut(count);
            let update = if sum.is_some() { Update::Accumulate } else { Update::Overwrite };
            let mut dx = sum.map_or_else(|| self.alloc(dtype, x.len()), Ok)?;
            let stats = rows.cut(mean, 1).zip(rows.cut(rstd, 1));
            let cut = rows.cut(stored::<T>(&mut dx)?, n).zip(rows.cut(dy, n)).zip(rows.cut(x, n)).zip(stats);
            let sums = dgammas.chunks_mut(n).zip(dbetas.chunks_mut(n));
            share(cut.zip(sums), |((((dx, dy), x), (mean, rstd)), (dgamma, dbeta))| {
                dgamma.fill(0.0);
                dbeta.fill(0.0);
                let stats = mean.chunks(at_once).zip(rstd.chunks(at_once));
                let pieces = dx.chunks(n * at_once).zip(dy.chunks(n * at_once)).zip(x.chunks(n * at_once));
                for (((dx, dy), x), (mean, rstd)) in pieces.zip(stats) {
                    read([dy, x], |[dy, x]| {
                        let write = |dx: &mut [T]| {
                            norm::backward(norm::Saved { dy, x, mean, rstd }, &gamma, (dx, update), dgamma, dbeta);
                        };
                        if update == Update::Accumulate { dx.update(write) } else { dx.write(write) }
                    });
                }
            });
            let (dgammas, dbetas) = parts.as_slice::<T>()?.split_at(count);
            Ok((dx, rows.finish(self, dgammas, n)?, rows.finish(self, dbetas, n)?))
        })
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f64, stored: DType) -> Result<(Buffer, Buffer)> {
        for_widened!(self, "rms_norm", x, T => {
            let (all, weight) = (loaded::<T>(x)?, loaded::<T>(weight)?.whole());
            let n = weight.len();
            let mut rstd = self.output::<T>(all.len() / n, |_| {})?;
            let rstds = rstd.as_mut_slice::<T>()?;
            let piece = row_piece_of(x.dtype(), n);
            let y = self.stored::<T>("rms_norm", (x.dtype(), stored), all.len(), |y| {
                share(y.chunks(piece).zip(all.chunks(piece)).zip(rstds.chunks_mut(piece / n)), |((y, x), rstd)| {
                    read([x], |[x]| rms_norm::forward(x, &weight, eps as T, y, rstd));
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
        for_widened!(self, "rms_norm", x, T => {
            let (dtype, dy, x, weight) = (x.dtype(), loaded::<T>(dy)?, loaded::<T>(x)?, loaded::<T>(weight)?.whole());
            let (rstd, n) = (rstd.as_slice::<T>()?, weight.len());
            let (rows, at_once) = (RowSums::new(rstd.len(), blocks), rows_at_once(n));
            let mut parts = self.output::<T>(n * rows.parts(), |_| {})?;
            let update = if sum.is_some() { Update::Accumulate } else { Update::Overwrite };
            let mut dx = sum.map_or_else(|| self.alloc(dtype, x.len()), Ok)?;
            let cut = rows.cut(stored::<T>(&mut dx)?, n).zip(rows.cut(dy, n)).zip(rows.cut(x, n));
            let cut = cut.zip(rows.cut(rstd, 1)).zip(parts.as_mut_slice::<T>()?.chunks_mut(n));
            share(cut, |((((dx, dy), x), rstd), dweight)| {
                dweight.fill(0.0);
                let pieces = dx.chunks(n * at_once).zip(dy.chunks(n * at_once)).zip(x.chunks(n * at_once));
                for (((dx, dy), x), rstd) in pieces.zip(rstd.chunks(at_once)) {
                    read([dy, x], |[dy, x]| {
                        let write = |dx: &mut [T]| {
                            rms_norm::backward(rms_norm::Saved { dy, x, rstd }, &weight, (dx, update), dweight);
                        };
                        if update == Update::Accumulate { dx.update(write) } else { dx.write(write) }
                    });
                }
            });
            Ok((dx, rows.finish(self, parts.as_slice::<T>()?, n)?))
        })
    }
}
