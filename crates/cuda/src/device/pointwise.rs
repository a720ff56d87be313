use super::prelude::*;
use meshwork_tensor::kernel::{DropoutMask, Layout, Pointwise};

impl CudaDevice {
    /// The result of a kernel over the elements of `inputs`, in their type. The kernel takes `rest` behind the number
    /// of elements.
    pub(super) fn elements(
        &self,
        op: &'static str,
        kernel: &'static str,
        inputs: &[&Buffer],
        rest: impl Operand,
    ) -> Result<Buffer> {
        let (count, out) = (inputs[0].count(), self.alloc(inputs[0].dtype(), inputs[0].count())?);
        launch!(self, op, kernel, [count, 0]; inputs, &out, count, rest)?;
        Ok(out)
    }

    /// One of three kernels, by the types of `x` and of the result: from f32 to f32, from f32 to bf16, from 16 bits to
    /// 16 bits.
    pub(super) fn storing(
        &self,
        op: &'static str,
        x: &Buffer,
        stored: DType,
        [wide, narrowing, halves]: [&'static str; 3],
    ) -> Result<&'static str> {
        match (x.dtype(), stored) {
            (DType::F32, DType::F32) => Ok(wide),
            (DType::F32, DType::Bf16) => Ok(narrowing),
            (of, stored) if of == stored && of.is_half() => Ok(halves),
            (of, stored) if of == stored => Err(self.no_f32(op, of)),
            (_, other) => Err(self.lacks(op, other)),
        }
    }

    /// gelu(x + bias) in the type `stored`; without a bias, gelu(x).
    pub(super) fn gelu_of(&self, x: &Buffer, bias: Option<&Buffer>, stored: DType) -> Result<Buffer> {
        let kernels = ["gelu_forward_f32", "gelu_forward_bf16", "gelu_forward_16"];
        let kernel = self.storing("gelu", x, stored, kernels)?;
        let (count, out, n) = (x.count(), self.alloc(stored, x.count())?, bias.map_or(1, Buffer::count));
        launch!(self, "gelu", kernel, [count, 0]; x, bias, &out, count, n)?;
        Ok(out)
    }

    /// Overwrites dy with dy · gelu'(x + bias).
    fn gelu_back(&self, dy: &mut Buffer, x: &Buffer, bias: Option<&Buffer>) -> Result<()> {
        let (count, n) = (x.count(), bias.map_or(1, Buffer::count));
        launch!(self, "gelu", "gelu_backward", [count, 0]; x, bias, dy, count, n)
    }

    /// Adds the bias to the first `count` elements of x.
    pub(super) fn add_bias(&self, x: &mut Buffer, count: usize, bias: &Buffer) -> Result<()> {
        launch!(self, "bias", "bias", [count, 0]; &*x, bias, x, count, bias.count())
    }

    /// silu(gate) · up of the pairs in x, in the type `stored`.
    pub(super) fn swiglu_of(&self, x: &Buffer, stored: DType) -> Result<Buffer> {
        let kernels = ["swiglu_forward_f32", "swiglu_forward_bf16", "swiglu_forward_16"];
        let kernel = self.storing("swiglu", x, stored, kernels)?;
        let (count, out) = (x.count() / 2, self.alloc(stored, x.count() / 2)?);
        launch!(self, "swiglu", kernel, [count, 0]; x, &out, count)?;
        Ok(out)
    }

    /// x times random factors, drawn by the kernel `op` from the global index of each element.
    pub(super) fn times_drawn(&self, op: &'static str, x: &Buffer, mask: &DropoutMask, of: [f32; 2]) -> Result<Buffer> {
        let DropoutMask { key, ndim, local, offset, global, .. } = *mask;
        let local = local[..ndim].iter().map(|&extent| extent as i64);
        let sizes = local.chain(offset[..ndim].iter().chain(&global[..ndim]).map(|&at| at as i64));
        let sizes = self.kept(sizes.collect())?;
        let (y, count) = (self.alloc(x.dtype(), x.count())?, x.count());
        launch!(self, op, op, [count, 0]; x, &sizes, ndim as i32, key.words(), of, &y, count)?;
        Ok(y)
    }
}

impl Pointwise for CudaDevice {
    fn add(&self, a: &Buffer, b: &Buffer) -> Result<Buffer> {
        self.elements("add", "add", &[a, b], ())
    }

    fn add_assign(&self, a: &mut Buffer, at: usize, b: &Buffer) -> Result<()> {
        let count = b.count();
        launch!(self, "add", "add_assign", [count, 0]; &mut *a.window(at..at + count)?, b, count)
    }

