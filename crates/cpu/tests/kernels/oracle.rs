//! Helpers for the tests of all kernels: data, tolerances, and gradients by finite differences.

use half::bf16;
use meshwork_cpu::kernels::Float;
use meshwork_cpu::kernels::round::round;
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::tf32;
use meshwork_tensor::random::{fill_normal, key};

/// Standard normal values, the same for the same name; a prefix of a longer draw.
pub(crate) fn values<T: Float>(name: &str, len: usize) -> Vec<T> {
    let mut out = vec![T::ZERO; len];
    fill_normal(key(0, name), 0, &mut out);
    out
}

/// The same numbers in f64.
pub(crate) fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| v.to_f64()).collect()
}

/// The nearest number of 16 bits.
pub(crate) fn rounded(x: f32) -> f32 {
    let mut to = [bf16::ZERO];
    round(&[x], &mut to);
    to[0].to_f32()
}

/// How products in a precision round an operand.
pub(crate) fn rounding(precision: Precision) -> fn(f32) -> f32 {
    match precision {
        Precision::F32 => |x| x,
        Precision::Tf32 => tf32,
        Precision::Bf16 => rounded,
    }
}

/// Checks that every `|got - want|` is at most `tolerance * max(1, |want|)`, and names the first that is not.
#[track_caller]
pub(crate) fn assert_close<T: Float>(got: &[T], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got.to_f64() - want).abs();
        let bound = tolerance * want.abs().max(1.0);
        assert!(error <= bound, "element {i}: {got:?} against {want}, off by {error:e}");
    }
}

/// `sum_i x[i] y[i]`, the scalar whose gradient with respect to `x` is `y`.
pub(crate) fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(a, b)| a * b).sum()
}

/// Compares `gradient` with central differences of `f` at `x`, element by element, to 1e-7 relative.
#[track_caller]
pub(crate) fn check_gradient(x: &[f64], gradient: &[f64], f: impl Fn(&[f64]) -> f64) {
    const STEP: f64 = 1e-5;
    assert_eq!(x.len(), gradient.len());
    let mut at = x.to_vec();
    let differences: Vec<f64> = (0..x.len())
        .map(|i| {
            at[i] = x[i] + STEP;
            let above = f(&at);
            at[i] = x[i] - STEP;
            let below = f(&at);
            at[i] = x[i];
            (above - below) / (2.0 * STEP)
        })
        .collect();
    assert_close(gradient, &differences, 1e-7);
}
