use super::Meta;
use crate::device::{Device, Work};
use crate::error::Result;
use crate::kernel::{GroupBlocks, Grouped, GroupedGemm, GroupedGrad};
use meshwork_core::{Buffer, DType};

impl Grouped for Meta {
    fn grouped_linear(&self, spec: GroupedGemm<'_>, x: &Buffer, w: &Buffer) -> Result<Buffer> {
        self.meter().add_flops(Work::Matmul, spec.flops());
        self.alloc(GroupedGemm::result(x, w), spec.rows.iter().sum::<usize>() * spec.n)
    }

    fn grouped_linear_swiglu(
        &self,
        spec: GroupedGemm<'_>,
        x: &Buffer,
        w: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        let product = self.grouped_linear(spec, x, w)?;
        let activated = self.alloc(stored, product.count() / 2)?;
        Ok((product, activated))
    }

    fn grouped_input_grad(&self, spec: GroupedGemm<'_>, dy: &Buffer, w: &Buffer) -> Result<Buffer> {
        self.meter().add_flops(Work::Matmul, spec.flops());
        self.alloc(GroupedGemm::result(dy, w), spec.rows.iter().sum::<usize>() * spec.k)
    }

    fn grouped_weight_grad(
        &self,
        spec: GroupedGemm<'_>,
        blocks: &GroupBlocks,
        _dy: &Buffer,
        _x: &Buffer,
        _dw: GroupedGrad<'_>,
    ) -> Result<()> {
        let rows: Vec<usize> = blocks.iter().map(|blocks| blocks.iter().map(ExactSizeIterator::len).sum()).collect();
        self.meter().add_flops(Work::Matmul, GroupedGemm { rows: &rows, ..spec }.flops());
        Ok(())
    }

    fn grouped_bias(&self, _rows: &[usize], x: &Buffer, _bias: &Buffer) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }

    fn grouped_bias_grad(&self, _blocks: &GroupBlocks, _n: usize, _dy: &Buffer, _db: GroupedGrad<'_>) -> Result<()> {
        Ok(())
    }
}
