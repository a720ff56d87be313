#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod agreement;
mod boundary;
mod chunk;
mod clock;
mod compress;
mod decoder;
pub mod dry_run;
mod error;
mod fit;
mod gathers;
mod gradients;
mod layout;
mod message;
mod mixed;
mod model_plan;
pub mod offload;
pub mod one_rank;
mod pass;
mod plan;
mod plan_error;
pub mod program;
mod reduction;
mod running;
mod segment;
mod slow_build;
mod state;
mod state_vector;
mod statistics;
mod step;
mod trace;
mod transport;
mod update;
pub mod verify;
mod walk;
mod watch;
mod weights;
mod zero;

/// Items that most files use.
mod prelude {
    pub(crate) use crate::{ModelPlan, Plan, PlanError, Result, TrainError};
    pub(crate) use meshwork_core::{Axis, Buffer, DType, Group, Mesh, Rank, ReduceOp, Ty, Types};
    pub(crate) use meshwork_nn::{Batch, Model};
    pub(crate) use meshwork_pipeline::{Direction, Schedule};
    pub(crate) use meshwork_tensor::{Category, Device, Error, ParamId, ParamSpec, Params, Tensor, Var};
    pub(crate) use std::cell::{Cell, RefCell};
    pub(crate) use std::collections::BTreeMap;
    pub(crate) use std::ops::Range;
    pub(crate) use std::rc::Rc;
    pub(crate) use std::sync::Arc;
}

pub use boundary::Boundary;
pub use compress::crossing::require_compression;
pub use compress::fit::{Around, Unfit};
pub use compress::history::SAMPLES;
pub use compress::settings::{Compress, Setting};
pub use decoder::Decoder;
pub use error::{Result, TrainError};
pub use mixed::{LossScale, MixedPrecision};
pub use model_plan::{LocalModel, ModelPlan, TIED, TiedWeight};
pub use plan::{Numerics, Plan, Recompute, Samples, ScheduleSpec};
pub use plan_error::PlanError;
pub use segment::{Segment, SegmentSpec};
pub use slow_build::slow_build_warning;
pub use state::{
    GRADIENT, StatePiece, StateSlice, StateSource, StateView, TrainState, WholeState, gradient_layout, state_layout,
};
pub use state_vector::{StateKey, StateKind};
pub use statistics::ReportedStatistic;
pub use step::{AtCuts, Evaluation, HeldVector, Offloaded, Outputs, RankTime, StepReport, Trainer};
pub use update::OPTIMIZER;
pub use verify::Verify;
pub use watch::{At, Watch};
pub use zero::{Vector, ZERO, ZERO_REPLICAS, Zero, ZeroStage};
