use super::PART;
use super::kernels::channel_norm::{self as kernels, Channels, Means};
use super::kernels::pointwise;
use super::prelude::*;
use meshwork_tensor::kernel::{ChannelNorm, Groups, MeanVariance, Statistics};

/// The sums of groups, repeated for each of their channels, from `[blocks, channels]`.
fn group_sums<T: Float>(groups: &Groups, channels: impl Iterator<Item = T>) -> Vec<T> {
    let (mut sums, mut rest) = (Vec::with_capacity(groups.blocks * groups.channels), channels.peekable());
    let of_group = groups.channels / groups.groups;
    while rest.peek().is_some() {
        let sum = rest.by_ref().take(of_group).fold(T::ZERO, |sum, x| sum + x);
        sums.extend(std::iter::repeat_n(sum, of_group));
    }
    sums
}

/// One value per group, from values that are repeated for its channels.
fn once<'a, T>(groups: &Groups, channels: &'a [T]) -> impl Iterator<Item = &'a T> {
    channels.iter().step_by(groups.channels / groups.groups)
}

/// Repeats `[blocks, groups]` for each channel.
fn spread<T: Float>(groups: &Groups, values: &[T], f: impl Fn(T) -> T) -> Vec<T> {
    let of_group = groups.channels / groups.groups;
    values.iter().flat_map(|&x| std::iter::repeat_n(f(x), of_group)).collect()
}

impl RowSums {
    /// For each part, the vector of `[blocks, n]` to which its rows belong.
    fn vectors<'a, T>(&'a self, all: &'a [T], n: usize) -> impl Iterator<Item = &'a [T]> {
        let parts = self.blocks.iter().zip(all.chunks(n.max(1)));
        parts.flat_map(|(&parts, vector)| std::iter::repeat_n(vector, parts))
    }
}

/// Shares work on parts of rows of `n` elements, several parts at a time if rows are short.
fn share_parts<I: Send>(parts: impl Iterator<Item = I>, n: usize, work: impl Fn(&mut I) + Sync) {
    let mut parts: Vec<I> = parts.collect();
    let at_once = (PIECE / (PART * n.max(1))).max(1);
    for_each(parts.chunks_mut(at_once), |parts| parts.iter_mut().for_each(&work));
}

/// Mean and rstd of every channel of every block.
fn stats<T: Element + Float>(groups: Groups, by: MeanVariance<'_>) -> Result<(Vec<T>, Vec<T>)> {
    let (mean, variance, eps) = (by.mean.as_slice::<T>()?, by.variance.as_slice::<T>()?, T::from_f64(by.eps));
    Ok((spread(&groups, mean, |x| x), spread(&groups, variance, |x| T::ONE / (x + eps).sqrt())))
}

impl ChannelNorm for Cpu {
    fn moments(&self, groups: Groups, x: &Buffer) -> Result<(Buffer, Buffer)> {
        for_float!(self, "channel_norm", x, T => {
            let (x, n) = (x.as_slice::<T>()?, groups.channels);
            let rows = RowSums::new(groups.blocks * groups.rows, groups.row_blocks());
            let members = T::from_f64(groups.members() as f64);
            let mut parts = self.output::<T>(n * rows.parts(), |_| {})?;
            share_parts(parts.as_mut_slice::<T>()?.chunks_mut(n).zip(rows.cut(x, n)), n, |(part, x)| {
                part.fill(0.0);
                pointwise::bias_backward(x, part);
            });
            let mean: Vec<T> = {
                let sums = rows.finish(self, parts.as_slice::<T>()?, n)?;
                group_sums(&groups, sums.as_slice::<T>()?.iter().copied()).into_iter().map(|sum| sum / members).collect()
            };
            let pieces = parts.as_mut_slice::<T>()?.chunks_mut(n).zip(rows.cut(x, n)).zip(rows.vectors(&mean, n));
            share_parts(pieces, n, |((part, x), mean)| {
                part.fill(0.0);
                kernels::squares(x, mean, part);
            });
            let sums = rows.finish(self, parts.as_slice::<T>()?, n)?;
            let sums = group_sums(&groups, sums.as_slice::<T>()?.iter().copied());
            let [mean, variance] = [(mean, T::ONE), (sums, members)].map(|(values, by)| {
                self.output::<T>(groups.blocks * groups.groups, |out| {
                    out.iter_mut().zip(once(&groups, &values)).for_each(|(out, &value)| *out = value / by);
                })
            });
            Ok((mean?, variance?))
        })
    }

