//! Errors of saving and resuming.

use meshwork_checkpoint::{LockError, PlanError, SaveError, SnapshotError, Unread};
use meshwork_core::CommError;
use meshwork_engine::TrainError;
use meshwork_models::huggingface;
use std::path::PathBuf;

/// Why a trainer cannot be saved or resumed.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant names its fields")]
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
    Different { dir: PathBuf, differences: Vec<String>, permit: Vec<String> },
    /// A folder that cannot be read.
    #[error("the checkpoint folder {} cannot be read: {problem}", dir.display())]
    Folder { dir: PathBuf, problem: String },
    /// A state of another model or update rule.
    #[error(
        "{} does not fit this run:\n  {}\ncheckpoint.permit = \"optimizer\" drops states of the optimizer that do not fit",
        path.display(), misfits.join("\n  ")
    )]
    Misfit { path: PathBuf, misfits: Vec<String> },
    /// A checkpoint without the counters of a trainer.
    #[error("{} was not written by a trainer: its metadata has no number {key:?}", path.display())]
    Foreign { path: PathBuf, key: &'static str },
    /// Not one checkpoint of the folder is whole.
    #[error("every checkpoint in {} is damaged:\n  {}", dir.display(), damage.join("\n  "))]
    AllDamaged { dir: PathBuf, damage: Vec<String> },
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
    Unreadable { path: PathBuf, rank: usize, problem: String },
    /// A file that is not as it was written, or that cannot be read now.
    #[error(transparent)]
    Unread(#[from] Unread),
}

meshwork_core::debug_as_display!(CheckpointError);
meshwork_core::from!(CheckpointError: Train(CommError));
