use super::kernels::relu::PER_BYTE;
use super::kernels::zeros::{self, Pattern};
use super::prelude::*;
use bytemuck::Pod;
use meshwork_tensor::kernel::{Layout, check_copy};

/// Cuts `values` into parts of these lengths.
fn parts<P>(mut values: &mut [P], lengths: impl Iterator<Item = usize>) -> Vec<&mut [P]> {
    let mut parts = Vec::with_capacity(lengths.size_hint().0);
    for length in lengths {
        let (part, rest) = values.split_at_mut(length);
        parts.push(part);
        values = rest;
    }
    parts
}

/// One run of bytes in each of some equal chunks of memory.
struct Runs {
    /// Bytes of a chunk.
    every: usize,
    /// The first byte of its run.
    start: usize,
    /// Bytes of a run.
    len: usize,
}

impl Runs {
    /// Those of `range`, in chunks of `extent` times `inner` elements of the type of `x`.
    fn new(x: &Buffer, extent: usize, inner: usize, range: Range<usize>) -> Self {
        let unit = inner * x.dtype().size();
        Self { every: extent * unit, start: range.start * unit, len: range.len() * unit }
    }

    fn of<'a>(&self, chunk: &'a [u8]) -> &'a [u8] {
        &chunk[self.start..][..self.len]
    }

    /// Bytes of the chunks that a thread takes at once.
    fn wide_piece(&self) -> usize {
        self.every * (PIECE / self.every).max(1)
    }

    /// Bytes of the runs in these chunks.
    fn narrow_piece(&self) -> usize {
        self.wide_piece() / self.every * self.len
    }

    /// Copies runs. Short ones are a move each: a call for each would take longer than all that is moved.
    fn copy<'a>(&self, pairs: impl Iterator<Item = (&'a mut [u8], &'a [u8])>) {
        match self.len {
            2 => pairs.for_each(|(to, from)| to[..2].copy_from_slice(&from[..2])),
            4 => pairs.for_each(|(to, from)| to[..4].copy_from_slice(&from[..4])),
            8 => pairs.for_each(|(to, from)| to[..8].copy_from_slice(&from[..8])),
            _ => pairs.for_each(|(to, from)| to.copy_from_slice(from)),
        }
    }
}

impl Cpu {
    /// [`Layout::pack_nonzeros`], on bit patterns.
    fn pack_patterns<P: Pattern + Pod + Send + Sync>(&self, x: &Buffer) -> Result<Option<[Buffer; 2]>> {
        let from = bytemuck::cast_slice::<u8, P>(x.as_bytes()?);
        let mut bits = self.alloc(DType::U8, from.len().div_ceil(PER_BYTE))?;
        let mut counts = vec![0; from.len().div_ceil(PIECE)];
        let marks = bits.as_mut_slice::<u8>()?.chunks_mut(PIECE / PER_BYTE).zip(from.chunks(PIECE)).zip(&mut counts);
        for_each(marks, |((bits, x), count)| *count = zeros::mark(x, bits));
        let count: usize = counts.iter().sum();
        if bits.bytes() + count * x.dtype().size() >= x.bytes() {
            return Ok(None);
        }
        let mut values = self.alloc(x.dtype(), count)?;
        let to = parts(bytemuck::cast_slice_mut::<u8, P>(values.as_bytes_mut()?), counts.into_iter());
        for_each(to.into_iter().zip(from.chunks(PIECE)), |(values, x)| zeros::gather(x, values));
        Ok(Some([bits, values]))
    }

