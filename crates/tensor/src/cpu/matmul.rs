use super::kernels::Float;
use super::kernels::matmul::{
    Epilogue, MatmulOperand, Precision, Strides, Summand, Update, gemm_blocks, gemm_shared, gemm_sum,
};
use super::{Cpu, for_float};
use crate::device::{Device, Work};
use crate::error::Result;
use crate::kernel::{Gemm, Matmul};
use crate::tape::Terms;
use meshwork_core::{Buffer, DType, Element};

impl Matmul for Cpu {
    fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer, start: usize) -> Result<()> {
        for_float!(self, "matmul", c, T => {
            let c = &mut c.as_mut_slice::<T>()?[start..start + spec.m * spec.n];
            self.product::<T>(spec, [a, b], c, Epilogue::Nothing)
        })
    }

    fn gemm_sum(&self, specs: [Gemm; 2], a: [&Buffer; 2], b: [&Buffer; 2], c: &mut Buffer, start: usize) -> Result<()> {
        for_float!(self, "matmul", c, T => {
            let [Gemm { m, n, .. }, _] = specs;
            let mut summands = Vec::with_capacity(2);
            for (spec, operands) in specs.into_iter().zip(a.into_iter().zip(b)) {
                let [a, b] = self.operands_of::<T>(spec, operands.into())?;
                self.meter().add_flops(Work::Matmul, spec.flops());
                summands.push(Summand { k: spec.k, a, b, terms: spec.terms });
            }
            gemm_sum(self.precision, [m, n], &summands, &mut c.as_mut_slice::<T>()?[start..start + m * n]);
            Ok(())
        })
    }

    fn linear_bias(&self, [m, n, k]: [usize; 3], x: &Buffer, w: &Buffer, bias: &Buffer) -> Result<Buffer> {
        for_float!(self, "matmul", bias, T => {
            let bias = Epilogue::Bias(bias.as_slice::<T>()?);
            let mut y = self.alloc(T::DTYPE, m * n)?;
            self.product::<T>(Gemm::linear(m, n, k), [x, w], y.as_mut_slice()?, bias)?;
            Ok(y)
        })
    }

    fn linear_bias_gelu(
        &self,
        [m, n, k]: [usize; 3],
        x: &Buffer,
        w: &Buffer,
        bias: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        for_float!(self, "matmul", w, T => {
            let bias = bias.as_slice::<T>()?;
            let mut y = self.alloc(T::DTYPE, m * n)?;
            let product = y.as_mut_slice::<T>()?;
            let activated = self.stored::<T>("matmul", stored, m * n, |out| {
                self.product(Gemm::linear(m, n, k), [x, w], product, Epilogue::BiasGelu(bias, out))
            })?;
            Ok((y, activated))
        })
    }

    fn linear_swiglu(&self, [m, n, k]: [usize; 3], x: &Buffer, w: &Buffer, stored: DType) -> Result<(Buffer, Buffer)> {
        for_float!(self, "matmul", w, T => {
            let mut y = self.alloc(T::DTYPE, m * n)?;
            let product = y.as_mut_slice::<T>()?;
            let activated = self.stored::<T>("matmul", stored, m * n / 2, |out| {
                self.product(Gemm::linear(m, n, k), [x, w], product, Epilogue::Swiglu(out))
            })?;
            Ok((y, activated))
        })
    }
}

impl Cpu {
    fn product<T: Float + Element>(
        &self,
        spec: Gemm,
        operands: [&Buffer; 2],
        c: &mut [T],
        epilogue: Epilogue<'_, T>,
    ) -> Result<()> {
        let Gemm { m, n, k, accumulate, terms, exact, .. } = spec;
        let precision = if exact { Precision::F32 } else { self.precision };
        let [a, b] = self.operands_of(spec, operands)?;
        let update = if accumulate { Update::Accumulate } else { Update::Overwrite };
        self.meter().add_flops(Work::Matmul, spec.flops());
        match terms {
            Terms::WHOLE => gemm_shared(precision, [m, n, k], a, b, c, update, epilogue),
            _ => {
                debug_assert!(!accumulate && matches!(epilogue, Epilogue::Nothing), "only sums of one block go on");
                gemm_blocks(precision, [m, n, k], a, b, c, terms);
            }
        }
        Ok(())
    }

    /// Both operands of a product of `T`.
    fn operands_of<'a, T: Float + Element>(
        &self,
        spec: Gemm,
        [a, b]: [&'a Buffer; 2],
    ) -> Result<[MatmulOperand<'a, T>; 2]> {
        let Gemm { m, n, k, a_transposed, b_transposed, exact, .. } = spec;
        if let Some(rounded) = [a, b].into_iter().find(|operand| exact && operand.dtype() != T::DTYPE) {
            return Err(self.unsupported("matmul", rounded.dtype()));
        }
        let strides = |transposed, rows, columns| if transposed { (1, rows) } else { (columns, 1) };
        Ok([self.operand_of(a, strides(a_transposed, m, k))?, self.operand_of(b, strides(b_transposed, k, n))?])
    }

    /// An operand of a product of `T`, which may have been stored as a matmul operand.
    pub(super) fn operand_of<'a, T: Float + Element>(
        &self,
        x: &'a Buffer,
        strides: Strides,
    ) -> Result<MatmulOperand<'a, T>> {
        match x.dtype() {
            DType::Bf16 if self.operand_dtype(T::DTYPE) == DType::Bf16 => {
                Ok(MatmulOperand::Rounded(x.as_slice()?, strides))
            }
            DType::Bf16 => Err(self.unsupported("matmul", DType::Bf16)),
            _ => Ok(MatmulOperand::Full(x.as_slice()?, strides)),
        }
    }
}
