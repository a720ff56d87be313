//! Cuts of rows for sums over rows: computed once, and cached on the device.

use super::memory::Origin;
use super::prelude::*;
use meshwork_kernels::RowParts;
use std::collections::HashMap;

/// The cached cuts, by the number of rows and their blocks.
#[derive(Debug, Default)]
pub(super) struct Cuts(Mutex<HashMap<[usize; 3], Cut>>);

/// Rows cut into parts, and parts grouped into blocks.
#[derive(Clone, Debug)]
pub(super) struct Cut {
    /// The first row of each part, then the number of rows, in i64.
    rows: Buffer,
    /// The first part of each block, then the number of parts, in i64.
    parts: Buffer,
}

impl Cut {
    /// The number of parts.
    pub(super) fn parts(&self) -> usize {
        self.rows.count() - 1
    }
}

impl CudaDevice {
    /// The cut of `rows` rows into blocks.
    pub(super) fn cut(&self, rows: usize, blocks: RowBlocks) -> Result<Cut> {
        let key = [rows, blocks.samples, blocks.slices];
        let mut cuts = self.cuts.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cut) = cuts.get(&key) {
            return Ok(cut.clone());
        }
        let cut = RowParts::new(blocks.rows(rows).map(|rows| rows as u32));
        let upload = |starts: Vec<i64>| self.uploaded(&Buffer::from_vec(starts), false);
        let cut = Cut { rows: upload(cut.rows)?, parts: upload(cut.parts)? };
        cuts.insert(key, cut.clone());
        Ok(cut)
    }

    /// The address of the rows' cut, for kernels that sum parts.
    pub(super) fn starts(&self, op: &'static str, cut: &Cut) -> Result<Address> {
        self.place(op, &cut.rows)
    }

    /// For each part the sum of its rows of x.
    pub(super) fn sum_rows(&self, op: &'static str, x: &Buffer, cut: &Cut, n: usize) -> Result<Buffer> {
        let parts = self.alloc(DType::F32, n * cut.parts())?;
        launch!(self, op, "sum_parts", [cut.parts(), n]; x, &cut.rows, &parts, cut.parts(), n)?;
        Ok(parts)
    }

    /// For each block, the sum over its parts, `n` numbers each.
    pub(super) fn sum_parts(&self, op: &'static str, parts: &Buffer, cut: &Cut, n: usize) -> Result<Buffer> {
        let blocks = cut.parts.count() - 1;
        let sums = self.block_sums(n * blocks)?;
        launch!(self, op, "sum_blocks", [blocks, n]; parts, &cut.parts, &sums, None::<&Buffer>, blocks, n)?;
        Ok(sums)
    }

    /// The same for the parts of two tensors, one after the other, in one launch.
    pub(super) fn sum_both_parts(
        &self,
        op: &'static str,
        parts: &Buffer,
        cut: &Cut,
        n: usize,
    ) -> Result<(Buffer, Buffer)> {
        let blocks = cut.parts.count() - 1;
        let (first, second) = (self.block_sums(n * blocks)?, self.block_sums(n * blocks)?);
        launch!(self, op, "sum_blocks", [2 * blocks, n]; parts, &cut.parts, &first, &second, blocks, n)?;
        Ok((first, second))
    }

    fn block_sums(&self, count: usize) -> Result<Buffer> {
        self.buffer(DType::F32, count, Origin::Compute, true)
    }
}
