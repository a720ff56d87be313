//! A communication call as plain data, and the check that every call passes.

use super::error::CallError;
use super::reduce_op::ReduceOp;
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::hash::combine;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The operation. Ranks are ranks within the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// `output` of every rank becomes the reduction of all `input`s; a rank without an input uses its output as input.
    AllReduce(ReduceOp),
    /// `output` (c elements) of rank r becomes the reduction of the r-th parts of all `input`s (n·c elements).
    ReduceScatter(ReduceOp),
    /// `output` (n·c elements) becomes the `input`s (c elements) of all ranks, one after the other.
    AllGather,
    /// `output` of every rank becomes `root`'s.
    Broadcast {
        /// The rank whose elements all ranks get.
        root: usize,
    },
    /// Each rank cuts `input` into one part for each rank, and `output` into one part from each rank.
    AllToAll {
        /// Elements for each rank.
        send_counts: Vec<usize>,
        /// Elements from each rank.
        recv_counts: Vec<usize>,
    },
    /// Sends `input` to one rank. If nothing else refers to its memory, it may be traded for the receiver's.
    Send {
        /// The receiver.
        to: usize,
        /// A fingerprint of the message's shape and types: the receiver must expect the same.
        signature: u64,
    },
    /// Receives `output` from one rank.
    Recv {
        /// The sender.
        from: usize,
        /// A fingerprint of the message's shape and types: the sender must send the same.
        signature: u64,
    },
    /// Waits until every rank has started it.
    Barrier,
}

crate::named! {
    /// The kind of an [`Op`], without its parameters.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[expect(missing_docs, reason = "see the operation of the same name")]
    pub enum OpKind {
        AllReduce = "all_reduce",
        ReduceScatter = "reduce_scatter",
        AllGather = "all_gather",
        Broadcast = "broadcast",
        AllToAll = "all_to_all",
        Send = "send",
        Recv = "recv",
        Barrier = "barrier",
    }
    name: "Its name in programs and messages: `all_reduce`, ..."
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Op {
    /// Which operation.
    pub fn kind(&self) -> OpKind {
        match self {
            Op::AllReduce(_) => OpKind::AllReduce,
            Op::ReduceScatter(_) => OpKind::ReduceScatter,
            Op::AllGather => OpKind::AllGather,
            Op::Broadcast { .. } => OpKind::Broadcast,
            Op::AllToAll { .. } => OpKind::AllToAll,
            Op::Send { .. } => OpKind::Send,
            Op::Recv { .. } => OpKind::Recv,
            Op::Barrier => OpKind::Barrier,
        }
    }

    /// Whether the operation has an input and an output. Operations in place have only an output; each rank chooses
    /// whether its all-reduce is in place.
    fn buffers(&self, has_input: bool) -> (bool, bool) {
        match self.kind() {
            OpKind::AllReduce => (has_input, true),
            OpKind::Broadcast | OpKind::Recv => (false, true),
            OpKind::ReduceScatter | OpKind::AllGather | OpKind::AllToAll => (true, true),
            OpKind::Send => (true, false),
            OpKind::Barrier => (false, false),
        }
    }
}

/// The call of a program that an operation is part of, as its documentation names it: `Trainer::evaluate`. It is
/// collective: every rank makes it. Ranks whose programs are at different calls are refused, although they communicate
/// alike: see [`CommLog::enter`](super::CommLog::enter).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// The name, the same on every rank.
    pub name: Arc<str>,
    /// Its subject, which may differ from rank to rank: the part of a group that a rank names, say.
    pub about: Option<Arc<str>>,
}

impl From<&str> for Caller {
    fn from(name: &str) -> Caller {
        Caller { name: name.into(), about: None }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.about.as_ref().map_or(Ok(()), |about| write!(f, "({about:?})"))
    }
}

/// One communication call, the same for every backend. In-place operations (broadcast, all-reduce unless it has an
/// input) have only an output, which is read and written. The output must be unique; the input is only read, so it may
/// be shared.
#[derive(Clone, Debug)]
pub struct Call {
    /// The operation to run.
    pub op: Op,
    /// The buffer that is read.
    pub input: Option<Buffer>,
    /// The buffer that is written.
    pub output: Option<Buffer>,
    /// The call of the program that it is part of: for messages, and for comparing ranks.
    pub caller: Option<Arc<Caller>>,
}

