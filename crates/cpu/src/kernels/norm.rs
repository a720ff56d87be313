//! Layer norm (Ba, Kiros and Hinton, arXiv:1607.06450) and root mean square norm (Zhang and Sennrich,
//! arXiv:1910.07467) over the last dim.
//!
//! Per row of `n` elements: `mean = Σ x / n`, `rstd = 1/√(Σ (x - mean)² / n + eps)` (two passes, so that a large mean
//! costs no precision), `y = (x - mean) rstd gain + shift`. With `x̂ = (x - mean) rstd` and `g = dy gain`:
//! `dx = rstd (g - Σ g / n - x̂ Σ (g x̂) / n)`, `dgain = Σ_rows dy x̂`, `dshift = Σ_rows dy`.
//!
//! The root mean square norm is the form that is not `CENTRED`: its mean is 0, and it has no shift and no `Σ g`.
//!
//! `n` is the length of `gain`; the number of rows is the length of `rstd`.

use super::matmul::Update;
use super::prelude::*;
use super::reduce::{sum, sums};

/// Number of rows that go through each step together, so that no row waits for the sums, square root and divisions of
/// the previous one; few enough to stay in the L1 cache.
const TOGETHER: usize = 8;

/// `y[rows, n]` from `x[rows, n]`; saves `mean[rows]` and `rstd[rows]`. Overwrites all three. What is not centred has
/// an empty shift and an empty mean.
pub fn forward<const CENTRED: bool, T: Float>(
    x: &[T],
    [gain, shift]: [&[T]; 2],
    eps: T,
    y: Stored<'_, T>,
    mean: &mut [T],
    rstd: &mut [T],
) {
    let n = row_len::<CENTRED, T>(gain, shift.len(), mean.len(), rstd, &[x.len(), y.len()]);
    let count = T::from_f64(n as f64);
    wide!(for (at, (x, y)) in x.chunks(TOGETHER * n).zip(y.chunks(TOGETHER * n)).enumerate() {
        let rows = at * TOGETHER..at * TOGETHER + x.len() / n;
        let mean: &mut [T] = if CENTRED { &mut mean[rows.clone()] } else { &mut [] };
        let rstd = &mut rstd[rows];
        for (x, mean) in x.chunks_exact(n).zip(&mut *mean) {
            *mean = inlined!(sum, (x), |x| x) / count;
        }
        for (row, (x, rstd)) in x.chunks_exact(n).zip(&mut *rstd).enumerate() {
            let mean = mean_of::<CENTRED, T>(mean, row);
            *rstd = inlined!(sum, (x), |x| (x - mean) * (x - mean)) / count;
        }
        for rstd in &mut *rstd {
            *rstd = T::ONE / (*rstd + eps).sqrt();
        }
        for (row, ((y, x), &mut rstd)) in y.chunks(n).zip(x.chunks_exact(n)).zip(rstd).enumerate() {
            let mean = mean_of::<CENTRED, T>(mean, row);
            y.fill(
                #[inline(always)]
                |at, y| {
                    let y = y.iter_mut().zip(&x[at..]).zip(&gain[at..]);
                    if CENTRED {
                        y.zip(&shift[at..])
                            .for_each(|(((y, &x), &gain), &shift)| *y = (x - mean) * rstd * gain + shift);
                    } else {
                        y.for_each(|((y, &x), &gain)| *y = x * rstd * gain);
                    }
                },
            );
        }
    });
}

/// The results of the forward that the backward needs, and the incoming gradient.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, T> {
    /// Gradient of `y[rows, n]`.
    pub dy: &'a [T],
    /// The forward's `x[rows, n]`.
    pub x: &'a [T],
    /// The forward's mean of each row, if it is centred.
    pub mean: &'a [T],
    /// The forward's `1/√(variance + eps)` of each row.
    pub rstd: &'a [T],
}

/// `dx[rows, n]` (overwrites it, or adds to it), and `dgain[n] += Σ_rows dy x̂` and `dshift[n] += Σ_rows dy`, the rows
/// one after another. Each row is read from memory once. What is not centred has an empty `dshift`.
pub fn backward<const CENTRED: bool, T: Float>(
    Saved { dy, x, mean, rstd }: Saved<'_, T>,
    gain: &[T],
    (dx, update): (&mut [T], Update),
    [dgain, dshift]: [&mut [T]; 2],
) {
    let n = row_len::<CENTRED, T>(gain, dshift.len(), mean.len(), rstd, &[dy.len(), x.len(), dx.len()]);
    assert_eq!(dgain.len(), n, "elements of dgain against gain");
    let count = T::from_f64(n as f64);
    wide!({
        let rows = dx.chunks_exact_mut(n).zip(dy.chunks_exact(n)).zip(x.chunks_exact(n));
        for (row, (((dx, dy), x), &rstd)) in rows.zip(rstd).enumerate() {
            let mean = mean_of::<CENTRED, T>(mean, row);
            let [g, gx] = inlined!(sums, (dy, gain, x), |dy, gain, x| {
                let g = dy * gain;
                [if CENTRED { g } else { T::ZERO }, g * ((x - mean) * rstd)]
            });
            let (g_mean, gx_mean) = (g / count, gx / count);
            let params = gain.iter().zip(dgain.iter_mut());
            for (((dx, &dy), &x), (&gain, dgain)) in dx.iter_mut().zip(dy).zip(x).zip(params) {
                let normal = (x - mean) * rstd;
                let share = rstd * (dy * gain - g_mean - normal * gx_mean);
                *dx = if update == Update::Accumulate { *dx + share } else { share };
                *dgain += dy * normal;
            }
            dshift.iter_mut().zip(dy).for_each(|(dshift, &dy)| *dshift += dy);
        }
    });
}

/// The mean of a row, or 0.
#[inline(always)]
fn mean_of<const CENTRED: bool, T: Float>(mean: &[T], row: usize) -> T {
    if CENTRED { mean[row] } else { T::ZERO }
}

/// The row length, after checking every length against it and the number of rows.
fn row_len<const CENTRED: bool, T>(gain: &[T], shift: usize, mean: usize, rstd: &[T], tensors: &[usize]) -> usize {
    let (n, rows) = (gain.len(), rstd.len());
    assert!(n > 0, "a norm over no elements");
    assert_eq!([shift, mean], if CENTRED { [n, rows] } else { [0; 2] }, "elements of shift and rows of mean");
    assert!(tensors.iter().all(|&count| count == rows * n), "elements of the tensors against {rows} rows of {n}");
    n
}
