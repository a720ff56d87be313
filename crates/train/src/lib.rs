//! Configuration, data, the training step and the training loop of language models; and [`classify`], that of image classifiers.
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
