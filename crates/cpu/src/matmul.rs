use super::kernels::matmul::{
    Epilogue, Factors, MatmulOperand, Strides, Summand, Update, gemm_blocks, gemm_shared, gemm_sum,
};
use super::kernels::round::with_room;
use super::prelude::*;
use meshwork_tensor::Precision;
use meshwork_tensor::device::Work;
use meshwork_tensor::kernel::{Gemm, Matmul};

/// Elements of a block of a 16-bit result that are computed in f32 before rounding: 8 MiB, which stays in the
/// last-level cache.
const ROUNDED: usize = 1 << 21;

/// Rows of such a block: enough that packing the right operand again for each block takes 1% of the product.
const ROUNDED_ROWS: usize = 2048;

/// Columns of such a block are a multiple of this, the number that a product packs at a time.
const ROUNDED_COLUMNS: usize = 768;

/// Rows and columns of a block of a result.
type Block = [Range<usize>; 2];

/// Lets `compute` write a row-major C of `[m, n]`, or add to it: at once, or for 16 bits in blocks that are rounded
/// once.
pub(super) fn in_blocks<T: Float + Element>(
    [m, n]: [usize; 2],
    accumulate: bool,
    mut c: Stored<'_, T>,
    mut compute: impl FnMut(Block, &mut [T]),
) {
    if let Stored::Full(c) = c {
        return compute([0..m, 0..n], c);
    }
    let rows = m.clamp(1, ROUNDED_ROWS);
    let columns = (ROUNDED / rows / ROUNDED_COLUMNS).max(1) * ROUNDED_COLUMNS;
    for first_row in (0..m).step_by(rows) {
        for first in (0..n).step_by(columns) {
            let (rows, columns) = (first_row..m.min(first_row + rows), first..n.min(first + columns));
            let width = columns.len();
            with_room(rows.len() * width, |block: &mut [T]| {
                // Some rows of C, and of the block, at a time.
                let at_once = (PIECE / width).max(1);
                if accumulate {
                    let of_c = c.reborrow().split_at(rows.start * n).1.chunks(at_once * n);
                    for_each(block.chunks_mut(at_once * width).zip(of_c), |(block, c)| {
                        for (to, c) in block.chunks_mut(width).zip(c.chunks(n)) {
                            c.part(columns.clone()).loaded().widen(to);
                        }
                    });
                }
                compute([rows.clone(), columns.clone()], block);
                let of_c = c.reborrow().split_at(rows.start * n).1.chunks(at_once * n);
                for_each(block.chunks(at_once * width).zip(of_c), |(block, c)| {
                    for (from, c) in block.chunks(width).zip(c.chunks(n)) {
                        c.part(columns.clone()).round(from);
                    }
                });
            });
        }
    }
}

