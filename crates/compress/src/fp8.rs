//! Floats of 8 bits (OCP 8-bit floating point specification, 2023), branch-free.

/// A format. Codes are a sign, an exponent and a mantissa; exponent 0 encodes the subnormal numbers.
pub trait Fp8 {
    /// Mantissa bits.
    const MANTISSA: u32;
    /// The number that is added to an exponent.
    const BIAS: u32;
    /// The code of the largest number.
    const LAST: u8;
    /// The largest number, 1.75 times a power of two.
    const MAX: f32;
    /// The smallest number above zero.
    const SMALLEST: f32 = power(1 - (Self::BIAS + Self::MANTISSA) as i32);

    /// The smallest power of two, at least 2^-126, by which a number divided is in range; NaN for values that are not
    /// finite. `bits` are the bits of the number, without a sign.
    #[inline(always)]
    fn scale(bits: u32) -> f32 {
        if bits >= f32::INFINITY.to_bits() {
            return f32::NAN;
        }
        let largest = Self::MAX.to_bits();
        // Exponents and mantissas are compared separately: one more if the mantissa is above the mantissa of the
        // largest number.
        let more = i32::from(bits & 0x7f_ffff > largest & 0x7f_ffff);
        power(((bits >> 23) as i32 - (largest >> 23) as i32 + more).max(-126))
    }

    /// The code nearest to a number in range, ties to even.
    #[inline(always)]
    fn encode(x: f32) -> u8 {
        let (sign, bits) = ((x.to_bits() >> 24) as u8 & 0x80, x.to_bits() & 0x7fff_ffff);
        let shift = 23 - Self::MANTISSA;
        let rounded = bits + (1 << (shift - 1)) - 1 + (bits >> shift & 1);
        let normal = (rounded >> shift).wrapping_sub((127 - Self::BIAS) << Self::MANTISSA);
        // Adding a number whose last bit is the smallest of this format rounds to multiples of it.
        let magic = Self::SMALLEST * 8_388_608.0;
        let small = (f32::from_bits(bits) + magic).to_bits().wrapping_sub(magic.to_bits());
        let is_small = bits < (128 - Self::BIAS) << 23;
        sign | (if is_small { small } else { normal }) as u8
    }

    /// The number of a code. Codes above the last one are never written, and are NaN.
    #[inline(always)]
    fn decode(code: u8) -> f32 {
        let magnitude = u32::from(code & 0x7f);
        let normal = f32::from_bits((magnitude << (23 - Self::MANTISSA)) + ((127 - Self::BIAS) << 23));
        let small = magnitude as f32 * Self::SMALLEST;
        let x = if magnitude < 1 << Self::MANTISSA { small } else { normal };
        let x = if magnitude > u32::from(Self::LAST) { f32::NAN } else { x };
        f32::from_bits(x.to_bits() | u32::from(code & 0x80) << 24)
    }
}

/// 2^exponent, for exponents of normal numbers.
const fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

pub struct E4M3;

impl Fp8 for E4M3 {
    const MANTISSA: u32 = 3;
    const BIAS: u32 = 7;
    const LAST: u8 = 0x7e;
    const MAX: f32 = 448.0;
}

pub struct E5M2;

impl Fp8 for E5M2 {
    const MANTISSA: u32 = 2;
    const BIAS: u32 = 15;
    const LAST: u8 = 0x7b;
    const MAX: f32 = 57344.0;
}
