//! Batch norm (Ioffe and Szegedy, arXiv:1502.03167) and group norm (Wu and He, arXiv:1803.08494) over rows of channels.
//!
//! With `x̂ = (x - mean) rstd` and `g = dy gamma`, and means over all elements that share a mean:
//! `dx = rstd (g - mean(g) - x̂ mean(g x̂))`, `dgamma = Σ_rows dy x̂`, `dbeta = Σ_rows dy`. Both means follow from the
//! two sums over rows: `Σ g` is the sum over the group's channels of `gamma dbeta`, and `Σ g x̂` is the sum of
//! `gamma dgamma`. So one pass sums rows, a few operations on vectors of channels follow, and another pass writes dx.
//!
//! All rows of one call belong to one block; `mean` and `rstd` are per channel. Sums *add* to the output.

use super::pointwise::assert_rows;
use super::prelude::*;

/// The statistics of a block, per channel.
#[derive(Clone, Copy, Debug)]
pub struct Channels<'a, T> {
    /// Mean of the channel's group.
    pub mean: &'a [T],
    /// `1/√(variance + eps)` of the channel's group.
    pub rstd: &'a [T],
}

/// `sum[c] += Σ_rows (x[row, c] - mean[c])²`, the rows one after another.
pub fn squares<T: Float>(x: &[T], mean: &[T], sum: &mut [T]) {
    assert_eq!(mean.len(), sum.len(), "channels of mean against sum");
    assert_rows(x.len(), mean.len());
    wide!(for x in x.chunks_exact(mean.len().max(1)) {
        for ((sum, &x), &mean) in sum.iter_mut().zip(x).zip(mean) {
            *sum += (x - mean) * (x - mean);
        }
    });
}

/// `y = (x - mean) rstd gamma + beta`. Overwrites.
pub fn normalise<T: Float>(x: &[T], stats: Channels<'_, T>, gamma: &[T], beta: &[T], y: &mut [T]) {
    let Channels { mean, rstd } = stats;
    assert_eq!([rstd.len(), gamma.len(), beta.len()], [mean.len(); 3], "channels");
    assert_eq!(x.len(), y.len(), "elements of x against y");
    assert_rows(x.len(), mean.len());
    let n = mean.len().max(1);
    wide!(for (x, y) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)) {
        let channels = mean.iter().zip(rstd).zip(gamma).zip(beta);
        for ((y, &x), (((&mean, &rstd), &gamma), &beta)) in y.iter_mut().zip(x).zip(channels) {
            *y = (x - mean) * rstd * gamma + beta;
        }
    });
}

/// `dgamma[c] += Σ_rows dy x̂` and `dbeta[c] += Σ_rows dy`, the rows one after another.
pub fn affine_backward<T: Float>(dy: &[T], x: &[T], stats: Channels<'_, T>, dgamma: &mut [T], dbeta: &mut [T]) {
    let Channels { mean, rstd } = stats;
    assert_eq!([rstd.len(), dgamma.len(), dbeta.len()], [mean.len(); 3], "channels");
    assert_eq!(x.len(), dy.len(), "elements of x against dy");
    assert_rows(x.len(), mean.len());
    let n = mean.len().max(1);
    wide!(for (x, dy) in x.chunks_exact(n).zip(dy.chunks_exact(n)) {
        let channels = mean.iter().zip(rstd).zip(dgamma.iter_mut()).zip(dbeta.iter_mut());
        for ((&x, &dy), (((&mean, &rstd), dgamma), dbeta)) in x.iter().zip(dy).zip(channels) {
            *dgamma += dy * ((x - mean) * rstd);
            *dbeta += dy;
        }
    });
}

/// The means of `g` and of `g x̂`, per channel; zero if the statistics are given.
#[derive(Clone, Copy, Debug)]
pub struct Means<'a, T> {
    /// Mean of `g`.
    pub g: &'a [T],
    /// Mean of `g x̂`.
    pub gx: &'a [T],
}

/// `dx = rstd (dy gamma - mean(g) - x̂ mean(g x̂))`. Overwrites.
pub fn input_backward<T: Float>(
    dy: &[T],
    x: &[T],
    stats: Channels<'_, T>,
    gamma: &[T],
    means: Means<'_, T>,
    dx: &mut [T],
) {
    let Channels { mean, rstd } = stats;
    assert_eq!([rstd.len(), gamma.len(), means.g.len(), means.gx.len()], [mean.len(); 4], "channels");
    let scale: Vec<[T; 5]> = (0..mean.len()).map(|c| [mean[c], rstd[c], gamma[c], means.g[c], means.gx[c]]).collect();
    let n = mean.len();
    assert_eq!([x.len(), dy.len()], [dx.len(); 2], "elements of x and dy against dx");
    assert_rows(x.len(), n);
    wide!({
        let rows = dx.chunks_exact_mut(n.max(1)).zip(dy.chunks_exact(n.max(1))).zip(x.chunks_exact(n.max(1)));
        for ((dx, dy), x) in rows {
            for (((dx, &dy), &x), &[mean, rstd, gamma, g, gx]) in dx.iter_mut().zip(dy).zip(x).zip(&scale) {
                *dx = rstd * (dy * gamma - g - (x - mean) * rstd * gx);
            }
        }
    });
}
