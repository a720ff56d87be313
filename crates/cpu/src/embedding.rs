use super::kernels::{embedding, pointwise};
use super::prelude::*;
use meshwork_tensor::kernel::{Embedding, TableGrad};

/// Pieces into which the gradient of a table is cut.
const GRAD_PIECES: usize = 16;

impl Embedding for Cpu {
    fn lookup(&self, ids: &Buffer, table: &Buffer, rows: Range<usize>, vocab: usize, width: usize) -> Result<Buffer> {
        for_widened!(self, "embedding", table, T => {
            let ids = ids.as_slice::<i32>()?;
            let known = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocab);
            if let Some(at) = ids.iter().position(|&id| !known(id)) {
                return Err(Error::Id { op: "embedding", id: ids[at], at, vocab });
            }
            let held = loaded::<T>(table)?.part(0..rows.len() * width);
            self.like::<T>(table, ids.len() * width, |out| {
                let piece = row_piece_of(table.dtype(), width);
                for_each(out.chunks(piece).zip(ids.chunks(piece / width)), |(out, ids)| {
                    embedding::lookup(ids, held, rows.start, width, out);
                });
            })
        })
    }

    fn lookup_grad(&self, ids: &Buffer, dout: &Buffer, rows: Range<usize>, dtable: TableGrad<'_>) -> Result<()> {
        for_widened!(self, "embedding", dout, T => {
            let (ids, dout) = (ids.as_slice::<i32>()?, loaded::<T>(dout)?);
            let TableGrad { buffer, start, rows: table_rows, width, accumulate, blocks } = dtable;
            let dtable = &mut buffer.as_mut_slice::<T>()?[start..start + table_rows * width];
            let (held, padding) = dtable.split_at_mut(rows.len() * width);
            if !accumulate {
                padding.fill(0.0);
            }
            // Each piece of the table searches all ids for its own. There are few pieces, because frequent words have
            // neighbouring ids.
            let part = rows.len().div_ceil(GRAD_PIECES).max(1);
            for_each(held.chunks_mut(part * width).enumerate(), |(i, dtable)| {
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
        for_widened!(self, "positions", x, T => {
            let (all, table) = (loaded::<T>(x)?, loaded::<T>(table)?);
            let (sequence, piece) = ((seq * width).max(1), row_piece_of(x.dtype(), width));
            self.like::<T>(x, x.count(), |out| {
                let pieces = out.chunks(sequence).zip(all.chunks(sequence)).flat_map(|(out, x)| {
                    out.chunks(piece).zip(x.chunks(piece)).enumerate()
                });
                for_each(pieces, |(i, (out, x))| {
                    let at = first * width + i * piece;
                    read([x, table.part(at..at + x.len())], |[x, table]| {
                        out.write(|out| embedding::add_positions(x, table, 0, x.len() / width, width, out));
                    });
                });
            })
        })
    }

    fn positions_grad(&self, dout: &Buffer, first: usize, seq: usize, dtable: TableGrad<'_>) -> Result<()> {
        for_widened!(self, "positions", dout, T => {
            let dout = loaded::<T>(dout)?;
            let TableGrad { buffer, start, rows, width, accumulate, blocks } = dtable;
            let dtable = &mut buffer.as_mut_slice::<T>()?[start..start + rows * width];
            let (before, rest) = dtable.split_at_mut(first * width);
            let (used, after) = rest.split_at_mut(seq * width);
            if !accumulate {
                before.fill(0.0);
                after.fill(0.0);
            }
            // The samples are added up in pieces that stay in the cache.
            let samples = dout.len() / (seq * width).max(1);
            let piece = (row_piece(width) / samples.max(1)).max(64);
            for_each(used.chunks_mut(piece).enumerate(), |(i, dtable)| {
                if !accumulate {
                    dtable.fill(0.0);
                }
                let of_sample = |sample: usize| {
                    let at = sample * seq * width + i * piece;
                    dout.part(at..at + dtable.len())
                };
                let mut sums: Vec<T> = Vec::new();
                let of_block = samples.div_ceil(blocks);
                for block in 0..blocks {
                    let at = sums.len();
                    sums.resize(at + dtable.len(), 0.0);
                    for sample in block * of_block..((block + 1) * of_block).min(samples) {
                        read([of_sample(sample)], |[dout]| pointwise::add_assign(&mut sums[at..], dout));
                    }
                }
                pointwise::tree_sum(&mut sums, dtable.len(), pointwise::add_assign);
                pointwise::add_assign(dtable, &sums[..dtable.len()]);
            });
            Ok(())
        })
    }
}
