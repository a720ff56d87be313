//! Gradients against finite differences, in f64, or of functions that compute in f32.

/// Step of the central difference: a power of two near the cube root of the unit round-off, where truncation and
/// rounding weigh about the same.
pub const STEP: f64 = 1.0 / 131_072.0;

/// Largest difference between a right gradient and its central difference, in units of `max(1, |f|)`.
///
/// Truncation is `STEP²/6 · |f'''| ≈ 1e-11 · |f'''|`. Rounding is `δ/STEP` for an error `δ` of `f`, and a sum of some
/// hundred terms of order one is right to `δ ≈ 100 · 2⁻⁵³ ≈ 1e-14`: about 1e-9. A wrong gradient is off by the size of
/// one term.
pub const TOLERANCE: f64 = 1e-8;

/// [`STEP`] for a function that computes in f32.
pub const STEP_F32: f64 = 1.0 / 512.0;

/// [`TOLERANCE`] for a function that computes in f32. Truncation is `6e-7 · |f'''|`. What an element does not change is
/// rounded alike above and below; a few terms of order one that it does change are right to `δ ≈ 4 · 2⁻²⁴`, which is
/// about 1e-4.
pub const TOLERANCE_F32: f64 = 2e-3;

/// `(f(x + step·e_i) - f(x - step·e_i)) / (2·step)` for every element `i`, with [`STEP`] or [`STEP_F32`].
///
/// On the ranks of a world, where `f` communicates, every rank calls this with the same `x`, and they stay in step.
pub fn central_difference(x: &[f64], step: f64, f: &mut dyn FnMut(&[f64]) -> f64) -> Vec<f64> {
    let mut moved = x.to_vec();
    let mut gradient = Vec::with_capacity(x.len());
    for i in 0..x.len() {
        moved[i] = x[i] + step;
        let above = f(&moved);
        moved[i] = x[i] - step;
        let below = f(&moved);
        moved[i] = x[i];
        gradient.push((above - below) / (2.0 * step));
    }
    gradient
}

/// Compares `gradient` with the central differences of `f` at `x`.
///
/// ```
/// meshwork_testkit::gradcheck::assert_gradient("x³", &[2.0], &[12.0], |x| x[0].powi(3));
/// ```
///
/// # Panics
/// If an element differs by more than [`TOLERANCE`], or is not a number.
#[track_caller]
pub fn assert_gradient(name: &str, x: &[f64], gradient: &[f64], mut f: impl FnMut(&[f64]) -> f64) {
    compare(name, x, gradient, &mut f);
}

#[track_caller]
fn compare(name: &str, x: &[f64], gradient: &[f64], f: &mut dyn FnMut(&[f64]) -> f64) {
    assert_eq!(gradient.len(), x.len(), "{name}: elements of the gradient");
    let bound = TOLERANCE * f(x).abs().max(1.0);
    for (i, (&got, want)) in gradient.iter().zip(central_difference(x, STEP, f)).enumerate() {
        assert!(
            (got - want).abs() <= bound,
            "{name}: element {i} of the gradient is {got}, by finite differences {want} ± {bound:.1e}"
        );
    }
}
