#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod adafactor;
mod adam8bit;
mod adamw;
mod clip;
mod lamb;
mod muon;
mod optimizer;
mod rule;
mod schedule;
mod sgd;
mod shape;
mod whole;

pub use adafactor::Adafactor;
pub use adam8bit::{Adam8bit, Code};
pub use adamw::{AdamW, AdamWFactors};
pub use clip::clip_factor;
pub use lamb::{Lamb, LambFactors};
pub use muon::Muon;
pub use optimizer::{OptimError, Optimizer, Result, Update};
pub use rule::{OnHost, Rule};
pub use schedule::{Decay, LrSchedule};
pub use sgd::Sgd;
pub use shape::{Kept, Over, ParamShape, Pass, SetPart, State};
pub use whole::{PassTotals, Run, Transform, WholeOptimizer};
