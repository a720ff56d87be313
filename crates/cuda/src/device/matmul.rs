use super::prelude::*;
use crate::driver::{Operand, Product};
use meshwork_tensor::kernel::{Gemm, Matmul, Pointwise};

const OP: &str = "matmul";

/// Elements of a 16-bit result that are computed in f32 at a time before rounding: 64 MiB.
const ROUNDED: usize = 1 << 24;

/// Strides of A from row to row and from term to term, and of B from term to term and from column to column.
fn strides(Gemm { m, n, k, a_transposed, b_transposed, .. }: Gemm) -> [[usize; 2]; 2] {
    [if a_transposed { [1, m] } else { [k, 1] }, if b_transposed { [1, k] } else { [n, 1] }]
}

impl CudaDevice {
    /// The sum of two products with the same number of reduction blocks.
    fn sum_in_blocks(
        &self,
        specs: [Gemm; 2],
        a: [&Buffer; 2],
        b: [&Buffer; 2],
        c: &mut Buffer,
        start: usize,
    ) -> Result<()> {
        let Gemm { m, n, terms, .. } = specs[0];
        self.f32s(OP, &[c])?;
        c.slice(start..start + m * n)?;
        specs.iter().for_each(|spec| self.meter().add_flops(Work::Matmul, spec.flops()));
        let [x, y] = specs;
        let ([x_a, x_b], [y_a, y_b]) = (strides(x), strides(y));
        // Kept alive until the product is queued.
        let operand = |x| self.operand(OP, x, self.precision, false);
        let ([a, a2], [b, b2]) = ([operand(a[0])?, operand(a[1])?], [operand(b[0])?, operand(b[1])?]);
        let to = self.place_mut(OP, c)?.offset(4 * start);
        let kernel = self.of_precision(self.precision, ["product_sum_f32", "product_sum_bf16"]);
        launch!(self, OP, kernel, [m * n, 0];
            &a, x_a, &b, x_b, x.k, x.terms.segments, &a2, y_a, &b2, y_b, y.k, y.terms.segments, terms.blocks, to, m * n, n
        )
    }

    /// Lets `compute` write rows of a 16-bit result in f32, and rounds them once. Needed where the library does not
    /// round: in canonical numerics, for f16, and for two products in one sum. Works on some rows at a time, because
    /// the meter does not count their memory; if A is transposed, on all rows together.
    fn rounded(
        &self,
        spec: Gemm,
        (c, start): (&mut Buffer, usize),
        mut compute: impl FnMut(Gemm, Range<usize>, &mut Buffer) -> Result<()>,
    ) -> Result<()> {
        let Gemm { m, n, a_transposed, accumulate, .. } = spec;
        let at_once = if a_transposed { m } else { (ROUNDED / n.max(1)).clamp(1, m.max(1)) };
        let mut block = self.scratch(DType::F32, at_once * n)?;
        for first in (0..m).step_by(at_once.max(1)) {
            let rows = first..m.min(first + at_once);
            let at = start + first * n;
            if accumulate {
                self.cast_into(&c.slice(at..at + rows.len() * n)?, &mut block, 0)?;
            }
            compute(Gemm { m: rows.len(), ..spec }, rows.clone(), &mut block)?;
            self.cast_into(&block.slice(0..rows.len() * n)?, c, at)?;
        }
        Ok(())
    }

    /// The operand that products in a precision read: in low precision a rounded copy, unless it has bf16 already, or
    /// who multiplies rounds f32 to TF32 itself; else of one in bf16 a widened copy, which is exact in TF32 too.
    pub(super) fn operand(&self, op: &'static str, x: &Buffer, precision: Precision, rounds: bool) -> Result<Buffer> {
        match (precision, x.dtype()) {
            (Precision::Bf16, DType::Bf16) => return Ok(x.clone()),
            (_, DType::Bf16) if self.precision != Precision::Bf16 => {
                let mut wide = self.scratch(DType::F32, x.count())?;
                self.cast_into(x, &mut wide, 0)?;
                return Ok(wide);
            }
            _ => {}
        }
        self.f32s(op, &[x])?;
        if precision == Precision::F32 || precision == Precision::Tf32 && rounds {
            return Ok(x.clone());
        }
        let mut rounded = self.scratch(precision.operand_dtype(DType::F32), x.count())?;
        match precision {
            Precision::Bf16 => self.cast_into(x, &mut rounded, 0)?,
            _ => launch!(self, op, "f32_to_tf32", [x.count(), 0]; x, &rounded, x.count())?,
        }
        Ok(rounded)
    }

