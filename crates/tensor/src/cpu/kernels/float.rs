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

    /// `self · factor + term`, rounded once on every CPU; one instruction where [`wide`](meshwork_core::simd::wide) has any.
    fn mul_add(self, factor: Self, term: Self) -> Self;

    /// `e` to this power. NaN stays NaN. In `f32` branch-free and within 1.02 ulp (see `exp_f32`), in `f64` std's.
    fn exp(self) -> Self;

    /// The natural logarithm of a positive number that is not subnormal. Infinity and NaN stay. In `f32` branch-free and
    /// within 1 ulp (see `ln_f32`), in `f64` std's.
    fn ln(self) -> Self;

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
    fn mul_add(self, factor: f32, term: f32) -> f32 {
        f32::mul_add(self, factor, term)
    }

    #[inline(always)]
    fn exp(self) -> f32 {
        exp_f32(self)
    }

    #[inline(always)]
    fn ln(self) -> f32 {
        ln_f32(self)
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
    fn mul_add(self, factor: f64, term: f64) -> f64 {
        f64::mul_add(self, factor, term)
    }

    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }

    #[inline(always)]
    fn ln(self) -> f64 {
        f64::ln(self)
    }
}

/// `e^x` without branches or calls, so that loops over it vectorise. Its fused operations round once everywhere, so its bits
/// are the same on every machine; a CPU that has none (on x86-64, older than 2013) takes a slow function for each.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, `1 + r + r² p(r)` for `e^r` (`p` of degree 4 and minimax in the relative
/// error, 3.2e-9), times `2^n`. Within 1.02 ulp, for all that matters to exponentials of differences to a maximum: where
/// `n = 128`, from 88.38 on, the result is infinity, the largest numbers left out; where `n = -127`, from -87.68 down, it is
/// zero, most subnormals left out.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    /// 1.5 * 2^23 + 127: added to a small number it leaves the nearest integer, with the bias of an exponent, in the low bits of
    /// the mantissa.
    const ROUND: f32 = 12_583_039.0;
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

/// `ln x` without branches or calls, for `x` positive and not subnormal; its bits are the same on every machine.
///
/// `x = 2^n (1 + f)` with `1 + f` from `√½` to `√2`, `f - f²/2 + f³ p(f)` for `ln(1 + f)` (`p` of degree 8, that of Cephes'
/// `logf`), plus `n ln 2` in two parts.
#[inline(always)]
fn ln_f32(x: f32) -> f32 {
    /// The bits of `√½`.
    const HALF_ROOT: u32 = 0x3f35_04f3;
    /// ln 2 in two parts.
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;

    let above = x.to_bits().wrapping_sub(HALF_ROOT);
    let n = ((above as i32) >> 23) as f32;
    let f = f32::from_bits((above & 0x007f_ffff) + HALF_ROOT) - 1.0;
    let mut p = 7.037_683_6e-2_f32;
    for c in [
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ] {
        p = p.mul_add(f, c);
    }
    let square = f * f;
    let low = n.mul_add(LN2_LOW, p * (f * square));
    let ln = n.mul_add(LN2_HIGH, square.mul_add(-0.5, low) + f);
    if x < f32::INFINITY { ln } else { x }
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

    /// One value in 997; one in 7, tried once, gave 1.012 ulp at worst.
    #[test]
    fn exp_is_as_close_as_stated() {
        let sampled = (0..=f32::INFINITY.to_bits()).step_by(997).map(f32::from_bits);
        let in_range = sampled.flat_map(|x| [x, -x]).filter(|x| *x < 88.376 && *x > -87.68);
        let worst = in_range.map(ulps).fold(0.0, f64::max);
        assert!(worst <= 1.02, "{worst} ulp");
    }

    /// One value in 997 of all positive ones that are not subnormal.
    #[test]
    fn ln_is_as_close_as_stated() {
        let sampled = (f32::MIN_POSITIVE.to_bits()..f32::INFINITY.to_bits()).step_by(997).map(f32::from_bits);
        let error = |x: f32| {
            let exact = f64::from(x).ln();
            let ulp = 2_f64.powi((exact.abs().log2().floor() as i32).max(-126) - 23);
            (f64::from(ln_f32(x)) - exact).abs() / ulp
        };
        let worst = sampled.filter(|x| *x != 1.0).map(error).fold(0.0, f64::max);
        assert!(worst <= 1.0, "{worst} ulp");
        assert_eq!(ln_f32(1.0), 0.0);
        assert_eq!(ln_f32(f32::INFINITY), f32::INFINITY);
        assert!(ln_f32(f32::NAN).is_nan());
    }

    #[test]
    fn exp_handles_the_ends_of_its_range() {
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(-0.0), 1.0);
        for x in [88.377, 89.0, 100.0, f32::MAX, f32::INFINITY] {
            assert_eq!(exp_f32(x), f32::INFINITY, "{x}");
        }
        for x in [-87.69, -104.0, -1e4, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(exp_f32(x), 0.0, "{x}");
        }
        assert!(exp_f32(f32::NAN).is_nan());
    }
}
