//! Norms of rows against their definitions.

use super::oracle::{assert_close, check_gradient, dot, values, widen};
use half::bf16;
use meshwork_cpu::kernels::Float;
use meshwork_cpu::kernels::matmul::Update;
use meshwork_cpu::kernels::norm::*;
use meshwork_cpu::kernels::round::{Stored, round};
use proptest::prelude::*;
use std::ops::Range;

const EPS: f64 = 1e-5;

struct Case<T> {
    n: usize,
    x: Vec<T>,
    gain: Vec<T>,
    shift: Vec<T>,
    dy: Vec<T>,
}

fn case<const CENTRED: bool, T: Float>(rows: usize, n: usize) -> Case<T> {
    let shift = values("b", if CENTRED { n } else { 0 });
    Case { n, x: values("x", rows * n), gain: values("g", n), shift, dy: values("dy", rows * n) }
}

/// Output, mean and rstd.
fn run<const CENTRED: bool, T: Float>(x: &[T], gain: &[T], shift: &[T]) -> [Vec<T>; 3] {
    let rows = x.len() / gain.len();
    let [mut y, mut mean, mut rstd] =
        [x.len(), if CENTRED { rows } else { 0 }, rows].map(|len| vec![T::from(f32::NAN); len]);
    forward::<CENTRED, T>(x, [gain, shift], T::from_f64(EPS), Stored::Full(&mut y), &mut mean, &mut rstd);
    [y, mean, rstd]
}

fn naive_row<const CENTRED: bool>(x: &[f64], gain: &[f64], shift: &[f64]) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = if CENTRED { x.iter().sum::<f64>() / n } else { 0.0 };
    let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
    let shift = |j: usize| shift.get(j).copied().unwrap_or(0.0);
    (0..x.len()).map(|j| (x[j] - mean) / (variance + EPS).sqrt() * gain[j] + shift(j)).collect()
}

fn check_rounded<const CENTRED: bool>(rows: usize, n: usize) {
    let c = case::<CENTRED, f32>(rows, n);
    let [full, mean, rstd] = run::<CENTRED, _>(&c.x, &c.gain, &c.shift);
    let (mut got, mut want) = (vec![bf16::ONE; rows * n], vec![bf16::ZERO; rows * n]);
    let mut stats = [vec![9.0; mean.len()], vec![9.0; rows]];
    let [got_mean, got_rstd] = &mut stats;
    forward::<CENTRED, _>(&c.x, [&c.gain, &c.shift], EPS as f32, Stored::Bf16(&mut got), got_mean, got_rstd);
    round(&full, &mut want);
    assert!(got == want && stats == [mean, rstd], "{rows} rows of {n}");
}

fn check_equation<const CENTRED: bool>(rows: usize, n: usize, change: impl Fn(f32) -> f32, tolerance: f64) {
    let mut c = case::<CENTRED, f32>(rows, n);
    c.x.iter_mut().for_each(|x| *x = change(*x));
    let [y, ..] = run::<CENTRED, _>(&c.x, &c.gain, &c.shift);
    let (x, gain, shift) = (widen(&c.x), widen(&c.gain), widen(&c.shift));
    let want: Vec<f64> = x.chunks(n).flat_map(|x| naive_row::<CENTRED>(x, &gain, &shift)).collect();
    assert_close(&y, &want, tolerance);
}

fn check_gradients<const CENTRED: bool>(rows: usize, n: usize) {
    let c = case::<CENTRED, f64>(rows, n);
    let [_, mean, rstd] = run::<CENTRED, _>(&c.x, &c.gain, &c.shift);
    let (mut dx, mut dgain, mut dshift) = (vec![9.0; rows * n], vec![0.0; n], vec![0.0; c.shift.len()]);
    let saved = Saved { dy: &c.dy, x: &c.x, mean: &mean, rstd: &rstd };
    backward::<CENTRED, _>(saved, &c.gain, (&mut dx, Update::Overwrite), [&mut dgain, &mut dshift]);
    let loss = |x: &[f64], gain: &[f64], shift: &[f64]| dot(&run::<CENTRED, _>(x, gain, shift)[0], &c.dy);
    // With one element y is nearly its sign, and with two and a mean a step function of their difference:
    // differences are meaningless.
    if n > 1 + usize::from(CENTRED) {
        check_gradient(&c.x, &dx, |x| loss(x, &c.gain, &c.shift));
    }
    check_gradient(&c.gain, &dgain, |gain| loss(&c.x, gain, &c.shift));
    check_gradient(&c.shift, &dshift, |shift| loss(&c.x, &c.gain, shift));
}

