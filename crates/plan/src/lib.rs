#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod cluster;
mod cores;
mod count;
mod disturbance;
mod error;
pub mod fit;
pub mod goodput;
mod layout;
pub mod measure;
pub mod memory;
mod plan;
mod predict;
pub mod race;
pub mod search;
mod system;
pub mod table;

pub use cluster::{Card, Cluster, Cores};
pub use count::{Collective, Counter, Counts, Passes, Work};
pub use error::PlanError;
pub use predict::{Job, Prediction};
pub use system::{Constants, Held, Memory, System};
