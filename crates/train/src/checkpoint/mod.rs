//! Checkpoints of a trainer: its state by global name and slice, in the files of [`meshwork_checkpoint`].
//!
//! ```text
//! Trainer ── visit_state ──▶ Snapshot ── Writer ──▶ files ── Checkpoint ──▶ StateSource ── load_state ──▶ Trainer on any mesh
//!    └── state_layout ──▶ SavePlan: who writes what
//! ```
//! Nothing here knows what a vector means or how it is cut: whatever the engine declares as state is saved and
//! resharded.

mod error;
mod exchange;
pub(crate) mod export;
mod resume;
pub(crate) mod room;
pub(crate) mod run;
mod save;

pub use error::CheckpointError;
pub use exchange::exchange;
pub use resume::{Leeway, Resumed, States, resume};
pub(crate) use resume::{read_weights, resume_from, resume_into};
pub(crate) use save::save_plan_of;
pub use save::{save, save_plan};

use meshwork_checkpoint::{Dtype, Slice};
use meshwork_core::DType;
use meshwork_engine::StateKey;
use meshwork_tensor::Shape;
use meshwork_tensor::param::LocalSlice;

/// The updates of the weights so far, in the metadata.
const UPDATES: &str = "updates";
/// The key of the caller's own value in the metadata.
const RUN: &str = "run";
/// Where the run is in its data: a key of the caller's own value.
pub(crate) const POSITION: &str = "position";
/// The best validation so far: a key of the caller's own value.
pub(crate) const BEST: &str = "best";
/// The layers before the cuts of the model, in the metadata: where activations are compressed, if they are.
pub(crate) const CUTS: &str = "cuts";

/// The name of a vector in a checkpoint: `wte.weight`, and `wte.weight:exp_avg` for a state of the optimizer.
fn name_of(key: &StateKey) -> String {
    if let Some(state) = &key.state { format!("{}:{state}", key.parameter) } else { key.parameter.clone() }
}

pub(crate) fn dims_of(shape: Shape) -> Vec<u64> {
    shape.iter().map(|&extent| extent as u64).collect()
}

fn dtype_of(dtype: DType) -> Dtype {
    if dtype == DType::U8 { Dtype::U8 } else { Dtype::F32 }
}

pub(crate) fn slice_of(slice: &LocalSlice) -> Slice {
    Slice::new(slice.ranges.iter().map(|range| range.start as u64..range.end as u64))
}
