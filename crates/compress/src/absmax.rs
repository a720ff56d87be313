//! Codes of numbers that are divided by the largest magnitude of their part: 8 bits in even steps, and the 16 numbers
//! of NormalFloat (Dettmers et al., 2023). The largest one is restored exactly, so that compressing restored values
//! again changes none of them.

use crate::Scales;
use crate::wire::float_at;
use meshwork_core::simd::wide;

/// The numbers of the 16 codes of NF4: quantiles of a normal distribution, scaled to [-1, 1], with an exact zero
/// (Dettmers et al., 2023, arXiv:2305.14314, appendix E).
#[expect(clippy::excessive_precision, reason = "the digits of the paper")]
pub const NF4: [f32; 16] = [
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
];

/// The code of zero among them.
const ZERO: u8 = 7;

/// The largest code of 8 bits.
const LARGEST: f32 = 127.0;

/// Numbers of this size have no fraction: adding this one rounds to the nearest integer, ties to even, whose two's
/// complement is then in the low bits.
const INTEGERS: f32 = 12_582_912.0; // 1.5 · 2^23

/// The middle between a number of NF4 and the next one.
const fn middle(code: usize) -> f32 {
    0.5 * (NF4[code] + NF4[code + 1])
}

/// The nearest code of 8 bits of each number.
pub fn int8(x: &[f32], scale: f32, codes: &mut [u8]) {
    wide!({
        for (code, x) in codes.iter_mut().zip(x) {
            *code = (x / scale * LARGEST + INTEGERS).to_bits() as u8;
        }
    });
    if has_no_range(scale) {
        codes.fill(0);
    }
}

/// The numbers of such codes.
pub fn from_int8(codes: &[u8], scale: f32, out: &mut [f32]) {
    wide!(out.iter_mut().zip(codes).for_each(|(x, &code)| *x = f32::from(code.cast_signed()) / LARGEST * scale));
}

/// The nearest code of NF4 of each number: of two that are equally near the lower one.
pub fn nf4(x: &[f32], scale: f32, codes: &mut [u8]) {
    wide!({
        for (code, x) in codes.iter_mut().zip(x) {
            let x = x / scale;
            *code = (0..15).map(|below| u8::from(x > middle(below))).sum();
        }
    });
    if has_no_range(scale) {
        codes.fill(ZERO);
    }
}

/// The numbers of such codes.
pub fn from_nf4(codes: &[u8], scale: f32, out: &mut [f32]) {
    wide!(out.iter_mut().zip(codes).for_each(|(x, &code)| *x = NF4[usize::from(code & 15)] * scale));
}

/// The difference of the exponent of a scale of 8 bits and that of an f32, behind its three bits of mantissa.
const REBIASED: i32 = (127 - 20) << 3;

impl Scales {
    /// Bytes of a scale.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Scales::F32 => 4,
            Scales::E5M3 => 1,
        }
    }

    /// The scale with this number.
    pub(crate) fn at(self, scales: &[u8], at: usize) -> f32 {
        match self {
            Scales::F32 => float_at(scales, at),
            Scales::E5M3 => match scales[at] {
                0 => 0.0,
                255 => f32::NAN,
                code => f32::from_bits(((i32::from(code) + REBIASED) as u32) << 20),
            },
        }
    }

    /// Writes a scale, rounded to nearest, ties to even, and gives what was written.
    pub(crate) fn put(self, scale: f32, to: &mut [u8]) -> f32 {
        match self {
            Scales::F32 => to.copy_from_slice(&scale.to_le_bytes()),
            Scales::E5M3 if scale.is_nan() => to[0] = 255,
            Scales::E5M3 => {
                let bits = scale.to_bits();
                let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
                to[0] = (rounded as i32 - REBIASED).clamp(0, 254) as u8;
            }
        }
        self.at(to, 0)
    }
}

/// Whether all numbers of a part are zero, or one is not finite.
fn has_no_range(scale: f32) -> bool {
    scale.is_nan() || scale <= 0.0
}
