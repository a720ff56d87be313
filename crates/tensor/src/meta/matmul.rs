use super::Meta;
use crate::device::{Device, Work};
use crate::error::Result;
use crate::kernel::{Gemm, Matmul};
use meshwork_core::{Buffer, DType};

impl Matmul for Meta {
    fn gemm(&self, spec: Gemm, _a: &Buffer, _b: &Buffer, _c: &mut Buffer, _start: usize) -> Result<()> {
        self.meter().add_flops(Work::Matmul, spec.flops());
        Ok(())
    }

    fn gemm_sum(
        &self,
        specs: [Gemm; 2],
        _a: [&Buffer; 2],
        _b: [&Buffer; 2],
        _c: &mut Buffer,
        _start: usize,
    ) -> Result<()> {
        specs.iter().for_each(|spec| self.meter().add_flops(Work::Matmul, spec.flops()));
        Ok(())
    }

    fn linear_bias(&self, [m, n, k]: [usize; 3], _x: &Buffer, _w: &Buffer, bias: &Buffer) -> Result<Buffer> {
        self.meter().add_flops(Work::Matmul, Gemm::linear(m, n, k).flops());
        self.alloc(bias.dtype(), m * n)
    }

    fn linear_bias_gelu(
        &self,
        mnk: [usize; 3],
        x: &Buffer,
        w: &Buffer,
        bias: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        let product = self.linear_bias(mnk, x, w, bias)?;
        let activated = self.alloc(stored, product.count())?;
        Ok((product, activated))
    }

    fn linear_swiglu(&self, [m, n, k]: [usize; 3], _x: &Buffer, w: &Buffer, stored: DType) -> Result<(Buffer, Buffer)> {
        self.meter().add_flops(Work::Matmul, Gemm::linear(m, n, k).flops());
        Ok((self.alloc(w.dtype(), m * n)?, self.alloc(stored, m * n / 2)?))
    }
}
