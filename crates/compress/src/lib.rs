#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod absmax;
mod aq_sgd;
mod compressor;
mod error;
pub mod feedback;
mod fp8;
mod indices;
mod low_rank;
mod message;
mod methods;
mod planes;
mod reduction;
mod scheme;
mod select;
mod shape;
mod sparse;
pub mod sum;
mod values;
pub mod wire;

pub use aq_sgd::{AqSgd, FileStore, MemoryStore, Store};
pub use compressor::{Compressor, Draws, Fold, Guarantee, SumMethod};
pub use error::{CompressError, MessageError, Result};
pub use feedback::{Feedback, reshard};
pub use indices::Packed;
pub use message::{Message, compress_into, header, restore, restore_tiles, wire_bytes};
pub use methods::{Choice, Fp8Format, Keep, PowerSgd, Rounding, Scales, Sparse, Values};
pub use planes::TILE;
pub use reduction::{Partial, Reduction, Replicated, StateKind, StateSpec};
pub use scheme::Scheme;
pub use shape::{Per, Shape};
pub use sum::sum;
pub use wire::Method;