/// Each row alone, and parameter gradients in two calls, are bitwise identical to the whole; accumulation in place
/// equals separate addition.
fn check_rows<const CENTRED: bool>(rows: usize, n: usize, cut: f64) {
    let c = case::<CENTRED, f32>(rows, n);
    let [y, mean, rstd] = run::<CENTRED, _>(&c.x, &c.gain, &c.shift);
    // The gradients of the given rows; the gradients of gain and shift are added to the old values.
    let grads = |(dx, update): (&mut [f32], Update), rows: Range<usize>, params: &mut [Vec<f32>; 2]| {
        let all = rows.start * n..rows.end * n;
        let (mean, rstd) = (if CENTRED { &mean[rows.clone()] } else { &[] }, &rstd[rows]);
        let saved = Saved { dy: &c.dy[all.clone()], x: &c.x[all], mean, rstd };
        backward::<CENTRED, _>(saved, &c.gain, (dx, update), params.each_mut().map(|sums| &mut sums[..]));
    };
    let zeros = || [vec![0.0; n], vec![0.0; c.shift.len()]];
    let (mut dx, mut whole) = (vec![9.0; rows * n], [c.gain.clone(), c.shift.clone()]);
    let mut parts = whole.clone();
    grads((&mut dx, Update::Overwrite), 0..rows, &mut whole);
    for i in 0..rows {
        let row = i * c.n..(i + 1) * c.n;
        assert_eq!(run::<CENTRED, _>(&c.x[row.clone()], &c.gain, &c.shift)[0], y[row.clone()]);
        let mut alone = vec![9.0; n];
        grads((&mut alone, Update::Overwrite), i..i + 1, &mut zeros());
        assert_eq!(alone, dx[row]);
    }
    let cut = (cut * rows as f64) as usize;
    grads((&mut vec![9.0; cut * n], Update::Overwrite), 0..cut, &mut parts);
    grads((&mut vec![9.0; (rows - cut) * n], Update::Overwrite), cut..rows, &mut parts);
    assert_eq!(parts, whole);
    let mut sum = c.x.clone();
    grads((&mut sum, Update::Accumulate), 0..rows, &mut zeros());
    assert!((0..rows * n).all(|i| sum[i] == c.x[i] + dx[i]));
}

#[test]
fn a_rounded_result_is_the_full_one_rounded() {
    for (rows, n) in [(0, 3), (1, 1), (21, 70), (9, 511), (8, 512), (3, 513), (17, 1300)] {
        check_rounded::<true>(rows, n);
        check_rounded::<false>(rows, n);
    }
}

proptest! {
    #[test]
    fn layer_norm_matches_the_equation(rows in 0..6_usize, n in 1..2100_usize, shift in -100.0..100_f32) {
        // A row of one element has variance 0, where rounding of the mean is magnified by 1/sqrt(eps).
        check_equation::<true>(rows, n, |x| x + shift, if n < 3 { 1e-2 } else { 1e-4 });
    }

    #[test]
    fn rms_norm_matches_the_equation(rows in 0..6_usize, n in 1..2100_usize, scale in 0.01..100_f32) {
        check_equation::<false>(rows, n, |x| x * scale, 2e-6);
    }

    #[test]
    fn gradients_match_finite_differences(rows in 1..4_usize, n in 1..40_usize) {
        check_gradients::<true>(rows, n.max(2));
        check_gradients::<false>(rows, n);
    }

    #[test]
    fn bits_do_not_depend_on_the_other_rows(rows in 1..12_usize, n in 1..1100_usize, cut in 0.0..1.0) {
        check_rows::<true>(rows, n, cut);
        check_rows::<false>(rows, n, cut);
    }
}
