#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[cfg(feature = "device")]
pub mod check;
pub mod comm;
pub mod faults;
pub mod gradcheck;
#[cfg(feature = "device")]
pub mod halves;
#[cfg(feature = "device")]
pub mod opaque;
pub mod parity;
mod rng;
mod sampled;
pub mod throttled;
mod world;

pub use rng::Rng;
pub use sampled::{Sampled, sweeps};
pub use world::{run_world, try_run_world};