impl Call {
    /// A call whose caller has no name, unless its [`Group`](super::Group) knows one.
    pub fn new(op: Op, input: Option<Buffer>, output: Option<Buffer>) -> Call {
        Call { op, input, output, caller: None }
    }

    /// Checks everything that one rank alone can check, for a group of `size` ranks in which this one is `rank`.
    pub fn check(&self, rank: usize, size: usize) -> Result<(), CallError> {
        let (has_input, has_output) = self.op.buffers(self.input.is_some());
        for (which, buffer, wanted) in [("input", &self.input, has_input), ("output", &self.output, has_output)] {
            if buffer.is_some() != wanted {
                return Err(CallError::Buffers { which, wanted });
            }
        }
        if let (Some(input), Some(output)) = (&self.input, &self.output)
            && input.dtype() != output.dtype()
        {
            return Err(CallError::DTypes { input: input.dtype(), output: output.dtype() });
        }
        let (input, output) = (count(&self.input), count(&self.output));
        match &self.op {
            Op::AllReduce(_) if self.input.is_some() && input != output => {
                return Err(CallError::Count { which: "input", count: input, wanted: output });
            }
            Op::AllReduce(_) | Op::Barrier => {}
            Op::ReduceScatter(_) => parts("input", input, "output", output, size)?,
            Op::AllGather => parts("output", output, "input", input, size)?,
            Op::Broadcast { root } => member("root", *root, size)?,
            Op::AllToAll { send_counts, recv_counts } => {
                count_list("send_counts", send_counts, "input", input, size)?;
                count_list("recv_counts", recv_counts, "output", output, size)?;
                let (sent, received) = (send_counts[rank], recv_counts[rank]);
                if sent != received {
                    return Err(CallError::OwnCounts { rank, sent, received });
                }
            }
            Op::Send { to: peer, .. } | Op::Recv { from: peer, .. } => {
                member("peer", *peer, size)?;
                if *peer == rank {
                    return Err(CallError::OwnMessage { rank });
                }
            }
        }
        if self.output.as_ref().is_none_or(Buffer::is_unique) { Ok(()) } else { Err(CallError::OutputShared) }
    }

    /// A description of the call, for messages and for comparing ranks. `world_ranks` are the group's.
    pub fn info(&self, world_ranks: &[usize]) -> OpInfo {
        let world = |rank: usize| world_ranks.get(rank).copied().unwrap_or(rank);
        let (peer, signature) = match self.op {
            Op::Broadcast { root } => (Some(Peer::Root(world(root))), None),
            Op::Send { to, signature } => (Some(Peer::To(world(to))), Some(signature)),
            Op::Recv { from, signature } => (Some(Peer::From(world(from))), Some(signature)),
            _ => (None, None),
        };
        let reduce = if let Op::AllReduce(reduce) | Op::ReduceScatter(reduce) = self.op { Some(reduce) } else { None };
        let dtype = self.input.as_ref().or(self.output.as_ref()).map(Buffer::dtype);
        let (kind, elements) = (self.op.kind(), self.elements());
        OpInfo { kind, reduce, dtype, elements, peer, signature, caller: self.caller.clone() }
    }

    /// The same call without elements, for a group of `size` ranks. Sender and receiver of a message compare its length
    /// with the rest.
    pub fn without_elements(&self, size: usize) -> Call {
        let none = |buffer: &Option<Buffer>| buffer.as_ref().map(|buffer| Buffer::zeros(buffer.dtype(), 0));
        let signed = |signature: u64| {
            let length = self.input.as_ref().or(self.output.as_ref()).map_or(0, Buffer::bytes);
            combine(signature, length as u64)
        };
        let zeros = || vec![0; size];
        let op = match self.op.clone() {
            Op::AllToAll { .. } => Op::AllToAll { send_counts: zeros(), recv_counts: zeros() },
            Op::Send { to, signature } => Op::Send { to, signature: signed(signature) },
            Op::Recv { from, signature } => Op::Recv { from, signature: signed(signature) },
            op => op,
        };
        Call { op, input: none(&self.input), output: none(&self.output), caller: self.caller.clone() }
    }

    /// Elements of the full buffer: the larger of input and output; for an all-to-all, the elements that are sent.
    pub fn elements(&self) -> usize {
        match self.op {
            Op::AllToAll { .. } => count(&self.input),
            _ => count(&self.input).max(count(&self.output)),
        }
    }
}

