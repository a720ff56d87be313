//! How a run is asked to stop, and how its ranks end together.
//!
//! The request is a flag, which everything that takes long is given as an argument and looks at between its parts.
//!
//! - **Before the first step** there is nothing to save. The first rank that sees the flag ends with
//!   [`RankError::Stopped`], which ends its world and with it every rank, wherever it waits.
//! - **From the first step on** ranks agree where they meet: in the report of a step, before each batch of a
//!   validation, before each token. None leaves a collective alone, and all save the same step.
//!
//! The writing of a file (a checkpoint, an export) is finished or not begun.

use crate::error::RankError;
use meshwork_core::{CommError, Group, RankEnd, ReduceOp, RunError};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this rank knows that the run was asked to stop.
pub(crate) fn is_asked(stop: &AtomicBool) -> bool {
    stop.load(Ordering::Relaxed)
}

/// Ends the work before the first step.
///
/// # Errors
/// [`RankError::Stopped`] if the run was asked to stop.
pub(crate) fn require_unasked(stop: &AtomicBool) -> Result<(), RankError> {
    if is_asked(stop) { Err(RankError::Stopped) } else { Ok(()) }
}

/// Whether some rank was asked to stop. Collective: all ranks get the same answer at the same place.
pub(crate) fn agreed(world: &Group, stop: &AtomicBool) -> Result<bool, CommError> {
    let mut asked = [i32::from(is_asked(stop))];
    world.all_reduce_slice(&mut asked, ReduceOp::Max)?;
    Ok(asked[0] > 0)
}

/// The end of a world, where a world that was stopped before its first step is no failure: then the value of `stopped`.
pub(crate) fn unless_stopped<T>(ended: Result<T, RunError>, stopped: impl FnOnce() -> T) -> Result<T, RunError> {
    // Of a rank in another process there is only the text.
    let is_stop = |end: &RankEnd| end.to_string() == RankError::Stopped.to_string();
    match ended {
        Err(error) if error.ends.get(error.rank).is_some_and(|end| end.as_ref().is_some_and(is_stop)) => Ok(stopped()),
        ended => ended,
    }
}
