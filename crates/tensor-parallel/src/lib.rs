#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod adapter;
mod attention;
mod linear;
mod mlp;
mod region;
mod vocab;

pub use attention::{AttentionBias, NormOver, ParallelAttention, ParallelGroupedAttention};
pub use linear::{ColumnLinear, RowLinear};
pub use mlp::ParallelMlp;
pub use region::Region;
pub use vocab::VocabParallelEmbedding;
