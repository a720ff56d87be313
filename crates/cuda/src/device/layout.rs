use super::prelude::*;
use meshwork_tensor::kernel::{Layout, check_copy};

/// Rows in memory.
#[derive(Clone, Copy)]
struct Rows {
    /// The first row.
    at: Address,
    /// Stride in bytes.
    row: usize,
}

impl CudaDevice {
    /// Copies `rows` rows of `bytes` bytes. Rows that are not contiguous are copied by a kernel, in the largest element
    /// size that divides all addresses and lengths.
    fn copy_rows(&self, from: Rows, to: Rows, bytes: usize, rows: usize) -> Result<()> {
        const OP: &str = "copy";
        if bytes * rows == 0 {
            return Ok(());
        }
        if rows == 1 || (from.row == bytes && to.row == bytes) {
            return self.pool.driver.copy(self.pool.compute, from.at, to.at, bytes * rows).map_err(self.failed(OP));
        }
        let all = from.at.0 as usize | from.row | to.at.0 as usize | to.row | bytes;
        let (kernel, size) = match all.trailing_zeros() {
            0 => ("copy_rows_8", 1),
            1 => ("copy_rows_16", 2),
            _ => ("copy_rows_32", 4),
        };
        let [from_row, to_row, n] = [from.row, to.row, bytes].map(|bytes| bytes / size);
        launch!(self, OP, kernel, [rows, n]; from.at, from_row, to.at, to_row, rows, n)
    }
}

impl Layout for CudaDevice {
    fn swap_blocks(&self, x: &Buffer, a: usize, b: usize, inner: usize) -> Result<Buffer> {
        let out = self.alloc(x.dtype(), x.count())?;
        let (from, to, block) = (self.place("swap", x)?, self.place("swap", &out)?, inner * x.dtype().size());
        for j in 0..b {
            let from = Rows { at: from.offset(j * block), row: b * block };
            self.copy_rows(from, Rows { at: to.offset(j * a * block), row: block }, block, a)?;
        }
        Ok(out)
    }

    fn narrow(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        let out = self.alloc(x.dtype(), outer * range.len() * inner)?;
        let unit = inner * x.dtype().size();
        let from = Rows { at: self.place("narrow", x)?.offset(range.start * unit), row: extent * unit };
        let to = Rows { at: self.place("narrow", &out)?, row: range.len() * unit };
        self.copy_rows(from, to, to.row, outer)?;
        Ok(out)
    }

    fn widen(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        let out = self.zeros(x.dtype(), outer * extent * inner)?;
        let unit = inner * x.dtype().size();
        let from = Rows { at: self.place("widen", x)?, row: range.len() * unit };
        let to = Rows { at: self.place("widen", &out)?.offset(range.start * unit), row: extent * unit };
        self.copy_rows(from, to, from.row, outer)?;
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
        self.copy_rows(Rows { at: from, row: 0 }, Rows { at: to, row: 0 }, range.len() * size, 1)
    }
}
