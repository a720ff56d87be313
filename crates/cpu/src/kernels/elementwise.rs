//! Functions of one and of two numbers, element by element, and derivatives of functions of one number.
//!
//! The sigmoid is computed from `e^-|x| <= 1`, so that nothing overflows; it and its derivative σ(x) σ(-x) are within
//! 1.5e-7 in f32. `tanh` has a relative error below 6e-7 in f32 (see [`Float::tanh`]); `silu` is within
//! `2e-7 max(1, |x|)`, and so is the exact GELU. The logarithm is within 1 ulp of normal numbers.

use super::prelude::*;
use meshwork_tensor::kernel::{Map, Zip};

/// `out = f(x)`. Overwrites.
pub fn map<T: Float>(f: Map, x: &[T], out: &mut [T]) {
    match f {
        Map::Scale(factor) => {
            let factor = T::from_f64(factor);
            inlined!(each, (x, out), |x| x * factor);
        }
        Map::Exp => each(x, out, T::exp),
        Map::Tanh => each(x, out, T::tanh),
        Map::Sigmoid => inlined!(each, (x, out), |x| sigmoid(x).0),
        Map::Silu => inlined!(each, (x, out), |x| x * sigmoid(x).0),
        Map::Gelu => inlined!(each, (x, out), |x| x * normal(x)),
        Map::SoftCap(cap) => {
            let cap = T::from_f64(cap);
            inlined!(each, (x, out), |x| cap * (x / cap).tanh());
        }
        Map::Log => inlined!(each, (x, out), |x| log(x)),
        Map::Sqrt => inlined!(each, (x, out), |x| x.sqrt()),
    }
}

/// `dx = dy f'(x)`. Overwrites.
pub fn map_backward<T: Float>(f: Map, x: &[T], dy: &[T], dx: &mut [T]) {
    match f {
        Map::Scale(_) => map(f, dy, dx),
        Map::Exp => inlined!(each_grad, (x, dy, dx), |x| x.exp()),
        Map::Tanh => each_grad(x, dy, dx, tanh_derivative),
        Map::Sigmoid => inlined!(each_grad, (x, dy, dx), |x| {
            let (at, against) = sigmoid(x);
            at * against
        }),
        Map::Silu => inlined!(each_grad, (x, dy, dx), |x| {
            // Beyond ±200, σ(x) σ(-x) is zero and x may be infinite.
            let near = T::from_f64(200.0).smaller(T::from_f64(-200.0).larger(x));
            let (at, against) = sigmoid(x);
            (near * at).mul_add(against, at)
        }),
        Map::Gelu => inlined!(each_grad, (x, dy, dx), |x| {
            // Beyond ±200 the density is zero, and x may be infinite.
            let near = T::from_f64(200.0).smaller(T::from_f64(-200.0).larger(x));
            let density = (near * near * T::from_f64(-0.5)).exp() * T::from_f64(DENSITY);
            near.mul_add(density, normal(x))
        }),
        Map::SoftCap(cap) => {
            let cap = T::from_f64(cap);
            inlined!(each_grad, (x, dy, dx), |x| tanh_derivative(x / cap));
        }
        Map::Log => inlined!(each_grad, (x, dy, dx), |x| T::ONE / x),
        Map::Sqrt => inlined!(each_grad, (x, dy, dx), |x| T::from_f64(0.5) / x.sqrt()),
    }
}

/// `out[o, e, i] = f(x[o, e, i], y[o, i])`, where `[extent, inner]` are the last two dims of x. Overwrites.
pub fn zip<T: Float>(f: Zip, x: &[T], y: &[T], [extent, inner]: [usize; 2], out: &mut [T]) {
    let [zero, one] = [T::ZERO, T::ONE];
    let dims = [extent, inner];
    match f {
        Zip::Add => inlined!(beside, (x, y, dims, out), |x, y| x + y),
        Zip::Sub => inlined!(beside, (x, y, dims, out), |x, y| x - y),
        Zip::Mul => inlined!(beside, (x, y, dims, out), |x, y| x * y),
        Zip::Div => inlined!(beside, (x, y, dims, out), |x, y| x / y),
        Zip::Keep => inlined!(beside, (x, y, dims, out), |x, y| if y == zero { zero } else { x }),
        Zip::Drop => inlined!(beside, (x, y, dims, out), |x, y| if y == zero { x } else { zero }),
        Zip::Second => inlined!(beside, (x, y, dims, out), |_, y| y),
        Zip::Greater => inlined!(beside, (x, y, dims, out), |x, y| if x > y { one } else { zero }),
    }
}

