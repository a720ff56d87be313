use super::CudaDevice;
use crate::driver::Argument;
use meshwork_core::{Buffer, BufferError, DType};
use meshwork_tensor::kernel::{Window, Windows};
use meshwork_tensor::{Device, Result};

/// The extents, as the kernels of `windows.cu` take them.
fn extents(windows: Windows) -> [Argument; 9] {
    let Windows { image: [height, width], channels, kernel: [down, across], stride, padding, .. } = windows;
    let [rows, columns] = windows.count();
    [height, width, channels, rows, columns, down, across, stride, padding].map(Argument::from)
}

/// Elements of all images.
fn pixels(windows: Windows) -> usize {
    windows.samples * windows.pixels()
}

impl Window for CudaDevice {
    fn patches(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        self.elements("conv2d", "patches_forward", windows.rows() * windows.patch(), &[x], &extents(windows))
    }

    fn patches_grad(&self, windows: Windows, dpatches: &Buffer) -> Result<Buffer> {
        self.elements("conv2d", "patches_backward", pixels(windows), &[dpatches], &extents(windows))
    }

    fn max_pool(&self, windows: Windows, x: &Buffer) -> Result<(Buffer, Buffer)> {
        const OP: &str = "max_pool";
        self.f32s(OP, &[x])?;
        let (count, places) = (windows.rows() * windows.channels, windows.place_dtype());
        let kernel = if places == DType::U8 { "max_pool_forward_u8" } else { "max_pool_forward_i32" };
        let (out, places) = (self.alloc(DType::F32, count)?, self.alloc(places, count)?);
        let args = [self.place(OP, x)?, self.place(OP, &out)?, self.place(OP, &places)?].map(Argument::from);
        self.launch(OP, kernel, [count, 0], &[&args[..], &[count.into()], &extents(windows)].concat())?;
        Ok((out, places))
    }

    fn max_pool_grad(&self, windows: Windows, dy: &Buffer, places: &Buffer) -> Result<Buffer> {
        const OP: &str = "max_pool";
        self.f32s(OP, &[dy])?;
        let (count, expected) = (pixels(windows), windows.place_dtype());
        if places.dtype() != expected {
            return Err(BufferError::DType { actual: places.dtype(), asked: expected }.into());
        }
        let kernel = if expected == DType::U8 { "max_pool_backward_u8" } else { "max_pool_backward_i32" };
        let dx = self.alloc(DType::F32, count)?;
        let args = [self.place(OP, dy)?, self.place(OP, places)?, self.place(OP, &dx)?].map(Argument::from);
        self.launch(OP, kernel, [count, 0], &[&args[..], &[count.into()], &extents(windows)].concat())?;
        Ok(dx)
    }

    fn average_pool(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        let count = windows.rows() * windows.channels;
        self.elements("average_pool", "average_pool_forward", count, &[x], &extents(windows))
    }

    fn average_pool_grad(&self, windows: Windows, dy: &Buffer) -> Result<Buffer> {
        self.elements("average_pool", "average_pool_backward", pixels(windows), &[dy], &extents(windows))
    }
}
