//! Functions of one and of two numbers, element by element, and derivatives of functions of one number.
//!
//! The sigmoid is computed from `e^-|x| <= 1`, so that nothing overflows; it and its derivative σ(x) σ(-x) are within
//! 1.5e-7 in f32. `tanh` has a relative error below 6e-7 in f32 (see [`Float::tanh`]); `silu` is within
//! `2e-7 max(1, |x|)`, and so is the exact GELU.

use super::pointwise::for_rows;
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
    }
}

/// `out[i, j] = f(x[i, j], y[j])` over rows as long as `y`. Overwrites.
pub fn zip<T: Float>(f: Zip, x: &[T], y: &[T], out: &mut [T]) {
    match f {
        Zip::Sub => inlined!(for_rows, (y, [x, x], out), |y, [x, _]| x - y),
        Zip::Mul => inlined!(for_rows, (y, [x, x], out), |y, [x, _]| x * y),
        Zip::Div => inlined!(for_rows, (y, [x, x], out), |y, [x, _]| x / y),
    }
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

#[inline(always)]
fn each_grad<T: Float>(x: &[T], dy: &[T], dx: &mut [T], derivative: impl Fn(T) -> T) {
    assert_eq!([x.len(), dy.len()], [dx.len(); 2], "elements of x, dy against dx");
    wide!(for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
        *dx = dy * derivative(x);
    });
}

#[cfg(test)]
mod tests {
    use super::super::oracle::{assert_close, check_gradient, dot, values, widen};
    use super::*;

    type Definition = fn(f64) -> f64;

    const MAPS: [(Map, Definition); 7] = [
        (Map::Scale(-2.5), |x| -2.5 * x),
        (Map::Exp, f64::exp),
        (Map::Tanh, f64::tanh),
        (Map::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
        (Map::Silu, |x| x / (1.0 + (-x).exp())),
        (Map::Gelu, |x| x / 2.0 * libm::erfc(-x / 2.0_f64.sqrt())),
        (Map::SoftCap(0.75), |x| 0.75 * (x / 0.75).tanh()),
    ];

    #[test]
    fn each_function_is_its_definition() {
        let mut x: Vec<f32> = values("x", 1003);
        x.extend([0.0, -0.0, 1e-6, -1e-3, 0.24, 0.26, 9.0, -30.0]);
        for (f, definition) in MAPS {
            let want: Vec<f64> = widen(&x).into_iter().map(definition).collect();
            let mut out = vec![9.0; x.len()];
            map(f, &x, &mut out);
            assert_close(&out, &want, 1e-6);
            let (x, mut out) = (widen(&x), vec![9.0; x.len()]);
            map(f, &x, &mut out);
            assert_close(&out, &want, 1e-15);
        }
    }

    #[test]
    fn derivatives_are_those_of_the_functions() {
        let (x, dy): (Vec<f64>, Vec<f64>) = (values("x", 40), values("dy", 40));
        for (f, _) in MAPS {
            let mut dx = vec![9.0; 40];
            map_backward(f, &x, &dy, &mut dx);
            check_gradient(&x, &dx, |x| {
                let mut y = vec![0.0; 40];
                map(f, x, &mut y);
                dot(&y, &dy)
            });
            let single = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
            let mut dx32 = vec![9.0; 40];
            map_backward(f, &single(&x), &single(&dy), &mut dx32);
            assert_close(&dx32, &dx, 2e-6);
        }
    }

    #[test]
    fn the_ends_of_the_range() {
        let x = [f32::NEG_INFINITY, -1e30, 1e30, f32::INFINITY];
        let ends = |f: Map| {
            let (mut y, mut dx) = ([9.0; 4], [9.0; 4]);
            map(f, &x, &mut y);
            map_backward(f, &x, &[1.0; 4], &mut dx);
            [y, dx]
        };
        assert_eq!(ends(Map::Tanh), [[-1.0, -1.0, 1.0, 1.0], [0.0; 4]]);
        assert_eq!(ends(Map::Sigmoid), [[0.0, 0.0, 1.0, 1.0], [0.0; 4]]);
        assert_eq!(ends(Map::SoftCap(30.0)), [[-30.0, -30.0, 30.0, 30.0], [0.0; 4]]);
        for f in [Map::Silu, Map::Gelu] {
            assert_eq!(ends(f)[1], [0.0, 0.0, 1.0, 1.0]);
        }
        for (f, _) in MAPS {
            let mut y = [0.0];
            map(f, &[f32::NAN], &mut y);
            assert!(y[0].is_nan(), "{f:?}");
        }
    }

    #[test]
    fn two_numbers_at_a_time_over_rows() {
        let (x, y): (Vec<f32>, Vec<f32>) = (values("x", 60), values("y", 12));
        for (f, definition) in
            [(Zip::Sub, (|x, y| x - y) as fn(f32, f32) -> f32), (Zip::Mul, |x, y| x * y), (Zip::Div, |x, y| x / y)]
        {
            for n in [12, 60] {
                let y: Vec<f32> = y.iter().cycle().take(n).copied().collect();
                let mut out = vec![9.0; 60];
                zip(f, &x, &y, &mut out);
                assert!((0..60).all(|i| out[i] == definition(x[i], y[i % 12])), "{f:?} {n}");
            }
        }
    }
}
