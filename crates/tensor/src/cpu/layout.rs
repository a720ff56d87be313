use super::Cpu;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{Layout, check_copy};
use meshwork_core::Buffer;
use meshwork_core::pool::share;
use std::ops::Range;

impl Layout for Cpu {
    fn swap_blocks(&self, x: &Buffer, a: usize, b: usize, inner: usize) -> Result<Buffer> {
        let mut out = self.alloc(x.dtype(), x.count())?;
        let block = inner * x.dtype().size();
        let (from, to) = (x.as_bytes()?, out.as_bytes_mut()?);
        share(to.chunks_mut((a * block).max(1)).enumerate(), |(j, to)| {
            for (i, to) in to.chunks_exact_mut(block).enumerate() {
                to.copy_from_slice(&from[(i * b + j) * block..][..block]);
            }
        });
        Ok(out)
    }

    fn narrow(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        let mut out = self.alloc(x.dtype(), outer * range.len() * inner)?;
        let unit = inner * x.dtype().size();
        let part = range.len() * unit;
        let (from, to) = (x.as_bytes()?, out.as_bytes_mut()?);
        for i in 0..outer {
            to[i * part..][..part].copy_from_slice(&from[(i * extent + range.start) * unit..][..part]);
        }
        Ok(out)
    }

    fn widen(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        let mut out = self.zeros(x.dtype(), outer * extent * inner)?;
        let unit = inner * x.dtype().size();
        let part = range.len() * unit;
        let (from, to) = (x.as_bytes()?, out.as_bytes_mut()?);
        for i in 0..outer {
            to[(i * extent + range.start) * unit..][..part].copy_from_slice(&from[i * part..][..part]);
        }
        Ok(out)
    }

    fn copy_into(&self, src: &Buffer, range: Range<usize>, dst: &mut Buffer, at: usize) -> Result<()> {
        check_copy(src, &range, dst, at)?;
        let size = src.dtype().size();
        let (from, to) = (src.as_bytes()?, dst.as_bytes_mut()?);
        to[at * size..][..range.len() * size].copy_from_slice(&from[range.start * size..range.end * size]);
        Ok(())
    }
}
