use super::kernels::matmul::{Update, gemm};
use super::{Cpu, for_float};
use crate::device::{Device, Work};
use crate::error::Result;
use crate::family::{Gemm, Matmul};
use meshwork_core::Buffer;

impl Matmul for Cpu {
    fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer) -> Result<()> {
        let Gemm { m, n, k, .. } = spec;
        self.meter().add_flops(Work::Matmul, 2 * (m * n * k) as u64);
        let strides = |transposed, rows, columns| if transposed { (1, rows) } else { (columns, 1) };
        let update = if spec.accumulate { Update::Accumulate } else { Update::Overwrite };
        for_float!(self, "matmul", a, T => {
            gemm(
                [m, n, k],
                (a.as_slice::<T>()?, strides(spec.a_transposed, m, k)),
                (b.as_slice::<T>()?, strides(spec.b_transposed, k, n)),
                (c.as_mut_slice::<T>()?, (n, 1)),
                update,
            );
            Ok(())
        })
    }
}
