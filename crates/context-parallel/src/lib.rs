#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod all_to_all;
mod balance;
mod context;
mod method;

pub use all_to_all::AllToAll;
pub use balance::{Balance, ByDocument};
pub use context::ContextParallel;
pub use method::{Method, MethodError};
