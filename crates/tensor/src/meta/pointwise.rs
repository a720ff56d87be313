use super::Meta;
use crate::cpu::leaves_len;
use crate::device::Device;
use crate::error::Result;
use crate::family::{DropoutMask, Pointwise};
use meshwork_core::Buffer;

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

    fn bias_grad(&self, dy: &Buffer, n: usize) -> Result<Buffer> {
        let _leaves = self.alloc(dy.dtype(), leaves_len(dy.count() / n, n))?;
        self.alloc(dy.dtype(), n)
    }

    fn bias_residual(&self, x: &Buffer, _bias: &Buffer, _residual: &Buffer) -> Result<Buffer> {
        self.like(x)
    }

    fn bias_gelu(&self, x: &Buffer, _bias: &Buffer) -> Result<Buffer> {
        self.like(x)
    }

    fn bias_gelu_grad(&self, _dy: &mut Buffer, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        let n = bias.count();
        let _leaves = self.alloc(x.dtype(), leaves_len(x.count() / n, n))?;
        self.like(bias)
    }

    fn gelu(&self, x: &Buffer) -> Result<Buffer> {
        self.like(x)
    }

    fn gelu_grad(&self, _dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        self.like(x)
    }

    fn dropout(&self, x: &Buffer, _mask: &DropoutMask) -> Result<Buffer> {
        self.like(x)
    }
}
