//! How a run is asked to stop, and how its ranks end together.
//!
//! The request is a flag, which everything that takes long is given as an argument and looks at between its parts.
//!
//! - **Before the first step** there is nothing to save. The first rank that sees the flag ends with
//!   [`RunError::Stopped`], which ends its world and with it every rank, wherever it waits.
//! - **From the first step on** ranks agree where they meet: in the report of a step, before each batch of a
//!   validation, before each token. None leaves a collective alone, and all save the same step.
//!
//! The writing of a file (a checkpoint, an export) is finished or not begun.

use crate::error::RunError;
use meshwork_core::comm::thread::{RankEnd, WorldError};
use meshwork_core::{CommError, Group, ReduceOp};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this rank knows that the run was asked to stop.
pub(crate) fn is_asked(stop: &AtomicBool) -> bool {
    stop.load(Ordering::Relaxed)
}

/// Ends what comes before the first step.
///
/// # Errors
/// [`RunError::Stopped`] if the run was asked to stop.
pub(crate) fn require_unasked(stop: &AtomicBool) -> Result<(), RunError> {
    if is_asked(stop) { Err(RunError::Stopped) } else { Ok(()) }
}

/// Whether some rank was asked to stop. Collective: all ranks get the same answer at the same place.
pub(crate) fn agreed(world: &Group, stop: &AtomicBool) -> Result<bool, CommError> {
    let mut asked = [i32::from(is_asked(stop))];
    world.all_reduce_slice(&mut asked, ReduceOp::Max)?;
    Ok(asked[0] > 0)
}

/// The end of a world. A world that was stopped before its first step has not failed, and gives the value of `stopped`.
pub(crate) fn unless_stopped<T>(
    ended: Result<T, WorldError<RunError>>,
    stopped: impl FnOnce() -> T,
) -> Result<T, WorldError<RunError>> {
    match ended {
        Err(error) if matches!(error.ends.get(error.rank), Some(Some(RankEnd::Error(RunError::Stopped)))) => {
            Ok(stopped())
        }
        ended => ended,
    }
}
