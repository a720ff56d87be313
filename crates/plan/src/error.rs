//! What is wrong with the input of the planner.

use meshwork_core::{MeshError, debug_as_display};
use meshwork_engine::TrainError;
use meshwork_pipeline::{CheckError, ShapeError, UnknownSchedule};
use meshwork_train::config::ConfigError;

/// An input that cannot be planned.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum PlanError {
    /// A file of a cluster, a system or a table that is no such file.
    #[error("{file}: {problem}; {valid}")]
    File { file: String, problem: String, valid: String },
    /// A row of a table.
    #[error("{table}, row {row}: {problem}")]
    Row { table: String, row: usize, problem: String },
    /// A name that nothing has.
    #[error("there is no {kind} {name:?}; known: {known}")]
    Unknown { kind: &'static str, name: String, known: String },
    /// A configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A mesh.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// A model that cannot be split over its mesh.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A pipeline that its schedule does not take.
    #[error(transparent)]
    Schedule(#[from] CheckError),
    /// A run that measures.
    #[error(transparent)]
    Run(#[from] meshwork_core::RunError),
    /// Processes that do not meet.
    #[error(transparent)]
    Rank(Box<meshwork_train::RankError>),
    /// A schedule that nothing is known of.
    #[error(transparent)]
    UnknownSchedule(#[from] UnknownSchedule),
    /// A pipeline's size.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}
debug_as_display!(PlanError);

impl From<meshwork_train::RankError> for PlanError {
    fn from(error: meshwork_train::RankError) -> Self {
        Self::Rank(Box::new(error))
    }
}

/// The text that comes with the planner under this name.
pub(crate) fn named<'a>(kind: &'static str, all: &[(&str, &'a str)], name: &str) -> Result<&'a str, PlanError> {
    let known = || all.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
    let found = all.iter().find(|(known, _)| *known == name);
    found.map(|(_, text)| *text).ok_or_else(|| PlanError::Unknown { kind, name: name.to_owned(), known: known() })
}
