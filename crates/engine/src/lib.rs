//! Trains any [model](meshwork_nn::Model) over a device mesh: the step of one rank.
//!
//! ```text
//! model ─┐
//! plan  ─┤            ┌─ stages and their tapes (chunk), activations over pp (transport)
//! rank  ─┼▶ Trainer ──┼─ gradients on their way through buckets (gradients, layout)
//! device ┘            ├─ weights, optimizer state, their versions (weights)
//!                     └─ the step, which needs several axes at once (step)
//! ```
//! A [`Trainer`] is built from a model, a [`Plan`] (mesh, schedule, batch, numerics), a rank and a device. Configuration files,
//! command lines, data, processes and reports are the business of its clients.
//!
//! ```
//! use meshwork_core::Rank;
//! use meshwork_core::comm::thread;
//! use meshwork_engine::{Plan, Trainer};
//! use meshwork_models::gpt2::{Gpt2, Gpt2Config};
//! use meshwork_models::language;
//! use meshwork_tensor::cpu::Cpu;
//! use std::sync::Arc;
//!
//! let model = Arc::new(Gpt2::new(Gpt2Config { hidden_size: 32, ffn_hidden_size: 64, seq_len: 16, ..Gpt2Config::default() }));
//! let plan = Plan { mesh: "dp=2,tp=2,pp=2".parse()?, ..Plan::default() };
//! let losses = thread::run(plan.mesh.world_size(), thread::Options::default(), |world| {
//!     let rank = Arc::new(Rank::new(&plan.mesh, world.communicator().clone())?);
//!     let mut trainer = Trainer::new(model.clone(), &plan, rank, Cpu::device())?;
//!     let tokens: Vec<i32> = trainer.samples().flat_map(|sample| (0..17).map(move |at| (sample + at) as i32)).collect();
//!     let row = |shift: usize| tokens.chunks(17).flat_map(|row| &row[shift..shift + 16]).copied().collect();
//!     let batch = language::batch(row(0), row(1), 16)?;
//!     let first = trainer.step(&batch)?.loss;
//!     trainer.step(&batch)?;
//!     Ok::<_, meshwork_engine::TrainError>((first, trainer.step(&batch)?.loss))
//! })?;
//! assert!(losses.iter().all(|&(first, third)| third < first));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod chunk;
pub mod dry_run;
mod error;
mod gradients;
mod layout;
mod model_plan;
mod pass;
mod plan;
mod state;
mod statistics;
mod step;
mod trace;
mod transport;
mod watch;
mod weights;

pub use error::TrainError;
pub use layout::TIES;
pub use model_plan::{LocalModel, ModelPlan, TiedWeight};
pub use plan::{Numerics, Plan, PlanError, Recompute, ScheduleSpec};
pub use state::{StateKey, StatePiece, StateSource, TrainState, WholeState};
pub use step::{Evaluation, StepReport, Trainer};
pub use watch::{At, Watch};
