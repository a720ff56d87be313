use super::prelude::*;
use meshwork_tensor::kernel::Reduction;

impl Reduction for CudaDevice {
    fn sum(&self, x: &Buffer, [outer, extent, inner]: [usize; 3], blocks: usize, scale: f64) -> Result<Buffer> {
        let count = blocks * outer * inner;
        let out = self.alloc(DType::F32, count)?;
        // Empty sums are zero, whatever the scale.
        let scale = if extent == 0 { 0.0 } else { scale };
        launch!(self, "sum", "sum_dim", [count, 0]; x, &out, count, outer, extent, inner, blocks, scale)?;
        Ok(out)
    }

    fn spread(&self, dy: &Buffer, [outer, extent, inner]: [usize; 3], scale: f64) -> Result<Buffer> {
        let count = outer * extent * inner;
        let dx = self.alloc(DType::F32, count)?;
        launch!(self, "sum", "spread_dim", [count, 0]; dy, &dx, count, extent, inner, scale as f32)?;
        Ok(dx)
    }

    fn softmax(&self, x: &Buffer, n: usize) -> Result<Buffer> {
        let (rows, y) = (x.count() / n.max(1), self.alloc(DType::F32, x.count())?);
        launch!(self, "softmax", "softmax_forward", [rows, n]; x, &y, rows, n)?;
        Ok(y)
    }

    fn softmax_grad(&self, dy: &Buffer, y: &Buffer, n: usize) -> Result<Buffer> {
        let (rows, dx) = (y.count() / n.max(1), self.alloc(DType::F32, y.count())?);
        launch!(self, "softmax", "softmax_backward", [rows, n]; dy, y, &dx, rows, n)?;
        Ok(dx)
    }

    fn squared_error(&self, x: &Buffer, targets: &Buffer, samples: usize, terms: Terms, scale: f64) -> Result<Buffer> {
        let Terms { segments, blocks } = terms;
        let (count, each) = (samples * blocks, x.count() / samples.max(1));
        let loss = self.alloc(DType::F64, count)?;
        launch!(self, "squared_error", "squared_error", [count, 0];
            x, targets, &loss, scale, samples, each, segments, blocks
        )?;
        Ok(loss)
    }

    fn squared_error_grad(&self, x: &Buffer, targets: &Buffer, dloss: &Buffer, scale: f64) -> Result<Buffer> {
        let (dx, count) = (self.alloc(DType::F32, x.count())?, x.count());
        launch!(self, "squared_error", "squared_error_backward", [count, 0];
            x, targets, dloss, scale, &dx, count, count / dloss.count().max(1)
        )?;
        Ok(dx)
    }
}
