//! Root mean square norm over the last dim (Zhang and Sennrich, arXiv:1910.07467).
//!
//! Per row of `n` elements: `rstd = 1/√(Σ x² / n + eps)`, `y = x rstd weight`. With `x̂ = x rstd` and `g = dy weight`:
//! `dx = rstd (g - x̂ Σ (g x̂) / n)`, `dweight = Σ_rows dy x̂`.
//!
//! `n` is the length of `weight`; the number of rows is the length of `rstd`.

use super::Float;
use super::matmul::Update;
use super::reduce::{sum, sums};
use super::round::Stored;
use meshwork_core::simd::wide;

/// Number of rows that go through each step together, as in layer norm.
const TOGETHER: usize = 8;

/// `y[rows, n]` from `x[rows, n]`; saves `rstd[rows]`. Overwrites both.
pub fn forward<T: Float>(x: &[T], weight: &[T], eps: T, y: Stored<'_, T>, rstd: &mut [T]) {
    let n = row_len(weight, rstd, [x.len(), y.len()]);
    let count = T::from_f64(n as f64);
    wide!({
        let rows = x.chunks(TOGETHER * n).zip(y.chunks(TOGETHER * n)).zip(rstd.chunks_mut(TOGETHER));
        for ((x, y), rstd) in rows {
            for (x, rstd) in x.chunks_exact(n).zip(&mut *rstd) {
                *rstd = inlined!(sum, (x), |x| x * x) / count;
            }
            for rstd in &mut *rstd {
                *rstd = T::ONE / (*rstd + eps).sqrt();
            }
            for ((y, x), &mut rstd) in y.chunks(n).zip(x.chunks_exact(n)).zip(rstd) {
                y.fill(
                    #[inline(always)]
                    |at, y| {
                        for ((y, &x), &weight) in y.iter_mut().zip(&x[at..]).zip(&weight[at..]) {
                            *y = x * rstd * weight;
                        }
                    },
                );
            }
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
    /// The forward's `1/√(mean square + eps)` of each row.
    pub rstd: &'a [T],
}

/// `dx[rows, n]` (overwrites it, or adds to it), and `dweight[n] += Σ_rows dy x̂`, the rows one after another. Each row
/// is read from memory once.
pub fn backward<T: Float>(saved: Saved<'_, T>, weight: &[T], (dx, update): (&mut [T], Update), dweight: &mut [T]) {
    let Saved { dy, x, rstd } = saved;
    let n = row_len(weight, rstd, [dy.len(), x.len(), dx.len()]);
    assert_eq!(dweight.len(), n, "elements of dweight against weight");
    let count = T::from_f64(n as f64);
    wide!({
        let rows = dx.chunks_exact_mut(n).zip(dy.chunks_exact(n)).zip(x.chunks_exact(n));
        for (((dx, dy), x), &rstd) in rows.zip(rstd) {
            let [gx] = inlined!(sums, (dy, weight, x), |dy, weight, x| [dy * weight * (x * rstd)]);
            let gx_mean = gx / count;
            let params = weight.iter().zip(dweight.iter_mut());
            for (((dx, &dy), &x), (&weight, dweight)) in dx.iter_mut().zip(dy).zip(x).zip(params) {
                let normal = x * rstd;
                let share = rstd * (dy * weight - normal * gx_mean);
                *dx = if update == Update::Accumulate { *dx + share } else { share };
                *dweight += dy * normal;
            }
        }
    });
}

/// The row length, after checking every length against it and the number of rows.
fn row_len<T, const X: usize>(weight: &[T], rstd: &[T], tensors: [usize; X]) -> usize {
    let (n, rows) = (weight.len(), rstd.len());
    assert!(n > 0, "a norm over no elements");
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
        x: Vec<T>,
        weight: Vec<T>,
        dy: Vec<T>,
    }

    fn case<T: Float>(rows: usize, n: usize) -> Case<T> {
        Case { x: values("x", rows * n), weight: values("w", n), dy: values("dy", rows * n) }
    }

    /// Output and rstd.
    fn run<T: Float>(x: &[T], weight: &[T]) -> [Vec<T>; 2] {
        let rows = x.len() / weight.len();
        let [mut y, mut rstd] = [x.len(), rows].map(|len| vec![T::from(f32::NAN); len]);
        forward(x, weight, T::from_f64(EPS), Stored::Full(&mut y), &mut rstd);
        [y, rstd]
    }

    fn naive_row(x: &[f64], weight: &[f64]) -> Vec<f64> {
        let square = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        x.iter().zip(weight).map(|(x, weight)| x / (square + EPS).sqrt() * weight).collect()
    }

    #[test]
    fn a_rounded_result_is_the_full_one_rounded() {
        for (rows, n) in [(0, 3), (1, 1), (21, 70), (9, 511), (8, 512), (3, 513), (17, 1300)] {
            let c = case::<f32>(rows, n);
            let [full, rstd] = run(&c.x, &c.weight);
            let (mut got, mut want) = (vec![bf16::ONE; rows * n], vec![bf16::ZERO; rows * n]);
            let mut got_rstd = vec![9.0; rows];
            forward(&c.x, &c.weight, EPS as f32, Stored::Bf16(&mut got), &mut got_rstd);
            round(&full, &mut want);
            assert!(got == want && got_rstd == rstd, "{rows} rows of {n}");
        }
    }

    proptest! {
        #[test]
        fn forward_matches_the_equation(rows in 0..6_usize, n in 1..2100_usize, scale in 0.01..100_f32) {
            let mut c = case::<f32>(rows, n);
            c.x.iter_mut().for_each(|x| *x *= scale);
            let [y, _] = run(&c.x, &c.weight);
            let (x, weight) = (widen(&c.x), widen(&c.weight));
            let want: Vec<f64> = x.chunks(n).flat_map(|x| naive_row(x, &weight)).collect();
            assert_close(&y, &want, 2e-6);
        }

        #[test]
        fn gradients_match_finite_differences(rows in 1..4_usize, n in 1..40_usize) {
            let c = case::<f64>(rows, n);
            let [_, rstd] = run(&c.x, &c.weight);
            let (mut dx, mut dweight) = (vec![9.0; rows * n], vec![0.0; n]);
            let saved = Saved { dy: &c.dy, x: &c.x, rstd: &rstd };
            backward(saved, &c.weight, (&mut dx, Update::Overwrite), &mut dweight);
            let loss = |x: &[f64], weight: &[f64]| dot(&run(x, weight)[0], &c.dy);
            if n > 1 {
                // With one element y is nearly its sign, so differences are meaningless.
                check_gradient(&c.x, &dx, |x| loss(x, &c.weight));
            }
            check_gradient(&c.weight, &dweight, |weight| loss(&c.x, weight));
        }

        /// Each row alone, and gradients of the weight in two calls, are bitwise identical to the whole; accumulation
        /// in place equals separate addition.
        #[test]
        fn bits_do_not_depend_on_the_other_rows(rows in 1..12_usize, n in 1..1100_usize, cut in 0.0..1.0) {
            let c = case::<f32>(rows, n);
            let [y, rstd] = run(&c.x, &c.weight);
            // The gradients of the given rows; the gradient of the weight is added to the old value.
            let grads = |dx: &mut [f32], update: Update, rows: std::ops::Range<usize>, dweight: &mut [f32]| {
                let all = rows.start * n..rows.end * n;
                let saved = Saved { dy: &c.dy[all.clone()], x: &c.x[all], rstd: &rstd[rows] };
                backward(saved, &c.weight, (dx, update), dweight);
            };
            let (mut dx, mut dweight) = (vec![9.0; rows * n], c.weight.clone());
            grads(&mut dx, Update::Overwrite, 0..rows, &mut dweight);
            for i in 0..rows {
                let row = i * n..(i + 1) * n;
                prop_assert_eq!(&run(&c.x[row.clone()], &c.weight)[0], &y[row.clone()]);
                let mut alone = vec![9.0; n];
                grads(&mut alone, Update::Overwrite, i..i + 1, &mut vec![0.0; n]);
                prop_assert_eq!(&alone, &dx[row]);
            }
            let (mut parts, cut) = (c.weight.clone(), (cut * rows as f64) as usize);
            grads(&mut vec![9.0; cut * n], Update::Overwrite, 0..cut, &mut parts);
            grads(&mut vec![9.0; (rows - cut) * n], Update::Overwrite, cut..rows, &mut parts);
            prop_assert_eq!(parts, dweight);
            let mut sum = c.x.clone();
            grads(&mut sum, Update::Accumulate, 0..rows, &mut vec![0.0; n]);
            prop_assert!((0..rows * n).all(|i| sum[i] == c.x[i] + dx[i]));
        }
    }
}
