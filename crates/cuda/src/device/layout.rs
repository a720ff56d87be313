use super::CudaDevice;
use crate::driver::{Address, Place};
use meshwork_core::Buffer;
use meshwork_tensor::kernel::{Layout, check_copy};
use meshwork_tensor::{Device, Result};
use std::ops::Range;

impl CudaDevice {
    /// Copies `rows` rows of `bytes` bytes, from one (place, pitch) to another.
    fn copy_rows(&self, from: (Address, usize), to: (Address, usize), bytes: usize, rows: usize) -> Result<()> {
        if bytes * rows == 0 {
            return Ok(());
        }
        let [from, to] = [from, to].map(|(at, pitch)| Place { at, pitch });
        self.pool.driver.copy(self.pool.compute, from, to, bytes, rows).map_err(self.failed("copy"))
    }
}

impl Layout for CudaDevice {
    fn swap_blocks(&self, x: &Buffer, a: usize, b: usize, inner: usize) -> Result<Buffer> {
        let out = self.alloc(x.dtype(), x.count())?;
        let (from, to, block) = (self.place("swap", x)?, self.place("swap", &out)?, inner * x.dtype().size());
        for j in 0..b {
            self.copy_rows((from.offset(j * block), b * block), (to.offset(j * a * block), block), block, a)?;
        }
        Ok(out)
    }

    fn narrow(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        let out = self.alloc(x.dtype(), outer * range.len() * inner)?;
        let unit = inner * x.dtype().size();
        let (from, part) = (self.place("narrow", x)?.offset(range.start * unit), range.len() * unit);
        self.copy_rows((from, extent * unit), (self.place("narrow", &out)?, part), part, outer)?;
        Ok(out)
    }

    fn widen(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        let out = self.zeros(x.dtype(), outer * extent * inner)?;
        let unit = inner * x.dtype().size();
        let (to, part) = (self.place("widen", &out)?.offset(range.start * unit), range.len() * unit);
        self.copy_rows((self.place("widen", x)?, part), (to, extent * unit), part, outer)?;
        Ok(out)
    }

    fn pack_nonzeros(&self, x: &Buffer) -> Result<Option<[Buffer; 2]>> {
        self.without_zeros(x)
    }

    fn unpack_nonzeros(&self, bits: &Buffer, values: &Buffer, count: usize) -> Result<Buffer> {
        self.with_zeros(bits, values, count)
    }

    fn copy_into(&self, src: &Buffer, range: Range<usize>, dst: &mut Buffer, at: usize) -> Result<()> {
        check_copy(src, &range, dst, at)?;
        let size = src.dtype().size();
        let from = self.place("copy", src)?.offset(range.start * size);
        let to = self.place_mut("copy", dst)?.offset(at * size);
        self.copy_rows((from, 0), (to, 0), range.len() * size, 1)
    }
}
