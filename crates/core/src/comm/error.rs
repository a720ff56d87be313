//! Errors of communication: a bad call, or a world that stopped.

use super::fault::{Fault, Site};
use super::{Communicator, OpKind, world_rank};
use crate::buffer::BufferError;
use crate::dtype::DType;
use crate::mesh::Mesh;
use std::sync::Arc;

/// Why a call failed.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum CommError {
    /// This rank's call is wrong by itself. Other ranks are not affected.
    #[error("{op} on the {group} group of world rank {world_rank} ({size} ranks): {problem}")]
    Call {
        op: OpKind,
        group: String,
        world_rank: usize,
        size: usize,
        #[source]
        problem: CallError,
    },
    /// The output's memory has other owners, which would see it change.
    #[error(
        "{op} on the {group} group of world rank {world_rank}: the output's memory is shared: \
         drop its clones and slices first"
    )]
    BufferShared { op: OpKind, group: String, world_rank: usize },
    /// The members of a new group are not valid.
    #[error("cannot split {name} = {members:?} off the {group} group of world rank {world_rank}: {problem}")]
    Split {
        name: String,
        group: String,
        world_rank: usize,
        /// The requested members, as ranks of the group to split.
        members: Vec<usize>,
        #[source]
        problem: SplitError,
    },
    /// A rank cannot join a mesh: the world has another number of ranks.
    #[error(
        "world rank {world_rank} cannot join the mesh {mesh}: the mesh has {} ranks, the world has {size}",
        mesh.world_size()
    )]
    WorldSize { world_rank: usize, mesh: Mesh, size: usize },
    /// The world stopped: some rank failed, or ranks disagree. Every rank gets the same fault.
    #[error("{}", fault.describe(site))]
    Stopped { site: Site, fault: Arc<Fault> },
    /// A value that should be the same on several ranks differs, or the reverse. Every rank that compared it gets the
    /// same error.
    #[error(transparent)]
    Disagreement(Box<Disagreement>),
    /// A buffer cannot be used for the call.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// A backend's own failure (a transport, a driver).
    #[error("{op} on the {group} group of world rank {world_rank}: {message}")]
    Backend { op: OpKind, group: String, world_rank: usize, message: String },
}

crate::debug_as_display!(CommError);

/// A fact that does not hold, the same on every rank that compared it.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{claim} {over}, and {found}; {valid}")]
pub struct Disagreement {
    /// [What was claimed](crate::agreement::Fact).
    pub claim: String,
    /// About which ranks: `over tp`, `on all ranks`.
    pub over: String,
    /// The facts instead: ranks, and their values where these are short.
    pub found: String,
    /// The world ranks to look at first: the ranks that differ from most, or all ranks if there is no majority.
    pub ranks: Vec<usize>,
    /// What would be valid.
    pub valid: String,
}

crate::debug_as_display!(Disagreement);
crate::from!(CommError: Disagreement(Disagreement));

/// Why a call is invalid.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum CallError {
    /// A buffer is missing, or the operation does not use it.
    #[error("it {} an {which} buffer", if *wanted { "needs" } else { "does not take" })]
    Buffers { which: &'static str, wanted: bool },
    /// Input and output differ in type.
    #[error("the input is {input} and the output {output}: they must be equal")]
    DTypes { input: DType, output: DType },
    /// A buffer has the wrong number of elements.
    #[error("the {which} has {count} elements, it must have {wanted}")]
    Count { which: &'static str, count: usize, wanted: usize },
    /// The full buffer cannot be cut into equal parts.
    #[error("the {which} has {count} elements, it must have a multiple of {size}")]
    Indivisible { which: &'static str, count: usize, size: usize },
    /// One count per rank is needed.
    #[error("{what} has {len} entries, it must have {size}, one for each rank")]
    CountList { what: &'static str, len: usize, size: usize },
    /// The number of elements that a rank sends to itself is not the number that it receives from itself.
    #[error("rank {rank} sends {sent} elements to itself but expects {received}")]
    OwnCounts { rank: usize, sent: usize, received: usize },
    /// A rank that the group does not have.
    #[error("{what} {rank} is not in the group, it must be below {size}")]
    NoSuchRank { what: &'static str, rank: usize, size: usize },
    /// A message to the calling rank itself.
    #[error("rank {rank} cannot exchange messages with itself")]
    OwnMessage { rank: usize },
    /// The output's memory has other owners.
    #[error("the output's memory is shared: drop its clones and slices first")]
    OutputShared,
}

crate::debug_as_display!(CallError);

impl CallError {
    /// The error of a call on `comm`.
    pub fn on(self, comm: &(impl Communicator + ?Sized), op: OpKind) -> CommError {
        let (group, world_rank) = (comm.name().to_owned(), world_rank(comm));
        match self {
            CallError::OutputShared => CommError::BufferShared { op, group, world_rank },
            problem => CommError::Call { op, group, world_rank, size: comm.size(), problem },
        }
    }
}

/// Why a part of a group is invalid.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum SplitError {
    /// The caller names a part that it is not in.
    #[error("rank {rank}, which calls, must be among the members")]
    NotAMember { rank: usize },
    /// A rank that the group does not have.
    #[error("rank {rank} is not in the group, it must be below {size}")]
    NoSuchRank { rank: usize, size: usize },
    /// A rank that is named twice.
    #[error("rank {rank} is named twice")]
    Twice { rank: usize },
}

crate::debug_as_display!(SplitError);
