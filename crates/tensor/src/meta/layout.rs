use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{Layout, check_copy};
use meshwork_core::Buffer;
use std::ops::Range;

impl Layout for Meta {
    fn swap_blocks(&self, x: &Buffer, _a: usize, _b: usize, _inner: usize) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }

    fn narrow(&self, x: &Buffer, outer: usize, _extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        self.alloc(x.dtype(), outer * range.len() * inner)
    }

    fn widen(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, _range: Range<usize>) -> Result<Buffer> {
        self.alloc(x.dtype(), outer * extent * inner)
    }

    fn copy_into(&self, src: &Buffer, range: Range<usize>, dst: &mut Buffer, at: usize) -> Result<()> {
        check_copy(src, &range, dst, at)
    }
}
