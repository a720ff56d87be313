#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod attention;
mod averages;
mod channel_norm;
mod conv;
mod embedding;
mod linear;
mod mlp;
mod norm;

pub use attention::SelfAttention;
pub use averages::Averages;
pub use channel_norm::{BatchNorm2d, GroupNorm};
pub use conv::Conv2d;
pub use embedding::{Embedding, Positions};
pub use linear::Linear;
pub use mlp::Mlp;
pub use norm::LayerNorm;
