//! A communicator that does nothing: one rank's view of a group whose other ranks do not exist.
//!
//! With memory that has only sizes, a program runs as any rank of any mesh, and the [`Group`](super::Group)'s log
//! holds what that rank would communicate. Every operation is over as soon as it starts and gives its output back
//! unchanged. Splits are arithmetic, so no other rank is needed.

use super::{
    Activity, Call, CommError, Communicator, Ended, Membership, OpKind, Pending, PendingOp, ReductionOrder,
    check_members,
};
use crate::buffer::Buffer;
use std::sync::Arc;
use std::time::Instant;

/// Rank `rank` of a group whose other ranks do not exist. `rank` must be an index of `world_ranks`.
pub fn communicator(name: &str, rank: usize, world_ranks: Vec<usize>) -> Result<Arc<dyn Communicator>, CommError> {
    if rank >= world_ranks.len() {
        let size = world_ranks.len();
        return Err(CommError::Split {
            name: name.to_owned(),
            group: "record".to_owned(),
            world_rank: rank,
            members: world_ranks,
            problem: super::SplitError::NoSuchRank { rank, size },
        });
    }
    Ok(Arc::new(RecordComm { name: name.to_owned(), rank, world_ranks, origin: Instant::now() }))
}

#[derive(Debug)]
struct RecordComm {
    name: String,
    rank: usize,
    world_ranks: Vec<usize>,
    origin: Instant,
}

/// An operation that is over. It keeps its memory until it is waited for, as an operation between ranks does, so that
/// peaks of memory are the same.
struct Recorded(Call);

impl PendingOp for Recorded {
    fn wait(self: Box<Self>) -> Result<Buffer, CommError> {
        let Call { op, input, output, .. } = self.0;
        let buffer = if op.kind() == OpKind::Send { input } else { output };
        Ok(buffer.unwrap_or_else(Buffer::empty))
    }

    fn is_done(&self) -> bool {
        true
    }
}

impl Communicator for RecordComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.world_ranks.len()
    }

    fn world_ranks(&self) -> &[usize] {
        &self.world_ranks
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn start(&self, call: Call) -> Result<Pending, CommError> {
        Ok(Pending::new(Recorded(call)))
    }

    fn split(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        let world_ranks = check_members(self, name, members)?;
        // `check_members` found this rank among the members.
        let rank = members.iter().position(|&member| member == self.rank).unwrap_or_default();
        communicator(name, rank, world_ranks)
    }

    fn membership(&self) -> &dyn Membership {
        self
    }

    /// The order of threads, so that a run is planned as it will be trained.
    fn reduction_order(&self) -> ReductionOrder {
        ReductionOrder::BalancedTree
    }
}

impl Membership for RecordComm {
    fn origin(&self) -> Instant {
        self.origin
    }

    fn fork(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError> {
        communicator(name, self.rank, self.world_ranks.clone())
    }

    /// The others end well.
    fn end(&self, how: Activity) -> Ended {
        let mut ranks = vec![Activity::Returned; self.world_ranks.len()];
        let first = (how != Activity::Returned).then(|| (self.rank, how.failure(self.rank)));
        ranks[self.rank] = how;
        Ended { first, fault: None, ranks }
    }
}
