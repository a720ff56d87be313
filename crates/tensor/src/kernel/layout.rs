//! Moving blocks: for collectives along a dim other than the first, and for gathering the values of a step into one
//! vector.

use super::table::*;
use meshwork_core::{Buffer, BufferError};
use std::ops::Range;

kernels! {
    /// Copies of blocks, for any dtype.
    pub trait Layout at layout {
        /// `[a, b, inner] → [b, a, inner]`.
        fn swap_blocks(&self, x: &Buffer, a: usize, b: usize, inner: usize) -> Result<Buffer>
            | profile(Memory: x), halves(as_is), meta(like x);

        /// `[outer, extent, inner] → [outer, range, inner]`.
        fn narrow(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer>
            | profile(= Traffic::moved(Class::Memory, "narrow", x, outer * range.len() * inner)), halves(as_is),
              meta(x => outer * range.len() * inner);

        /// `[outer, range, inner] → [outer, extent, inner]`, zero outside `range`.
        fn widen(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer>
            | profile(Memory: x), halves(as_is), meta(x => outer * extent * inner);

        /// A copy of the elements in new memory.
        fn copy(&self, x: &Buffer) -> Result<Buffer>
            | profile(Memory: x), halves(as_is), meta(like x)
            | default { self.narrow(x, 1, x.count(), 1, 0..x.count()) };

        /// Packs a vector of floats as (a bit per element: whether it is not +0; the elements whose bit is set, in
        /// order). [`unpack_nonzeros`](Self::unpack_nonzeros) restores the same bits. The first of eight elements has
        /// the lowest bit of a byte. `None` if both together take no less memory than x. Their size depends on the
        /// values; a device without values takes as much as x.
        fn pack_nonzeros(&self, x: &Buffer) -> Result<Option<[Buffer; 2]>>
            | profile(Memory: x), halves(as_is), meta(= self.packed_nonzeros(x));

        /// Restores the `count` elements that [`pack_nonzeros`](Self::pack_nonzeros) packed.
        fn unpack_nonzeros(&self, bits: &Buffer, values: &Buffer, count: usize) -> Result<Buffer>
            | profile(Memory: bits, values), halves(as_is), meta(values => count);

        /// Copies the elements `range` of `src` to `dst`, from element `at` on. Both have the same dtype.
        ///
        /// # Errors
        /// When the dtypes differ, when either range lies outside its buffer, or when `dst` is shared.
        fn copy_into(&self, src: &Buffer, range: Range<usize>, dst: &mut Buffer, at: usize) -> Result<()>
            | profile(= Traffic::moved(Class::Memory, "copy_into", src, 2 * range.len())), halves(as_is),
              meta(= check_copy(src, &range, dst, at));
    }
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
