//! The tensors of a checkpoint, by name: plain data.

use serde::{Deserialize, Serialize};

/// A whole tensor, independent of the mesh that holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// Its global name, unique in the checkpoint.
    pub name: String,
    /// Its kind.
    pub kind: TensorKind,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its extents, outermost first; none for a single number.
    pub dims: Vec<u64>,
}

impl Tensor {
    /// The numbers of elements and of bytes; `None` if they exceed the size of a file.
    pub fn size(&self) -> Option<(u64, u64)> {
        let elements = self.dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim))?;
        Some((elements, elements.checked_mul(self.dtype.size())?))
    }
}

/// The kind of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    /// A weight.
    Weight,
    /// An optimizer state of a weight.
    OptimizerState,
    /// Neither trained nor optimizer state, such as a running mean.
    Buffer,
    /// A counter of the run.
    Counter,
    /// The error of lossy compression. A run can continue without it.
    Feedback,
}

impl TensorKind {
    /// The kind as text.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Weight => "weight",
            Self::OptimizerState => "optimizer state",
            Self::Buffer => "buffer",
            Self::Counter => "counter",
            Self::Feedback => "feedback",
        }
    }
}

/// The type of an element, little-endian. The names are as in safetensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[expect(missing_docs, reason = "the names say it")]
pub enum Dtype {
    F64,
    I64,
    U64,
    F32,
    I32,
    U32,
    F16,
    Bf16,
    U8,
}

impl Dtype {
    /// Bytes of an element.
    pub const fn size(self) -> u64 {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }

    /// Its name in safetensors.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::U64 => "U64",
            Self::F32 => "F32",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::U8 => "U8",
        }
    }
}
