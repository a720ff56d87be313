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

#[cfg(test)]
mod tests {
    use super::*;

    /// The error states the purpose of the memory and its current holders, and a failed allocation is not counted.
    #[test]
    fn memory_that_the_system_lacks_is_an_error_that_says_what_holds_it() {
        let (arena, meter) = (Arc::new(Arena::default()), Arc::<Meter>::default());
        let _held = memory(&arena, &meter, 4096, false).unwrap();
        let error = memory(&arena, &meter, usize::MAX / 4, false).unwrap_err();
        assert!(matches!(&error, Error::OutOfMemory { bytes, .. } if *bytes == (usize::MAX / 4) as u64), "{error}");
        assert!(error.to_string().contains("device cpu: the system has no memory for it"), "{error}");
        assert!(error.to_string().contains("this rank's buffers hold other 4.0 KiB"), "{error}");
        assert_eq!(meter.live_bytes(), 4096);
    }

    #[test]
    fn a_dead_block_is_handed_out_again_and_zeroed_when_asked() {
        let (arena, meter) = (Arc::new(Arena::default()), Arc::<Meter>::default());
        let mut first = memory(&arena, &meter, 1000, false).unwrap();
        first.memory.as_mut_slice().fill(7);
        assert_eq!(meter.live_bytes(), 1000);
        drop(first);
        assert_eq!((meter.live_bytes(), meter.peak_bytes()), (0, 1000));
        let second = memory(&arena, &meter, 900, true).unwrap();
        assert_eq!(arena.system_allocations(), 1);
        assert!(second.memory.as_slice().iter().all(|&byte| byte == 0));
        // A request that is too small does not take the large block.
        drop(second);
        let _small = memory(&arena, &meter, 64, false).unwrap();
        assert_eq!(arena.system_allocations(), 2);
    }
}
