use super::CudaDevice;
use super::checked::Checked;
use crate::driver::{Address, Argument};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::kernel::{Choices, Permutation};
use meshwork_tensor::{Device, Result};
use std::ops::Range;

impl CudaDevice {
    /// Where a buffer begins, or no place.
    pub(super) fn place_or_none(&self, op: &'static str, buffer: Option<&Buffer>) -> Result<Argument> {
        Ok(buffer.map_or(Ok(Address::NULL), |buffer| self.place(op, buffer))?.into())
    }
}

/// How choices are cut into parts, one for a warp.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    samples: usize,
    /// Choices of a sample, and of a part of it.
    each: usize,
    part: usize,
    /// Parts of a sample.
    pub(super) parts: usize,
}

/// Choices that a warp counts, unless there would be more parts than that.
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
        let args = [
            self.place(op, choices)?.into(),
            each.into(),
            part.into(),
            parts.into(),
            ids.start.into(),
            ids.len().into(),
            self.place(op, counts)?.into(),
            samples.into(),
        ];
        self.launch(op, "choice_parts", [samples * parts, 0], &args)
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
        const OP: &str = "group_ids";
        let tokens = choices.count() / k;
        let args = [
            self.place(OP, choices)?.into(),
            k.into(),
            size.into(),
            i32::from(once).into(),
            self.place(OP, groups)?.into(),
            tokens.into(),
        ];
        self.launch(OP, "group_ids", [tokens, 0], &args)
    }

    /// Sorts the choices of some ids by the counts of their parts: the order, and the slots of all choices. Leaves in
    /// the last part of `next` where each id ends. `fault` is written if they are not as many as the order has room
    /// for.
    #[allow(clippy::too_many_arguments)] // what the kernel takes
    pub(super) fn place_choices(
        &self,
        op: &'static str,
        choices: &Buffer,
        of: Parts,
        ids: &Range<usize>,
        [counts, next]: [&Buffer; 2],
        (order, slots): (&Buffer, &Buffer),
        fault: Address,
    ) -> Result<()> {
        let args = [
            self.place(op, choices)?.into(),
            choices.count().into(),
            of.part.into(),
            of.parts.into(),
            ids.start.into(),
            ids.len().into(),
            self.place(op, counts)?.into(),
            self.place(op, next)?.into(),
            self.place(op, order)?.into(),
            order.count().into(),
            self.place(op, slots)?.into(),
            fault.into(),
        ];
        self.launch(op, "choice_places", [of.parts, 0], &args)
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
        let (from, to) = (self.place(OP, &parts)?.into(), self.place(OP, &counts)?.into());
        let args = [from, of.parts.into(), ids.len().into(), to, counts.count().into()];
        self.launch(OP, "choice_counts", [counts.count(), 0], &args)?;
        Ok(counts)
    }

    fn sort(&self, choices: &Buffer, ids: Range<usize>, total: usize) -> Result<(Buffer, Buffer)> {
        const OP: &str = "sort";
        let (order, slots) = (self.alloc(DType::I32, total)?, self.alloc(DType::I32, choices.count())?);
        let of = self.parts_of(choices.count(), 1);
        let [counts, next] = [(); 2].map(|()| self.scratch(DType::I32, of.parts * ids.len()));
        let (counts, next) = (counts?, next?);
        self.count_parts(OP, choices, of, &ids, &counts)?;
        let fault = self.fault_of(Checked::Sort);
        self.place_choices(OP, choices, of, &ids, [&counts, &next], (&order, &slots), fault)?;
        Ok((order, slots))
    }

    fn invert(&self, order: &Buffer, n: usize) -> Result<Buffer> {
        const OP: &str = "invert";
        let slots = self.alloc(DType::I32, n)?;
        let (at, count) = (self.place(OP, &slots)?, order.count());
        self.launch(OP, "invert_fill", [n, 0], &[at.into(), n.into()])?;
        self.launch(OP, "invert", [count, 0], &[self.place(OP, order)?.into(), at.into(), count.into()])?;
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
        let args = [
            self.place(OP, x)?.into(),
            self.place(OP, index)?.into(),
            rows.into(),
            per.into(),
            words.into(),
            self.place(OP, &out)?.into(),
            count.into(),
        ];
        self.launch(OP, kernel, [count, 0], &args)?;
        Ok(out)
    }

    fn combine(&self, rows: &Buffer, choices: Choices<'_>, weights: Option<&Buffer>, width: usize) -> Result<Buffer> {
        const OP: &str = "combine";
        self.f32s(OP, &[rows])?;
        self.f32s(OP, weights.as_slice())?;
        let count = choices.ids.count() / choices.k * width;
        let out = self.alloc(DType::F32, count)?;
        let args = [
            self.place(OP, rows)?.into(),
            self.place(OP, choices.ids)?.into(),
            self.place(OP, choices.slots)?.into(),
            self.place_or_none(OP, weights)?,
            choices.k.into(),
            width.into(),
            self.place(OP, &out)?.into(),
            count.into(),
        ];
        self.launch(OP, "combine_forward", [count, 0], &args)?;
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
        self.f32s(OP, &[dout, rows, weights])?;
        let (k, places) = (choices.k.into(), choices.slots.count());
        let (drows, dweights) = (self.alloc(DType::F32, rows.count())?, self.alloc(DType::F32, places)?);
        let (count, of) = (order.count() * width, self.place(OP, dout)?.into());
        let args = [of, self.place(OP, order)?.into(), self.place(OP, weights)?.into(), k, width.into()];
        let to = [self.place(OP, &drows)?.into(), count.into()];
        self.launch(OP, "combine_backward_rows", [count, 0], &[&args[..], &to].concat())?;
        let args = [of, self.place(OP, rows)?.into(), self.place(OP, choices.slots)?.into(), k];
        let to = [self.place(OP, &dweights)?.into(), places.into(), width.into()];
        self.launch(OP, "combine_backward_weights", [places, width], &[&args[..], &to].concat())?;
        Ok((drows, dweights))
    }
}
