use super::prelude::*;
use meshwork_tensor::kernel::{Window, Windows};

/// The extents, as arguments of the kernels in `windows.cu`.
fn extents(windows: Windows) -> [usize; 9] {
    let Windows { image: [height, width], channels, kernel: [down, across], stride, padding, .. } = windows;
    let [rows, columns] = windows.count();
    [height, width, channels, rows, columns, down, across, stride, padding]
}

/// Elements of all images.
fn pixels(windows: Windows) -> usize {
    windows.samples * windows.pixels()
}

impl CudaDevice {
    /// A result of `count` numbers that a kernel computes from `x`.
    fn each_window(
        &self,
        op: &'static str,
        kernel: &'static str,
        windows: Windows,
        x: &Buffer,
        count: usize,
    ) -> Result<Buffer> {
        let out = self.alloc(DType::F32, count)?;
        launch!(self, op, kernel, [count, 0]; x, &out, count, extents(windows))?;
        Ok(out)
    }
}

impl Window for CudaDevice {
    fn patches(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        self.each_window("conv2d", "patches_forward", windows, x, windows.rows() * windows.patch())
    }

    fn patches_grad(&self, windows: Windows, dpatches: &Buffer) -> Result<Buffer> {
        self.each_window("conv2d", "patches_backward", windows, dpatches, pixels(windows))
    }

    fn max_pool(&self, windows: Windows, x: &Buffer) -> Result<(Buffer, Buffer)> {
        const OP: &str = "max_pool";
        let (count, places) = (windows.rows() * windows.channels, windows.place_dtype());
        let kernel = if places == DType::U8 { "max_pool_forward_u8" } else { "max_pool_forward_i32" };
        let (out, places) = (self.alloc(DType::F32, count)?, self.alloc(places, count)?);
        launch!(self, OP, kernel, [count, 0]; x, &out, &places, count, extents(windows))?;
        Ok((out, places))
    }

    fn max_pool_grad(&self, windows: Windows, dy: &Buffer, places: &Buffer) -> Result<Buffer> {
        const OP: &str = "max_pool";
        let (count, expected) = (pixels(windows), windows.place_dtype());
        if places.dtype() != expected {
            return Err(BufferError::DType { actual: places.dtype(), asked: expected }.into());
        }
        let kernel = if expected == DType::U8 { "max_pool_backward_u8" } else { "max_pool_backward_i32" };
        let dx = self.alloc(DType::F32, count)?;
        launch!(self, OP, kernel, [count, 0]; dy, places, &dx, count, extents(windows))?;
        Ok(dx)
    }

    fn average_pool(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        self.each_window("average_pool", "average_pool_forward", windows, x, windows.rows() * windows.channels)
    }

    fn average_pool_grad(&self, windows: Windows, dy: &Buffer) -> Result<Buffer> {
        self.each_window("average_pool", "average_pool_backward", windows, dy, pixels(windows))
    }
}
