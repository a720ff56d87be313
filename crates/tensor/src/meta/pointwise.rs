use super::Meta;
use crate::device::Device;
use crate::error::Result;
use crate::kernel::{DropoutMask, Pointwise};
use crate::tape::RowBlocks;
use meshwork_core::{Buffer, DType};

impl Meta {
    fn like(&self, x: &Buffer) -> Result<Buffer> {
        self.alloc(x.dtype(), x.count())
    }
}

impl Pointwise for Meta {
    fn add(&self, a: &Buffer, _b: &Buffer) -> Result<Buffer> {
        self.like(a)
    }

    fn add_assign(&self, _a: &mut Buffer, _at: usize, _b: &Buffer) -> Result<()> {
        Ok(())
    }

    fn bias(&self, x: &Buffer, _bias: &Buffer) -> Result<Buffer> {
        self.like(x)
    }

    fn tree_sum(&self, _x: &mut Buffer, _start: usize, _count: usize, _n: usize, _to: usize) -> Result<()> {
        Ok(())
    }

    fn bias_grad(&self, dy: &Buffer, n: usize, blocks: RowBlocks) -> Result<Buffer> {
        let sums = dy.dtype().widened();
        let _parts = self.alloc(sums, n * blocks.parts(dy.count() / n))?;
        self.alloc(sums, n * blocks.count())
    }

    fn bias_residual(&self, x: &Buffer, _bias: &Buffer, _residual: &Buffer) -> Result<Buffer> {
        self.like(x)
    }

    fn bias_gelu(&self, x: &Buffer, _bias: &Buffer, stored: DType) -> Result<Buffer> {
        self.alloc(stored, x.count())
    }

    fn bias_gelu_grad(&self, _dy: &mut Buffer, x: &Buffer, bias: &Buffer, blocks: RowBlocks) -> Result<Buffer> {
        let (n, sums) = (bias.count(), x.dtype().widened());
        let _parts = self.alloc(sums, n * blocks.parts(x.count() / n))?;
        self.alloc(sums, n * blocks.count())
    }

    fn gelu(&self, x: &Buffer) -> Result<Buffer> {
        self.like(x)
    }

    fn gelu_grad(&self, _dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        self.like(x)
    }

    fn swiglu(&self, x: &Buffer, stored: DType) -> Result<Buffer> {
        self.alloc(stored, x.count() / 2)
    }

    fn swiglu_grad(&self, _dy: &Buffer, _x: &mut Buffer) -> Result<()> {
        Ok(())
    }

    fn relu(&self, x: &Buffer) -> Result<(Buffer, Buffer)> {
        let above = self.alloc(DType::U8, x.count().div_ceil(u8::BITS as usize))?;
        Ok((self.like(x)?, above))
    }

    fn relu_grad(&self, dy: &Buffer, _above: &Buffer) -> Result<Buffer> {
        self.like(dy)
    }

    fn cast(&self, x: &Buffer, to: DType) -> Result<Buffer> {
        self.alloc(to, x.count())
    }

    fn cast_into(&self, _x: &Buffer, _out: &mut Buffer, _at: usize) -> Result<()> {
        Ok(())
    }

    fn dropout(&self, x: &Buffer, _mask: &DropoutMask) -> Result<Buffer> {
        self.like(x)
    }
}
