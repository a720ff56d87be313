//! What ranks of one world tell each other: the head of every message, and where its bytes are.

use std::sync::Arc;

use meshwork_core::Buffer;
use meshwork_core::comm::{Activity, Ended, Fault, FaultKind, OpInfo, RankReport, Site};
use serde::{Deserialize, Serialize};

use crate::ground::Claim;

/// An operation, as its members name it: each numbers the operations of a group in the order in which it starts them,
/// and messages for each sender and receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Key {
    pub(crate) group: u64,
    /// The world ranks of a message's sender and receiver.
    pub(crate) message: Option<(usize, usize)>,
    pub(crate) seq: u64,
}

/// The head of a message between two ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Head {
    pub(crate) world: u64,
    /// World ranks.
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) what: What,
}

/// What a message is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum What {
    /// Bytes of a unit of an operation. The first message of each member to another one says what it does.
    Part { key: Key, unit: u32, info: Option<Info> },
    /// The part that a rank named in a split, by the hash of its name and world ranks.
    Split { parent: u64, seq: u64, part: u64 },
    /// That part itself: to a rank that named another one.
    Named { parent: u64, seq: u64, name: String, ranks: Vec<usize> },
    /// To the rank that judges, rank 0.
    Tell(Tell),
    /// From the rank that judges.
    Judge(Judge),
}

/// What a member of an operation does.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Info {
    pub(crate) op: OpInfo,
    /// The elements that it expects of the receiver, where each pair has a number of its own.
    pub(crate) expects: Option<usize>,
}

/// What a rank tells the one that judges.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Tell {
    /// It found a fault.
    Found { kind: FaultKind, site: Option<Site> },
    /// It has waited for some time, in the wait of this number, for these ranks.
    Waits { number: u64, since_millis: u64, key: Key, site: Site, lacks: Vec<usize> },
    /// That wait is over.
    Goes { number: u64 },
    /// It has ended, and had come to this many forks.
    Ends { how: Activity, forks: u64 },
    /// It has come to the fork of this number.
    Forks { number: u64, name: String },
    /// It waits, and wants to know whether the judge is there.
    Asks,
    /// The answer to [`Judge::Ask`]: whether it has started the operation, and then whom that one lacks.
    Answer { asked: u64, posted: bool, lacks: Vec<usize>, waits: Option<u64>, ended: bool, beats: u64 },
    /// The answer to [`Judge::Report`].
    Report(RankReport),
    /// Another rank has ended, and cannot say so itself: its process is lost, or it never came to this world.
    Missing { rank: usize, how: Activity },
}

/// What the rank that judges tells the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Judge {
    /// It is there.
    Hears,
    /// Whether the rank has started this operation, and what it does now.
    Ask { asked: u64, key: Key },
    /// There is a fault: what the rank does now.
    Report,
    /// The world has stopped.
    Stopped(Arc<Fault>),
    /// All ranks have ended, or have had the time to: how. All of them ended well if it says nothing.
    Over(Option<Ended>),
}

/// The bytes of a message that has arrived.
#[derive(Debug)]
pub(crate) enum Body {
    /// They came with the head, in this memory from this offset on.
    Here(Vec<u8>, usize),
    /// They lie in memory of this process.
    Near(Bytes),
    /// They wait at another process, under this tag.
    Far { process: usize, tag: usize, bytes: usize },
}

impl Body {
    /// Their number.
    pub(crate) fn len(&self) -> usize {
        match self {
            Body::Here(memory, at) => memory.len() - at,
            Body::Near(bytes) => bytes.as_ref().len(),
            Body::Far { bytes, .. } => *bytes,
        }
    }

    /// Those that are here.
    pub(crate) fn bytes(&self) -> Option<&[u8]> {
        match self {
            Body::Here(memory, at) => Some(&memory[*at..]),
            Body::Near(bytes) => Some(bytes.as_ref()),
            Body::Far { .. } => None,
        }
    }
}

/// Bytes that a message reads, and that stay as they are until it is over.
#[derive(Clone, Debug)]
pub(crate) enum Bytes {
    /// No bytes.
    None,
    /// Of a part of the output.
    Claim(Arc<Claim>),
    /// Of a part of the input, which others may read too.
    Input(Arc<Buffer>, usize, usize),
}

impl Bytes {
    /// These bytes.
    pub(crate) fn of(memory: Vec<u8>) -> Bytes {
        let bytes = memory.len();
        Bytes::Input(Arc::new(Buffer::from_vec(memory)), 0, bytes)
    }
}

impl AsRef<[u8]> for Bytes {
    fn as_ref(&self) -> &[u8] {
        match self {
            Bytes::None => &[],
            Bytes::Claim(claim) => claim,
            // A buffer that is not on the host was refused when the operation started.
            Bytes::Input(buffer, start, end) => buffer.as_bytes().map_or(&[], |bytes| &bytes[*start..*end]),
        }
    }
}

/// What arrives at a rank.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// A message.
    Packet(Box<Head>, Body),
    /// The bytes of a message are in the memory that was given for them, under this number.
    Landed(u64, Claim),
    /// A process is lost, and why.
    Lost(usize, String),
}
