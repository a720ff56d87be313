//! Norm-wise comparison of the results of a parallel run and the plain run.
//!
//! The bound is `‖got − reference‖ ≤ 1e-5 · max(‖reference‖, 1e-4 · ‖all‖)`, where `all` is every gradient of the run.
//! Only the order of f32 additions may differ between the two. The comparison is norm-wise, because single elements
//! cancel. It has a floor, because some gradients are zero except for rounding (a key bias has such a gradient).

/// The largest relative difference between two runs that differ in the order of f32 additions.
pub const TOLERANCE: f64 = 1e-5;
/// The part of the norm of all gradients below which one gradient is rounding noise.
pub const FLOOR: f64 = 1e-4;

/// The Euclidean norm, accumulated in f64.
pub fn norm<T: Copy + Into<f64>>(values: &[T]) -> f64 {
    values.iter().map(|&value| value.into() * value.into()).sum::<f64>().sqrt()
}

/// The norm of several slices taken as one vector: `all_norm` of [`assert_close`].
pub fn norm_of_all<'a, T: Copy + Into<f64> + 'a>(parts: impl IntoIterator<Item = &'a [T]>) -> f64 {
    parts.into_iter().map(|part| norm(part).powi(2)).sum::<f64>().sqrt()
}

/// Compares `got` with `reference` under the module's bound. `all_norm` is the norm of all gradients of the run, or 0
/// for a single value.
///
/// ```
/// use meshwork_testkit::parity::assert_close;
/// assert_close("w", &[1.0f32, 2.0], &[1.0, 2.000001], 0.0);
/// ```
///
/// # Panics
/// If the lengths differ, if the difference is above the bound, or if it is not a number.
#[track_caller]
pub fn assert_close<T: Copy + Into<f64>>(name: &str, got: &[T], reference: &[T], all_norm: f64) {
    assert_eq!(got.len(), reference.len(), "{name}: number of elements");
    let differences: Vec<f64> = got.iter().zip(reference).map(|(&a, &b)| a.into() - b.into()).collect();
    let (distance, size) = (norm(&differences), norm(reference));
    let bound = TOLERANCE * size.max(FLOOR * all_norm);
    assert!(
        distance <= bound,
        "{name}: ‖got − reference‖ = {distance:.3e} is above the bound {bound:.3e} \
         (‖got‖ = {:.6e}, ‖reference‖ = {size:.6e}, ‖all‖ = {all_norm:.6e})",
        norm(got),
    );
}
