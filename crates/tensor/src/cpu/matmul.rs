use super::kernels::matmul::{Epilogue, Update, gemm_shared};
use super::{Cpu, for_float};
use crate::device::{Device, Work};
use crate::error::Result;
use crate::family::{Gemm, Matmul};
use meshwork_core::Buffer;

impl Matmul for Cpu {
    fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer, start: usize) -> Result<()> {
        let Gemm { m, n, k, .. } = spec;
        self.meter().add_flops(Work::Matmul, spec.flops());
        let strides = |transposed, rows, columns| if transposed { (1, rows) } else { (columns, 1) };
        let update = if spec.accumulate { Update::Accumulate } else { Update::Overwrite };
        for_float!(self, "matmul", a, T => {
            gemm_shared(
                self.precision,
                [m, n, k],
                (a.as_slice::<T>()?, strides(spec.a_transposed, m, k)),
                (b.as_slice::<T>()?, strides(spec.b_transposed, k, n)),
                &mut c.as_mut_slice::<T>()?[start..start + m * n],
                update,
                Epilogue::Nothing,
            );
            Ok(())
        })
    }
}