impl Matmul for Cpu {
    fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer, start: usize) -> Result<()> {
        for_widened!(self, "matmul", c, T => {
            let c = stored::<T>(c)?.part(start..start + spec.m * spec.n);
            self.product::<T>(spec, [a, b], c, None)
        })
    }

    fn gemm_sum(&self, specs: [Gemm; 2], a: [&Buffer; 2], b: [&Buffer; 2], c: &mut Buffer, start: usize) -> Result<()> {
        for_widened!(self, "matmul", c, T => {
            let [Gemm { m, n, .. }, _] = specs;
            let mut summands = Vec::with_capacity(2);
            for (spec, operands) in specs.into_iter().zip(a.into_iter().zip(b)) {
                let [a, b] = self.operands_of::<T>(spec, operands.into())?;
                self.meter().add_flops(Work::Matmul, spec.flops());
                summands.push(Summand { k: spec.k, a, b, terms: spec.terms });
            }
            let c = stored::<T>(c)?.part(start..start + m * n);
            in_blocks([m, n], false, c, |[rows, columns], c| {
                let summands: Vec<Summand<'_, T>> = summands
                    .iter()
                    .map(|of| Summand { a: of.a.from(rows.start, 0), b: of.b.from(0, columns.start), ..*of })
                    .collect();
                gemm_sum(self.precision, [rows.len(), columns.len()], &summands, c);
            });
            Ok(())
        })
    }

    fn linear_bias(&self, [m, n, k]: [usize; 3], x: &Buffer, w: &Buffer, bias: &Buffer) -> Result<Buffer> {
        for_widened!(self, "matmul", bias, T => {
            let mut y = self.alloc(bias.dtype(), m * n)?;
            let bias = loaded::<T>(bias)?.whole();
            self.product::<T>(Gemm::linear(m, n, k), [x, w], stored(&mut y)?, Some(&bias))?;
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
        for_float!(self, "matmul", bias, T => {
            let bias = bias.as_slice::<T>()?;
            let mut y = self.alloc(T::DTYPE, m * n)?;
            let product = y.as_mut_slice::<T>()?;
            let activated = self.stored::<T>("matmul", (T::DTYPE, stored), m * n, |out| {
                self.finished(Gemm::linear(m, n, k), [x, w], product, Epilogue::BiasGelu(bias, out))
            })?;
            Ok((y, activated))
        })
    }

    fn linear_swiglu(&self, [m, n, k]: [usize; 3], x: &Buffer, w: &Buffer, stored: DType) -> Result<(Buffer, Buffer)> {
        for_widened!(self, "matmul", w, T => {
            let mut y = self.alloc(T::DTYPE, m * n)?;
            let product = y.as_mut_slice::<T>()?;
            let activated = self.stored::<T>("matmul", (T::DTYPE, stored), m * n / 2, |out| {
                self.finished(Gemm::linear(m, n, k), [x, w], product, Epilogue::Swiglu(out))
            })?;
            Ok((y, activated))
        })
    }
}

impl Cpu {
    /// A product, and a bias added to it.
    fn product<T: Float + Element>(
        &self,
        spec: Gemm,
        operands: [&Buffer; 2],
        c: Stored<'_, T>,
        bias: Option<&[T]>,
    ) -> Result<()> {
        let Gemm { m, n, k, accumulate, terms, exact, .. } = spec;
        let precision = if exact { Precision::F32 } else { self.precision };
        let [a, b] = self.operands_of(spec, operands)?;
        let update = if accumulate { Update::Accumulate } else { Update::Overwrite };
        self.meter().add_flops(Work::Matmul, spec.flops());
        in_blocks([m, n], accumulate, c, |[rows, columns], c| {
            let dims = [rows.len(), columns.len(), k];
            let factors = Factors { precision, dims, a: a.from(rows.start, 0), b: b.from(0, columns.start) };
            let epilogue = bias.map_or(Epilogue::Nothing, |bias| Epilogue::Bias(&bias[columns]));
            match terms {
                Terms::WHOLE => gemm_shared(factors, c, update, epilogue),
                _ => {
                    debug_assert!(!accumulate && bias.is_none(), "only sums of one block go on");
                    gemm_blocks(factors, c, terms);
                }
            }
        });
        Ok(())
    }

    /// A product with one reduction block, in its own type, with a fused epilogue.
    fn finished<T: Float + Element>(
        &self,
        spec: Gemm,
        operands: [&Buffer; 2],
        c: &mut [T],
        epilogue: Epilogue<'_, T>,
    ) -> Result<()> {
        let [a, b] = self.operands_of(spec, operands)?;
        self.meter().add_flops(Work::Matmul, spec.flops());
        let factors = Factors { precision: self.precision, dims: [spec.m, spec.n, spec.k], a, b };
        gemm_shared(factors, c, Update::Overwrite, epilogue);
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

    /// An operand of a product of `T`, which may be stored in bf16 if that is f32.
    pub(super) fn operand_of<'a, T: Float + Element>(
        &self,
        x: &'a Buffer,
        strides: Strides,
    ) -> Result<MatmulOperand<'a, T>> {
        match x.dtype() {
            DType::Bf16 if T::WIDENS => Ok(MatmulOperand::Rounded(x.as_slice()?, strides)),
            DType::Bf16 => Err(self.unsupported("matmul", DType::Bf16)),
            _ => Ok(MatmulOperand::Full(x.as_slice()?, strides)),
        }
    }
}
