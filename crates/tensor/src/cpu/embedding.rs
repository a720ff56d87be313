use super::kernels::embedding;
use super::{Cpu, for_float};
use crate::error::{Error, Result};
use crate::family::Embedding;
use meshwork_core::Buffer;
use std::ops::Range;

impl Embedding for Cpu {
    fn lookup(&self, ids: &Buffer, table: &Buffer, rows: Range<usize>, vocab: usize, width: usize) -> Result<Buffer> {
        for_float!(self, "embedding", table, T => {
            let ids = ids.as_slice::<i32>()?;
            let known = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocab);
            if let Some(at) = ids.iter().position(|&id| !known(id)) {
                return Err(Error::Id { op: "embedding", id: ids[at], at, vocab });
            }
            let held = &table.as_slice::<T>()?[..rows.len() * width];
            self.output::<T>(ids.len() * width, |out| embedding::lookup(ids, held, rows.start, width, out))
        })
    }

    fn lookup_grad(
        &self,
        ids: &Buffer,
        dout: &Buffer,
        rows: Range<usize>,
        table_rows: usize,
        width: usize,
    ) -> Result<Buffer> {
        for_float!(self, "embedding", dout, T => {
            let (ids, dout) = (ids.as_slice::<i32>()?, dout.as_slice::<T>()?);
            self.sum::<T>(table_rows * width, |dtable| {
                embedding::lookup_backward(ids, dout, rows.start, width, &mut dtable[..rows.len() * width]);
            })
        })
    }

    fn positions(&self, x: &Buffer, table: &Buffer, first: usize, seq: usize, width: usize) -> Result<Buffer> {
        for_float!(self, "positions", x, T => {
            let (x, table) = (x.as_slice::<T>()?, table.as_slice::<T>()?);
            self.output::<T>(x.len(), |out| embedding::add_positions(x, table, first, seq, width, out))
        })
    }

    fn positions_grad(
        &self,
        dout: &Buffer,
        first: usize,
        seq: usize,
        table_rows: usize,
        width: usize,
    ) -> Result<Buffer> {
        for_float!(self, "positions", dout, T => {
            let dout = dout.as_slice::<T>()?;
            self.sum::<T>(table_rows * width, |dtable| {
                embedding::add_positions_backward(dout, first, seq, width, dtable);
            })
        })
    }
}
