//! A caching arena: blocks of dead buffers are reused for buffers of about the same size.

use super::prelude::*;
use meshwork_core::{Block, HostMemory, Memory, Recycle};
use meshwork_tensor::device::Meter;
use meshwork_tensor::memory::Category;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Free blocks by size.
#[derive(Debug, Default)]
pub(super) struct Arena {
    free: Mutex<BTreeMap<usize, Vec<Block>>>,
    system_allocations: AtomicU64,
}

impl Arena {
    pub(super) fn system_allocations(&self) -> u64 {
        self.system_allocations.load(Ordering::Relaxed)
    }

    /// A block of at least `bytes`, and whether it is known to be zero. `None` if the system has no memory, even after
    /// all free blocks of other sizes were returned to it. Takes the smallest free block that fits and is at most a
    /// quarter too large; larger ones are left for larger requests.
    fn take(&self, bytes: usize) -> Option<(Block, bool)> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = free.range_mut(bytes..=bytes + bytes / 4 + 64).find_map(|(_, blocks)| blocks.pop());
        match fitting {
            Some(block) => Some((block, false)),
            None => {
                self.system_allocations.fetch_add(1, Ordering::Relaxed);
                let new = Block::try_zeroed(bytes).or_else(|| {
                    free.clear();
                    Block::try_zeroed(bytes)
                });
                Some((new?, true))
            }
        }
    }
}

impl Recycle for Arena {
    fn recycle(&self, block: Block) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry(block.bytes()).or_default().push(block);
    }
}

/// Memory of an arena. The device's meter counts its requested bytes as long as it lives.
#[derive(Debug)]
pub(super) struct Metered {
    memory: HostMemory,
    meter: Arc<Meter>,
    bytes: usize,
    category: Category,
}

/// Memory of at least `bytes` from the arena, zeroed if asked.
pub(super) fn memory(arena: &Arc<Arena>, meter: &Arc<Meter>, bytes: usize, zeroed: bool) -> Result<Metered> {
    let category = meter.grow(bytes)?;
    let Some((mut block, is_zero)) = arena.take(bytes) else {
        meter.shrink(bytes, category);
        let (device, held) = ("cpu".to_owned(), Box::new(meter.live()));
        let fault = "the system has no memory for it (a limit on this process, or on its control group)".into();
        return Err(Error::OutOfMemory { device, bytes: bytes as u64, category, fault, held });
    };
    if zeroed && !is_zero {
        block.as_mut_slice().fill(0);
    }
    Ok(Metered { memory: HostMemory::recycled(block, arena.clone()), meter: Arc::clone(meter), bytes, category })
}

impl Memory for Metered {
    fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    fn host(&self) -> Option<&HostMemory> {
        Some(&self.memory)
    }

    fn host_mut(&mut self) -> Option<&mut HostMemory> {
        Some(&mut self.memory)
    }
}

impl Drop for Metered {
    fn drop(&mut self) {
        self.meter.shrink(self.bytes, self.category);
    }
}