    fn tree_sum(&self, x: &mut Buffer, start: usize, count: usize, n: usize, to: usize) -> Result<()> {
        self.f32s("add", &[x])?;
        let whole = self.place_mut("add", x)?;
        // A thread reads an element of each vector before it writes one, and no thread may overwrite an element that
        // another thread still reads.
        let apart = to == start || to + n <= start;
        let scratch = if apart { None } else { Some(self.scratch(DType::F32, n)?) };
        let out = scratch.as_ref().map_or(Ok(whole.offset(4 * to)), |scratch| self.place("add", scratch))?;
        launch!(self, "add", "tree_sum", [n, 0]; whole.offset(4 * start), count, out, n)?;
        if let Some(scratch) = &scratch { self.copy_into(scratch, 0..n, x, to) } else { Ok(()) }
    }

    fn bias(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        self.elements("bias", "bias", &[x, bias], bias.count())
    }

    fn bias_grad(&self, dy: &Buffer, n: usize, blocks: RowBlocks) -> Result<Buffer> {
        let cut = self.cut(dy.count() / n, blocks)?;
        let parts = self.sum_rows("bias", dy, &cut, n)?;
        self.sum_parts("bias", &parts, &cut, n)
    }

    fn bias_residual(&self, x: &Buffer, bias: &Buffer, residual: &Buffer) -> Result<Buffer> {
        self.elements("bias_residual", "bias_residual", &[x, bias, residual], bias.count())
    }

    fn bias_gelu(&self, x: &Buffer, bias: &Buffer, stored: DType) -> Result<Buffer> {
        self.gelu_of(x, Some(bias), stored)
    }

    fn bias_gelu_grad(&self, dy: &mut Buffer, x: &Buffer, bias: &Buffer, blocks: RowBlocks) -> Result<Buffer> {
        if !x.dtype().is_half() {
            self.gelu_back(dy, x, Some(bias))?;
            return self.bias_grad(dy, bias.count(), blocks);
        }
        // The gradient of the bias is summed before dx is rounded.
        let (op, n) = ("gelu", bias.count());
        let cut = self.cut(x.count() / n, blocks)?;
        let parts = self.alloc(DType::F32, n * cut.parts())?;
        launch!(self, op, "gelu_backward_parts_16", [cut.parts(), n];
            x, bias, dy, self.starts(op, &cut)?, &parts, cut.parts(), n
        )?;
        self.sum_parts(op, &parts, &cut, n)
    }

    fn gelu(&self, x: &Buffer) -> Result<Buffer> {
        self.gelu_of(x, None, x.dtype())
    }

    fn gelu_grad(&self, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        let mut dx = self.copy(dy)?;
        self.gelu_back(&mut dx, x, None)?;
        Ok(dx)
    }

    fn swiglu(&self, x: &Buffer, stored: DType) -> Result<Buffer> {
        self.swiglu_of(x, stored)
    }

    fn swiglu_grad(&self, dy: &Buffer, x: &mut Buffer) -> Result<()> {
        launch!(self, "swiglu", "swiglu_backward", [dy.count(), 0]; dy, x, dy.count())
    }

    fn relu(&self, x: &Buffer) -> Result<(Buffer, Buffer)> {
        let count = x.count();
        let (out, above) = (self.alloc(DType::F32, count)?, self.alloc(DType::U8, count.div_ceil(8))?);
        launch!(self, "relu", "relu_forward", [count, 0]; x, &out, &above, count)?;
        Ok((out, above))
    }

    fn relu_grad(&self, dy: &Buffer, above: &Buffer) -> Result<Buffer> {
        let (count, dx) = (dy.count(), self.alloc(DType::F32, dy.count())?);
        launch!(self, "relu", "relu_backward", [count, 0]; dy, above, &dx, count)?;
        Ok(dx)
    }

    fn cast(&self, x: &Buffer, to: DType) -> Result<Buffer> {
        let mut out = self.alloc(to, x.count())?;
        self.cast_into(x, &mut out, 0)?;
        Ok(out)
    }

    fn cast_into(&self, x: &Buffer, out: &mut Buffer, at: usize) -> Result<()> {
        let kernel = match (x.dtype(), out.dtype()) {
            (DType::F32, DType::Bf16) => "f32_to_operand",
            (DType::F32, DType::F16) => "f32_to_f16",
            (DType::Bf16, DType::F32) => "bf16_to_f32",
            (DType::F16, DType::F32) => "f16_to_f32",
            (DType::F32 | DType::Bf16 | DType::F16, other) | (other, _) => return Err(self.lacks("cast", other)),
        };
        let count = x.count();
        out.slice(at..at + count)?;
        let to = self.place_mut("cast", out)?.offset(at * out.dtype().size());
        launch!(self, "cast", kernel, [count, 0]; x, to, count)
    }

    fn dropout(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        self.times_drawn("dropout", x, mask, [mask.p, (1.0 / (1.0 - f64::from(mask.p))) as f32])
    }
}
