//! Configuration, data, the training step and the training loop.
#![forbid(unsafe_code)]

pub mod config;
pub mod data;
pub mod engine;
mod load;
pub mod metrics;
pub mod progress;
mod step;

pub use data::Data;
pub use engine::TrainError;
pub use load::load;
pub use step::{StepReport, Trainer};
