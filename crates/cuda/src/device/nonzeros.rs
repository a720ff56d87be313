//! Vectors packed without their zeros.

use super::prelude::*;
use meshwork_kernels::NONZERO_CHUNK;

const OP: &str = "nonzeros";

/// Kernels for elements of 32 or of 16 bits.
struct Patterns {
    mark: &'static str,
    gather: &'static str,
    scatter: &'static str,
}

const WIDE: Patterns =
    Patterns { mark: "nonzeros_mark_32", gather: "nonzeros_gather_32", scatter: "nonzeros_scatter_32" };
const HALF: Patterns =
    Patterns { mark: "nonzeros_mark_16", gather: "nonzeros_gather_16", scatter: "nonzeros_scatter_16" };

impl CudaDevice {
    fn patterns(&self, dtype: DType) -> Result<Patterns> {
        match dtype {
            DType::F32 => Ok(WIDE),
            DType::Bf16 | DType::F16 => Ok(HALF),
            other => Err(self.lacks(OP, other)),
        }
    }

    /// The number of set bits before each chunk of bytes, then the total, in i64.
    fn starts_of(&self, bits: &Buffer) -> Result<Buffer> {
        let chunks = bits.count().div_ceil(NONZERO_CHUNK as usize);
        let [counts, starts] = [self.scratch(DType::I64, chunks)?, self.scratch(DType::I64, chunks + 1)?];
        launch!(self, OP, "nonzeros_count", [chunks, 1]; bits, bits.count(), &counts)?;
        launch!(self, OP, "nonzeros_starts", [1, 1]; &counts, chunks, &starts)?;
        Ok(starts)
    }

    /// The bits and the values, if they take less memory; the host waits for the number of values.
    pub(super) fn without_zeros(&self, x: &Buffer) -> Result<Option<[Buffer; 2]>> {
        let (patterns, count) = (self.patterns(x.dtype())?, x.count());
        let bits = self.alloc(DType::U8, count.div_ceil(8))?;
        launch!(self, OP, patterns.mark, [count, 0]; x, &bits, count)?;
        let starts = self.starts_of(&bits)?;
        let chunks = starts.count() - 1;
        let total = self.fetch(&starts.slice(chunks..chunks + 1)?)?.as_slice::<i64>()?[0] as usize;
        if bits.bytes() + total * x.dtype().size() >= x.bytes() {
            return Ok(None);
        }
        let values = self.alloc(x.dtype(), total)?;
        launch!(self, OP, patterns.gather, [chunks, 1]; x, &bits, bits.count(), &starts, &values, count)?;
        Ok(Some([bits, values]))
    }

    pub(super) fn with_zeros(&self, bits: &Buffer, values: &Buffer, count: usize) -> Result<Buffer> {
        let patterns = self.patterns(values.dtype())?;
        bits.slice(0..count.div_ceil(8))?;
        let (starts, out) = (self.starts_of(bits)?, self.alloc(values.dtype(), count)?);
        launch!(self, OP, patterns.scatter, [starts.count() - 1, 1];
            bits, bits.count(), &starts, values, values.count(), &out, count
        )?;
        Ok(out)
    }
}
