//! Element types of buffers.

pub use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// The element type of a [`Buffer`](crate::Buffer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit IEEE float.
    F32,
    /// 64-bit IEEE float.
    F64,
    /// bfloat16: 8 bits of exponent, 7 of mantissa.
    Bf16,
    /// 16-bit IEEE float.
    F16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned byte.
    U8,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::U8 => 1,
            DType::Bf16 | DType::F16 => 2,
            DType::F32 | DType::I32 => 4,
            DType::F64 | DType::I64 => 8,
        }
    }

    /// Whether it is a float of 16 bits.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::Bf16 | DType::F16)
    }

    /// The type in which operations on elements of this type compute: f32 for floats of 16 bits.
    pub const fn widened(self) -> DType {
        if self.is_half() { DType::F32 } else { self }
    }

    /// Whether gradients can flow through values of this type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::Bf16 | DType::F16)
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
        })
    }
}

/// A Rust type that can be the element of a [`Buffer`](crate::Buffer).
pub trait Element: bytemuck::Pod + Send + Sync + std::fmt::Debug + PartialEq {
    /// The matching [`DType`].
    const DTYPE: DType;
}

macro_rules! elements {
    ($($t:ty => $d:ident),*) => { $(impl Element for $t { const DTYPE: DType = DType::$d; })* };
}
elements!(f32 => F32, f64 => F64, bf16 => Bf16, f16 => F16, i32 => I32, i64 => I64, u8 => U8);
