use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{Layout, check_copy};
use meshwork_core::{Buffer, DType};
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

    /// Assumes the worst case: the largest packed form that is still smaller than `x`.
    fn pack_nonzeros(&self, x: &Buffer) -> Result<Option<[Buffer; 2]>> {
        let bits = x.count().div_ceil(u8::BITS as usize);
        let values = (x.bytes() - bits.min(x.bytes())).div_ceil(x.dtype().size());
        Ok(Some([self.alloc(DType::U8, bits)?, self.alloc(x.dtype(), values)?]))
    }

    fn unpack_nonzeros(&self, _bits: &Buffer, values: &Buffer, count: usize) -> Result<Buffer> {
        self.alloc(values.dtype(), count)
    }

    fn copy_into(&self, src: &Buffer, range: Range<usize>, dst: &mut Buffer, at: usize) -> Result<()> {
        check_copy(src, &range, dst, at)
    }
}
