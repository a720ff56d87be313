//! The element types in which kernels compute, and their elementary functions.

use super::traits::{Narrow, Product};
use meshwork_tensor::random::ln;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

/// An element type in which kernels compute: `f32` or `f64`.
pub trait Float:
    Copy
    + Debug
    + PartialOrd
    + From<f32>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + MulAssign
    + Product
    + Narrow
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Minus infinity, the maximum of an empty row.
    const NEG_INFINITY: Self;

    /// Rounds to the nearest value.
    fn from_f64(value: f64) -> Self;

    /// Exact.
    fn to_f64(self) -> f64;

    /// The square root, correctly rounded.
    fn sqrt(self) -> Self;

    /// The magnitude.
    fn abs(self) -> Self;

    /// `self · factor + term`, rounded once on every CPU; a single instruction where
    /// [`wide`](meshwork_core::simd::wide()) has fused multiply-adds.
    fn mul_add(self, factor: Self, term: Self) -> Self;

    /// `e` to this power. NaN stays NaN. In `f32` branch-free and within 1.02 ulp (see `exp_f32`), in `f64` std's.
    fn exp(self) -> Self;

    /// The natural logarithm of a positive number that is not subnormal. Infinity and NaN stay. In `f32` branch-free
    /// and within 1 ulp (see [`ln`]), in `f64` std's.
    fn ln(self) -> Self;

    /// The hyperbolic tangent. NaN stays NaN. In `f32` branch-free and within a relative error of 6e-7 (see
    /// `tanh_f32`), in `f64` std's.
    fn tanh(self) -> Self;

    /// `1/(1 + 2^-t)` and `1/(1 + 2^t)` for a `t` of at least 0; they add up to 1. NaN stays NaN. In `f32`
    /// branch-free and within 1.3e-7 (see `logistic_f32`).
    fn logistic_base_2(self) -> (Self, Self);

    /// The share of a normal distribution below `-t`, `erfc(t/√2)/2`, for a `t` of at least 0. NaN stays NaN. In `f32`
    /// branch-free and within 1.5e-7 (see `normal_tail_f32`), in `f64` that of libm.
    fn normal_tail(self) -> Self;

    /// The larger of two numbers; if either is NaN, `other`.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    /// The smaller of two numbers; if either is NaN, `other`.
    #[inline(always)]
    fn smaller(self, other: Self) -> Self {
        if self < other { self } else { other }
    }
}

/// The constants and functions that are std's; `$own` are not.
macro_rules! float {
    ($t:ident: $($own:item)*) => {
        impl Float for $t {
            const ZERO: $t = 0.0;
            const ONE: $t = 1.0;
            const NEG_INFINITY: $t = $t::NEG_INFINITY;

            #[inline(always)]
            fn from_f64(value: f64) -> $t {
                value as $t
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                self.into()
            }

            #[inline(always)]
            fn sqrt(self) -> $t {
                $t::sqrt(self)
            }

            #[inline(always)]
            fn abs(self) -> $t {
                $t::abs(self)
            }

            #[inline(always)]
            fn mul_add(self, factor: $t, term: $t) -> $t {
                $t::mul_add(self, factor, term)
            }

            $(#[inline(always)]
            $own)*
        }
    };
}

float! { f32:
    fn exp(self) -> f32 {
        exp_f32(self)
    }

    fn ln(self) -> f32 {
        ln(self)
    }

    fn tanh(self) -> f32 {
        tanh_f32(self)
    }

    fn logistic_base_2(self) -> (f32, f32) {
        logistic_f32(self)
    }

    fn normal_tail(self) -> f32 {
        normal_tail_f32(self)
    }
}

float! { f64:
    fn exp(self) -> f64 {
        f64::exp(self)
    }

    fn ln(self) -> f64 {
        f64::ln(self)
    }

    fn tanh(self) -> f64 {
        f64::tanh(self)
    }

    fn logistic_base_2(self) -> (f64, f64) {
        let e = f64::exp2(-self);
        let near = 1.0 / (1.0 + e);
        (near, e * near)
    }

    fn normal_tail(self) -> f64 {
        libm::erfc(self * std::f64::consts::FRAC_1_SQRT_2) / 2.0
    }
}

