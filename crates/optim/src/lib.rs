#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod adamw;
mod clip;
mod optimizer;
mod rule;
mod schedule;
mod sgd;

pub use adamw::AdamW;
pub use clip::clip_factor;
pub use optimizer::{OptimError, Optimizer, Update};
pub use rule::Rule;
pub use schedule::{Decay, LrSchedule};
pub use sgd::Sgd;
