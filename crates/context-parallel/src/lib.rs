#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod all_to_all;
mod balance;
mod choice;
mod context;
mod heads;
mod hybrid;
mod method;
mod pass;
mod ring;

pub use all_to_all::AllToAll;
pub use balance::{Balance, ByDocument};
pub use choice::{Sent, Sizes};
pub use context::ContextParallel;
pub use heads::parts_of_heads;
pub use hybrid::Hybrid;
pub use method::{Method, MethodError};
pub use ring::Ring;
