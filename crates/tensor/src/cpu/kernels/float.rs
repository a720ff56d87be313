//! The element types kernels compute in, and the exponential they share.

use super::matmul::Product;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub};

/// An element type kernels compute in: `f32` or `f64`.
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
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Minus infinity, the maximum of nothing.
    const NEG_INFINITY: Self;

    /// Rounds to the nearest.
    fn from_f64(value: f64) -> Self;

    /// Exact.
    fn to_f64(self) -> f64;

    /// The square root, correctly rounded.
    fn sqrt(self) -> Self;

    /// The magnitude.
    fn abs(self) -> Self;

    /// `e` to this power. NaN stays NaN. In `f32` branch-free and within 1 ulp (see `exp_f32`), in `f64` std's.
    fn exp(self) -> Self;

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

impl Float for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(value: f64) -> f32 {
        value as f32
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }

    #[inline(always)]
    fn abs(self) -> f32 {
        f32::abs(self)
    }

    #[inline(always)]
    fn exp(self) -> f32 {
        exp_f32(self)
    }
}

impl Float for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(value: f64) -> f64 {
        value
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }

    #[inline(always)]
    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }

    #[inline(always)]
    fn abs(self) -> f64 {
        f64::abs(self)
    }

    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }
}

/// `e^x` without branches, calls or fused operations, so that loops over it vectorise on any x86-64 and its bits are
/// the same on every machine.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, `1 + r + r² p(r)` for `e^r` (`p` of degree 4 and minimax in the relative
/// error, 3.2e-9), and two multiplications by powers of two, so that results overflow to infinity and underflow
/// through the subnormals to zero as they should. Within 1 ulp everywhere.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    /// 1.5 * 2^23: added to a small number it leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts, the first so short that `n` times it is exact.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// 2^-25, which brings the results of negative `x` down to where they belong.
    const SMALL: f32 = 1.0 / 33_554_432.0;

    // Outside, the result is 0 or infinity. Ordered so that NaN passes.
    let x = Float::smaller(89.0, Float::larger(-104.0, x));
    // 2^n = 2^(n + 25) 2^-25 or 2^(n - 2) 4, of which the first factor is a normal number for every n: its exponent
    // with its bias, 127, comes out of the rounding.
    let (round, unit) = if x > 0.0 { (ROUND + 125.0, 4.0) } else { (ROUND + 152.0, SMALL) };
    let shifted = x * std::f32::consts::LOG2_E + round;
    let n = shifted - round;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.383_881_2e-3;
    for c in [8.369_192e-3, 4.166_810_2e-2, 1.666_651_7e-1, 0.499_999_94] {
        p = p * r + c;
    }
    let exp_r = (p * (r * r) + r) + 1.0;
    exp_r * f32::from_bits(shifted.to_bits() << 23) * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error of `exp_f32(x)` in units of the last place of the exact result.
    fn ulps(x: f32) -> f64 {
        let exact = f64::from(x).exp();
        let ulp = 2_f64.powi((exact.log2().floor() as i32).max(-126) - 23);
        (f64::from(exp_f32(x)) - exact).abs() / ulp
    }

    /// One value in 997; one in 7, tried once, gave 0.989 ulp at worst.
    #[test]
    fn exp_is_within_1_ulp() {
        let sampled = (0..=f32::INFINITY.to_bits()).step_by(997).map(f32::from_bits);
        let in_range = sampled.flat_map(|x| [x, -x]).filter(|x| *x < 88.722_83 && *x > -104.0);
        let worst = in_range.map(ulps).fold(0.0, f64::max);
        assert!(worst <= 1.0, "{worst} ulp");
    }

    #[test]
    fn exp_handles_the_ends_of_its_range() {
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(-0.0), 1.0);
        for x in [88.722_85, 89.0, 100.0, f32::MAX, f32::INFINITY] {
            assert_eq!(exp_f32(x), f32::INFINITY, "{x}");
        }
        for x in [-104.0, -1e4, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(exp_f32(x), 0.0, "{x}");
        }
        assert!(exp_f32(88.722_8).is_finite());
        assert_eq!(exp_f32(-103.0).to_bits(), 1, "the smallest subnormal");
        assert!(exp_f32(f32::NAN).is_nan());
    }
}
