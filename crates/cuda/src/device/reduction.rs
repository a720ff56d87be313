use super::CudaDevice;
use crate::driver::Argument;
use meshwork_core::{Buffer, DType};
use meshwork_tensor::kernel::Reduction;
use meshwork_tensor::tape::Terms;
use meshwork_tensor::{Device, Result};

impl Reduction for CudaDevice {
    fn sum(&self, x: &Buffer, [outer, extent, inner]: [usize; 3], blocks: usize, scale: f64) -> Result<Buffer> {
        // Sums of nothing are zero, whatever the scale.
        let scale = if extent == 0 { 0.0 } else { scale };
        let rest = [outer.into(), extent.into(), inner.into(), blocks.into(), scale.into()];
        self.elements("sum", "sum_dim", blocks * outer * inner, &[x], &rest)
    }

    fn spread(&self, dy: &Buffer, [outer, extent, inner]: [usize; 3], scale: f64) -> Result<Buffer> {
        let rest = [extent.into(), inner.into(), (scale as f32).into()];
        self.elements("sum", "spread_dim", outer * extent * inner, &[dy], &rest)
    }

    fn softmax(&self, x: &Buffer, n: usize) -> Result<Buffer> {
        self.f32s("softmax", &[x])?;
        let (rows, y) = (x.count() / n.max(1), self.alloc(DType::F32, x.count())?);
        let args = [self.place("softmax", x)?.into(), self.place("softmax", &y)?.into(), rows.into(), n.into()];
        self.launch("softmax", "softmax_forward", [rows, n], &args)?;
        Ok(y)
    }

    fn softmax_grad(&self, dy: &Buffer, y: &Buffer, n: usize) -> Result<Buffer> {
        self.f32s("softmax", &[dy, y])?;
        let (rows, dx) = (y.count() / n.max(1), self.alloc(DType::F32, y.count())?);
        let [dy, y, to] = [self.place("softmax", dy)?, self.place("softmax", y)?, self.place("softmax", &dx)?];
        self.launch(
            "softmax",
            "softmax_backward",
            [rows, n],
            &[dy.into(), y.into(), to.into(), rows.into(), n.into()],
        )?;
        Ok(dx)
    }

    fn squared_error(&self, x: &Buffer, targets: &Buffer, samples: usize, terms: Terms, scale: f64) -> Result<Buffer> {
        const OP: &str = "squared_error";
        self.f32s(OP, &[x, targets])?;
        let (count, elements) = (samples * terms.blocks, x.count() / samples.max(1));
        let loss = self.alloc(DType::F64, count)?;
        let mut args: Vec<Argument> =
            vec![self.place(OP, x)?.into(), self.place(OP, targets)?.into(), self.place(OP, &loss)?.into()];
        args.push(scale.into());
        args.extend([samples, elements, terms.segments, terms.blocks].map(Argument::from));
        self.launch(OP, "squared_error", [count, 0], &args)?;
        Ok(loss)
    }

    fn squared_error_grad(&self, x: &Buffer, targets: &Buffer, dloss: &Buffer, scale: f64) -> Result<Buffer> {
        const OP: &str = "squared_error";
        self.f32s(OP, &[x, targets])?;
        let (dx, count) = (self.alloc(DType::F32, x.count())?, x.count());
        let args = [
            self.place(OP, x)?.into(),
            self.place(OP, targets)?.into(),
            self.doubles(OP, dloss)?,
            scale.into(),
            self.place(OP, &dx)?.into(),
            count.into(),
            (count / dloss.count().max(1)).into(),
        ];
        self.launch(OP, "squared_error_backward", [count, 0], &args)?;
        Ok(dx)
    }
}
