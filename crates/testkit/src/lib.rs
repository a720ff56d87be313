//! For tests: worlds of rank threads, fault injection, repeatable randomness, parity and gradient checks, and a device whose memory
//! the host cannot read.
//!
//! That device needs `meshwork-tensor`, so it comes with the feature `device`: the tests of crates below `tensor` do without.

#![forbid(unsafe_code)]

pub mod faults;
pub mod gradcheck;
#[cfg(feature = "device")]
pub mod opaque;
pub mod parity;
mod rng;
mod world;

pub use rng::Rng;
pub use world::{run_world, try_run_world};
