#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod balance;
mod capacity;
mod config;
pub mod dispatch;
mod experts;
mod layer;
pub mod router;

pub use capacity::capacity;
pub use config::{AuxLossScope, ExpertGroups, MoeConfig, MoeError, Overflow, RouterKind};
pub use experts::{ExpertShape, Experts, GroupedMlp, GroupedSwiGlu};
pub use layer::{Laid, MoeLayer};
pub use router::Router;
