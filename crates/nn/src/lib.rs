//! Un-sharded layers: parts of a model, and the oracle of every parity test.
//!
//! A layer declares its parameters once, into [`Declarations`](meshwork_tensor::Declarations), and holds their ids;
//! `forward` reads them on a tape. Its parameters are whole on every rank of whatever mesh it runs on, so that it fits
//! between parallel layers (a layer norm) or runs alone on a mesh with no axes.

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

pub use attention::{GroupedSelfAttention, SelfAttention};
pub use averages::Averages;
pub use channel_norm::{BatchNorm2d, GroupNorm};
pub use conv::Conv2d;
pub use embedding::{Embedding, Positions};
pub use linear::Linear;
pub use mlp::{Mlp, SwiGlu};
pub use norm::{LayerNorm, RmsNorm};
