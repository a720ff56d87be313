use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{Choices, Permutation};
use meshwork_core::{Buffer, DType};
use std::ops::Range;

impl Permutation for Meta {
    fn counts(&self, _choices: &Buffer, samples: usize, ids: Range<usize>) -> Result<Buffer> {
        self.alloc(DType::I32, samples * ids.len())
    }

    fn sort(&self, choices: &Buffer, _ids: Range<usize>, total: usize) -> Result<(Buffer, Buffer)> {
        Ok((self.alloc(DType::I32, total)?, self.alloc(DType::I32, choices.count())?))
    }

    fn invert(&self, _order: &Buffer, n: usize) -> Result<Buffer> {
        self.alloc(DType::I32, n)
    }

    fn group_ids(&self, choices: &Buffer, _k: usize, _size: usize, _once: bool) -> Result<Buffer> {
        self.alloc(DType::I32, choices.count())
    }

    fn gather(&self, x: &Buffer, index: &Buffer, _per: usize, width: usize) -> Result<Buffer> {
        self.alloc(x.dtype(), index.count() * width)
    }

    fn combine(&self, rows: &Buffer, choices: Choices<'_>, _weights: Option<&Buffer>, width: usize) -> Result<Buffer> {
        self.alloc(rows.dtype(), choices.ids.count() / choices.k * width)
    }

    fn combine_grad(
        &self,
        _dout: &Buffer,
        rows: &Buffer,
        choices: Choices<'_>,
        _order: &Buffer,
        _weights: &Buffer,
        _width: usize,
    ) -> Result<(Buffer, Buffer)> {
        Ok((self.alloc(rows.dtype(), rows.count())?, self.alloc(rows.dtype(), choices.slots.count())?))
    }
}
