//! GELU in its tanh form, without and with a fused bias (Hendrycks and Gimpel, arXiv:1606.08415).
//!
//! `gelu(x) = x/2 (1 + tanh u)` with `u = √(2/π) (x + 0.044715 x³)`. Since `(1 + tanh u)/2 = 1/(1 + e^(-2u))`, one
//! exponential and one division are enough, with no cancellation in the tails. In f32 the value is within `1.5e-7
//! max(1, |x|)` of the exact tanh form and the derivative within 3e-7.

use super::pointwise::assert_rows;
use super::prelude::*;

/// `out = gelu(x)`. Overwrites.
pub fn gelu<T: Float>(x: &[T], out: &mut [T]) {
    assert_eq!(x.len(), out.len(), "elements of x against out");
    wide!(for (out, &x) in out.iter_mut().zip(x) {
        *out = value(x);
    });
}

/// `dx = dy gelu'(x)`. Overwrites.
pub fn gelu_backward<T: Float>(x: &[T], dy: &[T], dx: &mut [T]) {
    assert_eq!([x.len(), dy.len()], [dx.len(); 2], "elements of x, dy against dx");
    wide!(for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
        *dx = dy * derivative(x);
    });
}

/// `out[i, j] = gelu(x[i, j] + bias[j])`. Overwrites.
pub fn bias_gelu<T: Float>(x: &[T], bias: &[T], out: Stored<'_, T>) {
    assert_eq!(x.len(), out.len(), "elements of x against out");
    assert_rows(x.len(), bias.len());
    let n = bias.len().max(1);
    wide!(for (x, out) in x.chunks_exact(n).zip(out.chunks(n)) {
        out.fill(
            #[inline(always)]
            |at, out| {
                for ((out, &x), &b) in out.iter_mut().zip(&x[at..]).zip(&bias[at..]) {
                    *out = value(x + b);
                }
            },
        );
    });
}

/// `dx[i, j] = dy[i, j] gelu'(x[i, j] + bias[j])`, in place of dy, and `dbias[j] += Σ_i dx[i, j]`, the rows one after
/// another.
pub fn bias_gelu_backward<T: Float>(x: &[T], bias: &[T], dy: &mut [T], dbias: &mut [T]) {
    assert_eq!(x.len(), dy.len(), "elements of x against dy");
    assert_eq!(bias.len(), dbias.len(), "elements of bias against dbias");
    assert_rows(dy.len(), bias.len());
    let n = bias.len().max(1);
    wide!(for (dy, x) in dy.chunks_exact_mut(n).zip(x.chunks_exact(n)) {
        for (((dy, &x), &b), dbias) in dy.iter_mut().zip(x).zip(bias).zip(dbias.iter_mut()) {
            *dy *= derivative(x + b);
            *dbias += *dy;
        }
    });
}

/// √(2/π) and the coefficient of the cube.
const SLOPE: f64 = 0.797_884_560_802_865_4;
const CUBE: f64 = 0.044_715;

#[inline(always)]
fn value<T: Float>(x: T) -> T {
    x * gate(x).0
}

/// `σ + x σ' `, with `σ(x) = 1/(1 + e^(-2u))` and `σ' = σ (1 - σ) 2 du/dx`.
#[inline(always)]
fn derivative<T: Float>(x: T) -> T {
    let x = clamp(x);
    let (sigma, slope) = gate(x);
    let two_du = T::from_f64(6.0 * SLOPE * CUBE).mul_add(x * x, T::from_f64(2.0 * SLOPE));
    (x * slope).mul_add(two_du, sigma)
}

/// `σ` and `σ (1 - σ)`. Both are computed from `e^(-2|u|) <= 1`, so that nothing overflows or cancels.
#[inline(always)]
fn gate<T: Float>(x: T) -> (T, T) {
    // 2u in units of ln 2.
    const BITS: f64 = 2.0 * SLOPE * std::f64::consts::LOG2_E;
    let two_u = x * T::from_f64(BITS * CUBE).mul_add(x * x, T::from_f64(BITS));
    let (near, far) = two_u.abs().logistic_base_2();
    (if x > T::ZERO { near } else { far }, far * near)
}

/// `x` clamped to ±30, where `σ` is already 0 or 1, to avoid `σ'`, which is zero there, times infinity. NaN stays NaN.
#[inline(always)]
fn clamp<T: Float>(x: T) -> T {
    T::from_f64(30.0).smaller(T::from_f64(-30.0).larger(x))
}
