//! Local operations: each states its algebra, its gradient and, through a rule of `meshwork_core::rules`, its SPMD
//! types. None of them communicates.

mod attention;
mod bias;
mod cast;
mod channel_norm;
mod concat;
mod conv;
mod custom;
mod documents;
mod dropout;
mod elementwise;
mod embedding;
mod gelu;
mod grouped_attention;
mod grouped_linear;
mod images;
mod jitter;
mod linear;
mod linear_cross_entropy;
mod loss;
mod map;
mod norm;
mod pool;
mod relu;
mod reshape;
mod residual;
mod rms_norm;
mod softmax;
mod squared_error;
mod sum;
mod swiglu;
mod whole;

pub use crate::kernel::{Rotary, RotaryScaling};
pub use channel_norm::Moments;
pub use documents::Documents;
pub use grouped_attention::GroupedHeads;
pub use grouped_linear::RowGroups;
pub use loss::VocabLoss;