/// ln x, also of numbers that are subnormal; -∞ of 0, NaN below it.
#[inline(always)]
fn log<T: Float>(x: T) -> T {
    const SCALE: f64 = 16_777_216.0; // 2^24
    const LN_SCALE: f64 = 16.635_532_333_438_686;
    let small = x < T::from_f64(f64::from(f32::MIN_POSITIVE));
    let (scaled, less) = if small { (x * T::from_f64(SCALE), T::from_f64(LN_SCALE)) } else { (x, T::ZERO) };
    let ln = scaled.ln() - less;
    let outside = if x == T::ZERO { T::NEG_INFINITY } else { T::from_f64(f64::NAN) };
    if x > T::ZERO { ln } else { outside }
}

/// σ(x) and σ(-x) = 1 - σ(x), both computed from `e^-|x| <= 1`, so that nothing overflows or cancels.
#[inline(always)]
pub(super) fn sigmoid<T: Float>(x: T) -> (T, T) {
    let (near, far) = (x.abs() * T::from_f64(std::f64::consts::LOG2_E)).logistic_base_2();
    if x > T::ZERO { (near, far) } else { (far, near) }
}

/// `1/√(2π)`, the density of a normal distribution at its mean.
const DENSITY: f64 = 0.398_942_280_401_432_7;

/// Φ(x), the share of a normal distribution below x.
#[inline(always)]
fn normal<T: Float>(x: T) -> T {
    let tail = x.abs().normal_tail();
    if x > T::ZERO { T::ONE - tail } else { tail }
}

/// `1 - tanh² x = 4 σ(2x) σ(-2x)`, without the cancellation.
#[inline(always)]
fn tanh_derivative<T: Float>(x: T) -> T {
    let (at, against) = sigmoid(x + x);
    T::from_f64(4.0) * at * against
}

#[inline(always)]
fn each<T: Float>(x: &[T], out: &mut [T], f: impl Fn(T) -> T) {
    assert_eq!(x.len(), out.len(), "elements of x against out");
    wide!(for (out, &x) in out.iter_mut().zip(x) {
        *out = f(x);
    });
}

/// One y beside the elements of x over which it is repeated.
#[inline(always)]
fn beside<T: Float>(x: &[T], y: &[T], [extent, inner]: [usize; 2], out: &mut [T], f: impl Fn(T, T) -> T) {
    assert_eq!([x.len(), y.len() * extent], [out.len(); 2], "elements of x and of y, repeated, against out");
    assert!(inner > 0 && y.len().is_multiple_of(inner) || y.is_empty(), "{} elements are no rows of {inner}", y.len());
    let (inner, slab) = (inner.max(1), (extent * inner).max(1));
    wide!(for ((out, x), y) in out.chunks_exact_mut(slab).zip(x.chunks_exact(slab)).zip(y.chunks_exact(inner)) {
        match y {
            &[y] => {
                for (out, &x) in out.iter_mut().zip(x) {
                    *out = f(x, y);
                }
            }
            _ => {
                for (out, x) in out.chunks_exact_mut(inner).zip(x.chunks_exact(inner)) {
                    for ((out, &x), &y) in out.iter_mut().zip(x).zip(y) {
                        *out = f(x, y);
                    }
                }
            }
        }
    });
}

#[inline(always)]
fn each_grad<T: Float>(x: &[T], dy: &[T], dx: &mut [T], derivative: impl Fn(T) -> T) {
    assert_eq!([x.len(), dy.len()], [dx.len(); 2], "elements of x, dy against dx");
    wide!(for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
        *dx = dy * derivative(x);
    });
}
