#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod classify;
pub mod config;
pub mod data;
pub mod diff;
pub mod engine;
mod generate;
mod launch;
mod load;
pub mod metrics;
pub mod partition;
pub mod plan;
pub mod profile;
pub mod progress;
mod step;

pub use data::Data;
pub use engine::TrainError;
pub use generate::generate;
pub use launch::{Outcome, train};
pub use load::load;
pub use step::{StepReport, Trainer};
