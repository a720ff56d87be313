//! Checkpoints of a trainer: its state by global name and slice, in the files of [`meshwork_checkpoint`].
//!
//! ```text
//! Trainer ── visit_state ──▶ Snapshot ── Writer ──▶ files ── Checkpoint ──▶ StateSource ── load_state ──▶ Trainer on any mesh
//!    └── state_layout ──▶ SavePlan: who writes what
//! ```
//! Nothing here knows what a vector means or how it is cut: whatever the engine declares as state is saved and
//! resharded.

mod exchange;
pub(crate) mod export;
mod resume;
pub(crate) mod room;
pub(crate) mod run;
mod save;

pub use exchange::exchange;
pub use resume::{Leeway, Resumed, States, resume};
pub(crate) use resume::{read_weights, resume_into};
pub(crate) use save::save_plan_of;
pub use save::{save, save_plan};

use meshwork_checkpoint::{Dtype, LockError, PlanError, SaveError, Slice, SnapshotError, Unread};
use meshwork_core::{CommError, DType};
use meshwork_engine::{StateKey, TrainError};
use meshwork_models::huggingface;
use meshwork_tensor::Shape;
use meshwork_tensor::param::LocalSlice;
use std::path::PathBuf;

/// Why a trainer cannot be saved or resumed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The trainer.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A state that cannot be shared out among writers.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A state that the plan of the checkpoint does not have.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A checkpoint that could not be written.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A folder that cannot be written to, or that another run writes to.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A run that differs from the saved run.
    #[error(
        "the newest checkpoint in {} is of another run:\n  {}\nuse the same values, start anew in another folder, or permit them by checkpoint.permit = {:?}",
        dir.display(), differences.join("\n  "), permit.join(",")
    )]
    Different {
        /// The folder.
        dir: PathBuf,
        /// The differences.
        differences: Vec<String>,
        /// The words of `checkpoint.permit` that allow it.
        permit: Vec<String>,
    },
    /// A folder that cannot be read.
    #[error("the checkpoint folder {} cannot be read: {problem}", dir.display())]
    Folder {
        /// The folder.
        dir: PathBuf,
        /// The error of the system.
        problem: String,
    },
    /// A state of another model or update rule.
    #[error(
        "{} does not fit this run:\n  {}\ncheckpoint.permit = \"optimizer\" drops states of the optimizer that do not fit",
        path.display(), misfits.join("\n  ")
    )]
    Misfit {
        /// The checkpoint.
        path: PathBuf,
        /// The misfits.
        misfits: Vec<String>,
    },
    /// A checkpoint without the counters of a trainer.
    #[error("{} was not written by a trainer: its metadata has no number {key:?}", path.display())]
    Foreign {
        /// The checkpoint.
        path: PathBuf,
        /// The missing key.
        key: &'static str,
    },
    /// Not one checkpoint of the folder is whole.
    #[error("every checkpoint in {} is damaged:\n  {}", dir.display(), damage.join("\n  "))]
    AllDamaged {
        /// The folder.
        dir: PathBuf,
        /// The damage of each, the newest first.
        damage: Vec<String>,
    },
    /// A model that could not be written for Hugging Face.
    #[error("checkpoint.export: {0}")]
    Export(#[source] Box<huggingface::Error>),
    /// This rank was asked to stop while it read.
    #[error("stopped as asked, while a checkpoint was read")]
    Stopped,
    /// A checkpoint that some rank cannot read now. An older one is not used in its place: the run would write over the
    /// newer.
    #[error(
        "rank {rank}: {problem}\nThis does not mean that {} is damaged, so the run does not go on from an older checkpoint. Make it readable, \
         or move it away to go on from the one before",
        path.display()
    )]
    Unreadable {
        /// The checkpoint.
        path: PathBuf,
        /// The first rank that cannot read it.
        rank: usize,
        /// Its error.
        problem: String,
    },
    /// A file that is not as it was written, or that cannot be read now.
    #[error(transparent)]
    Unread(#[from] Unread),
}

meshwork_core::debug_as_display!(CheckpointError);

impl From<CommError> for CheckpointError {
    fn from(error: CommError) -> Self {
        Self::Train(error.into())
    }
}

/// The updates of the weights so far, in the metadata.
const UPDATES: &str = "updates";
/// The key of the caller's own value in the metadata.
const RUN: &str = "run";
/// Where the run is in its data, inside what the caller keeps.
pub(crate) const POSITION: &str = "position";
/// The layers before the cuts of the model, in the metadata: where activations are compressed, if they are.
pub(crate) const CUTS: &str = "cuts";

/// The name of a vector in a checkpoint: `wte.weight`, and `wte.weight:exp_avg` for a state of the optimizer.
fn name_of(key: &StateKey) -> String {
    match &key.state {
        None => key.parameter.clone(),
        Some(state) => format!("{}:{state}", key.parameter),
    }
}

fn dims_of(shape: Shape) -> Vec<u64> {
    shape.iter().map(|&extent| extent as u64).collect()
}

fn dtype_of(dtype: DType) -> Dtype {
    if dtype == DType::U8 { Dtype::U8 } else { Dtype::F32 }
}

fn slice_of(slice: &LocalSlice) -> Slice {
    Slice::new(slice.ranges.iter().map(|range| range.start as u64..range.end as u64))
}
