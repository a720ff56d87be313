//! Memory of elements: host bytes that an arena can take back, or anything else that has a size.

use crate::comm::device::DevicePlace;
use memmap2::MmapMut;
use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex, PoisonError};

/// The memory of elements: host memory, a device allocation, or only a size.
pub trait Memory: Send + Sync + Debug + Any {
    /// Size in bytes.
    fn bytes(&self) -> usize;

    /// The bytes, when the host can reach them; by default it cannot.
    fn host(&self) -> Option<&HostMemory> {
        None
    }

    /// The bytes for writing, when the host can reach them.
    fn host_mut(&mut self) -> Option<&mut HostMemory> {
        None
    }

    /// Where it lies on a device whose memory ranks of one process can exchange
    /// ([`comm::device`](crate::comm::device)). By default nowhere: collectives refuse such memory unless the host can
    /// reach it.
    fn on_device(&self) -> Option<DevicePlace> {
        None
    }
}

/// One cache line: the unit of allocation, which gives every block its alignment.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Blocks of at least this many bytes are mapped by themselves, in huge pages if the system has them. It is the size of
/// a huge page on x86-64 and most others.
const HUGE: usize = 2 << 20;

/// Whether every block is an allocation of its own, so that a sanitizer sees where it begins and ends.
const PLAIN: bool = cfg!(any(plain_blocks, miri));

/// Smaller blocks of at least this many bytes, a page, are parts of a slab.
const PAGE: usize = 4 << 10;

/// Bytes of a slab: many huge pages, so that little is wasted when the next part does not fit.
const SLAB: usize = 32 << 20;

/// Owned, 64-byte aligned bytes; their number is a multiple of 64.
///
/// Blocks request huge pages: large ones have their own, smaller ones share them. This gives one page fault instead of
/// 512, no TLB misses in a product that reads along columns, and no page boundaries at which prefetching stops (3% of a
/// step in which most tensors have a megabyte).
pub struct Block(Bytes);

enum Bytes {
    Lines(Vec<Line>),
    /// A mapping, and how much of it is used.
    Pages(MmapMut, usize),
    SlabPart(SlabPart),
}

/// A part of a slab, which returns to the free parts of the process when it is dropped. Slabs stay mapped as long as
/// the process lives, as the system allocator's blocks do.
struct SlabPart(&'static mut [u8]);

/// The slabs of the process.
static SLABS: Mutex<Slabs> = Mutex::new(Slabs { rest: &mut [], free: BTreeMap::new() });

struct Slabs {
    /// The unused rest of the newest slab.
    rest: &'static mut [u8],
    /// Parts that were dropped, by size.
    free: BTreeMap<usize, Vec<&'static mut [u8]>>,
}

impl Slabs {
    /// A part of exactly `bytes` bytes, a multiple of 64, all zero; `None` if the system has no memory to map.
    fn take(&mut self, bytes: usize) -> Option<SlabPart> {
        if let Some(part) = self.free.get_mut(&bytes).and_then(Vec::pop) {
            part.fill(0);
            return Some(SlabPart(part));
        }
        // Parts are one cache line apart, because blocks of a power of two would otherwise all map to the same cache
        // sets.
        let apart = bytes + size_of::<Line>();
        if self.rest.len() < apart {
            let slab = MmapMut::map_anon(SLAB).ok()?;
            #[cfg(target_os = "linux")]
            let _ = slab.advise(memmap2::Advice::HugePage);
            self.rest = &mut **Box::leak(Box::new(slab));
        }
        let (part, rest) = std::mem::take(&mut self.rest).split_at_mut(apart);
        self.rest = rest;
        Some(SlabPart(&mut part[..bytes]))
    }
}

impl Drop for SlabPart {
    fn drop(&mut self) {
        let part = std::mem::take(&mut self.0);
        SLABS.lock().unwrap_or_else(PoisonError::into_inner).free.entry(part.len()).or_default().push(part);
    }
}

impl Block {
    /// At least `bytes` bytes, all zero. Large blocks come from the system already zeroed, so this touches nothing.
    ///
    /// # Panics
    /// If the system has no memory. [`try_zeroed`](Self::try_zeroed) says so.
    pub fn zeroed(bytes: usize) -> Block {
        Block::try_zeroed(bytes).unwrap_or_else(|| panic!("the system has no memory for {bytes} bytes more"))
    }

    /// As [`zeroed`](Self::zeroed); `None` if the system has no memory: a limit on the process or on its address space.
    pub fn try_zeroed(bytes: usize) -> Option<Block> {
        let lines = bytes.div_ceil(64);
        let plain = || bytemuck::allocation::try_zeroed_vec(lines).ok().map(|lines| Block(Bytes::Lines(lines)));
        if PLAIN {
            return plain();
        }
        if bytes >= HUGE
            // Whole huge pages are mapped where a huge page begins.
            && let Some(whole) = lines.checked_mul(64).and_then(|bytes| bytes.checked_next_multiple_of(HUGE))
            && let Ok(pages) = MmapMut::map_anon(whole)
        {
            // The end uses small pages, so that its unused part costs nothing. A system without huge pages, or
            // with huge pages turned off, gives small ones.
            #[cfg(target_os = "linux")]
            let _ = pages.advise_range(memmap2::Advice::HugePage, 0, lines * 64 / HUGE * HUGE);
            return Some(Block(Bytes::Pages(pages, lines * 64)));
        }
        if (PAGE..HUGE).contains(&bytes)
            && let Some(part) = SLABS.lock().unwrap_or_else(PoisonError::into_inner).take(lines * 64)
        {
            return Some(Block(Bytes::SlabPart(part)));
        }
        plain()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.as_slice().len()
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match &self.0 {
            Bytes::Lines(lines) => bytemuck::cast_slice(lines),
            Bytes::Pages(pages, used) => &pages[..*used],
            Bytes::SlabPart(SlabPart(bytes)) => bytes,
        }
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match &mut self.0 {
            Bytes::Lines(lines) => bytemuck::cast_slice_mut(lines),
            Bytes::Pages(pages, used) => &mut pages[..*used],
            Bytes::SlabPart(SlabPart(bytes)) => bytes,
        }
    }
}

impl Default for Block {
    /// No bytes.
    fn default() -> Block {
        Block(Bytes::Lines(Vec::new()))
    }
}

impl Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} bytes)", self.bytes())
    }
}

