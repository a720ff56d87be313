//! The precision of products.

use meshwork_core::DType;

/// The precision in which products of `f32` are computed; products of `f64` are always in `f64`. Sums are computed and
/// stored in `f32` either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Operands are not rounded.
    #[default]
    F32,
    /// Operands rounded by [`tf32`], to 11 bits in the range of `f32`: the format of tensor cores for operands of 32
    /// bits. A CPU gains no speed by it; it computes what a GPU computes, to be compared with it. The product of two
    /// such numbers is exact in `f32`, so the bits do not depend on the instructions of the CPU. Operands are stored in
    /// `f32`, in full.
    Tf32,
    /// Operands rounded to the nearest `bf16` (ties to even, subnormals to zero): twice as fast where the CPU
    /// multiplies pairs of them (`avx512bf16`). Elsewhere the rounded operands are multiplied in `f32`, with the same
    /// bits on x86-64 unless a partial sum is subnormal, which `avx512bf16` treats as zero.
    Bf16,
}

impl Precision {
    /// All, those with the most bits first.
    pub const ALL: [Self; 3] = [Self::F32, Self::Tf32, Self::Bf16];

    /// The type in which a value of type `dtype` that only products read may be stored: the type to which products
    /// round it, if it is smaller.
    pub fn operand_dtype(self, dtype: DType) -> DType {
        if matches!((self, dtype), (Precision::Bf16, DType::F32)) { DType::Bf16 } else { dtype }
    }
}

/// The nearest number of TF32, which has the sign, the exponent and the upper 10 bits of the fraction of an `f32`; ties
/// go away from zero, as with `cvt.rna.tf32.f32`. Subnormal numbers are rounded too, to multiples of 2^-136. Numbers
/// from 2^128 (1 - 2^-12) on become infinity, infinity stays, and a NaN becomes a quiet one with its sign and upper
/// bits.
///
/// ```
/// use meshwork_tensor::kernel::tf32;
/// assert_eq!(tf32(1.0 + 2_f32.powi(-11)), 1.0 + 2_f32.powi(-10));
/// assert_eq!(tf32(-1.0 - 2_f32.powi(-12)), -1.0);
/// assert_eq!(tf32(f32::MAX), f32::INFINITY);
/// ```
#[inline(always)]
pub fn tf32(x: f32) -> f32 {
    let bits = x.to_bits();
    // Without branches, so that the compiler makes few vector instructions of it.
    let half = if x.is_finite() { 0x1000 } else { 0 };
    let quiet = if x.is_nan() { 0x0040_0000 } else { 0 };
    f32::from_bits(bits.wrapping_add(half) & 0xffff_e000 | quiet)
}
