use super::kernels::matmul::Update;
use super::kernels::norm;
use super::prelude::*;
use meshwork_tensor::kernel::Norm;
use std::iter::repeat_with;

/// Gradients of x, of gain and of shift.
type Grads = (Buffer, Buffer, Buffer);

const fn name<const CENTRED: bool>() -> &'static str {
    if CENTRED { "layer_norm" } else { "rms_norm" }
}

impl Cpu {
    /// (y, mean, rstd) of a [norm](norm::forward). Without a shift it is not centred, and its mean is empty.
    fn norm<const CENTRED: bool>(
        &self,
        x: &Buffer,
        [gain, shift]: [&Buffer; 2],
        eps: f64,
        stored: DType,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        for_widened!(self, name::<CENTRED>(), x, T => {
            let [gain, shift] = [loaded::<T>(gain)?.whole(), loaded::<T>(shift)?.whole()];
            let (all, n) = (loaded::<T>(x)?, gain.len());
            let mut mean = self.output::<T>(if CENTRED { all.len() / n } else { 0 }, |_| {})?;
            let mut rstd = self.output::<T>(all.len() / n, |_| {})?;
            let (means, rstds) = (mean.as_mut_slice::<T>()?, rstd.as_mut_slice::<T>()?);
            let piece = row_piece_of(x.dtype(), n);
            let y = self.stored::<T>(name::<CENTRED>(), (x.dtype(), stored), all.len(), |y| {
                let means = means.chunks_mut(piece / n).chain(repeat_with(Default::default));
                let stats = rstds.chunks_mut(piece / n).zip(means);
                for_each(y.chunks(piece).zip(all.chunks(piece)).zip(stats), |((y, x), (rstd, mean))| {
                    read([x], |[x]| norm::forward::<CENTRED, T>(x, [&gain, &shift], eps as T, y, mean, rstd));
                });
                Ok(())
            })?;
            Ok((y, mean, rstd))
        })
    }

    /// The gradients of a [norm](norm::backward); of the shift nothing if it is not centred, and the mean is then not
    /// read.
    fn norm_grad<const CENTRED: bool>(
        &self,
        [dy, x, gain]: [&Buffer; 3],
        [mean, rstd]: [&Buffer; 2],
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<Grads> {
        for_widened!(self, name::<CENTRED>(), x, T => {
            let (dtype, dy, x, gain) = (x.dtype(), loaded::<T>(dy)?, loaded::<T>(x)?, loaded::<T>(gain)?.whole());
            let (mean, rstd) = (mean.as_slice::<T>()?, rstd.as_slice::<T>()?);
            let (n, rows) = (gain.len(), RowSums::new(rstd.len(), blocks));
            let (count, at_once) = (n * rows.parts(), rows_at_once(n));
            let mut parts = self.output::<T>(if CENTRED { 2 * count } else { count }, |_| {})?;
            let (dgains, dshifts) = parts.as_mut_slice::<T>()?.split_at_mut(count);
            let update = if sum.is_some() { Update::Accumulate } else { Update::Overwrite };
            let mut dx = sum.map_or_else(|| self.alloc(dtype, x.len()), Ok)?;
            let stats = rows.cut(mean, 1).zip(rows.cut(rstd, 1));
            let cut = rows.cut(stored::<T>(&mut dx)?, n).zip(rows.cut(dy, n)).zip(rows.cut(x, n)).zip(stats);
            let sums = dgains.chunks_mut(n).zip(dshifts.chunks_mut(n).chain(repeat_with(Default::default)));
            for_each(cut.zip(sums), |((((dx, dy), x), (mean, rstd)), (dgain, dshift))| {
                dgain.fill(0.0);
                dshift.fill(0.0);
                let stats = mean.chunks(at_once).zip(rstd.chunks(at_once));
                let pieces = dx.chunks(n * at_once).zip(dy.chunks(n * at_once)).zip(x.chunks(n * at_once));
                for (((dx, dy), x), (mean, rstd)) in pieces.zip(stats) {
                    let mean = if CENTRED { mean } else { &[] };
                    read([dy, x], |[dy, x]| {
                        let write = |dx: &mut [T]| {
                            let saved = norm::Saved { dy, x, mean, rstd };
                            norm::backward::<CENTRED, T>(saved, &gain, (dx, update), [&mut *dgain, &mut *dshift]);
                        };
                        if update == Update::Accumulate { dx.update(write) } else { dx.write(write) }
                    });
                }
            });
            let (dgains, dshifts) = parts.as_slice::<T>()?.split_at(count);
            let dshift = if CENTRED { rows.finish(self, dshifts, n)? } else { Buffer::empty() };
            Ok((dx, rows.finish(self, dgains, n)?, dshift))
        })
    }
}

impl Norm for Cpu {
    fn layer_norm(&self, x: &Buffer, affine: [&Buffer; 2], eps: f64, stored: DType) -> Result<Grads> {
        self.norm::<true>(x, affine, eps, stored)
    }

    fn layer_norm_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        gamma: &Buffer,
        stats: [&Buffer; 2],
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<Grads> {
        self.norm_grad::<true>([dy, x, gamma], stats, blocks, sum)
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f64, stored: DType) -> Result<(Buffer, Buffer)> {
        let none = self.alloc(weight.dtype(), 0)?;
        self.norm::<false>(x, [weight, &none], eps, stored).map(|(y, _, rstd)| (y, rstd))
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
        self.norm_grad::<false>([dy, x, weight], [rstd; 2], blocks, sum).map(|(dx, dweight, _)| (dx, dweight))
    }
}
