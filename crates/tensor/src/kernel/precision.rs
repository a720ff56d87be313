//! The precision of products.

use meshwork_core::DType;

/// The precision in which products of `f32` are computed; products of `f64` are always in `f64`. Sums are computed and
/// stored in `f32` either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Operands are not rounded.
    #[default]
    F32,
    /// Operands rounded to the nearest `bf16` (ties to even, subnormals to zero): twice as fast where the CPU
    /// multiplies pairs of them (`avx512bf16`). Elsewhere the rounded operands are multiplied in `f32`, with the same
    /// bits on x86-64 unless a partial sum is subnormal, which `avx512bf16` treats as zero.
    Bf16,
}

impl Precision {
    /// The type in which a value of type `dtype` that only products read may be stored: the type to which products
    /// round it.
    pub fn operand_dtype(self, dtype: DType) -> DType {
        if matches!((self, dtype), (Precision::Bf16, DType::F32)) { DType::Bf16 } else { dtype }
    }
}
