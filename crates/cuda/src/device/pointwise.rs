use super::CudaDevice;
use crate::driver::{Address, Argument};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::kernel::{DropoutMask, Layout, Pointwise};
use meshwork_tensor::tape::RowBlocks;
use meshwork_tensor::{Device, Result};

impl CudaDevice {
    /// A result of `count` numbers, in the type that all `inputs` have, that a kernel over elements writes after them:
    /// the first for f32, the second for 16 bits.
    fn elements_like(
        &self,
        op: &'static str,
        kernels: [&'static str; 2],
        inputs: &[&Buffer],
        rest: &[Argument],
    ) -> Result<Buffer> {
        let (kernel, f16) = self.of_storage(op, inputs, kernels)?;
        let (count, out) = (inputs[0].count(), self.alloc(inputs[0].dtype(), inputs[0].count())?);
        self.write_elements(op, kernel, count, inputs, &out, &[rest, f16.as_slice()].concat())?;
        Ok(out)
    }

    /// A result of `count` numbers of f32 that a kernel over elements writes after its `inputs`.
    pub(super) fn elements(
        &self,
        op: &'static str,
        kernel: &'static str,
        count: usize,
        inputs: &[&Buffer],
        rest: &[Argument],
    ) -> Result<Buffer> {
        self.f32s(op, inputs)?;
        let out = self.alloc(DType::F32, count)?;
        self.write_elements(op, kernel, count, inputs, &out, rest)?;
        Ok(out)
    }

    /// The same in `out`.
    pub(super) fn write_elements(
        &self,
        op: &'static str,
        kernel: &'static str,
        count: usize,
        inputs: &[&Buffer],
        out: &Buffer,
        rest: &[Argument],
    ) -> Result<()> {
        let mut args = Vec::with_capacity(inputs.len() + rest.len() + 2);
        for input in inputs.iter().chain([&out]) {
            args.push(self.place(op, input)?.into());
        }
        args.push(count.into());
        args.extend(rest);
        self.launch(op, kernel, [count, 0], &args)
    }

    /// gelu(x + bias) in the type `stored`; without a bias, gelu(x).
    pub(super) fn gelu_of(&self, x: &Buffer, bias: Option<&Buffer>, stored: DType) -> Result<Buffer> {
        let operands = [&[x][..], bias.as_slice()].concat();
        let (kernel, f16) = self.of_storage("gelu", &operands, ["gelu_forward_f32", "gelu_forward_16"])?;
        let kernel = self.stored("gelu", (x, stored), [kernel, "gelu_forward_bf16"])?;
        let (count, out) = (x.count(), self.alloc(stored, x.count())?);
        let (bias, n) = self.bias_of("gelu", bias)?;
        let args = [self.place("gelu", x)?.into(), bias, self.place("gelu", &out)?.into(), count.into(), n.into()];
        self.launch("gelu", kernel, [count, 0], &[&args[..], f16.as_slice()].concat())?;
        Ok(out)
    }

    /// The kernel that writes the type of x, or the one that writes bf16 from f32.
    pub(super) fn stored(
        &self,
        op: &'static str,
        (x, stored): (&Buffer, DType),
        kernels: [&'static str; 2],
    ) -> Result<&'static str> {
        match (x.dtype(), stored) {
            (of, stored) if of == stored => Ok(kernels[0]),
            (DType::F32, DType::Bf16) => Ok(kernels[1]),
            (_, other) => Err(self.lacks(op, other)),
        }
    }

    fn bias_of(&self, op: &'static str, bias: Option<&Buffer>) -> Result<(Argument, usize)> {
        match bias {
            None => Ok((Address::NULL.into(), 1)),
            Some(bias) => Ok((self.place(op, bias)?.into(), bias.count())),
        }
    }

    /// dy becomes dy · gelu'(x + bias).
    fn gelu_back(&self, dy: &mut Buffer, x: &Buffer, bias: Option<&Buffer>) -> Result<()> {
        let operands = [&[x, dy][..], bias.as_slice()].concat();
        let (kernel, f16) = self.of_storage("gelu", &operands, ["gelu_backward", "gelu_backward_16"])?;
        let (bias, n) = self.bias_of("gelu", bias)?;
        let (count, dy) = (x.count(), self.place_mut("gelu", dy)?);
        let args = [self.place("gelu", x)?.into(), bias, dy.into(), count.into(), n.into()];
        self.launch("gelu", kernel, [count, 0], &[&args[..], f16.as_slice()].concat())
    }

    /// The first `count` elements of x become x + bias.
    pub(super) fn add_bias(&self, x: &mut Buffer, count: usize, bias: &Buffer) -> Result<()> {
        self.f32s("bias", &[x, bias])?;
        let (at, n) = (self.place_mut("bias", x)?, bias.count());
        let args = [at.into(), self.place("bias", bias)?.into(), at.into(), count.into(), n.into()];
        self.launch("bias", "bias", [count, 0], &args)
    }

    /// silu(gate) · up of the pairs in x, in the type `stored`.
    pub(super) fn swiglu_of(&self, x: &Buffer, stored: DType) -> Result<Buffer> {
        let (kernel, f16) = self.of_storage("swiglu", &[x], ["swiglu_forward_f32", "swiglu_forward_16"])?;
        let kernel = self.stored("swiglu", (x, stored), [kernel, "swiglu_forward_bf16"])?;
        let out = self.alloc(stored, x.count() / 2)?;
        self.write_elements("swiglu", kernel, out.count(), &[x], &out, f16.as_slice())?;
        Ok(out)
    }
}

impl CudaDevice {
    /// x times factors that a kernel, for x of f32 or of 16 bits, draws by the global index of each element.
    pub(super) fn times_drawn(
        &self,
        op: &'static str,
        kernels: [&'static str; 2],
        x: &Buffer,
        mask: &DropoutMask,
        of: [f32; 2],
    ) -> Result<Buffer> {
        let (kernel, f16) = self.of_storage(op, &[x], kernels)?;
        let DropoutMask { key, ndim, local, offset, global, .. } = *mask;
        let local = local[..ndim].iter().map(|&extent| extent as i64);
        let sizes = local.chain(offset[..ndim].iter().chain(&global[..ndim]).map(|&at| at as i64));
        let sizes = self.kept(sizes.collect())?;
        let (y, [key0, key1], count) = (self.alloc(x.dtype(), x.count())?, key.words(), x.count());
        let from = [self.place(op, x)?.into(), self.place(op, &sizes)?.into(), (ndim as i32).into()];
        let rest = [key0.into(), key1.into(), of[0].into(), of[1].into(), self.place(op, &y)?.into(), count.into()];
        self.launch(op, kernel, [count, 0], &[&from[..], &rest, f16.as_slice()].concat())?;
        Ok(y)
    }
}

impl Pointwise for CudaDevice {
    fn add(&self, a: &Buffer, b: &Buffer) -> Result<Buffer> {
        if [a.dtype(), b.dtype()] != [DType::F64; 2] {
            return self.elements_like("add", ["add", "add_16"], &[a, b], &[]);
        }
        let out = self.alloc(DType::F64, a.count())?;
        self.write_elements("add", "add_f64", a.count(), &[a, b], &out, &[])?;
        Ok(out)
    }

