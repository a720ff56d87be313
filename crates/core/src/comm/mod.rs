//! Communicators: how ranks exchange data.
//!
//! A backend implements [`Communicator`], which takes one [`Call`] at a time as plain data. All other code uses
//! [`Group`], which checks calls, logs their bytes and adds blocking and typed-slice forms.
//!
//! | backend | ranks are | promises |
//! |---|---|---|
//! | [`thread`] | threads of this process | a fixed order of reduction, so the same bits on every run; no operation hangs |
//! | [`record`] | one rank alone, whose peers do not exist | the same log as a real run |

mod call;
mod decorator;
pub mod device;
mod error;
mod fault;
mod group;
mod log;
mod membership;
mod pending;
pub mod record;
mod reduce_op;
pub mod thread;

use std::fmt::Debug;
use std::sync::Arc;

pub use call::{Call, Caller, Op, OpInfo, OpKind, Peer};
pub use decorator::Decorator;
pub use error::{CallError, CommError, Disagreement, SplitError};
pub use fault::{Activity, Fault, FaultKind, RankReport, Site};
pub(crate) use fault::{grouped, runs};
pub use group::Group;
pub use log::{CommLog, Entered, Record};
pub use membership::{Ended, Membership, shared_moment};
pub use pending::{Pending, PendingOp};
pub use reduce_op::ReduceOp;

/// One rank's end of a group of ranks. A backend implements this trait, over threads, NCCL or MPI. It passes the groups
/// `results` and `flight` of the suite `meshwork_testkit::comm::conformance`, and all of it if it compares ranks.
///
/// A caller keeps to these rules, and a backend may rely on them:
///
/// - Every member makes the same collective calls, splits among them, in the same order.
/// - The calls have passed [`Call::check`], as all calls of a [`Group`] have. A group of one rank starts only
///   operations that copy memory that is not on the host.
/// - An operation may have no elements: an all-to-all in which a rank sends or receives nothing, a message or a
///   reduction of an empty buffer. A backend completes it as any other, with all members; ranks that agree on zero
///   still wait for each other.
/// - Several operations may be in flight at once. A caller waits for them in any order, or drops the [`Pending`].
/// - A rank communicates from one thread at a time. A second thread of it does so in a [fork](Membership::fork).
///
/// A backend promises:
///
/// - [`start`](Self::start) does not wait for other ranks. (NCCL enqueues on a stream; MPI has a non-blocking form of
///   each operation.)
/// - Messages are matched in order per sender and receiver, independently of other pairs and of collectives: two ranks
///   that both send and then receive do not block each other. (MPI matches by source. NCCL runs the operations of one
///   communicator one after the other, so a backend on it needs a communicator, or a stream, per pair and direction.)
/// - The operation owns its buffers until [`Pending::wait`] returns or, if the handle was dropped, until it is over.
///   The sender's memory comes back unchanged or traded for the receiver's: see [`Op::Send`].
/// - An operation that cannot complete ends with an error: [`CommError::Backend`] with the library's own code. Only
///   [`thread`] promises that every rank gets the same first cause.
///
/// It need not compare what the ranks do. Where it can, it reports ranks whose operations, element types, counts or
/// message signatures differ; NCCL and MPI leave such programs undefined.
pub trait Communicator: Send + Sync + Debug {
    /// This rank's place in the group.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// World rank of each member.
    fn world_ranks(&self) -> &[usize];

    /// Name of the group: `world`, or the mesh axis.
    fn name(&self) -> &str;

    /// Starts an operation without waiting for other ranks. Its memory belongs to the operation until
    /// [`Pending::wait`].
    fn start(&self, call: Call) -> Result<Pending, CommError>;

    /// Starts an operation whose elements take another way, such as NCCL: its members meet and are compared, and no
    /// buffer is touched. By default only what the call [without elements](Call::without_elements) has is compared.
    fn meet(&self, call: &Call) -> Result<Pending, CommError> {
        self.start(call.without_elements(self.size()))
    }

    /// Cuts the group into disjoint parts. Collective: every rank of the group calls it, and names the part it is in:
    /// distinct ranks of this group, itself among them, in the order that they have in the new group. All members of a
    /// part name the same list, so that its first rank can serve as the colour, and a rank's place in it as the key, of
    /// `MPI_Comm_split` and `ncclCommSplit`.
    fn split(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError>;

    /// Connects the ranks of a part, after [`split`](Self::split). Collective over the group that was cut: its ranks
    /// have met before, so that one that did not come there is missed by its name, and not waited for in a library that
    /// cannot tell. Does nothing by default.
    fn connect(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// The membership of this rank in its world.
    fn membership(&self) -> &dyn Membership;

    /// The order in which reductions add up; unspecified by default. It must hold for every group that is split off
    /// this one.
    fn reduction_order(&self) -> ReductionOrder {
        ReductionOrder::Unspecified
    }
}

/// The promise of a communicator about the order in which it reduces the elements of several ranks. Each promise
/// includes those before it. Canonical numerics need [`BalancedTree`](Self::BalancedTree).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ReductionOrder {
    /// Nothing: two runs of one program may differ in the last bits.
    Unspecified,
    /// The same group, operation, type and count add up in the same order on every run: the same bits, in an order that
    /// the backend chooses. (NCCL with its algorithm and protocol pinned, on the same machines.)
    Repeatable,
    /// The balanced tree of [`tree`](crate::tree) over the ranks in the order of the group, whatever the count and
    /// place of the elements; 16-bit floats are added in f32 and rounded once.
    BalancedTree,
}

impl std::fmt::Display for ReductionOrder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            ReductionOrder::Unspecified => "unspecified",
            ReductionOrder::Repeatable => "repeatable",
            ReductionOrder::BalancedTree => "balanced tree",
        })
    }
}

/// This rank's number in the world, for messages. A communicator with too few world ranks gives 0.
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
