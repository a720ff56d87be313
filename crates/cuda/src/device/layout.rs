use super::CudaDevice;
use crate::driver::{Address, Argument};
use meshwork_core::Buffer;
use meshwork_tensor::kernel::{Layout, check_copy};
use meshwork_tensor::{Device, Result};
use std::ops::Range;

impl CudaDevice {
    /// Copies `rows` rows of `bytes` bytes, from one (place, bytes to the next row) to another: where they do not lie
    /// one behind the other by a kernel, in the largest elements that all of these are multiples of.
    fn copy_rows(&self, from: (Address, usize), to: (Address, usize), bytes: usize, rows: usize) -> Result<()> {
        const OP: &str = "copy";
        if bytes * rows == 0 {
            return Ok(());
        }
        if rows == 1 || (from.1 == bytes && to.1 == bytes) {
            return self.pool.driver.copy(self.pool.compute, from.0, to.0, bytes * rows).map_err(self.failed(OP));
        }
        let all = from.0.0 as usize | from.1 | to.0.0 as usize | to.1 | bytes;
        let (kernel, size) = match all.trailing_zeros() {
            0 => ("copy_rows_8", 1),
            1 => ("copy_rows_16", 2),
            _ => ("copy_rows_32", 4),
        };
        let [from_row, to_row, n] = [from.1, to.1, bytes].map(|bytes| Argument::from(bytes / size));
        let args = [from.0.into(), from_row, to.0.into(), to_row, rows.into(), n];
        self.launch(OP, kernel, [rows, bytes / size], &args)
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