    fn add_assign(&self, a: &mut Buffer, at: usize, b: &Buffer) -> Result<()> {
        let (kernel, f16) = match [a.dtype(), b.dtype()] {
            [DType::F64, DType::F64] => ("add_assign_f64", None),
            _ => self.of_storage("add", &[a, b], ["add_assign", "add_assign_16"])?,
        };
        let count = b.count();
        a.slice(at..at + count)?;
        let to = self.place_mut("add", a)?.offset(a.dtype().size() * at);
        let args = [to.into(), self.place("add", b)?.into(), count.into()];
        self.launch("add", kernel, [count, 0], &[&args[..], f16.as_slice()].concat())
    }

    fn tree_sum(&self, x: &mut Buffer, start: usize, count: usize, n: usize, to: usize) -> Result<()> {
        self.f32s("add", &[x])?;
        let whole = self.place_mut("add", x)?;
        // A thread reads an element of each vector before it writes one, and no thread may write what another still
        // reads.
        let apart = to == start || to + n <= start;
        let scratch = if apart { None } else { Some(self.scratch(DType::F32, n)?) };
        let out = scratch.as_ref().map_or(Ok(whole.offset(4 * to)), |scratch| self.place("add", scratch))?;
        let args = [whole.offset(4 * start).into(), count.into(), out.into(), n.into()];
        self.launch("add", "tree_sum", [n, 0], &args)?;
        match &scratch {
            Some(scratch) => self.copy_into(scratch, 0..n, x, to),
            None => Ok(()),
        }
    }