/// 1.5 * 2^23 + 127: added to a small number it leaves the nearest integer, with the bias of an exponent, in the low
/// bits of the mantissa.
const ROUND: f32 = 12_583_039.0;

/// `e^x` without branches or calls, so that loops over it vectorise. Its fused operations round once on every machine,
/// so its bits are the same everywhere; a CPU without them (on x86-64, older than 2013) calls a slow function for each.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, `1 + r + r² p(r)` for `e^r` (`p` of degree 4 and minimax in the relative
/// error, 3.2e-9), times `2^n`. Within 1.02 ulp, in the range that matters for exponentials of differences to a
/// maximum. If `n = 128`, from 88.38 on, the result is infinity, without the largest numbers; if `n = -127`, from
/// -87.68 down, it is zero, without most subnormals.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    /// ln 2 in two parts.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;

    // Ordered so that NaN passes.
    let x = Float::smaller(89.0, Float::larger(-88.0, x));
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, x));
    let mut p = 1.383_881_2e-3_f32;
    for c in [8.369_192e-3, 4.166_810_2e-2, 1.666_651_7e-1, 0.499_999_94] {
        p = p.mul_add(r, c);
    }
    let exp_r = p.mul_add(r * r, r) + 1.0;
    exp_r * f32::from_bits(shifted.to_bits() << 23)
}

/// `1/(1 + e)` and `e/(1 + e)` for `e = 2^-t`, without branches or calls, as in [`exp_f32`], but with two thirds of the
/// operations of a computation through it.
///
/// `e = 2^n p(f)` with an integer `n`, `f = -t - n`, `|f| <= 1/2`, and `p` of degree 5 and minimax in the relative
/// error, 7.5e-8; zero from 126.5 on.
#[inline(always)]
fn logistic_f32(t: f32) -> (f32, f32) {
    // Ordered so that NaN passes; 2^-127 becomes zero below.
    let x = Float::larger(-127.0, -t);
    let shifted = x + ROUND;
    let f = x - (shifted - ROUND);
    let mut p = 1.327_647_2e-3_f32;
    for c in [9.675_541e-3, 5.550_713e-2, 0.240_221_2, 0.693_146_94, 1.000_000_1] {
        p = p.mul_add(f, c);
    }
    let e = p * f32::from_bits(shifted.to_bits() << 23);
    let near = 1.0 / (1.0 + e);
    (near, e * near)
}

/// `tanh x` without branches or calls: `σ(2|x|) - σ(-2|x|)` from [`logistic_f32`], which cancels near zero, where the
/// first terms of the series are used instead. The error is below 6e-7 of the result.
#[inline(always)]
fn tanh_f32(x: f32) -> f32 {
    let size = x.abs();
    let (near, far) = logistic_f32(size * (2.0 * std::f32::consts::LOG2_E));
    let z = x * x;
    let mut p = 3.592_128e-3_f32;
    for c in [-8.863_235e-3, 2.186_949e-2, -5.396_825_4e-2, 1.333_333_3e-1, -3.333_333_4e-1, 1.0] {
        p = p.mul_add(z, c);
    }
    let tanh = if size < 0.5 { size * p } else { near - far };
    tanh.copysign(x)
}

/// `erfc(t/√2)/2` without branches or calls, as in [`exp_f32`]: a polynomial of `1/(1 + p t/√2)` times `e^(-t²/2)`
/// (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26, whose error is below 0.75e-7 here).
#[inline(always)]
fn normal_tail_f32(t: f32) -> f32 {
    let z = t * std::f32::consts::FRAC_1_SQRT_2;
    let of = 1.0 / z.mul_add(0.327_591_1, 1.0);
    let mut p = 1.061_405_4_f32;
    for c in [-1.453_152, 1.421_413_7, -0.284_496_72, 0.254_829_6] {
        p = p.mul_add(of, c);
    }
    p * of * exp_f32(-z * z) * 0.5
}
