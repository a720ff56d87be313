use super::CudaDevice;
use super::checked::Checked;
use meshwork_core::{Buffer, DType};
use meshwork_kernels::TABLE_ROWS;
use meshwork_tensor::kernel::{Embedding, Optim, TableGrad};
use meshwork_tensor::{Device, Result};
use std::ops::Range;

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
        let [counts, ends] = [(); 2].map(|()| self.scratch(DType::I32, of.parts * each));
        let (counts, ends) = (counts?, ends?);
        self.count_parts(OP, &of_places, of, &buckets, &counts)?;
        // How many ids have these rows is not known here, and of no account: room for all, and a fault that nobody
        // reads.
        let [order, slots] = [(); 2].map(|()| self.scratch(DType::I32, count));
        let (order, slots, fewer) = (order?, slots?, self.scratch(DType::I64, 1)?);
        self.place_choices(OP, &of_places, of, &buckets, [&counts, &ends], (&order, &slots), self.place(OP, &fewer)?)?;
        Ok((order, ends.slice((of.parts - 1) * each..of.parts * each)?))
    }
}

impl Embedding for CudaDevice {
    fn lookup(&self, ids: &Buffer, table: &Buffer, rows: Range<usize>, vocab: usize, width: usize) -> Result<Buffer> {
        let op = "embedding";
        let (kernel, f16) = self.of_storage(op, &[table], ["embedding_forward", "embedding_forward_16"])?;
        self.check_ids(Checked::Embedding, ids, vocab, false)?;
        let (count, out) = (ids.count(), self.alloc(table.dtype(), ids.count() * width)?);
        let args = [
            self.place(op, ids)?.into(),
            self.place(op, table)?.into(),
            rows.start.into(),
            rows.len().into(),
            self.place(op, &out)?.into(),
            count.into(),
            width.into(),
        ];
        self.launch(op, kernel, [out.count(), 0], &[&args[..], f16.as_slice()].concat())?;
        Ok(out)
    }

    fn lookup_grad(
        &self,
        ids: &Buffer,
        dout: &Buffer,
        rows: Range<usize>,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        let op = "embedding";
        let TableGrad { buffer, start, rows: table_rows, accumulate, blocks } = dtable;
        self.f32s(op, &[buffer])?;
        let kernels = match blocks {
            1 => ["embedding_backward", "embedding_backward_16"],
            _ => ["embedding_backward_tree", "embedding_backward_tree_16"],
        };
        let (kernel, f16) = self.of_storage(op, &[dout], kernels)?;
        let (held, count) = (rows.len(), ids.count());
        if !accumulate {
            self.zero(buffer, start + held * width..start + table_rows * width)?;
        }
        let (order, ends) = self.bucketed(ids, &rows)?;
        let to = self.place_mut(op, buffer)?.offset(4 * start);
        let (places, ends) = (self.place(op, &order)?.into(), self.place(op, &ends)?.into());
        let of = [self.place(op, ids)?.into(), places, ends, self.place(op, dout)?.into(), rows.start.into()];
        let into = [to.into(), i32::from(accumulate).into()];
        let runs = [blocks.into(), (count / blocks).max(1).into()];
        let runs = if blocks == 1 { &[][..] } else { &runs };
        let vector = if blocks == 1 && f16.is_some() { 8 } else { 4 };
        let args = [&of[..], &into, runs, &[width.into()], f16.as_slice()].concat();
        self.launch(op, kernel, [held, width.div_ceil(vector)], &args)
    }

    fn positions(&self, x: &Buffer, table: &Buffer, first: usize, seq: usize, width: usize) -> Result<Buffer> {
        let op = "positions";
        let (kernel, f16) = self.of_storage(op, &[x, table], ["positions_forward", "positions_forward_16"])?;
        let (count, out) = (x.count(), self.alloc(x.dtype(), x.count())?);
        let args = [
            self.place(op, x)?.into(),
            self.place(op, table)?.into(),
            first.into(),
            seq.into(),
            self.place(op, &out)?.into(),
            count.into(),
            width.into(),
        ];
        self.launch(op, kernel, [count, 0], &[&args[..], f16.as_slice()].concat())?;
        Ok(out)
    }

    fn positions_grad(
        &self,
        dout: &Buffer,
        first: usize,
        seq: usize,
        width: usize,
        dtable: TableGrad<'_>,
    ) -> Result<()> {
        let op = "positions";
        let TableGrad { buffer, start, rows, accumulate, blocks } = dtable;
        self.f32s(op, &[buffer])?;
        let (kernel, f16) = self.of_storage(op, &[dout], ["positions_backward", "positions_backward_16"])?;
        if !accumulate {
            self.zero(buffer, start..start + first * width)?;
            self.zero(buffer, start + (first + seq) * width..start + rows * width)?;
        }
        let batch = dout.count() / (seq * width).max(1);
        let args = [
            self.place(op, dout)?.into(),
            first.into(),
            seq.into(),
            self.place_mut(op, buffer)?.offset(4 * start).into(),
            i32::from(accumulate).into(),
            batch.into(),
            batch.div_ceil(blocks).max(1).into(),
            width.into(),
        ];
        self.launch(op, kernel, [seq * width, 0], &[&args[..], f16.as_slice()].concat())
    }
}
