//! Pinned host memory: only from there does a copy run beside the host's work. Bytes of the host go to and from a GPU
//! by way of it, and offloaded memory is in it.

use super::libraries::failed;
use crate::driver::{Address, Result};
use cudarc::driver::result::{event, free_host, malloc_host};
use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_PORTABLE, CUevent, CUevent_flags, CUstream, cuMemcpyDtoHAsync_v2, cuMemcpyHtoDAsync_v2,
};
use std::collections::VecDeque;
use std::ffi::c_void;

/// Bytes of a slot.
pub(super) const SLOT: usize = 4 << 20;

/// Slots of a GPU. A thread that finds all of them taken gets one more. If all are in flight, the next copy waits for
/// the first.
const SLOTS: usize = 8;

/// Pinned memory of [`SLOT`] bytes, and the event after its last copy.
#[derive(Debug)]
pub(super) struct Slot {
    at: *mut u8,
    pub(super) done: CUevent,
}

/// Slots, the longest in use first.
#[derive(Debug, Default)]
pub(super) struct Staging {
    slots: VecDeque<Slot>,
    made: usize,
}

/// Pinned memory, all zero, usable in every context. A context must be current.
pub(super) fn allocate(bytes: usize) -> Result<*mut u8> {
    // SAFETY: the caller frees the memory.
    let at = unsafe { malloc_host(bytes, CU_MEMHOSTALLOC_PORTABLE) }.map_err(failed("cuMemHostAlloc"))?.cast::<u8>();
    // SAFETY: as many bytes as were just allocated.
    unsafe { at.write_bytes(0, bytes) };
    Ok(at)
}

/// Copies between pinned memory of [`allocate`] and a GPU; the caller guarantees all addresses.
pub(super) fn save(queue: CUstream, from: Address, to: Address, bytes: usize) -> Result<()> {
    // SAFETY: there are no references to pinned memory: only queued copies use it, and it is freed when none is queued.
    let queued = unsafe { cuMemcpyDtoHAsync_v2(to.0 as *mut c_void, from.0, bytes, queue) };
    queued.result().map_err(failed("cuMemcpyDtoHAsync"))
}

/// The same in the other direction.
pub(super) fn load(queue: CUstream, from: Address, to: Address, bytes: usize) -> Result<()> {
    // SAFETY: as in `save`.
    let queued = unsafe { cuMemcpyHtoDAsync_v2(to.0, from.0 as *const c_void, bytes, queue) };
    queued.result().map_err(failed("cuMemcpyHtoDAsync"))
}

/// Frees memory of [`allocate`]. Its context must be current, and no copy in flight.
pub(super) fn free(at: Address) -> Result<()> {
    // SAFETY: the driver refuses an address that it did not give out.
    unsafe { free_host(at.0 as *mut c_void) }.map_err(failed("cuMemFreeHost"))
}

impl Slot {
    /// Its first `count` bytes, at most [`SLOT`].
    pub(super) fn bytes(&mut self, count: usize) -> &mut [u8] {
        assert!(count <= SLOT);
        // SAFETY: within the allocation, which was zeroed; the slot has a single owner, who has waited for its last
        // copy.
        unsafe { std::slice::from_raw_parts_mut(self.at, count) }
    }
}

impl Staging {
    /// A slot, whose last copy may be in flight until its event. The context must be current.
    pub(super) fn take(&mut self) -> Result<Slot> {
        // SAFETY: the event lives as long as the slot.
        let idle = |slot: &Slot| unsafe { event::query(slot.done) }.is_ok();
        if let Some(slot) = self.slots.pop_front_if(|slot| self.made >= SLOTS || idle(slot)) {
            return Ok(slot);
        }
        let done = event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(failed("cuEventCreate"))?;
        let at = allocate(SLOT)?;
        self.made += 1;
        Ok(Slot { at, done })
    }

    /// Takes a slot back; its copy may be in flight until its event.
    pub(super) fn give_back(&mut self, slot: Slot) {
        self.slots.push_back(slot);
    }

    /// Frees all slots. The context must be current, and no copy in flight.
    pub(super) fn drop_all(&mut self) {
        for slot in self.slots.drain(..) {
            // SAFETY: created in `take`, and no longer used: the slots are removed from the list.
            unsafe {
                _ = event::destroy(slot.done);
                _ = free_host(slot.at.cast());
            }
        }
    }
}
