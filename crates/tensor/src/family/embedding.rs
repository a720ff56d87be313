//! Rows of a table.

use crate::error::Result;
use meshwork_core::Buffer;
use std::fmt::Debug;
use std::ops::Range;

/// Where the gradient of a table goes.
#[derive(Debug)]
pub struct TableGrad<'a> {
    /// Memory that holds it.
    pub buffer: &'a mut Buffer,
    /// Its first element there.
    pub start: usize,
    /// Rows of the table.
    pub rows: usize,
    /// Add to what is there instead of overwriting it.
    pub accumulate: bool,
}

/// Lookups by i32 ids, and positions added to a sequence.
pub trait Embedding: Debug {
    /// `out[i] = table[ids[i] - rows.start]`, zero where the id is outside `rows`: the rows that `table` holds of `vocab` over all
    /// ranks. An id outside the vocabulary is an error.
    fn lookup(&self, ids: &Buffer, table: &Buffer, rows: Range<usize>, vocab: usize, width: usize) -> Result<Buffer>;

    /// Gradient of a table: `dtable[ids[i] - rows.start] += dout[i]`, in the order of i.
    fn lookup_grad(
        &self,
        ids: &Buffer,
        dout: &Buffer,
        rows: Range<usize>,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()>;

    /// `out[b, s, :] = x[b, s, :] + table[first + s, :]`.
    fn positions(&self, x: &Buffer, table: &Buffer, first: usize, seq: usize, width: usize) -> Result<Buffer>;

    /// Gradient of a table of `table_rows` rows: `dtable[first + s] = Σ_b dout[b, s]`, zero elsewhere.
    fn positions_grad(
        &self,
        dout: &Buffer,
        first: usize,
        seq: usize,
        table_rows: usize,
        width: usize,
    ) -> Result<Buffer>;
}