/// Takes blocks back when the memory made of them is dropped: a caching arena.
pub trait Recycle: Send + Sync + Debug {
    /// Takes back a block, which has whatever was last written to it. Must not panic, because it runs in `drop`.
    fn recycle(&self, block: Block);
}

/// Host bytes, 64-byte aligned and always initialised.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use meshwork_core::{Block, Buffer, DType, HostMemory, Recycle};
///
/// #[derive(Debug, Default)]
/// struct Arena(Mutex<Vec<Block>>);
/// impl Recycle for Arena {
///     fn recycle(&self, block: Block) {
///         self.0.lock().unwrap().push(block);
///     }
/// }
///
/// let arena = Arc::new(Arena::default());
/// let memory = HostMemory::recycled(Block::zeroed(256), arena.clone());
/// let buffer = Buffer::from_memory(Arc::new(memory), DType::F32, 64)?;
/// drop(buffer);
/// assert_eq!(arena.0.lock().unwrap().len(), 1); // ready to be handed out again
/// # Ok::<(), meshwork_core::BufferError>(())
/// ```
#[derive(Debug)]
pub struct HostMemory {
    block: Block,
    recycler: Option<Arc<dyn Recycle>>,
}

impl HostMemory {
    /// At least `bytes` bytes, all zero.
    pub fn zeroed(bytes: usize) -> HostMemory {
        HostMemory::from(Block::zeroed(bytes))
    }

    /// Memory whose block goes to `recycler` when it is dropped.
    pub fn recycled(block: Block, recycler: Arc<dyn Recycle>) -> HostMemory {
        HostMemory { block, recycler: Some(recycler) }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.block.as_slice()
    }

    /// The bytes, for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.block.as_mut_slice()
    }

    /// Exchanges blocks with memory of the same size; false if the sizes differ. A block goes back to the recycler of
    /// the memory that it is in at the end, so that each recycler gets back as much as it gave.
    pub fn trade(&mut self, other: &mut HostMemory) -> bool {
        let alike = self.block.bytes() == other.block.bytes();
        if alike {
            std::mem::swap(&mut self.block, &mut other.block);
        }
        alike
    }
}

impl From<Block> for HostMemory {
    fn from(block: Block) -> HostMemory {
        HostMemory { block, recycler: None }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if let Some(recycler) = self.recycler.take() {
            recycler.recycle(std::mem::take(&mut self.block));
        }
    }
}

impl Memory for HostMemory {
    fn bytes(&self) -> usize {
        self.block.bytes()
    }

    fn host(&self) -> Option<&HostMemory> {
        Some(self)
    }

    fn host_mut(&mut self) -> Option<&mut HostMemory> {
        Some(self)
    }
}
