//! Pooling of images `[samples, height, width, channels]`: each window becomes a pixel, channel by channel.

use super::images::whole_images;
use super::prelude::*;
use crate::kernel::Windows;

/// How a window becomes a pixel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pool {
    Max,
    Average,
}

#[derive(Debug)]
struct Pooling {
    how: Pool,
    /// Height and width of the windows; `None`: the whole image.
    kernel: Option<[usize; 2]>,
    stride: usize,
    padding: usize,
    input_shape: Shape,
}

impl Var {
    /// `[n, h, w, c] → [n, h', w', c]` with `h' = ⌊(h + 2·padding - kernel) / stride⌋ + 1` and w' alike: the largest
    /// pixel of each window, of equal ones the first.
    pub fn max_pool(&self, kernel: [usize; 2], stride: usize, padding: usize) -> Result<Var> {
        self.pool(Pool::Max, Some(kernel), stride, padding)
    }

    /// The same extents: the mean of each window, padding counted as zeros.
    pub fn average_pool(&self, kernel: [usize; 2], stride: usize, padding: usize) -> Result<Var> {
        self.pool(Pool::Average, Some(kernel), stride, padding)
    }

    /// `[n, h, w, c] → [n, c]`: the mean of each image.
    pub fn global_average_pool(&self) -> Result<Var> {
        self.pool(Pool::Average, None, 1, 0)
    }

    fn pool(&self, how: Pool, kernel: Option<[usize; 2]>, stride: usize, padding: usize) -> Result<Var> {
        let op = Pooling { how, kernel, stride, padding, input_shape: self.shape() };
        self.tape().apply(op, &[self])
    }
}

impl Pooling {
    fn windows(&self) -> Windows {
        let [samples, height, width, channels] = std::array::from_fn(|dim| self.input_shape[dim]);
        let (image, stride, padding) = ([height, width], self.stride, self.padding);
        Windows { samples, image, channels, kernel: self.kernel.unwrap_or(image), stride, padding }
    }
}

impl Op for Pooling {
    fn name(&self) -> &'static str {
        match (self.how, self.kernel) {
            (Pool::Max, _) => "max_pool",
            (Pool::Average, Some(_)) => "average_pool",
            (Pool::Average, None) => "global_average_pool",
        }
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        whole_images(self.name(), operands[0], &[])
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        let x = inputs[0];
        require_images(cx, inputs[0])?;
        let windows = self.windows();
        require_windows(cx, windows)?;
        cx.require(
            windows.kernel.iter().all(|&kernel| self.padding < kernel),
            format_args!("padding {} leaves windows of {:?} on padding alone", self.padding, windows.kernel),
        )?;
        let [height, width] = windows.count();
        let shape = match self.kernel {
            Some(_) => Shape::new(&[windows.samples, height, width, windows.channels]),
            None => Shape::new(&[windows.samples, windows.channels]),
        };
        let device = x.device().window()?;
        let y = match self.how {
            Pool::Max => {
                let (y, places) = device.max_pool(windows, x.buffer())?;
                let count = places.count();
                cx.save(&Tensor::from_buffer(x.device(), places, [count])?)?;
                y
            }
            Pool::Average => device.average_pool(windows, x.buffer())?,
        };
        Tensor::from_buffer(x.device(), y, shape)
    }

    fn backward(&self, cx: &mut Backward<'_>, grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        let device = grad.device();
        let dx = match self.how {
            Pool::Max => device.window()?.max_pool_grad(self.windows(), grad.buffer(), cx.saved(0)?.buffer())?,
            Pool::Average => device.window()?.average_pool_grad(self.windows(), grad.buffer())?,
        };
        Ok(vec![Some(Tensor::from_buffer(device, dx, self.input_shape)?)])
    }
}

/// Refuses inputs that are not a batch of images.
pub(super) fn require_images(cx: &Forward<'_>, x: &Tensor) -> Result<()> {
    let shape = x.shape();
    cx.require(shape.len() == 4 && shape.count() > 0, "x must be images [samples, height, width, channels]")
}

/// Refuses windows that do not fit the image.
pub(super) fn require_windows(cx: &Forward<'_>, windows: Windows) -> Result<()> {
    let Windows { image: [height, width], kernel, stride, padding, .. } = windows;
    cx.require(
        stride > 0 && kernel.iter().all(|&kernel| kernel > 0) && windows.count().iter().all(|&count| count > 0),
        format_args!(
            "windows of {kernel:?} with stride {stride} do not fit {height}×{width} pixels padded by {padding}: the kernel \
             must be no larger than the padded image, and both at least 1"
        ),
    )
}
