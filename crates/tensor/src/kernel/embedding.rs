//! Rows of a table.

use super::table::*;
use crate::tape::BlockSlot;
use meshwork_core::Buffer;
use std::ops::Range;

/// The destination of a table's gradient.
#[derive(Debug)]
pub struct TableGrad<'a> {
    /// Memory that holds it.
    pub buffer: &'a mut Buffer,
    /// Index of its first element in `buffer`.
    pub start: usize,
    /// Rows of the table.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// Whether to add to the old contents instead of overwriting them.
    pub accumulate: bool,
    /// Reduction blocks of the samples in the [tree](meshwork_core::tree): one per sample, or one for all.
    pub blocks: usize,
}

impl<'a> TableGrad<'a> {
    /// The gradient of a table of `rows` rows of `width` elements, in the memory `room`.
    pub fn new(room: BlockSlot<'a>, [rows, width]: [usize; 2]) -> Self {
        let BlockSlot { buffer, start, accumulate, blocks, .. } = room;
        Self { buffer, start, rows, width, accumulate, blocks }
    }
}

kernels! {
    /// Lookups by i32 ids, and positions added to a sequence. All but the gradients of tables take 16 bits.
    pub trait Embedding at embedding {
        /// `out[i] = table[ids[i] - rows.start]`, zero where the id is outside `rows`: the rows that `table` holds of
        /// `vocab` over all ranks. An id outside the vocabulary is an error.
        fn lookup(&self, ids: &Buffer, table: &Buffer, rows: Range<usize>, vocab: usize, width: usize) -> Result<Buffer>
            | profile(= Traffic::lookup(ids, table, width)), halves(as_is), meta(table => ids.count() * width);

        /// Gradient of a table: `dtable[ids[i] - rows.start] += dout[i]`, within each block in the order of i.
        fn lookup_grad(&self, ids: &Buffer, dout: &Buffer, rows: Range<usize>, dtable: TableGrad<'_>) -> Result<()>
            | profile(= Traffic::lookup_grad(ids, dout, &dtable)), halves({
                  self.write_table(dtable, |dtable| self.inner.embedding()?.lookup_grad(ids, dout, rows, dtable))
              }), meta(nothing);

        /// `out[b, s, :] = x[b, s, :] + table[first + s, :]`.
        fn positions(&self, x: &Buffer, table: &Buffer, first: usize, seq: usize, width: usize) -> Result<Buffer>
            | profile(Embedding: x, table), halves(alike x, table -> x), meta(like x);

        /// Gradient of a table: `dtable[first + s] = Σ_b dout[b, s]`, zero elsewhere. Each block sums its samples one
        /// after the other.
        fn positions_grad(&self, dout: &Buffer, first: usize, seq: usize, dtable: TableGrad<'_>) -> Result<()>
            | profile(= Traffic::positions_grad(dout, &dtable)), halves({
                  self.write_table(dtable, |dtable| self.inner.embedding()?.positions_grad(dout, first, seq, dtable))
              }), meta(nothing);
    }
}
