//! SwiGLU against its definition in f64.

use super::oracle::{check_gradient, dot, values};
use half::bf16;
use meshwork_cpu::kernels::Float;
use meshwork_cpu::kernels::round::{Stored, round};
use meshwork_cpu::kernels::swiglu::*;
use proptest::prelude::*;

fn full<T: Float>(x: &[T]) -> Vec<T> {
    let mut out = vec![T::from(f32::NAN); x.len() / 2];
    swiglu(x, Stored::Full(&mut out));
    out
}

/// `x σ(x)`.
fn silu(x: f32) -> f32 {
    let mut out = [f32::NAN];
    swiglu(&[x, 1.0], Stored::Full(&mut out));
    out[0]
}

#[test]
fn f32_errors_are_within_the_stated_bounds() {
    let (mut worst, mut worst_slope) = (0_f64, 0_f64);
    for x in (-2_000_000..=2_000_000).map(|i| i as f32 * 1e-5) {
        let wide = f64::from(x);
        let sigma = 1.0 / (1.0 + (-wide).exp());
        worst = worst.max((f64::from(silu(x)) - wide * sigma).abs() / wide.abs().max(1.0));
        let mut pair = [x, 1.0];
        swiglu_backward(&[1.0], &mut pair);
        let slope = sigma + wide * sigma * (1.0 - sigma);
        worst_slope = worst_slope.max((f64::from(pair[0]) - slope).abs());
    }
    assert!(worst <= 1.5e-7 && worst_slope <= 3e-7, "{worst} {worst_slope}");
}

#[test]
fn far_tails_are_exact_and_nan_stays() {
    for x in [100.0_f32, 1e4, 1e20, 1e38] {
        assert_eq!(full(&[x, 1.0, -x, 1.0]), [x, 0.0]);
        let mut pairs = [x, 1.0, -x, 1.0];
        swiglu_backward(&[1.0, 1.0], &mut pairs);
        assert_eq!(pairs, [1.0, x, 0.0, 0.0]);
    }
    let mut pair = [f32::NAN, 1.0];
    assert!(full(&pair)[0].is_nan());
    swiglu_backward(&[1.0], &mut pair);
    assert!(pair[0].is_nan() && pair[1].is_nan());
}

#[test]
fn rounded_results_are_the_full_ones_rounded() {
    for len in [0, 1, 70, 511, 512, 513, 1300] {
        let x: Vec<f32> = values("x", 2 * len);
        let (mut got, mut want) = (vec![bf16::ONE; len], vec![bf16::ZERO; len]);
        swiglu(&x, Stored::Bf16(&mut got));
        round(&full(&x), &mut want);
        assert!(got == want, "{len}");
    }
}

proptest! {
    #[test]
    fn gradients_match_finite_differences(len in 1..40_usize) {
        let (x, dy): (Vec<f64>, Vec<f64>) = (values("x", 2 * len), values("dy", len));
        let mut dx = x.clone();
        swiglu_backward(&dy, &mut dx);
        check_gradient(&x, &dx, |x| dot(&full(x), &dy));
    }

    /// Whole vectors and the remainder are bitwise identical to each element computed alone.
    #[test]
    fn every_path_gives_the_bits_of_one_element(len in 0..70_usize) {
        let (x, dy): (Vec<f32>, Vec<f32>) = (values("x", 2 * len), values("dy", len));
        let (y, mut dx) = (full(&x), x.clone());
        swiglu_backward(&dy, &mut dx);
        for i in 0..len {
            let mut pair = [x[2 * i], x[2 * i + 1]];
            prop_assert_eq!(y[i], silu(pair[0]) * pair[1]);
            swiglu_backward(&dy[i..=i], &mut pair);
            prop_assert_eq!(&dx[2 * i..2 * i + 2], &pair[..]);
        }
    }
}
