//! Collectives of devices in several processes, as NCCL has them: communicators, and work on them as data.

use super::address::Address;
use super::error::Result;
use meshwork_core::{DType, ReduceOp};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One rank's end of a communicator of NCCL, as its device numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NcclComm(pub u64);

/// Names a communicator that is to be made: one rank asks for it and sends it to the others.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct UniqueId(pub [u8; UniqueId::BYTES]);

impl UniqueId {
    /// Its length, as NCCL defines it.
    pub const BYTES: usize = 128;
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

/// One rank's part in a collective of a communicator. Every member queues one of the same kind and size, and all of
/// them run at once: the stream waits until the streams of all members have come to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Exchange {
    /// `to` of every rank becomes the reduction of `from` of all; the two may be the same.
    AllReduce {
        /// Source.
        from: Address,
        /// Destination.
        to: Address,
        /// Number of elements.
        count: usize,
        /// Type of the elements.
        dtype: DType,
        /// How they are reduced, in the library's own order.
        reduce: ReduceOp,
    },
    /// `to` of rank r becomes the reduction of the r-th parts of `from` of all.
    ReduceScatter {
        /// Source: `count` elements for each rank.
        from: Address,
        /// Destination.
        to: Address,
        /// Number of elements of a part.
        count: usize,
        /// Type of the elements.
        dtype: DType,
        /// How they are reduced, in the library's own order.
        reduce: ReduceOp,
    },
    /// `to` becomes `from` of all ranks, one after the other.
    AllGather {
        /// Source.
        from: Address,
        /// Destination: `bytes` for each rank.
        to: Address,
        /// Number of bytes of a part.
        bytes: usize,
    },
    /// The bytes of `root`, on every rank.
    Broadcast {
        /// Source on `root`, destination elsewhere.
        at: Address,
        /// Number of bytes.
        bytes: usize,
        /// The rank that has them.
        root: usize,
    },
    /// Messages that run at once, as between `ncclGroupStart` and `ncclGroupEnd`: at most one to and one from each
    /// rank.
    Messages(Vec<Message>),
}

/// A message to or from a rank of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Message {
    /// The other rank.
    pub peer: usize,
    /// Whether this rank sends, and does not receive.
    pub sends: bool,
    /// The address of the bytes, or where they go.
    pub at: Address,
    /// Number of bytes.
    pub bytes: usize,
}

impl Exchange {
    /// Its name, as NCCL's.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllReduce { .. } => "ncclAllReduce",
            Self::ReduceScatter { .. } => "ncclReduceScatter",
            Self::AllGather { .. } => "ncclAllGather",
            Self::Broadcast { .. } => "ncclBroadcast",
            Self::Messages(_) => "ncclSend and ncclRecv",
        }
    }
}

/// The communicators of a device. Work on them is [`Work::Exchange`](super::Work::Exchange).
pub trait Nccl {
    /// A name for a new communicator.
    fn unique_id(&self) -> Result<UniqueId>;

    /// Joins the communicator of this name as rank `rank` of `size`. Every rank of it does, each on a device of its
    /// own.
    fn join(&self, id: &UniqueId, rank: usize, size: usize) -> Result<NcclComm>;

    /// Cuts a communicator into parts: ranks of one `color` are a new one, in the order of their `key`; a rank without
    /// a color is in none. Collective over `of`.
    fn split(&self, of: NcclComm, color: Option<usize>, key: usize) -> Result<Option<NcclComm>>;

    /// Ends a communicator once its queued work is done.
    fn leave(&self, of: NcclComm) -> Result<()>;

    /// Ends a communicator at once: its queued work is over, with unspecified results. Others wait for this rank until
    /// they abort it too.
    fn abort(&self, of: NcclComm) -> Result<()>;

    /// Whether a communicator is well: its queued work may have met an error, after which it never ends.
    ///
    /// # Errors
    /// [`DriverError::Comm`](super::DriverError::Comm), as `ncclCommGetAsyncError` tells it.
    fn health(&self, of: NcclComm) -> Result<()>;
}
