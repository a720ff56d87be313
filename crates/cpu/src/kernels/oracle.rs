//! Helpers for the tests of all kernels: data, tolerances, and gradients by finite differences.

use super::prelude::*;
use meshwork_tensor::random::{fill_normal, key};

/// Standard normal values, the same for the same name; a prefix of a longer draw.
pub(super) fn values<T: Float>(name: &str, len: usize) -> Vec<T> {
    let mut out = vec![T::ZERO; len];
    fill_normal(key(0, name), 0, &mut out);
    out
}

/// The same numbers in f64.
pub(super) fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|v| v.to_f64()).collect()
}

/// Checks that every `|got - want|` is at most `tolerance * max(1, |want|)`, and names the first that is not.
#[track_caller]
pub(super) fn assert_close<T: Float>(got: &[T], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got.to_f64() - want).abs();
        let bound = tolerance * want.abs().max(1.0);
        assert!(error <= bound, "element {i}: {got:?} against {want}, off by {error:e}");
    }
}

/// `sum_i x[i] y[i]`, the scalar whose gradient with respect to `x` is `y`.
pub(super) fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(a, b)| a * b).sum()
}

/// Compares `gradient` with central differences of `f` at `x`, element by element, to 1e-7 relative.
#[track_caller]
pub(super) fn check_gradient(x: &[f64], gradient: &[f64], f: impl Fn(&[f64]) -> f64) {
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
