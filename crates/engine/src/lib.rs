#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod agreement;
mod boundary;
mod chunk;
mod clock;
mod codec;
mod compress;
mod decoder;
pub mod dry_run;
mod error;
mod factor_sum;
mod feedback;
mod gathers;
mod gradients;
mod history;
mod layout;
mod lossy_sum;
mod mixed;
mod model_plan;
pub mod offload;
pub mod one_rank;
mod packing;
mod pass;
mod plan;
pub mod program;
mod running;
mod segment;
mod slow_build;
mod state;
mod statistics;
mod step;
mod trace;
mod transport;
mod update;
pub mod verify;
mod watch;
mod weight_messages;
mod weights;
mod zero;

pub use boundary::Boundary;
pub use compress::{Around, Compress, Place, Unfit};
pub use decoder::Decoder;
pub use error::TrainError;
pub use feedback::require_compression;
pub use history::SAMPLES;
pub use layout::TIED;
pub use mixed::{LossScale, MixedPrecision};
pub use model_plan::{LocalModel, ModelPlan, TiedWeight};
pub use plan::{Numerics, Plan, PlanError, Recompute, Samples, ScheduleSpec};
pub use segment::{Segment, SegmentSpec};
pub use slow_build::slow_build_warning;
pub use state::{
    StateKey, StateKind, StatePiece, StateSlice, StateSource, StateView, TrainState, WholeState, state_layout,
};
pub use statistics::ReportedStatistic;
pub use step::{AtCuts, Evaluation, Offloaded, StepReport, Trainer};
pub use update::OPTIMIZER;
pub use verify::Verify;
pub use watch::{At, Watch};
pub use zero::{Vector, ZERO, ZERO_REPLICAS, Zero, ZeroStage};
