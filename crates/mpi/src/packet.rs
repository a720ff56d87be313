//! What ranks of one world tell each other: the head of every message, and where its bytes are.

use std::ops::Deref;
use std::sync::Arc;

use meshwork_core::Buffer;
use meshwork_core::comm::{Activity, Ended, Fault, FaultKind, RankReport, Site};
use serde::{Deserialize, Serialize};

use crate::block::Block;
use crate::ground::Claim;
use crate::lookout::Ring;

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

/// What a message is, but for those of operations.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum What {
    /// The part that a rank named in a split, by the hash of its name and world ranks.
    Split { parent: u64, seq: u64, part: u64 },
    /// That part itself: to a rank that named another one.
    Named { parent: u64, seq: u64, name: String, ranks: Vec<usize> },
    /// To the rank that judges, rank 0.
    Tell(Tell),
    /// From the rank that judges.
    Judge(Judge),
}

/// The head of a message of an operation: bytes of a unit follow. It is written in words at fixed places, because every
/// call of a rank writes and reads some.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) world: u64,
    /// World ranks.
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) key: Key,
    pub(crate) unit: usize,
    /// The first message of each member to another one says what it does.
    pub(crate) says: Option<Says>,
}

/// What a member of an operation does.
#[derive(Clone, Debug)]
pub(crate) struct Says {
    /// Members whose operations agree have equal ones.
    pub(crate) hash: u64,
    /// The elements that it expects of the receiver, where each pair has a number of its own.
    pub(crate) expects: Option<usize>,
    /// The operation, for messages: an [`OpInfo`](meshwork_core::comm::OpInfo) as postcard writes it.
    pub(crate) op: Arc<[u8]>,
}

/// A word that stands for nothing.
const NONE: u64 = u64::MAX;

/// Bytes of the words of a [`Part`].
pub(crate) const WORDS: usize = 80;

impl Part {
    /// Its bytes when it is written.
    pub(crate) fn len(&self) -> usize {
        WORDS + self.says.as_ref().map_or(0, |says| says.op.len())
    }

    /// Writes the head. Bytes that do not follow it wait at the sender, under this tag.
    pub(crate) fn write(&self, far: Option<(usize, usize, usize)>, block: &mut Block) {
        let two = |low: usize, high: usize| low as u64 | (high as u64) << 32;
        let says = self.says.as_ref();
        let words: [u64; WORDS / 8] = [
            self.world,
            self.key.group,
            self.key.seq,
            two(self.from, self.to),
            self.key.message.map_or(NONE, |(from, to)| two(from, to)),
            two(self.unit, says.map_or(u32::MAX as usize, |says| says.op.len())),
            says.map_or(0, |says| says.hash),
            says.and_then(|says| says.expects).map_or(NONE, |expects| expects as u64),
            far.map_or(NONE, |(process, tag, _)| two(process, tag)),
            far.map_or(0, |(.., bytes)| bytes as u64),
        ];
        words.iter().for_each(|word| block.push(&word.to_le_bytes()));
        block.push(says.map_or(&[], |says| &says.op));
    }

    /// Reads what [`write`](Self::write) wrote from the beginning of a message, whose bytes follow.
    pub(crate) fn read(memory: Block, at: usize) -> Option<(Part, Body)> {
        let word = |number: usize| Some(u64::from_le_bytes(*memory.get(at + 8 * number..)?.first_chunk()?));
        let two = |number: usize| word(number).map(|word| (word as u32 as usize, (word >> 32) as usize));
        let some = |word: u64| (word != NONE).then_some(word);
        let ((from, to), (unit, length)) = (two(3)?, two(5)?);
        let mut body = at + WORDS;
        let says = match length == u32::MAX as usize {
            true => None,
            false => {
                let op = memory.get(body..body + length)?.into();
                body += length;
                Some(Says { hash: word(6)?, expects: some(word(7)?).map(|expects| expects as usize), op })
            }
        };
        let message = some(word(4)?).and_then(|_| two(4));
        let key = Key { group: word(1)?, message, seq: word(2)? };
        let part = Part { world: word(0)?, from, to, key, unit, says };
        let far = some(word(8)?).and_then(|_| two(8));
        let bytes = word(9)? as usize;
        Some(match far {
            Some((process, tag)) => (part, Body::Far { process, tag, bytes }),
            None => (part, Body::Here(memory, body)),
        })
    }
}

/// What a rank tells the one that judges.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Tell {
    /// It found a fault.
    Found { kind: FaultKind, site: Option<Site> },
    /// It has waited for some time, in the wait of this number, for these ranks.
    Waits { number: u64, since_millis: u64, key: Key, site: Site, lacks: Vec<usize> },
    /// It has waited for some time, in the wait of this number, for its device, in whose work all ranks take part.
    Attends { number: u64, site: Site },
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
    Here(Block, usize),
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

/// Memory that a message uses. When the message lets go of it, the bell of its rank rings.
#[derive(Debug)]
pub(crate) struct Used<T> {
    memory: Arc<T>,
    _ring: Ring, // dropped after the memory
}

impl<T> Used<T> {
    pub(crate) fn new(memory: Arc<T>, ring: &Ring) -> Used<T> {
        Used { memory, _ring: ring.clone() }
    }
}

impl<T> Clone for Used<T> {
    fn clone(&self) -> Used<T> {
        Used::new(self.memory.clone(), &self._ring)
    }
}

impl<T> Deref for Used<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.memory
    }
}

/// Bytes that a message reads, and that stay as they are until it is over.
#[derive(Clone, Debug)]
pub(crate) enum Bytes {
    /// No bytes.
    None,
    /// Of a part of the output.
    Claim(Used<Claim>),
    /// Of a part of the input, which others may read too.
    Input(Used<Buffer>, usize, usize),
}

impl Bytes {
    /// These bytes.
    pub(crate) fn of(memory: Vec<u8>) -> Bytes {
        let bytes = memory.len();
        Bytes::Input(Used::new(Arc::new(Buffer::from_vec(memory)), &Ring::default()), 0, bytes)
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
    /// A message of an operation.
    Part(Part, Body),
    /// Any other message.
    Told(Box<Head>),
    /// The bytes of a message are in the memory that was given for them, under this number.
    Landed(u64, Claim),
    /// The library failed in the sum of this number, and why.
    Failed(u64, String),
    /// A process is lost, and why.
    Lost(usize, String),
}
