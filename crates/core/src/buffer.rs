//! Memory that collectives and kernels work on: typed, counted, shared.
//!
//! A [`Buffer`] is a window of elements on a [`Memory`]. Host memory is a [`HostMemory`]: 64-byte aligned bytes that
//! are always initialised, so that everything here is safe code. Other crates bring other kinds (device allocations,
//! or sizes without bytes) by implementing [`Memory`].
//!
//! Memory is written only while a single buffer refers to it ([`Buffer::is_unique`]). Any number of ranks may read
//! clones and slices, and the elements that they read do not change.

use crate::dtype::{DType, Element};
use crate::memory::{Block, HostMemory, Memory};
use std::fmt::{self, Debug};
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

/// Why a buffer could not be made, sliced, read or written.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum BufferError {
    /// The elements were requested as a different type.
    #[error("the buffer holds {actual}, it was asked for as {asked}")]
    DType { actual: DType, asked: DType },
    /// The memory has no bytes that the host can reach.
    #[error("the memory of this buffer ({count} of {dtype}) is not on the host")]
    NotHost { dtype: DType, count: usize },
    /// Other buffers refer to the same memory, so it can only be read.
    #[error(
        "the memory of this buffer ({count} of {dtype}) is shared: drop its clones and slices before writing to it"
    )]
    Shared { dtype: DType, count: usize },
    /// A slice outside the buffer.
    #[error("elements {start}..{end} are not inside the buffer's 0..{count}")]
    Range { start: usize, end: usize, count: usize },
    /// The memory is too small for the elements.
    #[error("{count} of {dtype} do not fit into memory of {bytes} bytes")]
    TooSmall { dtype: DType, count: usize, bytes: usize },
}

crate::debug_as_display!(BufferError);

/// A typed window on shared memory. Cloning and slicing share the memory; writing needs it to be unique.
///
/// ```
/// use meshwork_core::Buffer;
///
/// let mut buffer = Buffer::from_vec(vec![1.0f32, 2.0, 3.0, 4.0]);
/// buffer.as_mut_slice::<f32>()?[0] = 5.0;
/// let half = buffer.slice(0..2)?;
/// assert_eq!(half.as_slice::<f32>()?, [5.0, 2.0]);
/// assert!(buffer.as_mut_slice::<f32>().is_err()); // `half` reads the same memory
/// # Ok::<(), meshwork_core::BufferError>(())
/// ```
#[derive(Clone)]
pub struct Buffer {
    memory: Arc<dyn Memory>,
    dtype: DType,
    /// First element, counted from the start of the memory.
    offset: usize,
    count: usize,
}

impl Buffer {
    /// Host memory holding the elements of `v`.
    pub fn from_vec<T: Element>(v: Vec<T>) -> Buffer {
        Buffer::from_slice(&v)
    }

    /// Host memory holding a copy of `elements`.
    pub fn from_slice<T: Element>(elements: &[T]) -> Buffer {
        let source: &[u8] = bytemuck::cast_slice(elements);
        let mut block = Block::zeroed(source.len());
        block.as_mut_slice()[..source.len()].copy_from_slice(source);
        Buffer::whole(Arc::new(HostMemory::from(block)), T::DTYPE, elements.len())
    }

    /// Host memory holding `count` zeros, 64-byte aligned.
    ///
    /// # Panics
    /// If the size in bytes overflows `usize`, as for a `Vec`.
    pub fn zeros(dtype: DType, count: usize) -> Buffer {
        // Checked in release builds too: a buffer smaller than its stated size would be unsound.
        let bytes = count.checked_mul(dtype.size());
        let Some(bytes) = bytes else { panic!("a buffer of {count} of {dtype} overflows the address space") };
        Buffer::whole(Arc::new(HostMemory::zeroed(bytes)), dtype, count)
    }

    /// A buffer without elements: the result of an operation without data.
    pub fn empty() -> Buffer {
        Buffer::zeros(DType::U8, 0)
    }

    /// The first `count` elements of `memory`.
    pub fn from_memory(memory: Arc<dyn Memory>, dtype: DType, count: usize) -> Result<Buffer, BufferError> {
        let bytes = memory.bytes();
        match count.checked_mul(dtype.size()) {
            Some(needed) if needed <= bytes => Ok(Buffer::whole(memory, dtype, count)),
            _ => Err(BufferError::TooSmall { dtype, count, bytes }),
        }
    }

