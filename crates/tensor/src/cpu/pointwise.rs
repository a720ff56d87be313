use super::kernels::{dropout, gelu, pointwise};
use super::{Cpu, for_float};
use crate::error::Result;
use crate::family::{DropoutMask, Pointwise};
use meshwork_core::Buffer;

impl Pointwise for Cpu {
    fn add(&self, a: &Buffer, b: &Buffer) -> Result<Buffer> {
        for_float!(self, "add", a, T => {
            let (a, b) = (a.as_slice::<T>()?, b.as_slice::<T>()?);
            self.output::<T>(a.len(), |out| pointwise::add(a, b, out))
        })
    }

    fn add_assign(&self, a: &mut Buffer, at: usize, b: &Buffer) -> Result<()> {
        for_float!(self, "add", b, T => {
            pointwise::add_assign(&mut a.as_mut_slice::<T>()?[at..at + b.count()], b.as_slice::<T>()?);
            Ok(())
        })
    }

    fn bias(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        for_float!(self, "bias", x, T => {
            let (x, bias) = (x.as_slice::<T>()?, bias.as_slice::<T>()?);
            self.output::<T>(x.len(), |out| pointwise::bias(x, bias, out))
        })
    }

    fn bias_grad(&self, dy: &Buffer, n: usize) -> Result<Buffer> {
        for_float!(self, "bias", dy, T => {
            let dy = dy.as_slice::<T>()?;
            self.sum::<T>(n, |dbias| pointwise::bias_backward(dy, dbias))
        })
    }

    fn bias_residual(&self, x: &Buffer, bias: &Buffer, residual: &Buffer) -> Result<Buffer> {
        for_float!(self, "bias_residual", x, T => {
            let (x, bias, residual) = (x.as_slice::<T>()?, bias.as_slice::<T>()?, residual.as_slice::<T>()?);
            self.output::<T>(x.len(), |out| pointwise::bias_residual(x, bias, residual, out))
        })
    }

    fn bias_gelu(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        for_float!(self, "gelu", x, T => {
            let (x, bias) = (x.as_slice::<T>()?, bias.as_slice::<T>()?);
            self.output::<T>(x.len(), |out| gelu::bias_gelu(x, bias, out))
        })
    }

    fn bias_gelu_grad(&self, dy: &Buffer, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        for_float!(self, "gelu", x, T => {
            let (dy, x, bias) = (dy.as_slice::<T>()?, x.as_slice::<T>()?, bias.as_slice::<T>()?);
            self.output::<T>(x.len(), |dx| gelu::bias_gelu_backward(x, bias, dy, dx))
        })
    }

    fn gelu(&self, x: &Buffer) -> Result<Buffer> {
        for_float!(self, "gelu", x, T => {
            let x = x.as_slice::<T>()?;
            self.output::<T>(x.len(), |out| gelu::gelu(x, out))
        })
    }

    fn gelu_grad(&self, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        for_float!(self, "gelu", x, T => {
            let (dy, x) = (dy.as_slice::<T>()?, x.as_slice::<T>()?);
            self.output::<T>(x.len(), |dx| gelu::gelu_backward(x, dy, dx))
        })
    }

    fn dropout(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        let region = dropout::Region {
            shape: &mask.local[..mask.ndim],
            offset: &mask.offset[..mask.ndim],
            global: &mask.global[..mask.ndim],
        };
        for_float!(self, "dropout", x, T => {
            let x = x.as_slice::<T>()?;
            let mask = dropout::Mask { key: mask.key, p: mask.p };
            self.output::<T>(x.len(), |y| dropout::dropout(mask, region, x, y))
        })
    }
}
