//! Layer norm over the last dim (Ba, Kiros and Hinton, arXiv:1607.06450).
//!
//! Per row of `n` elements: `mean = Σ x / n`, `rstd = 1/√(Σ (x - mean)² / n + eps)` (two passes, so that a large mean
//! costs no precision), `y = (x - mean) rstd gamma + beta`. With `x̂ = (x - mean) rstd` and `g = dy gamma`:
//! `dx = rstd (g - Σ g / n - x̂ Σ (g x̂) / n)`, `dgamma = Σ_rows dy x̂`, `dbeta = Σ_rows dy`.
//!
//! `n` is the length of `gamma`; the number of rows is the length of `mean`.

use super::Float;
use super::matmul::Update;
use super::reduce::{sum, sums};
use super::round::Stored;
use meshwork_core::simd::wide;

/// Number of rows that go through each step together, so that no row waits for the sums, square root and divisions of
/// the previous one; few enough to stay in the L1 cache.
const TOGETHER: usize = 8;

/// `y[rows, n]` from `x[rows, n]`; saves `mean[rows]` and `rstd[rows]`. Overwrites all three.
pub fn forward<T: Float>(x: &[T], gamma: &[T], beta: &[T], eps: T, y: Stored<'_, T>, mean: &mut [T], rstd: &mut [T]) {
    let n = row_len(gamma, [beta.len()], mean, rstd, [x.len(), y.len()]);
    let count = T::from_f64(n as f64);
    let stats = mean.chunks_mut(TOGETHER).zip(rstd.chunks_mut(TOGETHER));
    wide!(for ((x, y), (mean, rstd)) in x.chunks(TOGETHER * n).zip(y.chunks(TOGETHER * n)).zip(stats) {
        for (x, mean) in x.chunks_exact(n).zip(&mut *mean) {
            *mean = inlined!(sum, (x), |x| x) / count;
        }
        for (x, (&mut mean, rstd)) in x.chunks_exact(n).zip(mean.iter_mut().zip(&mut *rstd)) {
            *rstd = inlined!(sum, (x), |x| (x - mean) * (x - mean)) / count;
        }
        for rstd in &mut *rstd {
            *rstd = T::ONE / (*rstd + eps).sqrt();
        }
        let rows = y.chunks(n).zip(x.chunks_exact(n)).zip(mean.iter().zip(rstd));
        for ((y, x), (&mean, &mut rstd)) in rows {
            y.fill(
                #[inline(always)]
                |at, y| {
                    let params = gamma[at..].iter().zip(&beta[at..]);
                    for ((y, &x), (&gamma, &beta)) in y.iter_mut().zip(&x[at..]).zip(params) {
                        *y = (x - mean) * rstd * gamma + beta;
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
    /// The forward's mean of each row.
    pub mean: &'a [T],
    /// The forward's `1/√(variance + eps)` of each row.
    pub rstd: &'a [T],
}

/// `dx[rows, n]` (overwrites it, or adds to it), and `dgamma[n] += Σ_rows dy x̂` and `dbeta[n] += Σ_rows dy`, the rows
/// one after another. Each row is read from memory once.
pub fn backward<T: Float>(
    saved: Saved<'_, T>,
    gamma: &[T],
    (dx, update): (&mut [T], Update),
    dgamma: &mut [T],
    dbeta: &mut [T],
) {
    let Saved { dy, x, mean, rstd } = saved;
    let n = row_len(gamma, [dgamma.len(), dbeta.len()], mean, rstd, [dy.len(), x.len(), dx.len()]);
    let count = T::from_f64(n as f64);
    wide!({
        let rows = dx.chunks_exact_mut(n).zip(dy.chunks_exact(n)).zip(x.chunks_exact(n));
        for (((dx, dy), x), (&mean, &rstd)) in rows.zip(mean.iter().zip(rstd)) {
            let [g, gx] = inlined!(sums, (dy, gamma, x), |dy, gamma, x| {
                let g = dy * gamma;
                [g, g * ((x - mean) * rstd)]
            });
            let (g_mean, gx_mean) = (g / count, gx / count);
            let params = gamma.iter().zip(dgamma.iter_mut()).zip(dbeta.iter_mut());
            for (((dx, &dy), &x), ((&gamma, dgamma), dbeta)) in dx.iter_mut().zip(dy).zip(x).zip(params) {
                let normal = (x - mean) * rstd;
                let share = rstd * (dy * gamma - g_mean - normal * gx_mean);
                *dx = if update == Update::Accumulate { *dx + share } else { share };
                *dgamma += dy * normal;
                *dbeta += dy;
            }
        }
    });
}

/// The row length, after checking every length against it and the number of rows.
fn row_len<T, const P: usize, const X: usize>(
    gamma: &[T],
    params: [usize; P],
    mean: &[T],
    rstd: &[T],
    tensors: [usize; X],
) -> usize {
    let (n, rows) = (gamma.len(), mean.len());
    assert!(n > 0, "a norm over no elements");
    assert_eq!(params, [n; P], "elements of beta against gamma");
    assert_eq!(rstd.len(), rows, "rows of rstd against mean");
    assert_eq!(tensors, [rows * n; X], "elements of the tensors against {rows} rows of {n}");
    n
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{assert_close, check_gradient, dot, values, widen};
    use super::super::round::round;
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    const EPS: f64 = 1e-5;

    struct Case<T> {
        n: usize,
        x: Vec<T>,
        gamma: Vec<T>,
        beta: Vec<T>,
        dy: Vec<T>,
    }

    fn case<T: Float>(rows: usize, n: usize) -> Case<T> {
        Case { n, x: values("x", rows * n), gamma: values("g", n), beta: values("b", n), dy: values("dy", rows * n) }
    }

    /// Output, mean and rstd.
    fn run<T: Float>(x: &[T], gamma: &[T], beta: &[T]) -> [Vec<T>; 3] {
        let rows = x.len() / gamma.len();
        let [mut y, mut mean, mut rstd] = [x.len(), rows, rows].map(|len| vec![T::ZERO; len]);
        forward(x, gamma, beta, T::from_f64(EPS), Stored::Full(&mut y), &mut mean, &mut rstd);
        [y, mean, rstd]
    }

    fn naive_row(x: &[f64], gamma: &[f64], beta: &[f64]) -> Vec<f64> {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        (0..x.len()).map(|j| (x[j] - mean) / (variance + EPS).sqrt() * gamma[j] + beta[j]).collect()
    }

    #[test]
    fn a_rounded_result_is_the_full_one_rounded() {
        for (rows, n) in [(0, 3), (1, 1), (21, 70), (9, 511), (8, 512), (3, 513), (17, 1300)] {
            let c = case::<f32>(rows, n);
            let [full, mean, rstd] = run(&c.x, &c.gamma, &c.beta);
            let (mut got, mut want) = (vec![bf16::ONE; rows * n], vec![bf16::ZERO; rows * n]);
            let mut stats = [vec![9.0; rows], vec![9.0; rows]];
            let [got_mean, got_rstd] = &mut stats;
            forward(&c.x, &c.gamma, &c.beta, EPS as f32, Stored::Bf16(&mut got), got_mean, got_rstd);
            round(&full, &mut want);
            assert!(got == want && stats == [mean, rstd], "{rows} rows of {n}");
        }
    }

    proptest! {
        #[test]
        fn forward_matches_the_equation(rows in 0..6_usize, n in 1..2100_usize, shift in -100.0..100_f32) {
            let mut c = case::<f32>(rows, n);
            c.x.iter_mut().for_each(|x| *x += shift);
            let [y, ..] = run(&c.x, &c.gamma, &c.beta);
            let (x, gamma, beta) = (widen(&c.x), widen(&c.gamma), widen(&c.beta));
            let want: Vec<f64> = x.chunks(n).flat_map(|x| naive_row(x, &gamma, &beta)).collect();
            // A row of one element has variance 0, where rounding of the mean is magnified by 1/sqrt(eps).
            assert_close(&y, &want, if n < 3 { 1e-2 } else { 1e-4 });
        }

        #[test]
        fn gradients_match_finite_differences(rows in 1..4_usize, n in 2..40_usize) {
            let c = case::<f64>(rows, n);
            let [_, mean, rstd] = run(&c.x, &c.gamma, &c.beta);
            let (mut dx, mut dgamma, mut dbeta) = (vec![9.0; rows * n], vec![0.0; n], vec![0.0; n]);
            let saved = Saved { dy: &c.dy, x: &c.x, mean: &mean, rstd: &rstd };
            backward(saved, &c.gamma, (&mut dx, Update::Overwrite), &mut dgamma, &mut dbeta);
            let loss = |x: &[f64], gamma: &[f64], beta: &[f64]| dot(&run(x, gamma, beta)[0], &c.dy);
            if n > 2 {
                // With two elements y is a step function of x[0] - x[1], so differences are meaningless.
                check_gradient(&c.x, &dx, |x| loss(x, &c.gamma, &c.beta));
            }
            check_gradient(&c.gamma, &dgamma, |gamma| loss(&c.x, gamma, &c.beta));
            check_gradient(&c.beta, &dbeta, |beta| loss(&c.x, &c.gamma, beta));
        }

        /// Each row alone, and parameter gradients in two calls, are bitwise identical to the whole.
        #[test]
        fn bits_do_not_depend_on_the_other_rows(rows in 1..12_usize, n in 1..1100_usize, cut in 0.0..1.0) {
            let c = case::<f32>(rows, n);
            let [y, mean, rstd] = run(&c.x, &c.gamma, &c.beta);
            // The gradients of the given rows; the gradients of gamma and beta are added to the old values.
            let grads = |dx: &mut [f32], rows: std::ops::Range<usize>, dgamma: &mut [f32], dbeta: &mut [f32]| {
                let all = rows.start * n..rows.end * n;
                let (mean, rstd) = (&mean[rows.clone()], &rstd[rows]);
                let saved = Saved { dy: &c.dy[all.clone()], x: &c.x[all], mean, rstd };
                backward(saved, &c.gamma, (dx, Update::Overwrite), dgamma, dbeta);
            };
            let (mut dx, mut dgamma, mut dbeta) = (vec![9.0; rows * n], c.gamma.clone(), c.beta.clone());
            grads(&mut dx, 0..rows, &mut dgamma, &mut dbeta);
            for i in 0..rows {
                let row = i * c.n..(i + 1) * c.n;
                let alone = run(&c.x[row.clone()], &c.gamma, &c.beta);
                prop_assert_eq!(&alone[0], &y[row.clone()]);
                let mut dx_alone = vec![9.0; n];
                grads(&mut dx_alone, i..i + 1, &mut vec![0.0; n], &mut vec![0.0; n]);
                prop_assert_eq!(&dx_alone, &dx[row]);
            }
            let (mut dgamma_parts, mut dbeta_parts) = (c.gamma.clone(), c.beta.clone());
            let cut = (cut * rows as f64) as usize;
            grads(&mut dx[..cut * n], 0..cut, &mut dgamma_parts, &mut dbeta_parts);
            grads(&mut dx[cut * n..], cut..rows, &mut dgamma_parts, &mut dbeta_parts);
            prop_assert_eq!((dgamma_parts, dbeta_parts), (dgamma, dbeta));
            let mut sum = c.x.clone();
            let saved = Saved { dy: &c.dy, x: &c.x, mean: &mean, rstd: &rstd };
            backward(saved, &c.gamma, (&mut sum, Update::Accumulate), &mut [0.0; 1100][..n], &mut [0.0; 1100][..n]);
            prop_assert!((0..rows * n).all(|i| sum[i] == c.x[i] + dx[i]));
        }
    }
}