fn count(buffer: &Option<Buffer>) -> usize {
    buffer.as_ref().map_or(0, Buffer::count)
}

fn member(what: &'static str, rank: usize, size: usize) -> Result<(), CallError> {
    if rank < size { Ok(()) } else { Err(CallError::NoSuchRank { what, rank, size }) }
}

fn parts(
    full: &'static str,
    full_count: usize,
    part: &'static str,
    part_count: usize,
    size: usize,
) -> Result<(), CallError> {
    if !full_count.is_multiple_of(size) {
        return Err(CallError::Indivisible { which: full, count: full_count, size });
    }
    match full_count / size {
        wanted if wanted == part_count => Ok(()),
        wanted => Err(CallError::Count { which: part, count: part_count, wanted }),
    }
}

fn count_list(
    what: &'static str,
    counts: &[usize],
    which: &'static str,
    count: usize,
    size: usize,
) -> Result<(), CallError> {
    if counts.len() != size {
        return Err(CallError::CountList { what, len: counts.len(), size });
    }
    // Saturating: a sum that overflows cannot equal the count of a buffer that exists.
    let wanted = counts.iter().fold(0usize, |sum, &c| sum.saturating_add(c));
    if count == wanted { Ok(()) } else { Err(CallError::Count { which, count, wanted }) }
}

/// The other rank of an operation, by world rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Peer {
    /// The rank whose elements are broadcast.
    Root(usize),
    /// The receiver.
    To(usize),
    /// The sender.
    From(usize),
}

/// A short description of an operation: for messages, and for comparing ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpInfo {
    /// Which operation.
    pub kind: OpKind,
    /// How elements are reduced, if they are.
    pub reduce: Option<ReduceOp>,
    /// Element type, if there are elements.
    pub dtype: Option<DType>,
    /// Elements of the full buffer.
    pub elements: usize,
    /// The other rank, if there is one.
    pub peer: Option<Peer>,
    /// The fingerprint of a message.
    pub signature: Option<u64>,
    /// The call of the program that it is part of.
    pub caller: Option<Arc<Caller>>,
}

impl OpInfo {
    /// Whether two members are in the same operation, part of the same call. The parts of an all-to-all are compared
    /// one by one instead. A sender and a receiver name each other by being there; where steps overlap, they may be in
    /// different calls.
    pub fn agrees(&self, other: &OpInfo) -> bool {
        let message = |of: &OpInfo| (of.dtype, of.elements, of.signature);
        match (self.kind, other.kind) {
            (OpKind::Send, OpKind::Recv) | (OpKind::Recv, OpKind::Send) => message(self) == message(other),
            (OpKind::AllToAll, OpKind::AllToAll) => self.is_part_of(other) && self.dtype == other.dtype,
            _ => {
                let all = |of: &OpInfo| (of.kind, of.reduce, of.peer, message(of));
                self.is_part_of(other) && all(self) == all(other)
            }
        }
    }

    /// Whether it is part of the call that `other` is part of.
    pub fn is_part_of(&self, other: &OpInfo) -> bool {
        let name = |of: &OpInfo| of.caller.as_ref().map(|caller| caller.name.clone());
        name(self) == name(other)
    }
}

impl fmt::Display for OpInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.kind)?;
        let mut separator = "";
        if let Some(dtype) = self.dtype {
            write!(f, "{dtype}, {}", self.elements)?;
            separator = ", ";
        }
        // A sum is the common case, and goes without saying.
        if let Some(reduce) = self.reduce.filter(|&reduce| reduce != ReduceOp::Sum) {
            write!(f, "{separator}{}", reduce.name())?;
        }
        match self.peer {
            Some(Peer::Root(rank)) => write!(f, "{separator}root {rank}")?,
            Some(Peer::To(rank)) => write!(f, "{separator}to {rank}")?,
            Some(Peer::From(rank)) => write!(f, "{separator}from {rank}")?,
            None => {}
        }
        if let Some(signature) = self.signature {
            write!(f, "{separator}signature {signature:#x}")?;
        }
        f.write_str(")")?;
        self.caller.as_ref().map_or(Ok(()), |caller| write!(f, " of {caller}"))
    }
}