    fn whole(memory: Arc<dyn Memory>, dtype: DType, count: usize) -> Buffer {
        Buffer { memory, dtype, offset: 0, count }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Size of the elements in bytes.
    pub fn bytes(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Whether the host can read the elements.
    pub fn is_host(&self) -> bool {
        self.memory.host().is_some()
    }

    /// Whether nothing else refers to the memory, so that it may be written.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.memory) == 1 && Arc::weak_count(&self.memory) == 0
    }

    /// The memory that the elements are in.
    pub fn memory(&self) -> &Arc<dyn Memory> {
        &self.memory
    }

    /// First element, counted from the start of the memory.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The elements of `range`, in the same memory.
    pub fn slice(&self, range: Range<usize>) -> Result<Buffer, BufferError> {
        if range.start > range.end || range.end > self.count {
            return Err(BufferError::Range { start: range.start, end: range.end, count: self.count });
        }
        let (offset, count) = (self.offset + range.start, range.len());
        Ok(Buffer { memory: Arc::clone(&self.memory), dtype: self.dtype, offset, count })
    }

    /// The elements of `range` alone, until the window is dropped. They can be written if the elements of this buffer
    /// can: it is the same handle, made smaller meanwhile.
    pub fn window(&mut self, range: Range<usize>) -> Result<Window<'_>, BufferError> {
        self.slice(range.clone())?;
        let (offset, count) = (self.offset, self.count);
        (self.offset, self.count) = (offset + range.start, range.len());
        Ok(Window { buffer: self, offset, count })
    }

    /// Swaps elements with a buffer of the same type and count, without copying them. The two exchange their host
    /// bytes, and keep everything else of their [`Memory`]s. Returns false and does nothing unless both are unique, on
    /// the host, at the same offset, and of memory of the same size.
    pub fn trade(&mut self, other: &mut Buffer) -> bool {
        let window = |buffer: &Buffer| (buffer.dtype, buffer.offset, buffer.count);
        if window(self) != window(other) {
            return false;
        }
        fn host(buffer: &mut Buffer) -> Option<&mut HostMemory> {
            Arc::get_mut(&mut buffer.memory)?.host_mut()
        }
        if let (Some(mine), Some(theirs)) = (host(self), host(other)) { mine.trade(theirs) } else { false }
    }

    /// The elements, when they are `T`s on the host.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], BufferError> {
        self.check_type::<T>()?;
        // Aligned: the block is to 64 bytes, and offsets are whole elements.
        Ok(bytemuck::cast_slice(self.as_bytes()?))
    }

    /// The elements for writing, when they are `T`s on the host and nothing else refers to them.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T], BufferError> {
        self.check_type::<T>()?;
        Ok(bytemuck::cast_slice_mut(self.as_bytes_mut()?))
    }

    /// The bytes of the elements, when they are on the host.
    pub fn as_bytes(&self) -> Result<&[u8], BufferError> {
        let host = self.memory.host().ok_or(self.not_host())?.as_slice();
        host.get(self.byte_range()).ok_or(self.too_small(host.len()))
    }

    /// The bytes of the elements for writing, when they are on the host and nothing else refers to them.
    pub fn as_bytes_mut(&mut self) -> Result<&mut [u8], BufferError> {
        let (range, not_host, too_small) = (self.byte_range(), self.not_host(), self.too_small(self.memory.bytes()));
        let shared = BufferError::Shared { dtype: self.dtype, count: self.count };
        let memory = Arc::get_mut(&mut self.memory).ok_or(shared)?;
        let host = memory.host_mut().ok_or(not_host)?.as_mut_slice();
        host.get_mut(range).ok_or(too_small)
    }

    fn check_type<T: Element>(&self) -> Result<(), BufferError> {
        if self.dtype == T::DTYPE { Ok(()) } else { Err(BufferError::DType { actual: self.dtype, asked: T::DTYPE }) }
    }

    fn byte_range(&self) -> Range<usize> {
        let size = self.dtype.size();
        self.offset * size..(self.offset + self.count) * size
    }

    fn not_host(&self) -> BufferError {
        BufferError::NotHost { dtype: self.dtype, count: self.count }
    }

    /// The error of a [`Memory`] with fewer host bytes than its stated size.
    fn too_small(&self, bytes: usize) -> BufferError {
        BufferError::TooSmall { dtype: self.dtype, count: self.offset + self.count, bytes }
    }
}

/// A range of a [`Buffer`], which has its own elements again when this is dropped.
#[derive(Debug)]
pub struct Window<'a> {
    buffer: &'a mut Buffer,
    offset: usize,
    count: usize,
}

impl Deref for Window<'_> {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        self.buffer
    }
}

impl DerefMut for Window<'_> {
    fn deref_mut(&mut self) -> &mut Buffer {
        self.buffer
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        (self.buffer.offset, self.buffer.count) = (self.offset, self.count);
    }
}

impl Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({}, {}", self.dtype, self.count)?;
        f.write_str(if self.is_host() { ")" } else { ", not on the host)" })
    }
}
