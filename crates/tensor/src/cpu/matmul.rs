use super::kernels::Float;
use super::kernels::matmul::{Epilogue, Update, gemm_leaves, gemm_shared};
use super::{Cpu, for_float};
use crate::device::{Device, Work};
use crate::error::Result;
use crate::family::{Gemm, Matmul};
use crate::tape::Terms;
use meshwork_core::{Buffer, Element};

impl Matmul for Cpu {
    fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer, start: usize) -> Result<()> {
        for_float!(self, "matmul", a, T => {
            let c = &mut c.as_mut_slice::<T>()?[start..start + spec.m * spec.n];
            self.product(spec, a.as_slice::<T>()?, b.as_slice::<T>()?, c, Epilogue::Nothing);
            Ok(())
        })
    }

    fn linear_bias(&self, [m, n, k]: [usize; 3], x: &Buffer, w: &Buffer, bias: &Buffer) -> Result<Buffer> {
        for_float!(self, "matmul", x, T => {
            let (x, w, bias) = (x.as_slice::<T>()?, w.as_slice::<T>()?, bias.as_slice::<T>()?);
            self.output::<T>(m * n, |y| self.product(Gemm::linear(m, n, k), x, w, y, Epilogue::Bias(bias)))
        })
    }

    fn linear_bias_gelu(&self, mnk: [usize; 3], x: &Buffer, w: &Buffer, bias: &Buffer) -> Result<(Buffer, Buffer)> {
        let [m, n, k] = mnk;
        for_float!(self, "matmul", x, T => {
            let (x, w, bias) = (x.as_slice::<T>()?, w.as_slice::<T>()?, bias.as_slice::<T>()?);
            let mut y = self.alloc(T::DTYPE, m * n)?;
            let product = y.as_mut_slice::<T>()?;
            let activated = self.output::<T>(m * n, |out| {
                self.product(Gemm::linear(m, n, k), x, w, product, Epilogue::BiasGelu(bias, out));
            })?;
            Ok((y, activated))
        })
    }
}

impl Cpu {
    fn product<T: Float>(&self, spec: Gemm, a: &[T], b: &[T], c: &mut [T], epilogue: Epilogue<'_, T>) {
        let Gemm { m, n, k, a_transposed, b_transposed, accumulate, terms } = spec;
        self.meter().add_flops(Work::Matmul, spec.flops());
        let strides = |transposed, rows, columns| if transposed { (1, rows) } else { (columns, 1) };
        let (a, b) = ((a, strides(a_transposed, m, k)), (b, strides(b_transposed, k, n)));
        let update = if accumulate { Update::Accumulate } else { Update::Overwrite };
        match terms {
            Terms::WHOLE => gemm_shared(self.precision, [m, n, k], a, b, c, update, epilogue),
            _ => {
                debug_assert!(!accumulate && matches!(epilogue, Epilogue::Nothing), "only sums of one leaf go on");
                gemm_leaves(self.precision, [m, n, k], a, b, c, terms);
            }
        }
    }
}
