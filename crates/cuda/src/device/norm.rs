use super::prelude::*;
use meshwork_kernels::NORM_WIDTH;
use meshwork_tensor::kernel::Norm;

impl Norm for CudaDevice {
    fn layer_norm(
        &self,
        x: &Buffer,
        affine: [&Buffer; 2],
        eps: f64,
        stored: DType,
    ) -> Result<(Buffer, Buffer, Buffer)> {
        let (op, [gamma, beta]) = ("layer_norm", affine);
        let kernels = ["layer_norm_forward_f32", "layer_norm_forward_bf16", "layer_norm_forward_16"];
        let kernel = self.storing(op, x, stored, kernels)?;
        let (n, rows) = (gamma.count(), x.count() / gamma.count());
        let (mean, rstd) = (self.alloc(DType::F32, rows)?, self.alloc(DType::F32, rows)?);
        let y = self.alloc(stored, x.count())?;
        launch!(self, op, kernel, [rows, n]; x, gamma, beta, eps as f32, &y, &mean, &rstd, rows, n)?;
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
        let (n, rows) = (gamma.count(), mean.count());
        let (cut, add) = (self.cut(rows, blocks)?, sum.is_some());
        let (parts, starts) = (cut.parts(), self.starts(op, &cut)?);
        let sums = self.alloc(DType::F32, 2 * n * parts)?;
        let [dgammas, dbetas] = [sums.slice(0..n * parts)?, sums.slice(n * parts..2 * n * parts)?];
        let mut dx = sum.map_or_else(|| self.alloc(x.dtype(), x.count()), Ok)?;
        if n as u64 > NORM_WIDTH {
            launch!(self, op, "layer_norm_backward_wide", [rows, n]; dy, x, gamma, mean, rstd, &mut dx, add, rows, n)?;
            launch!(self, op, "layer_norm_backward_parts", [parts, n];
                dy, x, mean, rstd, starts, &dgammas, &dbetas, parts, n
            )?;
        } else {
            launch!(self, op, "layer_norm_backward", [parts, n];
                dy, x, gamma, mean, rstd, starts, &mut dx, add, &dgammas, &dbetas, n
            )?;
        }
        let (dgamma, dbeta) = self.sum_both_parts(op, &sums, &cut, n)?;
        Ok((dx, dgamma, dbeta))
    }

    fn rms_norm(&self, x: &Buffer, weight: &Buffer, eps: f64, stored: DType) -> Result<(Buffer, Buffer)> {
        let op = "rms_norm";
        let kernels = ["rms_norm_forward_f32", "rms_norm_forward_bf16", "rms_norm_forward_16"];
        let kernel = self.storing(op, x, stored, kernels)?;
        let (n, rows) = (weight.count(), x.count() / weight.count());
        let (rstd, y) = (self.alloc(DType::F32, rows)?, self.alloc(stored, x.count())?);
        launch!(self, op, kernel, [rows, n]; x, weight, eps as f32, &y, &rstd, rows, n)?;
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
        let (n, rows) = (weight.count(), rstd.count());
        let (cut, add) = (self.cut(rows, blocks)?, sum.is_some());
        let (parts, starts) = (cut.parts(), self.starts(op, &cut)?);
        let sums = self.alloc(DType::F32, n * parts)?;
        let mut dx = sum.map_or_else(|| self.alloc(x.dtype(), x.count()), Ok)?;
        if n as u64 > NORM_WIDTH {
            launch!(self, op, "rms_norm_backward_wide", [rows, n]; dy, x, weight, rstd, &mut dx, add, rows, n)?;
            launch!(self, op, "rms_norm_backward_parts", [parts, n]; dy, x, rstd, starts, &sums, parts, n)?;
        } else {
            launch!(self, op, "rms_norm_backward", [parts, n]; dy, x, weight, rstd, starts, &mut dx, add, &sums, n)?;
        }
        Ok((dx, self.sum_parts(op, &sums, &cut, n)?))
    }
}
