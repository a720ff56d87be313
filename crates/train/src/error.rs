//! Errors that end a run.

use crate::metrics::MetricsError;
use crate::profile::TraceError;
use meshwork_core::CommError;
use meshwork_engine::TrainError;

/// The error of a run on one rank.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// Training.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A picture of a profile could not be written.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The metrics could not be written.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
}

impl From<CommError> for RunError {
    fn from(error: CommError) -> Self {
        Self::Train(error.into())
    }
}

impl From<meshwork_tensor::Error> for RunError {
    fn from(error: meshwork_tensor::Error) -> Self {
        Self::Train(error.into())
    }
}