    fn bias(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        self.elements_like("bias", ["bias", "bias_16"], &[x, bias], &[bias.count().into()])
    }

    fn bias_grad(&self, dy: &Buffer, n: usize, blocks: RowBlocks) -> Result<Buffer> {
        let cut = self.cut(dy.count() / n, blocks)?;
        let parts = self.sum_rows("bias", dy, &cut, n)?;
        self.sum_parts("bias", &parts, &cut, n)
    }

    fn bias_residual(&self, x: &Buffer, bias: &Buffer, residual: &Buffer) -> Result<Buffer> {
        let rest = [bias.count().into()];
        self.elements_like("bias_residual", ["bias_residual", "bias_residual_16"], &[x, bias, residual], &rest)
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
        let (kernel, f16) = self.of_storage(op, &[x, dy, bias], ["gelu_backward", "gelu_backward_parts_16"])?;
        let cut = self.cut(x.count() / n, blocks)?;
        let parts = self.alloc(DType::F32, n * cut.parts())?;
        let to = self.place_mut(op, dy)?;
        let place = |buffer| self.place(op, buffer);
        let args = [place(x)?, place(bias)?, to, self.starts(op, &cut)?, place(&parts)?].map(Argument::from);
        self.launch(
            op,
            kernel,
            [cut.parts(), n],
            &[&args[..], &[cut.parts().into(), n.into()], f16.as_slice()].concat(),
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
        let (kernel, f16) = self.of_storage("swiglu", &[dy, x], ["swiglu_backward", "swiglu_backward_16"])?;
        let args = [self.place("swiglu", dy)?.into(), self.place_mut("swiglu", x)?.into(), dy.count().into()];
        self.launch("swiglu", kernel, [dy.count(), 0], &[&args[..], f16.as_slice()].concat())
    }

    fn relu(&self, x: &Buffer) -> Result<(Buffer, Buffer)> {
        self.f32s("relu", &[x])?;
        let count = x.count();
        let (out, above) = (self.alloc(DType::F32, count)?, self.alloc(DType::U8, count.div_ceil(8))?);
        let args = [self.place("relu", x)?, self.place("relu", &out)?, self.place("relu", &above)?].map(Argument::from);
        self.launch("relu", "relu_forward", [count, 0], &[&args[..], &[count.into()]].concat())?;
        Ok((out, above))
    }

    fn relu_grad(&self, dy: &Buffer, above: &Buffer) -> Result<Buffer> {
        self.f32s("relu", &[dy])?;
        let (count, dx) = (dy.count(), self.alloc(DType::F32, dy.count())?);
        let args = [self.place("relu", dy)?, self.place("relu", above)?, self.place("relu", &dx)?].map(Argument::from);
        self.launch("relu", "relu_backward", [count, 0], &[&args[..], &[count.into()]].concat())?;
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
        self.launch("cast", kernel, [count, 0], &[self.place("cast", x)?.into(), to.into(), count.into()])
    }

    fn dropout(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        self.times_drawn(
            "dropout",
            ["dropout", "dropout_16"],
            x,
            mask,
            [mask.p, (1.0 / (1.0 - f64::from(mask.p))) as f32],
        )
    }
}
