//! Communicators: what ranks say to each other.
//!
//! A backend implements [`Communicator`], which takes one [`Call`] at a time as plain data. Everybody else uses
//! [`Group`], which checks calls, logs their bytes and adds blocking and typed-slice forms.
//!
//! | backend | ranks are | promises |
//! |---|---|---|
//! | [`thread`] | threads of this process | order of reduction, so the same bits on every run; nothing hangs |
//! | [`record`] | nobody: one rank alone, on memory without bytes | the same log as a real run |

mod call;
mod error;
mod fault;
mod group;
mod log;
mod pending;
pub mod record;
pub mod thread;

use std::fmt::Debug;
use std::sync::Arc;

pub use call::{Call, Op, OpInfo, OpKind, Peer, ReduceOp};
pub use error::{CallError, CommError, SplitError};
pub use fault::{Activity, Fault, FaultKind, RankReport, Site};
pub use group::Group;
pub use log::{CommLog, Record};
pub use pending::{Pending, PendingOp};

/// One rank's end of a group of ranks. Calls on one communicator are matched by their order: every member makes
/// the same collective calls in the same order; messages are matched in order per sender and receiver.
pub trait Communicator: Send + Sync + Debug {
    /// This rank's place in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// World rank of each member.
    fn world_ranks(&self) -> &[usize];

    /// Name of the group: `world`, or the mesh axis.
    fn name(&self) -> &str;

    /// Starts an operation; never blocks. Its memory belongs to the operation until [`Pending::wait`].
    fn start(&self, call: Call) -> Result<Pending, CommError>;

    /// Cuts the group into parts. Every rank calls it the same number of times and names the part it is in:
    /// distinct ranks of this group, itself among them, in the order that they have in the new group.
    fn split(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError>;

    /// Says that this rank is alive and makes progress, so that nobody waiting for it runs into the timeout.
    fn heartbeat(&self);
}

/// World rank of the member `rank`: for messages, so it takes any number.
fn world_rank(comm: &(impl Communicator + ?Sized)) -> usize {
    comm.world_ranks().get(comm.rank()).copied().unwrap_or_default()
}

/// The world ranks of `members`, checked as [`Communicator::split`] demands: for backends.
pub fn check_members(parent: &dyn Communicator, name: &str, members: &[usize]) -> Result<Vec<usize>, CommError> {
    let fail = |problem| CommError::Split {
        name: name.to_owned(),
        group: parent.name().to_owned(),
        world_rank: world_rank(parent),
        members: members.to_vec(),
        problem,
    };
    if !members.contains(&parent.rank()) {
        return Err(fail(SplitError::NotAMember { rank: parent.rank() }));
    }
    let mut seen = vec![false; parent.size()];
    for &rank in members {
        match seen.get_mut(rank) {
            None => return Err(fail(SplitError::NoSuchRank { rank, size: parent.size() })),
            Some(true) => return Err(fail(SplitError::Twice { rank })),
            Some(new) => *new = true,
        }
    }
    Ok(members.iter().map(|&rank| parent.world_ranks()[rank]).collect())
}
