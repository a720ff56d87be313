#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod adapter;
mod attention;
mod cross_attention;
mod latent_attention;
mod linear;
mod mlp;
mod region;
mod vocab;

pub use attention::{AttentionBias, NormOver, ParallelAttention, ParallelGroupedAttention};
pub use cross_attention::ParallelCrossAttention;
pub use latent_attention::{LatentHeads, ParallelLatentAttention};
pub use linear::{ColumnLinear, ReplicatedLinear, RowLinear};
pub use mlp::ParallelMlp;
pub use region::Region;
pub use vocab::VocabParallelEmbedding;
