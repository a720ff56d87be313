#![doc = include_str!("../README.md")]
//!
//! # Where things are
//!
//! - [`Tensor`]: contiguous, row-major memory on a [`Device`]: [`meta`] here, others in crates of their own.
//! - [`Tape`] and [`Var`]: operations on values that know, per mesh axis, whether they are replicated, sharded or
//!   partially summed. [`op`] has the local operations, [`collective`] the only ones that change an SPMD type.
//! - [`param`]: parameters with placements, from which initialisation and gradient synchronisation follow.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod accounts;
pub mod collective;
pub mod device;
mod error;
pub mod kernel;
mod launches;
pub mod memory;
pub mod meta;
pub mod op;
pub mod orthogonal;
pub mod param;
pub mod pinned;
pub mod profiled;
mod proxy;
pub mod random;
mod shape;
pub mod tape;
mod tensor;
pub mod verify;
mod widened;

pub use device::{Device, Download, Kernels, Meter, Transfers, Upload, Work};
pub use error::{Error, Result};
pub use kernel::Precision;
pub use launches::Launches;
pub use memory::{Category, MemoryUse};
pub use param::{Declarations, Init, ParamId, ParamSpec, Params, Placement, Role};
pub use proxy::Proxy;
pub use shape::{MAX_DIMS, Shape, unravel};
pub use tape::{Tape, Var};
pub use tensor::Tensor;
pub use widened::Widened;
