use super::prelude::*;
use meshwork_tensor::kernel::{Choices, Permutation};

/// The cut of choices into parts, one per warp.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    samples: usize,
    /// Choices of a sample, and of a part.
    each: usize,
    part: usize,
    /// Parts of a sample.
    pub(super) parts: usize,
}

/// Choices that a warp counts, unless there would be more than this many parts.
const PART: usize = 2048;
const PARTS: usize = 512;

impl CudaDevice {
    /// The parts of `count` choices of some samples: at least one of each.
    pub(super) fn parts_of(&self, count: usize, samples: usize) -> Parts {
        let each = count / samples.max(1);
        let part = each.div_ceil(PARTS).max(PART);
        Parts { samples, each, part, parts: each.div_ceil(part).max(1) }
    }

    /// Counts the choices of each id in every part, `[samples, parts, ids]` in i32.
    pub(super) fn count_parts(
        &self,
        op: &'static str,
        choices: &Buffer,
        Parts { samples, each, part, parts }: Parts,
        ids: &Range<usize>,
        counts: &Buffer,
    ) -> Result<()> {
        let (start, len) = (ids.start, ids.len());
        launch!(self, op, "choice_parts", [samples * parts, 0];
            choices, each, part, parts, start, len, counts, samples
        )
    }

    /// [`group_ids`](Permutation::group_ids) in given memory.
    pub(super) fn write_group_ids(
        &self,
        choices: &Buffer,
        k: usize,
        size: usize,
        once: bool,
        groups: &Buffer,
    ) -> Result<()> {
        let tokens = choices.count() / k;
        launch!(self, "group_ids", "group_ids", [tokens, 0]; choices, k, size, once, groups, tokens)
    }

    /// Sorts the choices of some ids into `order`, and writes the slots of all choices. Returns the end of each id, in
    /// the last part. `fault` is written if the number of choices differs from the length of `order`.
    pub(super) fn sorted(
        &self,
        op: &'static str,
        choices: &Buffer,
        of: Parts,
        ids: &Range<usize>,
        [order, slots]: [&Buffer; 2],
        fault: Address,
    ) -> Result<Buffer> {
        let len = ids.len();
        let (counts, ends) = (self.scratch(DType::I32, of.parts * len)?, self.scratch(DType::I32, of.parts * len)?);
        self.count_parts(op, choices, of, ids, &counts)?;
        launch!(self, op, "choice_places", [of.parts, 0];
            choices, choices.count(), of.part, of.parts, ids.start, len, &counts, &ends, order, order.count(), slots,
            fault
        )?;
        Ok(ends)
    }
}

impl Permutation for CudaDevice {
    fn counts(&self, choices: &Buffer, samples: usize, ids: Range<usize>) -> Result<Buffer> {
        const OP: &str = "counts";
        let counts = self.alloc(DType::I32, samples * ids.len())?;
        let of = self.parts_of(choices.count(), samples);
        if of.parts == 1 {
            self.count_parts(OP, choices, of, &ids, &counts)?;
            return Ok(counts);
        }
        let parts = self.scratch(DType::I32, samples * of.parts * ids.len())?;
        self.count_parts(OP, choices, of, &ids, &parts)?;
        let count = counts.count();
        launch!(self, OP, "choice_counts", [count, 0]; &parts, of.parts, ids.len(), &counts, count)?;
        Ok(counts)
    }

    fn sort(&self, choices: &Buffer, ids: Range<usize>, total: usize) -> Result<(Buffer, Buffer)> {
        let (order, slots) = (self.alloc(DType::I32, total)?, self.alloc(DType::I32, choices.count())?);
        let (of, fault) = (self.parts_of(choices.count(), 1), self.fault_of(Checked::Sort));
        self.sorted("sort", choices, of, &ids, [&order, &slots], fault)?;
        Ok((order, slots))
    }

    fn invert(&self, order: &Buffer, n: usize) -> Result<Buffer> {
        const OP: &str = "invert";
        let slots = self.alloc(DType::I32, n)?;
        launch!(self, OP, "invert_fill", [n, 0]; &slots, n)?;
        launch!(self, OP, "invert", [order.count(), 0]; order, &slots, order.count())?;
        Ok(slots)
    }

    fn group_ids(&self, choices: &Buffer, k: usize, size: usize, once: bool) -> Result<Buffer> {
        let groups = self.alloc(DType::I32, choices.count())?;
        self.write_group_ids(choices, k, size, once, &groups)?;
        Ok(groups)
    }

    fn gather(&self, x: &Buffer, index: &Buffer, per: usize, width: usize) -> Result<Buffer> {
        const OP: &str = "gather";
        let rows = x.count() / width.max(1);
        self.check_ids(Checked::Gather, index, rows * per, false)?;
        let out = self.alloc(x.dtype(), index.count() * width)?;
        let (kernel, word) = match x.dtype().size() {
            1 => ("gather_8", 1),
            2 => ("gather_16", 2),
            _ => ("gather_32", 4),
        };
        let (words, count) = (width * x.dtype().size() / word, out.bytes() / word);
        launch!(self, OP, kernel, [count, 0]; x, index, rows, per, words, &out, count)?;
        Ok(out)
    }

    fn combine(&self, rows: &Buffer, choices: Choices<'_>, weights: Option<&Buffer>, width: usize) -> Result<Buffer> {
        let Choices { ids, slots, k, .. } = choices;
        let count = ids.count() / k * width;
        let out = self.alloc(DType::F32, count)?;
        launch!(self, "combine", "combine_forward", [count, 0]; rows, ids, slots, weights, k, width, &out, count)?;
        Ok(out)
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
        const OP: &str = "combine";
        let Choices { slots, k, .. } = choices;
        let (places, count) = (slots.count(), order.count() * width);
        let (drows, dweights) = (self.alloc(DType::F32, rows.count())?, self.alloc(DType::F32, places)?);
        launch!(self, OP, "combine_backward_rows", [count, 0]; dout, order, weights, k, width, &drows, count)?;
        launch!(self, OP, "combine_backward_weights", [places, width];
            dout, rows, slots, k, &dweights, places, width
        )?;
        Ok((drows, dweights))
    }
}
