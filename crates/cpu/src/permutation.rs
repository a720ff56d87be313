use super::kernels::permutation;
use super::prelude::*;
use meshwork_tensor::kernel::{Choices, Permutation};

impl Permutation for Cpu {
    fn counts(&self, choices: &Buffer, samples: usize, ids: Range<usize>) -> Result<Buffer> {
        let choices = choices.as_slice::<i32>()?;
        let of_sample = (choices.len() / samples.max(1)).max(1);
        self.output::<i32>(samples * ids.len(), |counts| {
            counts.fill(0);
            for (choices, counts) in choices.chunks(of_sample).zip(counts.chunks_mut(ids.len().max(1))) {
                permutation::counts(choices, &ids, counts);
            }
        })
    }

    fn sort(&self, choices: &Buffer, ids: Range<usize>, total: usize) -> Result<(Buffer, Buffer)> {
        let choices = choices.as_slice::<i32>()?;
        let mut sorted = Ok(());
        let order = self.output::<i32>(total, |order| sorted = permutation::sort(choices, &ids, order))?;
        sorted.map_err(|found| Error::Shape {
            op: "sort",
            problem: format!("{found} choices have an id in {ids:?}, and there should be {total}"),
            shapes: vec![vec![choices.len()]],
        })?;
        let slots = self.invert(&order, choices.len())?;
        Ok((order, slots))
    }

    fn invert(&self, order: &Buffer, n: usize) -> Result<Buffer> {
        let order = order.as_slice::<i32>()?;
        self.output::<i32>(n, |slots| permutation::invert(order, slots))
    }

    fn group_ids(&self, choices: &Buffer, k: usize, size: usize, once: bool) -> Result<Buffer> {
        let choices = choices.as_slice::<i32>()?;
        self.output::<i32>(choices.len(), |groups| permutation::group_ids(choices, k, size, once, groups))
    }

    fn gather(&self, x: &Buffer, index: &Buffer, per: usize, width: usize) -> Result<Buffer> {
        let index = index.as_slice::<i32>()?;
        let mut out = self.alloc(x.dtype(), index.len() * width)?;
        let (bytes, rows) = (width * x.dtype().size(), row_piece(width) / width.max(1));
        let x = x.as_bytes()?;
        for_each(
            out.as_bytes_mut()?.chunks_mut((rows * bytes).max(1)).zip(index.chunks(rows.max(1))),
            |(out, index)| {
                permutation::gather(x, index, per, bytes, out);
            },
        );
        Ok(out)
    }

    fn combine(&self, rows: &Buffer, choices: Choices<'_>, weights: Option<&Buffer>, width: usize) -> Result<Buffer> {
        for_float!(self, "combine", rows, T => {
            let rows = rows.as_slice::<T>()?;
            let weights = weights.map_or(Ok(&[][..]), |weights| weights.as_slice::<T>())?;
            let (ids, slots, k) = (choices.ids.as_slice::<i32>()?, choices.slots.as_slice::<i32>()?, choices.k);
            let tokens = (PIECE / (width * k).max(1)).max(1);
            self.output::<T>(ids.len() / k * width, |out| {
                for_each(out.chunks_mut((tokens * width).max(1)).enumerate(), |(i, out)| {
                    let at = i * tokens * k..(i * tokens * k + out.len() / width * k);
                    let choices = permutation::Choices { ids: &ids[at.clone()], slots: &slots[at.clone()], k };
                    permutation::combine(rows, choices, weights.get(at).unwrap_or_default(), width, out);
                });
            })
        })
    }

    fn combine_grad(
        &self,
        dout: &Buffer,
        rows: &Buffer,
        choices: Choices<'_>,
        order: &Buffer,
        weights: &Buffer,
        width: usize,
    ) -> Result<(Buffer, Buffer)> {
        for_float!(self, "combine", rows, T => {
            let (dout, rows, weights) = (dout.as_slice::<T>()?, rows.as_slice::<T>()?, weights.as_slice::<T>()?);
            let (slots, order, k) = (choices.slots.as_slice::<i32>()?, order.as_slice::<i32>()?, choices.k);
            let (piece, at_once) = (row_piece(width), row_piece(width) / width.max(1));
            let drows = self.output::<T>(rows.len(), |drows| {
                for_each(drows.chunks_mut(piece).zip(order.chunks(at_once)), |(drows, order)| {
                    permutation::spread(dout, order, weights, k, width, drows);
                });
            })?;
            let tokens = (at_once / k).max(1);
            let dweights = self.output::<T>(slots.len(), |dweights| {
                let pieces = dweights.chunks_mut(tokens * k).zip(slots.chunks(tokens * k)).zip(dout.chunks((tokens * width).max(1)));
                for_each(pieces, |((dweights, slots), dout)| permutation::dots(dout, rows, slots, k, width, dweights));
            })?;
            Ok((drows, dweights))
        })
    }
}
