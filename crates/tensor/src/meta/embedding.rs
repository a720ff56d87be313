use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{Embedding, TableGrad};
use meshwork_core::Buffer;
use std::ops::Range;

impl Embedding for Meta {
    fn lookup(&self, ids: &Buffer, table: &Buffer, _rows: Range<usize>, _vocab: usize, width: usize) -> Result<Buffer> {
        self.alloc(table.dtype(), ids.count() * width)
    }

    fn lookup_grad(
        &self,
        _ids: &Buffer,
        _dout: &Buffer,
        _rows: Range<usize>,
        _width: usize,
        _dtable: TableGrad<'_>,
    ) -> Result<()> {
        Ok(())
    }

    fn positions(&self, x: &Buffer, _table: &Buffer, _first: usize, _seq: usize, _width: usize) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }

    fn positions_grad(
        &self,
        _dout: &Buffer,
        _first: usize,
        _seq: usize,
        _width: usize,
        _dtable: TableGrad<'_>,
    ) -> Result<()> {
        Ok(())
    }
}
