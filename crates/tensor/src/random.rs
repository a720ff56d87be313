//! Counter-based randomness: element `i` of a stream depends only on its [`Key`] and `i`.
//!
//! A parameter or a dropout mask is thus the same on every mesh: each rank draws the elements it holds, by their
//! global index, in any order and any number of pieces.
//!
//! The generator and the uniform stream are [`meshwork_core::random`]'s; the normal stream is here. [`uniform`] and
//! [`normal`] use the same words: give each use its own name. Only IEEE additions, products and square roots are used,
//! no libm, so every machine draws the same bits.

use meshwork_core::random::{Distribution, element, fill};
pub use meshwork_core::random::{Key, fill_uniform, key, uniform};
use meshwork_core::simd::wide;
use std::f32::consts::TAU;

/// Element `index` of the standard normal stream, by Box and Muller's transform of the words of its block: words 0
/// and 1 give elements 0 and 1, words 2 and 3 the others. The largest magnitude is 6.77.
pub fn normal(key: Key, index: u64) -> f32 {
    element::<Normal>(key, index)
}

/// `out[i] = normal(key, start + i)`, bit for bit, at a fraction of the cost. Overwrites.
pub fn fill_normal<T: From<f32>>(key: Key, start: u64, out: &mut [T]) {
    wide!(fill::<Normal, T>(key, start, out));
}

/// 2^-24, the step of the angles.
const ULP: f32 = 1.0 / 16_777_216.0;

struct Normal;

impl Distribution for Normal {
    #[inline(always)]
    fn draw<const N: usize>(words: [[u32; N]; 4]) -> [[f32; N]; 4] {
        let mut out = [[0.0; N]; 4];
        for pair in [0, 2] {
            for l in 0..N {
                let (radius, angle) = (words[pair][l], words[pair + 1][l]);
                (out[pair][l], out[pair + 1][l]) = box_muller(radius, angle);
            }
        }
        out
    }
}

/// Two independent standard normal values, each within 1e-6 of the exact transform of `u` and the angle.
#[inline(always)]
fn box_muller(radius: u32, angle: u32) -> (f32, f32) {
    // (radius + 1/2) / 2^32, rounded, in (0, 1]: the smallest, 2^-33, gives the longest radius, 6.764.
    let u = (radius as f32 + 0.5) * (ULP / 256.0);
    let r = (-2.0 * ln(u)).sqrt();
    let (sin, cos) = sin_cos_turn(angle >> 8);
    (r * cos, r * sin)
}

/// `ln x` without branches or calls, for `x` positive and not subnormal, after Cephes `logf` (Moshier): `x = m 2^e`,
/// `m` within √2 of 1. Within 1 ulp. No operation is fused, so that the normal stream has the same bits on every
/// machine at full speed. Infinity and NaN stay.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    const SQRT_HALF: u32 = 0x3f35_04f3;
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let bits = x.to_bits().wrapping_sub(SQRT_HALF);
    let e = (bits as i32 >> 23) as f32;
    let f = f32::from_bits((bits & 0x007f_ffff).wrapping_add(SQRT_HALF)) - 1.0;
    let z = f * f;
    let mut p = 7.037_683_6e-2;
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
        p = p * f + c;
    }
    let ln = (f + (f * z * p + e * LN2_LOW - 0.5 * z)) + e * LN2_HIGH;
    if x < f32::INFINITY { ln } else { x }
}

/// Sine and cosine of `turn / 2^24` turns, `turn < 2^24`: the nearest quarter is taken off exactly, the rest goes
/// through the polynomials of Cephes `sinf` and `cosf`.
#[inline(always)]
fn sin_cos_turn(turn: u32) -> (f32, f32) {
    let quarter = (turn + (1 << 21)) >> 22;
    let rest = turn as i32 - (quarter << 22) as i32;
    let x = rest as f32 * ULP * TAU;
    let z = x * x;
    let s = ((-1.951_529_6e-4 * z + 8.332_161e-3) * z - 1.666_665_5e-1) * z * x + x;
    let c = ((2.443_315_7e-5 * z - 1.388_731_6e-3) * z + 4.166_664_6e-2) * z * z - 0.5 * z + 1.0;
    let (s, c) = if quarter & 1 == 0 { (s, c) } else { (c, s) };
    let flip = |value: f32, sign: u32| f32::from_bits(value.to_bits() ^ ((sign & 2) << 30));
    (flip(s, quarter), flip(c, quarter + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn box_muller_is_within_1e_6_of_f64() {
        let oracle = |radius: u32, angle: u32| {
            let u = f64::from(radius as f32 + 0.5) * 2_f64.powi(-32);
            let r = (-2.0 * u.ln()).sqrt();
            let theta = f64::from(angle >> 8) * 2_f64.powi(-24) * std::f64::consts::TAU;
            (r * theta.cos(), r * theta.sin())
        };
        let corners = [0, 1, 255, 256, u32::MAX / 2, u32::MAX - 256, u32::MAX - 1, u32::MAX];
        let edges = corners.into_iter().flat_map(|r| (0..=64).map(move |a| (r, (a << 26) as u32)));
        let random = meshwork_core::random::blocks::<4096>(key(1, "words"), 0);
        let sampled = random[0].into_iter().zip(random[1]);
        for (radius, angle) in edges.chain(sampled) {
            let (got, want) = (box_muller(radius, angle), oracle(radius, angle));
            let error = (f64::from(got.0) - want.0).abs().max((f64::from(got.1) - want.1).abs());
            assert!(error <= 1e-6, "words {radius} {angle}: {got:?} against {want:?}");
        }
    }
}
