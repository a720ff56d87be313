use super::CudaDevice;
use crate::driver::Argument;
use meshwork_core::{Buffer, DType};
use meshwork_kernels::NORM_WIDTH;
use meshwork_tensor::kernel::Norm;
use meshwork_tensor::tape::RowBlocks;
use meshwork_tensor::{Device, Result};

impl Norm for CudaDevice {
    fn layer_norm(
        &self,
        x: &Buffer,
        gamma: &Buffer,
        beta: &Buffer,
        eps: f64,
        stored: DType,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let op = "layer_norm";
        let kernels = ["layer_norm_forward_f32", "layer_norm_forward_16"];
        let (kernel, f16) = self.of_storage(op, &[x, gamma, beta], kernels)?;
        let kernel = self.stored(op, (x, stored), [kernel, "layer_norm_forward_bf16"])?;
        let (n, rows) = (gamma.count(), x.count() / gamma.count());
        let (mean, rstd) = (self.alloc(DType::F32, rows)?, self.alloc(DType::F32, rows)?);
        let y = self.alloc(stored, x.count())?;
        let place = |buffer| self.place(op, buffer);
        let args = [
            place(x)?.into(),
            place(gamma)?.into(),
            place(beta)?.into(),
            (eps as f32).into(),
            place(&y)?.into(),
            place(&mean)?.into(),
            place(&rstd)?.into(),
            rows.into(),
            n.into(),
        ];
        self.launch(op, kernel, [rows, n], &[&args[..], f16.as_slice()].concat())?;
        Ok((y, mean, rstd))
    }

    fn layer_norm_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        gamma: &Buffer,
        [mean, rstd]: [&Buffer; 2],
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let op = "layer_norm";
        self.f32s(op, &[mean, rstd])?;
        let (n, rows) = (gamma.count(), mean.count());
        let cut = self.cut(rows, blocks)?;
        let sums = self.alloc(DType::F32, 2 * n * cut.parts())?;
        let accumulate = i32::from(sum.is_some());
        let mut dx = sum.map_or_else(|| self.alloc(x.dtype(), x.count()), Ok)?;
        let of = [dy, x, gamma, &dx];
        let wide = n as u64 > NORM_WIDTH;
        let kernels = [
            ["layer_norm_backward", "layer_norm_backward_16"],
            ["layer_norm_backward_wide", "layer_norm_backward_wide_16"],
        ];
        let (kernel, f16) = self.of_storage(op, &of, kernels[usize::from(wide)])?;
        let (of_parts, _) = self.of_storage(op, &of, ["layer_norm_backward_parts", "layer_norm_backward_parts_16"])?;
        let to = self.place_mut(op, &mut dx)?.into();
        let place = |buffer| self.place(op, buffer);
        let saved = [place(dy)?, place(x)?, place(gamma)?, place(mean)?, place(rstd)?];
        let [dy, x, gamma, mean, rstd] = saved.map(Into::into);
        let halves = [sums.slice(0..n * cut.parts())?, sums.slice(n * cut.parts()..sums.count())?];
        let [dgammas, dbetas] = [place(&halves[0])?.into(), place(&halves[1])?.into()];
        let (starts, accumulate) = (self.starts(op, &cut)?.into(), accumulate.into());
        let launch =
            |kernel, sizes, args: &[Argument]| self.launch(op, kernel, sizes, &[args, f16.as_slice()].concat());
        if wide {
            launch(kernel, [rows, n], &[dy, x, gamma, mean, rstd, to, accumulate, rows.into(), n.into()])?;
            launch(
                of_parts,
                [cut.parts(), n],
                &[dy, x, mean, rstd, starts, dgammas, dbetas, cut.parts().into(), n.into()],
            )?;
        } else {
            let args = [dy, x, gamma, mean, rstd, starts, to, accumulate, dgammas, dbetas, n.into()];
            launch(kernel, [cut.parts(), n], &args)?;
        }
        Ok((dx, self.sum_parts(op, &halves[0], &cut, n)?, self.sum_parts(op, &halves[1], &cut, n)?))
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f64, stored: DType) -> Result<(Buffer, Buffer)> {
        let op = "rms_norm";
        let (kernel, f16) = self.of_storage(op, &[x, weight], ["rms_norm_forward_f32", "rms_norm_forward_16"])?;
        let kernel = self.stored(op, (x, stored), [kernel, "rms_norm_forward_bf16"])?;
        let (n, rows) = (weight.count(), x.count() / weight.count());
        let rstd = self.alloc(DType::F32, rows)?;
        let y = self.alloc(stored, x.count())?;
        let place = |buffer| self.place(op, buffer);
        let args = [
            place(x)?.into(),
            place(weight)?.into(),
            (eps as f32).into(),
            place(&y)?.into(),
            place(&rstd)?.into(),
            rows.into(),
            n.into(),
        ];
        self.launch(op, kernel, [rows, n], &[&args[..], f16.as_slice()].concat())?;
        Ok((y, rstd))
    }

    fn rms_norm_grad(
        &self,
        dy: &Buffer,
        x: &Buffer,
        weight: &Buffer,
        rstd: &Buffer,
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, Buffer)> {
        let op = "rms_norm";
        self.f32s(op, &[rstd])?;
        let (n, rows) = (weight.count(), rstd.count());
        let cut = self.cut(rows, blocks)?;
        let sums = self.alloc(DType::F32, n * cut.parts())?;
        let accumulate = i32::from(sum.is_some());
        let mut dx = sum.map_or_else(|| self.alloc(x.dtype(), x.count()), Ok)?;
        let of = [dy, x, weight, &dx];
        let wide = n as u64 > NORM_WIDTH;
        let kernels =
            [["rms_norm_backward", "rms_norm_backward_16"], ["rms_norm_backward_wide", "rms_norm_backward_wide_16"]];
        let (kernel, f16) = self.of_storage(op, &of, kernels[usize::from(wide)])?;
        let (of_parts, _) = self.of_storage(op, &of, ["rms_norm_backward_parts", "rms_norm_backward_parts_16"])?;
        let to = self.place_mut(op, &mut dx)?.into();
        let place = |buffer| self.place(op, buffer);
        let [dy, x, weight, rstd] = [place(dy)?, place(x)?, place(weight)?, place(rstd)?].map(Into::into);
        let (dweights, starts, accumulate) = (place(&sums)?.into(), self.starts(op, &cut)?.into(), accumulate.into());
        let launch =
            |kernel, sizes, args: &[Argument]| self.launch(op, kernel, sizes, &[args, f16.as_slice()].concat());
        if wide {
            launch(kernel, [rows, n], &[dy, x, weight, rstd, to, accumulate, rows.into(), n.into()])?;
            launch(of_parts, [cut.parts(), n], &[dy, x, rstd, starts, dweights, cut.parts().into(), n.into()])?;
        } else {
            launch(kernel, [cut.parts(), n], &[dy, x, weight, rstd, starts, to, accumulate, dweights, n.into()])?;
        }
        Ok((dx, self.sum_parts(op, &sums, &cut, n)?))
    }
}
