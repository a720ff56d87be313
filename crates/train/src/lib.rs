#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod best;
pub mod checkpoint;
pub mod config;
pub mod data;
mod devices;
mod error;
pub mod generate;
mod launch;
mod load;
mod machine;
pub mod metrics;
pub mod numbers;
pub mod peers;
pub mod plan;
pub mod plan_memory;
mod predict;
pub mod processes;
pub mod profile;
pub mod progress;
pub mod replay;
mod rewards;
mod routes;
mod start_weights;
mod stop;
mod tensorboard;
pub mod terminal;

pub use best::Best;
pub use data::Data;
pub use devices::{Devices, RankDevice};
pub use error::{OutputError, RankError};
pub use generate::{generate, next_token_logits};
pub use launch::{Outcome, train, train_in};
pub use load::load;
pub use machine::memory_left;
pub use start_weights::StartWeights;
pub use tensorboard::TensorBoard;

pub use meshwork_core::{RunError, World};
pub use meshwork_engine::{StepReport, TrainError, Trainer};