    /// [`Layout::unpack_nonzeros`], on bit patterns.
    fn unpack_patterns<P: Pattern + Pod + Send + Sync>(
        &self,
        bits: &Buffer,
        values: &Buffer,
        count: usize,
    ) -> Result<Buffer> {
        let (bits, from) = (bits.as_slice::<u8>()?, bytemuck::cast_slice::<u8, P>(values.as_bytes()?));
        let mut out = self.alloc(values.dtype(), count)?;
        let pieces =
            bits.chunks(PIECE / PER_BYTE).zip(bytemuck::cast_slice_mut::<u8, P>(out.as_bytes_mut()?).chunks_mut(PIECE));
        let mut at = 0;
        let pieces: Vec<_> = pieces
            .map(|(bits, x)| {
                let first = at;
                at += zeros::set(bits);
                (bits, &from[first..at], x)
            })
            .collect();
        for_each(pieces, |(bits, values, x)| zeros::scatter(bits, values, x));
        Ok(out)
    }
}

impl Layout for Cpu {
    fn swap_blocks(&self, x: &Buffer, a: usize, b: usize, inner: usize) -> Result<Buffer> {
        let mut out = self.alloc(x.dtype(), x.count())?;
        let block = inner * x.dtype().size();
        let (from, to) = (x.as_bytes()?, out.as_bytes_mut()?);
        for_each(to.chunks_mut((a * block).max(1)).enumerate(), |(j, to)| {
            for (i, to) in to.chunks_exact_mut(block).enumerate() {
                to.copy_from_slice(&from[(i * b + j) * block..][..block]);
            }
        });
        Ok(out)
    }

    fn narrow(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        let (mut out, runs) = (self.alloc(x.dtype(), outer * range.len() * inner)?, Runs::new(x, extent, inner, range));
        if runs.len == 0 {
            return Ok(out);
        }
        let (from, to) = (x.as_bytes()?, out.as_bytes_mut()?);
        for_each(to.chunks_mut(runs.narrow_piece()).zip(from.chunks(runs.wide_piece())), |(to, from)| {
            runs.copy(to.chunks_exact_mut(runs.len).zip(from.chunks_exact(runs.every).map(|wide| runs.of(wide))));
        });
        Ok(out)
    }

    fn widen(&self, x: &Buffer, outer: usize, extent: usize, inner: usize, range: Range<usize>) -> Result<Buffer> {
        let runs = Runs::new(x, extent, inner, range);
        if runs.len == 0 {
            return self.zeros(x.dtype(), outer * extent * inner);
        }
        let mut out = self.alloc(x.dtype(), outer * extent * inner)?;
        let (from, to) = (x.as_bytes()?, out.as_bytes_mut()?);
        for_each(to.chunks_mut(runs.wide_piece()).zip(from.chunks(runs.narrow_piece())), |(to, from)| {
            to.fill(0);
            let wide = to.chunks_exact_mut(runs.every).map(|wide| &mut wide[runs.start..][..runs.len]);
            runs.copy(wide.zip(from.chunks_exact(runs.len)));
        });
        Ok(out)
    }

    fn pack_nonzeros(&self, x: &Buffer) -> Result<Option<[Buffer; 2]>> {
        match x.dtype() {
            DType::F32 => self.pack_patterns::<u32>(x),
            DType::Bf16 | DType::F16 => self.pack_patterns::<u16>(x),
            other => Err(self.unsupported("pack_nonzeros", other)),
        }
    }

    fn unpack_nonzeros(&self, bits: &Buffer, values: &Buffer, count: usize) -> Result<Buffer> {
        match values.dtype() {
            DType::F32 => self.unpack_patterns::<u32>(bits, values, count),
            DType::Bf16 | DType::F16 => self.unpack_patterns::<u16>(bits, values, count),
            other => Err(self.unsupported("unpack_nonzeros", other)),
        }
    }

    fn copy_into(&self, src: &Buffer, range: Range<usize>, dst: &mut Buffer, at: usize) -> Result<()> {
        check_copy(src, &range, dst, at)?;
        let size = src.dtype().size();
        let (from, to) = (src.as_bytes()?, dst.as_bytes_mut()?);
        let to = to[at * size..][..range.len() * size].chunks_mut(PIECE);
        let from = from[range.start * size..range.end * size].chunks(PIECE);
        for_each(to.zip(from), |(to, from)| to.copy_from_slice(from));
        Ok(())
    }
}
