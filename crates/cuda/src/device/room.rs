//! The pinned memory of a rank as one room of bytes.

use super::prelude::*;
use crate::driver::{DriverError, Result};
use std::sync::MutexGuard;

/// Blocks of pinned memory, one behind the other. Room that grows gets one more.
#[derive(Debug, Default)]
pub(super) struct Room(Mutex<Vec<Block>>);

#[derive(Clone, Copy, Debug)]
struct Block {
    /// The byte of the room that it begins with.
    first: u64,
    bytes: u64,
    at: Address,
}

impl Room {
    fn blocks(&self) -> MutexGuard<'_, Vec<Block>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for `bytes` bytes in all, with a block that `alloc` gives.
    pub(super) fn reserve(&self, bytes: u64, alloc: impl FnOnce(usize) -> Result<Address>) -> Result<()> {
        let mut blocks = self.blocks();
        let first = blocks.last().map_or(0, |last| last.first + last.bytes);
        if bytes > first {
            let bytes = bytes - first;
            blocks.push(Block { first, bytes, at: alloc(bytes as usize)? });
        }
        Ok(())
    }

    /// The addresses of all blocks, when nobody needs them any more.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Address> + use<> {
        std::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner)).into_iter().map(|block| block.at)
    }

    /// Where `bytes` bytes of the room from `at` on lie: for each part its first byte, counted from 0, its address and
    /// length.
    pub(super) fn parts(&self, at: u64, bytes: usize) -> Result<Vec<(usize, Address, usize)>> {
        let (mut parts, end) = (Vec::new(), at + bytes as u64);
        for block in &*self.blocks() {
            let (from, to) = (at.max(block.first), end.min(block.first + block.bytes));
            if from < to {
                let address = block.at.offset((from - block.first) as usize);
                parts.push(((from - at) as usize, address, (to - from) as usize));
            }
        }
        let there: usize = parts.iter().map(|(_, _, bytes)| bytes).sum();
        if there < bytes {
            let why = format!("{bytes} bytes at {at} lie beyond the room that was reserved");
            return Err(DriverError::Call { call: "offload", why });
        }
        Ok(parts)
    }
}
