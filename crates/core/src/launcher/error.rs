//! Why a launch cannot be run.

use super::Launcher;

/// Why a launch cannot be run.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum LaunchError {
    /// A variable is no number.
    #[error("{name} = {value:?}, which {launcher} sets, is not a whole number")]
    Number { launcher: Launcher, name: &'static str, value: String },
    /// A variable is not there.
    #[error(
        "some variables of {launcher} are set, and {missing} is not; start the program by the launcher itself, or unset them"
    )]
    Missing { launcher: Launcher, missing: String },
    /// A rank outside its world.
    #[error("rank {rank} of {size} by {launcher}: ranks count from 0 to {}", size.saturating_sub(1))]
    Outside { launcher: Launcher, rank: usize, size: usize },
    /// Two launchers disagree.
    #[error(
        "the environment has the variables of two launchers: {first}, and {second}; start the program by one of them, and unset \
             the variables of the other"
    )]
    Contradiction { first: String, second: String },
    /// A program that was started in the launcher's pod of an MPIJob, and not by its `mpirun`.
    #[error(
        "this is the launcher's pod of an MPIJob, and the program was started without mpirun; let its command begin with mpirun"
    )]
    NotStarted,
    /// Ranks on CPUs need MPI.
    #[error(
        "{place}: ranks of several processes communicate by MPI, which this launcher does not start; use {command}"
    )]
    NeedsMpi { place: String, command: String },
    /// The ranks of a mesh cannot be shared out evenly.
    #[error(
        "{launcher} started {processes} processes, and a mesh of {ranks} ranks needs a number of them that divides it"
    )]
    Uneven { launcher: Launcher, processes: usize, ranks: usize },
    /// The processes met as several worlds.
    #[error("{launcher} started {launched} processes, and this one met a world of {met} by {library}: {cause}")]
    Split { launcher: Launcher, launched: usize, met: usize, library: String, cause: &'static str },
}

crate::debug_as_display!(LaunchError);
