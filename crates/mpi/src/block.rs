//! Memory of small messages, which is used again for others.

use std::fmt;
use std::ops::Deref;
use std::sync::{Mutex, PoisonError};

/// Bytes up to which a message carries its bytes with its head.
pub(crate) const EAGER: usize = 16 << 10;

/// The longest first message: a head, and bytes. Longer heads (a fault of thousands of ranks) are sent as bytes.
pub(crate) const ROOM: usize = EAGER + 4096;

/// Blocks that are kept for other messages.
const SPARE: usize = 32;

static FREE: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// The bytes of a message, in memory that goes back when they are dropped.
pub(crate) struct Block {
    /// Of [`ROOM`] bytes, or more.
    memory: Vec<u8>,
    used: usize,
}

impl Block {
    /// A block without bytes, which has room for so many.
    pub(crate) fn new(bytes: usize) -> Block {
        let free = || FREE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memory = if bytes <= ROOM { free() } else { None };
        Block { memory: memory.unwrap_or_else(|| vec![0; bytes.max(ROOM)]), used: 0 }
    }

    /// Adds bytes.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.memory[self.used..self.used + bytes.len()].copy_from_slice(bytes);
        self.used += bytes.len();
    }

    /// All of its memory, of which the first `used` bytes are its own when it has been written.
    pub(crate) fn memory(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    /// It has these bytes of its memory: the first ones.
    pub(crate) fn fill(&mut self, used: usize) {
        self.used = used.min(self.memory.len());
    }

    /// Its bytes, as memory of their own.
    pub(crate) fn into_vec(mut self) -> Vec<u8> {
        let mut memory = std::mem::take(&mut self.memory);
        memory.truncate(self.used);
        memory
    }
}

impl From<&[u8]> for Block {
    fn from(bytes: &[u8]) -> Block {
        let mut block = Block::new(bytes.len());
        block.push(bytes);
        block
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.used]
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.memory.len() == ROOM {
            let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
            if free.len() < SPARE {
                free.push(std::mem::take(&mut self.memory));
            }
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.used)
    }
}
