use super::prelude::*;
use meshwork_kernels::TABLE_ROWS;
use meshwork_tensor::kernel::{Embedding, Optim, TableGrad};

impl CudaDevice {
    /// The places of ids of some rows, sorted by buckets of [`TABLE_ROWS`] ids and in order within each, and the end of
    /// each bucket.
    fn bucketed(&self, ids: &Buffer, rows: &Range<usize>) -> Result<(Buffer, Buffer)> {
        const OP: &str = "embedding";
        let (size, count) = (TABLE_ROWS as usize, ids.count());
        let buckets = rows.start / size..rows.end.div_ceil(size);
        let of_places = self.scratch(DType::I32, count)?;
        self.write_group_ids(ids, 1, size, false, &of_places)?;
        let (of, each) = (self.parts_of(count, 1), buckets.len());
        // The number of ids in these rows is unknown here and does not matter: there is room for all, and the fault is
        // not read.
        let (order, slots) = (self.scratch(DType::I32, count)?, self.scratch(DType::I32, count)?);
        let fewer = self.scratch(DType::I64, 1)?;
        let ends = self.sorted(OP, &of_places, of, &buckets, [&order, &slots], self.place(OP, &fewer)?)?;
        Ok((order, ends.slice((of.parts - 1) * each..of.parts * each)?))
    }
}

impl Embedding for CudaDevice {
    fn lookup(&self, ids: &Buffer, table: &Buffer, rows: Range<usize>, vocab: usize, width: usize) -> Result<Buffer> {
        let op = "embedding";
        self.check_ids(Checked::Embedding, ids, vocab, false)?;
        let (count, out) = (ids.count(), self.alloc(table.dtype(), ids.count() * width)?);
        launch!(self, op, "embedding_forward", [out.count(), 0];
            ids, table, rows.start, rows.len(), &out, count, width
        )?;
        Ok(out)
    }

    fn lookup_grad(&self, ids: &Buffer, dout: &Buffer, rows: Range<usize>, dtable: TableGrad<'_>) -> Result<()> {
        let op = "embedding";
        let TableGrad { buffer, start, rows: table_rows, width, accumulate, blocks } = dtable;
        self.f32s(op, &[buffer])?;
        let (held, count) = (rows.len(), ids.count());
        if !accumulate {
            self.zero(buffer, start + held * width..start + table_rows * width)?;
        }
        let (order, ends) = self.bucketed(ids, &rows)?;
        let to = self.place_mut(op, buffer)?.offset(4 * start);
        if blocks == 1 {
            let vector = if dout.dtype().is_half() { 8 } else { 4 };
            return launch!(self, op, "embedding_backward", [held, width.div_ceil(vector)];
                ids, &order, &ends, dout, rows.start, to, accumulate, width
            );
        }
        launch!(self, op, "embedding_backward_tree", [held, width.div_ceil(4)];
            ids, &order, &ends, dout, rows.start, to, accumulate, blocks, (count / blocks).max(1), width
        )
    }

    fn positions(&self, x: &Buffer, table: &Buffer, first: usize, seq: usize, width: usize) -> Result<Buffer> {
        let op = "positions";
        let (count, out) = (x.count(), self.alloc(x.dtype(), x.count())?);
        launch!(self, op, "positions_forward", [count, 0]; x, table, first, seq, &out, count, width)?;
        Ok(out)
    }

    fn positions_grad(&self, dout: &Buffer, first: usize, seq: usize, dtable: TableGrad<'_>) -> Result<()> {
        let op = "positions";
        let TableGrad { buffer, start, rows, width, accumulate, blocks } = dtable;
        self.f32s(op, &[buffer])?;
        if !accumulate {
            self.zero(buffer, start..start + first * width)?;
            self.zero(buffer, start + (first + seq) * width..start + rows * width)?;
        }
        let batch = dout.count() / (seq * width).max(1);
        let (each, to) = (batch.div_ceil(blocks).max(1), self.place_mut(op, buffer)?.offset(4 * start));
        launch!(self, op, "positions_backward", [seq * width, 0];
            dout, first, seq, to, accumulate, batch, each, width
        )
    }
}
