//! Moving blocks: for collectives along a dim other than the first, and for gathering the values of a step in one
//! vector.

use crate::error::Result;
use meshwork_core::{Buffer, BufferError};
use std::fmt::Debug;
use std::ops::Range;

/// Copies of blocks, for any dtype.
pub trait Layout: Debug {
    /// `[a, b, inner] → [b, a, inner]`.
    fn swap_blocks(&self, x: &Buffer, a: usize, b: usize, inner: usize) -> Result<Buffer>;

    /// `[outer, extent, inner] → [outer, range, inner]`.
    fn narrow(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer>;

    /// `[outer, range, inner] → [outer, extent, inner]`, zero outside `range`.
    fn widen(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer>;

    /// A copy of the elements in new memory.
    fn copy(&self, x: &Buffer) -> Result<Buffer> {
        self.narrow(x, 1, x.count(), 1, 0..x.count())
    }

    /// Copies the elements `range` of `src` to those of `dst` from `at` on. Both are of one dtype.
    ///
    /// # Errors
    /// When the dtypes differ, when either range lies outside its buffer, or when `dst` is shared.
    fn copy_into(&self, src: &Buffer, range: Range<usize>, dst: &mut Buffer, at: usize) -> Result<()>;
}

/// The checks that every device makes in [`Layout::copy_into`] and [`Device::upload_into`](crate::Device::upload_into).
pub fn check_copy(src: &Buffer, range: &Range<usize>, dst: &Buffer, at: usize) -> Result<()> {
    if src.dtype() != dst.dtype() {
        return Err(BufferError::DType { actual: dst.dtype(), asked: src.dtype() }.into());
    }
    if !dst.is_unique() {
        return Err(BufferError::Shared { dtype: dst.dtype(), count: dst.count() }.into());
    }
    src.slice(range.clone())?;
    dst.slice(at..at.saturating_add(range.len()))?;
    Ok(())
}
