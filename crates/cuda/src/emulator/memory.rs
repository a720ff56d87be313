//! The emulated memory of devices: host memory that has a device, and fences at its ends.

use crate::driver::{Address, DriverError, Result};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::{BTreeMap, HashSet};

/// Guard bytes on both sides of an allocation.
const FENCE: usize = 256;
const FENCE_BYTE: u8 = 0xa5;

/// The bytes of memory that was not written, or whose owner is gone: NaN as a float, -1 as an integer.
const POISON: u8 = 0xff;

/// The number that stands for the host, whose pinned memory is no device's.
pub(super) const HOST: usize = usize::MAX;

/// All allocations of all devices, and pinned ones, by the address of their first byte.
#[derive(Debug)]
pub(super) struct Memory {
    blocks: BTreeMap<u64, Block>,
    /// Allocated bytes per device.
    held: Vec<u64>,
    /// Pairs of devices of which the first has access to the memory of the second.
    open: HashSet<(usize, usize)>,
}

/// One allocation and its fences.
#[derive(Debug)]
struct Block {
    start: *mut u8,
    bytes: usize,
    device: usize,
}

// SAFETY: a block owns its memory, and only running kernels also have the pointer, under the lock of the emulator.
unsafe impl Send for Block {}

impl Block {
    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes.checked_add(2 * FENCE)?, FENCE).ok()
    }

    fn new(bytes: usize, device: usize) -> Option<Self> {
        let layout = Self::layout(bytes)?;
        // SAFETY: the size is not zero. All of it is written before it can be read.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return None;
        }
        // SAFETY: as many bytes as were just allocated.
        unsafe {
            start.write_bytes(FENCE_BYTE, layout.size());
            start.add(FENCE).write_bytes(POISON, bytes);
        }
        Some(Self { start, bytes, device })
    }

    fn address(&self) -> u64 {
        self.start as u64 + FENCE as u64
    }

    fn part(&self, from: usize, count: usize) -> &[u8] {
        assert!(from + count <= self.bytes + 2 * FENCE);
        // SAFETY: within the allocation, all of whose bytes are written; no kernel runs meanwhile, because it has
        // `&mut Memory`.
        unsafe { std::slice::from_raw_parts(self.start.add(from), count) }
    }

    fn part_mut(&mut self, from: usize, count: usize) -> &mut [u8] {
        assert!(from + count <= self.bytes + 2 * FENCE);
        // SAFETY: as in `part`, and this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), count) }
    }

    /// Whether the fences are unchanged.
    fn is_whole(&self) -> bool {
        let fences = self.part(0, FENCE).iter().chain(self.part(FENCE + self.bytes, FENCE));
        fences.into_iter().all(|&byte| byte == FENCE_BYTE)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.bytes) {
            // SAFETY: allocated with this layout in `new`, and dropped once.
            unsafe { dealloc(self.start, layout) }
        }
    }
}

impl Memory {
    /// Memory of `devices` devices, with nothing allocated.
    pub(super) fn new(devices: usize) -> Self {
        Self { blocks: BTreeMap::new(), held: vec![0; devices], open: HashSet::new() }
    }

    /// Bytes of all allocations of a device.
    pub(super) fn held(&self, device: usize) -> u64 {
        self.held[device]
    }

    /// Lets work of device `by` use the memory of `of`.
    pub(super) fn open(&mut self, by: usize, of: usize) {
        self.open.insert((by, of));
    }

    /// Memory of `bytes` bytes, poisoned; with at most `limit` bytes per device in total.
    pub(super) fn alloc(&mut self, device: usize, bytes: usize, limit: u64) -> Result<Address> {
        let full = DriverError::OutOfMemory { bytes, held: self.held[device], memory: limit };
        if self.held[device].saturating_add(bytes as u64) > limit {
            return Err(full);
        }
        let block = Block::new(bytes, device).ok_or(full)?;
        let at = block.address();
        self.held[device] += bytes as u64;
        self.blocks.insert(at, block);
        Ok(Address(at))
    }

    /// Pinned memory of the host, all zero.
    pub(super) fn alloc_host(&mut self, bytes: usize) -> Result<Address> {
        let mut block = Block::new(bytes, HOST)
            .ok_or_else(|| DriverError::Call { call: "alloc_host", why: format!("no {bytes} bytes") })?;
        block.part_mut(FENCE, bytes).fill(0);
        let at = block.address();
        self.blocks.insert(at, block);
        Ok(Address(at))
    }

    /// Frees an allocation of a device or of the host. Its fences must be unchanged.
    pub(super) fn free(&mut self, device: usize, at: Address) -> Result<()> {
        self.check(device, at, "free")?;
        match self.blocks.remove(&at.0) {
            Some(block) if block.device == HOST => {}
            Some(block) => self.held[block.device] -= block.bytes as u64,
            None => return Err(DriverError::Place { call: "free", at: at.0, bytes: 0 }),
        }
        Ok(())
    }

    /// The allocation that contains these bytes, checked for access by device `by`, and their offset in it.
    fn block(&self, by: usize, at: Address, bytes: usize, call: &'static str) -> Result<(&Block, usize)> {
        let found = self.blocks.range(..=at.0).next_back().map(|(start, block)| (block, (at.0 - start) as usize));
        let inside = |(block, from): &(&Block, usize)| from.checked_add(bytes).is_some_and(|end| end <= block.bytes);
        let (block, from) = found.filter(inside).ok_or(DriverError::Place { call, at: at.0, bytes })?;
        match block.device == by || self.open.contains(&(by, block.device)) {
            true => Ok((block, from)),
            false => Err(DriverError::NoAccess { call, by, of: block.device, at: at.0 }),
        }
    }

    /// The bytes from an address on.
    pub(super) fn read(&self, by: usize, at: Address, bytes: usize, call: &'static str) -> Result<&[u8]> {
        let (block, from) = self.block(by, at, bytes, call)?;
        Ok(block.part(FENCE + from, bytes))
    }

    /// The same, for writing.
    pub(super) fn write(&mut self, by: usize, at: Address, bytes: usize, call: &'static str) -> Result<&mut [u8]> {
        self.block(by, at, bytes, call)?;
        let found = self.blocks.range_mut(..=at.0).next_back();
        let (start, block) = found.ok_or(DriverError::Place { call, at: at.0, bytes })?;
        Ok(block.part_mut(FENCE + (at.0 - start) as usize, bytes))
    }

    /// Fills bytes with NaN.
    pub(super) fn poison(&mut self, by: usize, at: Address, bytes: usize) -> Result<()> {
        self.write(by, at, bytes, "discard")?.fill(POISON);
        Ok(())
    }

    /// Checks that an address lies in an allocation to which device `by` has access, with unchanged fences.
    pub(super) fn check(&self, by: usize, at: Address, call: &'static str) -> Result<()> {
        let (block, _) = self.block(by, at, 0, call)?;
        match block.is_whole() {
            true => Ok(()),
            false => Err(DriverError::Beyond { call, at: block.address(), bytes: block.bytes }),
        }
    }
}
