//! The line between the writers of a world's ranks.

use meshwork_checkpoint::{Exchange, ExchangeError};
use meshwork_core::{CommError, Group, Rank};
use std::sync::Arc;

/// A second world of the same ranks, for the threads that write: a checkpoint under way is finished also where a rank
/// has failed.
#[derive(Debug)]
struct Beside(Group);

/// This rank's end of a line between the writers of all ranks, to make a
/// [`Writer`](meshwork_checkpoint::Writer) with. Collective over the world of `rank`.
///
/// # Errors
/// A backend that has no second world.
pub fn exchange(rank: &Rank) -> Result<impl Exchange, CommError> {
    rank.world().fork("checkpoint").map(Beside)
}

impl Exchange for Beside {
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Arc<[Vec<u8>]>, ExchangeError> {
        let problem = |error| match error {
            CommError::Stopped { fault, .. } => fault.kind.to_string(),
            other => other.to_string(),
        };
        self.0.all_gather_bytes(&message).map(Arc::from).map_err(|error| ExchangeError { problem: problem(error) })
    }
}
