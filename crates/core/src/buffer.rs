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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typed_views_check_type_range_and_sharing() {
        let mut buffer = Buffer::from_vec(vec![1i32, 2, 3]);
        assert_eq!(buffer.as_slice::<f32>().unwrap_err().to_string(), "the buffer holds i32, it was asked for as f32");
        assert_eq!(buffer.slice(2..4).unwrap_err().to_string(), "elements 2..4 are not inside the buffer's 0..3");
        let tail = buffer.slice(1..3).unwrap();
        assert_eq!(tail.slice(1..2).unwrap().as_slice::<i32>().unwrap(), [3]);
        assert!(matches!(buffer.as_mut_slice::<i32>(), Err(BufferError::Shared { count: 3, .. })));
        drop(tail);
        assert!(buffer.is_unique());
        buffer.as_mut_slice::<i32>().unwrap()[2] = 9;
        assert_eq!(buffer.as_slice::<i32>().unwrap(), [1, 2, 9]);
    }

    #[test]
    fn a_part_is_written_without_sharing() {
        let mut buffer = Buffer::from_vec(vec![1i32, 2, 3, 4]).slice(1..4).unwrap();
        let mut part = buffer.window(1..3).unwrap();
        part.as_mut_slice::<i32>().unwrap()[0] = 7;
        assert_eq!(part.as_slice::<i32>().unwrap(), [7, 4]);
        drop(part);
        assert_eq!(buffer.as_slice::<i32>().unwrap(), [2, 7, 4]);
        assert!(buffer.window(2..4).is_err() && buffer.count() == 3);
        let other = buffer.clone();
        assert!(buffer.window(0..1).unwrap().as_mut_slice::<i32>().is_err() && other.count() == 3);
    }

    #[test]
    fn zeros_are_zero_and_aligned() {
        for count in [0, 1, 63, 1000] {
            let buffer = Buffer::zeros(DType::F64, count);
            let elements = buffer.as_slice::<f64>().unwrap();
            assert_eq!(elements, vec![0.0; count]);
            assert_eq!(elements.as_ptr() as usize % 64, 0);
        }
    }

    #[test]
    #[should_panic(expected = "a buffer of 4611686018427387904 of f32 overflows the address space")]
    fn a_buffer_is_never_smaller_than_it_says() {
        Buffer::zeros(DType::F32, 1 << 62); // 2^64 bytes: 0 where arithmetic wraps
    }

    #[test]
    fn buffers_trade_bytes_only_if_nobody_else_has_them() {
        let fresh = |v: [f32; 3]| Buffer::from_vec(v.to_vec());
        let (mut a, mut b) = (fresh([1.0, 2.0, 3.0]), fresh([4.0, 5.0, 6.0]));
        let at = |buffer: &Buffer| buffer.as_bytes().unwrap().as_ptr();
        let before = (at(&a), at(&b));
        assert!(a.trade(&mut b));
        assert_eq!((at(&b), at(&a)), before);
        assert_eq!(
            (a.as_slice::<f32>().unwrap(), b.as_slice::<f32>().unwrap()),
            (&[4.0, 5.0, 6.0][..], &[1.0, 2.0, 3.0][..])
        );

        let mut tail = a.slice(1..3).unwrap();
        assert!(!a.trade(&mut b) && !b.trade(&mut a), "`tail` reads the memory of `a`");
        drop(a);
        let mut head = fresh([7.0, 8.0, 9.0]).slice(0..2).unwrap();
        assert!(!tail.trade(&mut head), "not at the same offset");
        assert!(!head.trade(&mut Buffer::zeros(DType::I32, 2)), "another type");
        assert!(!head.trade(&mut Buffer::zeros(DType::F32, 3)), "another count");
        let mut large = Buffer::zeros(DType::F32, 100).slice(0..2).unwrap();
        assert!(!head.trade(&mut large), "more memory below it");
        assert_eq!(
            (head.as_slice::<f32>().unwrap(), tail.as_slice::<f32>().unwrap()),
            (&[7.0, 8.0][..], &[5.0, 6.0][..])
        );
    }

    #[test]
    fn memory_must_hold_the_elements() {
        let memory = Arc::new(HostMemory::zeroed(64));
        assert!(Buffer::from_memory(memory.clone(), DType::F32, 16).is_ok());
        let error = Buffer::from_memory(memory.clone(), DType::F32, 17).unwrap_err();
        assert_eq!(error.to_string(), "17 of f32 do not fit into memory of 64 bytes");
        assert!(Buffer::from_memory(memory, DType::F32, usize::MAX).is_err());
    }

    #[test]
    fn memory_without_host_bytes_has_a_size_only() {
        #[derive(Debug)]
        struct Opaque(usize);
        impl Memory for Opaque {
            fn bytes(&self) -> usize {
                self.0
            }
        }
        let mut buffer = Buffer::from_memory(Arc::new(Opaque(1 << 40)), DType::Bf16, 1 << 39).unwrap();
        assert!(!buffer.is_host());
        assert_eq!(buffer.slice(8..16).unwrap().bytes(), 16);
        assert!(matches!(buffer.as_bytes_mut(), Err(BufferError::NotHost { .. })));
    }
}
