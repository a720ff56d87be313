//! The approximation by tanh against its definition in f64.

use super::oracle::{check_gradient, dot, values};
use half::bf16;
use meshwork_cpu::kernels::Float;
use meshwork_cpu::kernels::gelu::*;
use meshwork_cpu::kernels::pointwise::bias_backward;
use meshwork_cpu::kernels::round::{Stored, round};
use proptest::prelude::*;

/// `√(2/π)` and the factor of the cube.
const SLOPE: f64 = 0.797_884_560_802_865_4;
const CUBE: f64 = 0.044_715;

fn value<T: Float>(x: T) -> T {
    let mut y = [T::ZERO];
    gelu(&[x], &mut y);
    y[0]
}

fn derivative<T: Float>(x: T) -> T {
    let mut dx = [T::ZERO];
    gelu_backward(&[x], &[T::ONE], &mut dx);
    dx[0]
}

/// The definition, in f64 with std's tanh, and its derivative.
fn oracle(x: f64) -> (f64, f64) {
    let tanh = (SLOPE * (x + CUBE * x.powi(3))).tanh();
    let du = SLOPE * (1.0 + 3.0 * CUBE * x * x);
    (0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * du)
}

#[test]
fn f32_errors_are_within_the_stated_bounds() {
    let (mut worst, mut worst_slope) = (0_f64, 0_f64);
    for x in (-1_200_000..=1_200_000).map(|i| i as f32 * 1e-5) {
        let want = oracle(f64::from(x));
        let unit = f64::from(x.abs()).max(1.0);
        worst = worst.max((f64::from(value(x)) - want.0).abs() / unit);
        worst_slope = worst_slope.max((f64::from(derivative(x)) - want.1).abs());
    }
    assert!(worst <= 1.5e-7 && worst_slope <= 3e-7, "{worst} {worst_slope}");
}

#[test]
fn far_tails_are_exact_and_nan_stays() {
    for x in [20.0, 1e4, 1e20, 1e38] {
        assert_eq!((value(x), derivative(x)), (x, 1.0_f32));
        assert_eq!((value(-x), derivative(-x)), (0.0, 0.0_f32));
        assert_eq!((value(f64::from(x)), derivative(f64::from(x))), (f64::from(x), 1.0));
    }
    assert!(value(f32::NAN).is_nan() && derivative(f32::NAN).is_nan());
}

#[test]
fn rounded_results_are_the_full_ones_rounded() {
    for (rows, n) in [(0, 3), (1, 1), (5, 70), (3, 511), (2, 512), (3, 513), (2, 1300)] {
        let len = rows * n;
        let (x, b): (Vec<f32>, Vec<f32>) = (values("x", len), values("b", n));
        let (mut full, mut got, mut want) = (vec![9.0; len], vec![bf16::ONE; len], vec![bf16::ZERO; len]);
        bias_gelu(&x, &b, Stored::Full(&mut full));
        bias_gelu(&x, &b, Stored::Bf16(&mut got));
        round(&full, &mut want);
        assert!(got == want, "{rows} rows of {n}");
    }
}

proptest! {
    #[test]
    fn gradients_match_finite_differences(rows in 1..4_usize, n in 1..20_usize) {
        let (x, b): (Vec<f64>, Vec<f64>) = (values("x", rows * n), values("b", n));
        let dy: Vec<f64> = values("dy", rows * n);
        let mut dx = vec![9.0; rows * n];
        let apply = |f: &dyn Fn(&mut [f64])| {
            let mut y = vec![9.0; rows * n];
            f(&mut y);
            dot(&y, &dy)
        };
        gelu_backward(&x, &dy, &mut dx);
        check_gradient(&x, &dx, |x| apply(&|y| gelu(x, y)));
        let mut db = vec![0.0; n];
        dx.copy_from_slice(&dy);
        bias_gelu_backward(&x, &b, &mut dx, &mut db);
        check_gradient(&x, &dx, |x| apply(&|y| bias_gelu(x, &b, Stored::Full(y))));
        check_gradient(&b, &db, |b| apply(&|y| bias_gelu(&x, b, Stored::Full(y))));
    }

    /// Vector body, remainder and fused forms are bitwise identical to each element computed alone.
    #[test]
    fn every_path_gives_the_bits_of_one_element(rows in 0..5_usize, n in 0..70_usize) {
        let len = rows * n;
        let (x, b, dy): (Vec<f32>, Vec<f32>, Vec<f32>) = (values("x", len), values("b", n), values("dy", len));
        let mut out = vec![9.0; len];
        gelu(&x, &mut out);
        prop_assert!((0..len).all(|i| out[i] == value(x[i])));
        gelu_backward(&x, &dy, &mut out);
        prop_assert!((0..len).all(|i| out[i] == dy[i] * derivative(x[i])));
        bias_gelu(&x, &b, Stored::Full(&mut out));
        prop_assert!((0..len).all(|i| out[i] == value(x[i] + b[i % n])));
        let (mut db, mut sum) = (b.clone(), b.clone());
        out.copy_from_slice(&dy);
        bias_gelu_backward(&x, &b, &mut out, &mut db);
        prop_assert!((0..len).all(|i| out[i] == dy[i] * derivative(x[i] + b[i % n])));
        bias_backward(&out, &mut sum);
        prop_assert_eq!(db, sum);
    }
}