    fn normalise(&self, groups: Groups, x: &Buffer, by: MeanVariance<'_>, affine: [&Buffer; 2]) -> Result<Buffer> {
        let [gamma, beta] = affine;
        for_float!(self, "channel_norm", x, T => {
            let (x, n) = (x.as_slice::<T>()?, groups.channels);
            let (gamma, beta) = (gamma.as_slice::<T>()?, beta.as_slice::<T>()?);
            let (mean, rstd) = stats::<T>(groups, by)?;
            let rows = RowSums::new(groups.blocks * groups.rows, groups.row_blocks());
            self.output::<T>(x.len(), |y| {
                let vectors = rows.vectors(&mean, n).zip(rows.vectors(&rstd, n));
                let pieces = rows.cut(y, n).zip(rows.cut(x, n)).zip(vectors);
                share_parts(pieces, n, |((y, x), (mean, rstd))| {
                    kernels::normalise(x, Channels { mean, rstd }, gamma, beta, y);
                });
            })
        })
    }

    fn normalise_grad(
        &self,
        groups: Groups,
        dy: &Buffer,
        x: &Buffer,
        by: MeanVariance<'_>,
        statistics: Statistics,
        gamma: &Buffer,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        for_float!(self, "channel_norm", x, T => {
            let (dy, x, gamma) = (dy.as_slice::<T>()?, x.as_slice::<T>()?, gamma.as_slice::<T>()?);
            let n = groups.channels;
            let (mean, rstd) = stats::<T>(groups, by)?;
            let rows = RowSums::new(groups.blocks * groups.rows, groups.row_blocks());
            let stats = || rows.vectors(&mean, n).zip(rows.vectors(&rstd, n));

            let count = n * rows.parts();
            let mut parts = self.output::<T>(2 * count, |_| {})?;
            let (dgammas, dbetas) = parts.as_mut_slice::<T>()?.split_at_mut(count);
            let cut = rows.cut(dy, n).zip(rows.cut(x, n)).zip(stats());
            let sums = dgammas.chunks_mut(n).zip(dbetas.chunks_mut(n));
            share_parts(cut.zip(sums), n, |(((dy, x), (mean, rstd)), (dgamma, dbeta))| {
                dgamma.fill(0.0);
                dbeta.fill(0.0);
                kernels::affine_backward(dy, x, Channels { mean, rstd }, dgamma, dbeta);
            });
            let (dgammas, dbetas) = parts.as_slice::<T>()?.split_at(count);
            let (dgamma, dbeta) = (rows.finish(self, dgammas, n)?, rows.finish(self, dbetas, n)?);

            let scale = match statistics {
                Statistics::OfInput => 1.0 / groups.members() as f64,
                Statistics::Given => 0.0,
            };
            let means = |sums: &Buffer| -> Result<Vec<T>> {
                let g = sums.as_slice::<T>()?.iter().zip(gamma.iter().cycle()).map(|(&sum, &gamma)| sum * gamma);
                Ok(group_sums(&groups, g).into_iter().map(|sum| sum * scale as T).collect())
            };
            let (g, gx) = (means(&dbeta)?, means(&dgamma)?);
            let dx = self.output::<T>(x.len(), |dx| {
                let means = rows.vectors(&g, n).zip(rows.vectors(&gx, n));
                let pieces = rows.cut(dx, n).zip(rows.cut(dy, n).zip(rows.cut(x, n))).zip(stats().zip(means));
                share_parts(pieces, n, |((dx, (dy, x)), ((mean, rstd), (g, gx)))| {
                    kernels::input_backward(dy, x, Channels { mean, rstd }, gamma, Means { g, gx }, dx);
                });
            })?;
            Ok((dx, dgamma, dbeta))
        })
    }
}
