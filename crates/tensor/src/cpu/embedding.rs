use super::kernels::{embedding, pointwise};
use super::{Cpu, for_float, row_piece};
use crate::error::{Error, Result};
use crate::kernel::{Embedding, TableGrad};
use meshwork_core::Buffer;
use meshwork_core::pool::share;
use std::ops::Range;

/// Pieces into which the gradient of a table is cut.
const GRAD_PIECES: usize = 16;

impl Embedding for Cpu {
    fn lookup(&self, ids: &Buffer, table: &Buffer, rows: Range<usize>, vocab: usize, width: usize) -> Result<Buffer> {
        for_float!(self, "embedding", table, T => {
            let ids = ids.as_slice::<i32>()?;
            let known = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocab);
            if let Some(at) = ids.iter().position(|&id| !known(id)) {
                return Err(Error::Id { op: "embedding", id: ids[at], at, vocab });
            }
            let held = &table.as_slice::<T>()?[..rows.len() * width];
            self.output::<T>(ids.len() * width, |out| {
                let piece = row_piece(width);
                share(out.chunks_mut(piece).zip(ids.chunks(piece / width)), |(out, ids)| {
                    embedding::lookup(ids, held, rows.start, width, out);
                });
            })
        })
    }

    fn lookup_grad(
        &self,
        ids: &Buffer,
        dout: &Buffer,
        rows: Range<usize>,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        for_float!(self, "embedding", dout, T => {
            let (ids, dout) = (ids.as_slice::<i32>()?, dout.as_slice::<T>()?);
            let TableGrad { buffer, start, rows: table_rows, accumulate, blocks } = dtable;
            let dtable = &mut buffer.as_mut_slice::<T>()?[start..start + table_rows * width];
            let (held, padding) = dtable.split_at_mut(rows.len() * width);
            if !accumulate {
                padding.fill(0.0);
            }
            // Each piece of the table searches all ids for its own. There are few pieces, because frequent words are
            // close together.
            let part = rows.len().div_ceil(GRAD_PIECES).max(1);
            share(held.chunks_mut(part * width).enumerate(), |(i, dtable)| {
                if !accumulate {
                    dtable.fill(0.0);
                }
                let first = rows.start + i * part;
                match blocks {
                    1 => embedding::lookup_backward(ids, dout, first, width, dtable),
                    _ => embedding::lookup_backward_tree(ids, dout, first, width, blocks, dtable),
                }
            });
            Ok(())
        })
    }

    fn positions(&self, x: &Buffer, table: &Buffer, first: usize, seq: usize, width: usize) -> Result<Buffer> {
        for_float!(self, "positions", x, T => {
            let (x, table) = (x.as_slice::<T>()?, table.as_slice::<T>()?);
            let (sequence, piece) = ((seq * width).max(1), row_piece(width));
            self.output::<T>(x.len(), |out| {
                let pieces = out.chunks_mut(sequence).zip(x.chunks(sequence)).flat_map(|(out, x)| {
                    out.chunks_mut(piece).zip(x.chunks(piece)).enumerate()
                });
                share(pieces, |(i, (out, x))| {
                    let (first, rows) = (first + i * piece / width, x.len() / width);
                    embedding::add_positions(x, table, first, rows, width, out);
                });
            })
        })
    }

    fn positions_grad(
        &self,
        dout: &Buffer,
        first: usize,
        seq: usize,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        for_float!(self, "positions", dout, T => {
            let dout = dout.as_slice::<T>()?;
            let TableGrad { buffer, start, rows, accumulate, blocks } = dtable;
            let dtable = &mut buffer.as_mut_slice::<T>()?[start..start + rows * width];
            let (before, rest) = dtable.split_at_mut(first * width);
            let (used, after) = rest.split_at_mut(seq * width);
            if !accumulate {
                before.fill(0.0);
                after.fill(0.0);
            }
            // The number of elements of all samples that stay in the cache while they are added up.
            let samples = dout.len() / (seq * width).max(1);
            let piece = (row_piece(width) / samples.max(1)).max(64);
            share(used.chunks_mut(piece).enumerate(), |(i, dtable)| {
                if !accumulate {
                    dtable.fill(0.0);
                }
                let of_sample = |sample: usize| &dout[sample * seq * width + i * piece..][..dtable.len()];
                let mut sums: Vec<T> = Vec::new();
                let of_block = samples.div_ceil(blocks);
                for block in 0..blocks {
                    let at = sums.len();
                    sums.resize(at + dtable.len(), 0.0);
                    for sample in block * of_block..((block + 1) * of_block).min(samples) {
                        pointwise::add_assign(&mut sums[at..], of_sample(sample));
                    }
                }
                pointwise::tree_sum(&mut sums, dtable.len(), pointwise::add_assign);
                pointwise::add_assign(dtable, &sums[..dtable.len()]);
            });
            Ok(())
        })
    }
}
