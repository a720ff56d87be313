#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod adapted;
mod attention;
mod batch;
mod channel_norm;
mod conv;
mod embedding;
mod joined;
mod linear;
mod mlp;
pub mod model;
mod norm;
mod preference;

pub use adapted::Adapted;
pub use attention::{GroupedSelfAttention, SelfAttention};
pub use batch::{Batch, BatchSource, Field, Reads, SAMPLE, sample_types};
pub use channel_norm::{BatchNorm2d, GroupNorm};
pub use conv::Conv2d;
pub use embedding::{Embedding, Positions};
pub use joined::Joined;
pub use linear::Linear;
pub use mlp::Mlp;
pub use model::{Activation, Metric, Model, Per, Stage, StageSpec};
pub use norm::{LayerNorm, RmsNorm};
pub use preference::{Preferring, REFERENCE};