    /// The kernel for operands of f32 or of bf16.
    pub(super) fn of_precision(&self, precision: Precision, kernels: [&'static str; 2]) -> &'static str {
        kernels[usize::from(precision == Precision::Bf16)]
    }
}

/// The rows of an A of `k` columns that some rows of a product read; the whole of A if it is transposed.
fn rows_of(a: &Buffer, Gemm { k, a_transposed, .. }: Gemm, rows: &Range<usize>) -> Result<Buffer> {
    if a_transposed { Ok(a.clone()) } else { Ok(a.slice(rows.start * k..rows.end * k)?) }
}

impl CudaDevice {
    /// A product plus `bias` on each row, fused into the library's product or added after it. With a bias, the result
    /// must start at 0.
    fn gemm_bias(
        &self,
        spec: Gemm,
        a: &Buffer,
        b: &Buffer,
        c: &mut Buffer,
        start: usize,
        bias: Option<&Buffer>,
    ) -> Result<()> {
        let Gemm { m, n, k, a_transposed, b_transposed, accumulate, terms, exact, .. } = spec;
        let precision = if exact { Precision::F32 } else { self.precision };
        let fast = self.products == Products::OfTheLibrary && terms == Terms::WHOLE && k > 0;
        let rounded = fast && c.dtype() == DType::Bf16 && precision == Precision::Bf16;
        if c.dtype().is_half() && !rounded {
            let bias = bias.map(|bias| self.read_as(bias, DType::F32)).transpose()?;
            return self.rounded(spec, (c, start), |spec, rows, c| {
                self.gemm_bias(spec, &rows_of(a, spec, &rows)?, b, c, 0, bias.as_ref())
            });
        }
        self.storage(OP, &[&[&*c][..], bias.as_slice()].concat())?;
        self.meter().add_flops(Work::Matmul, spec.flops());
        if m * n == 0 {
            return Ok(());
        }
        c.slice(start..start + m * n)?;
        let to = self.place_mut(OP, c)?.offset(c.dtype().size() * start);
        // Kept alive until the product is queued.
        let operands = [self.operand(OP, a, precision, fast)?, self.operand(OP, b, precision, fast)?];
        let [a, b] = [self.place(OP, &operands[0])?, self.place(OP, &operands[1])?];
        if fast {
            let places = [(a, a_transposed), (b, b_transposed)];
            let operands = places.map(|(at, transposed)| Operand { at, transposed });
            let bias = bias.map(|bias| self.aligned("bias", bias)).transpose()?; // kept alive as long
            let bias = bias.as_ref().map(|bias| self.place("bias", bias)).transpose()?;
            let product = Product { mnk: [m, n, k], operands, precision, c: to, rounded, accumulate, bias };
            return self.pool.driver.product(self.pool.compute, product).map_err(self.failed(OP));
        }
        let ([of_a, of_b], Terms { segments, blocks }) = (strides(spec), terms);
        let kernel = self.of_precision(precision, ["product_f32", "product_bf16"]);
        launch!(self, OP, kernel, [m * n, 0]; a, of_a, b, of_b, to, accumulate, k, segments, blocks, m * n, n)?;
        bias.map_or(Ok(()), |bias| self.add_bias(c, m * n, bias))
    }
}

impl Matmul for CudaDevice {
    fn gemm(&self, spec: Gemm, a: &Buffer, b: &Buffer, c: &mut Buffer, start: usize) -> Result<()> {
        self.gemm_bias(spec, a, b, c, start, None)
    }

    fn gemm_sum(&self, specs: [Gemm; 2], a: [&Buffer; 2], b: [&Buffer; 2], c: &mut Buffer, start: usize) -> Result<()> {
        let [first, second] = specs;
        if c.dtype().is_half() {
            // All rows together if one of the two is transposed.
            let cut = Gemm { a_transposed: first.a_transposed || second.a_transposed, ..first };
            return self.rounded(cut, (c, start), |part, rows, c| {
                let specs = specs.map(|spec| Gemm { m: part.m, ..spec });
                let whole = rows.len() == first.m;
                let of = |a: &Buffer, spec| if whole { Ok(a.clone()) } else { rows_of(a, spec, &rows) };
                self.gemm_sum(specs, [&of(a[0], specs[0])?, &of(a[1], specs[1])?], b, c, 0)
            });
        }
        if specs.iter().any(|spec| spec.terms != Terms::WHOLE) {
            return self.sum_in_blocks(specs, a, b, c, start);
        }
        self.gemm(first.accumulating(false), a[0], b[0], c, start)?;
        self.gemm(second.accumulating(true), a[1], b[1], c, start)
    }

    fn linear_bias(&self, [m, n, k]: [usize; 3], x: &Buffer, w: &Buffer, bias: &Buffer) -> Result<Buffer> {
        let mut y = self.alloc(bias.dtype(), m * n)?;
        self.gemm_bias(Gemm::linear(m, n, k), x, w, &mut y, 0, Some(bias))?;
        Ok(y)
    }

    fn linear_bias_gelu(
        &self,
        [m, n, k]: [usize; 3],
        x: &Buffer,
        w: &Buffer,
        bias: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        let mut y = self.alloc(DType::F32, m * n)?;
        self.gemm(Gemm::linear(m, n, k), x, w, &mut y, 0)?;
        let activated = self.gelu_of(&y, Some(bias), stored)?;
        Ok((y, activated))
    }

    fn linear_swiglu(&self, [m, n, k]: [usize; 3], x: &Buffer, w: &Buffer, stored: DType) -> Result<(Buffer, Buffer)> {
        let mut y = self.alloc(DType::F32, m * n)?;
        self.gemm(Gemm::linear(m, n, k), x, w, &mut y, 0)?;
        let activated = self.swiglu_of(&y, stored)?;
        Ok((y, activated))
    }
}
