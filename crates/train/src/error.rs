//! Errors that end a run.

use crate::checkpoint::CheckpointError;
use crate::config::Fault;
use crate::data::DataError;
use crate::replay::other_bits::OtherBits;
use meshwork_checkpoint::SaveError;
use meshwork_core::CommError;
use meshwork_engine::TrainError;
use meshwork_models::huggingface;
use meshwork_pipeline::partition::ProfileError;
use meshwork_tensor::memory::Bytes;
use std::io;
use std::path::{Path, PathBuf};

/// The error of a run on one rank.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant names its fields")]
pub enum RankError {
    /// Training.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// The memory of a device is full.
    #[error("{error}{}", in_words(savings))]
    OutOfMemory { error: Box<TrainError>, savings: Vec<(String, u64)> },
    /// Data that could not be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A layer profile that its format cannot hold.
    #[error("the layers cannot be written as a profile: {0}")]
    Layers(#[from] ProfileError),
    /// The weights to start from.
    #[error("model.init_from: {0}")]
    Pretrained(#[from] huggingface::Error),
    /// A checkpoint could not be read, or does not fit.
    #[error(transparent)]
    Checkpoint(#[from] Box<CheckpointError>),
    /// The last state of the run could not be saved.
    #[error("the run ended, and its last state was not saved: {0}")]
    Unsaved(Box<SaveError>),
    /// The run was asked to stop before its first step, on this rank first. Nothing was trained, and nothing is lost.
    #[error("stopped as asked, before the first step")]
    Stopped,
    /// A model that gives no probabilities.
    #[error("the logits after {token} tokens are not all numbers: the weights are damaged, or training has diverged")]
    Logits { token: usize },
    /// A process that cannot join the others.
    #[error("comm.kind: {0}")]
    Mpi(Box<meshwork_mpi::MpiError>),
    /// Processes that were launched and did not meet.
    #[error(transparent)]
    Launch(#[from] meshwork_core::launcher::LaunchError),
    /// A setting that the checks before the run would have refused.
    #[error("{0}")]
    Setting(Box<Fault>),
    /// A step that has other bits where it runs again.
    #[error(transparent)]
    Replay(#[from] Box<OtherBits>),
    /// A loss after which there is nothing to go on from.
    #[error("no snapshot in memory is whole, and there is no checkpoint.dir to go on from: {0}")]
    NoSnapshot(String),
    /// Ranks that are not the same run.
    #[error("the ranks of this run differ:\n  {}", .0.join("\n  "))]
    Differences(Vec<String>),
    /// A file could not be written.
    #[error(transparent)]
    Output(#[from] OutputError),
}

meshwork_core::debug_as_display!(RankError);

/// A file that could not be written: metrics, a profile or a picture of one.
#[derive(thiserror::Error)]
#[error("cannot write {what} to {}: {source}", path.display())]
pub struct OutputError {
    /// The output that could not be written.
    pub what: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The error of the system.
    pub source: io::Error,
}

meshwork_core::debug_as_display!(OutputError);

impl OutputError {
    /// Makes the error of a failed write of `what` to `path`.
    pub(crate) fn writing<'a>(what: &'static str, path: &'a Path) -> impl Fn(io::Error) -> Self + 'a {
        move |source| Self { what, path: path.to_path_buf(), source }
    }
}

/// The memory that settings would free, the largest first.
fn in_words(savings: &[(String, u64)]) -> String {
    let words: Vec<String> = savings.iter().map(|(settings, bytes)| format!("{settings} {}", Bytes(*bytes))).collect();
    match words.is_empty() {
        true => "; no single setting would free more: use more ranks or a smaller model".to_owned(),
        false => format!("; on the fullest rank would free, each by itself: {}", words.join(", ")),
    }
}

impl RankError {
    /// The error, with the settings that would free memory if a device was full.
    pub(crate) fn with_savings(self, savings: impl FnOnce() -> Vec<(String, u64)>) -> Self {
        match self {
            Self::Train(error) if error.is_out_of_memory() => {
                Self::OutOfMemory { savings: savings(), error: error.into() }
            }
            other => other,
        }
    }
}

impl From<CheckpointError> for RankError {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Train(error) => Self::Train(error),
            CheckpointError::Stopped => Self::Stopped,
            error => Self::Checkpoint(Box::new(error)),
        }
    }
}

meshwork_core::from!(RankError: Setting(Fault), Train(CommError), Train(meshwork_tensor::Error));
