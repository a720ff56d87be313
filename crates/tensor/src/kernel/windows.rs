//! Windows that slide over images: the parts of a convolution besides the product, and pooling.
//!
//! Images are `[samples, height, width, channels]`, the channels last. So a window is a few contiguous runs, a
//! convolution is one product of patches `[pixels, window]` with weights `[features, window]` whose result has the
//! layout that the next layer reads, and biases and norms repeat over rows as everywhere else.

use crate::error::Result;
use meshwork_core::Buffer;
use std::fmt::Debug;

/// Extents of images and of the windows over them. Pixels beyond the edges are zero, and a maximum never sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Images.
    pub samples: usize,
    /// Height and width of an image.
    pub image: [usize; 2],
    /// Channels of an image.
    pub channels: usize,
    /// Height and width of a window.
    pub kernel: [usize; 2],
    /// Pixels from one window to the next, both ways; at least 1.
    pub stride: usize,
    /// Pixels added on each side, both ways.
    pub padding: usize,
}

impl Windows {
    /// Windows down and across: `⌊(image + 2·padding - kernel) / stride⌋ + 1`, 0 if the kernel is larger than the
    /// padded image.
    pub fn count(&self) -> [usize; 2] {
        [0, 1].map(|dim| {
            let room = (self.image[dim] + 2 * self.padding).checked_sub(self.kernel[dim]);
            room.map_or(0, |room| room / self.stride + 1)
        })
    }

    /// Windows of all samples.
    pub fn rows(&self) -> usize {
        self.samples * self.count().iter().product::<usize>()
    }

    /// Elements of a window.
    pub fn patch(&self) -> usize {
        self.kernel.iter().product::<usize>() * self.channels
    }

    /// Elements of an image.
    pub fn pixels(&self) -> usize {
        self.image.iter().product::<usize>() * self.channels
    }

    /// The same windows over `samples` images.
    pub fn over(self, samples: usize) -> Self {
        Self { samples, ..self }
    }

    /// Whether patches are the images themselves: windows of one pixel, on every pixel.
    pub fn are_pixels(&self) -> bool {
        (self.kernel, self.stride, self.padding) == ([1, 1], 1, 0)
    }
}

/// Patches and pooling. Each result is summed in one order, window by window, whatever the number of samples.
pub trait Window: Debug {
    /// `[rows, patch]`: each window, row by row (im2col).
    fn patches(&self, windows: Windows, x: &Buffer) -> Result<Buffer>;

    /// The images' gradient from that of their patches: for each pixel the sum over the windows that hold it, in order.
    fn patches_grad(&self, windows: Windows, dpatches: &Buffer) -> Result<Buffer>;

    /// `[rows, channels]`: the largest pixel of each window; of equal ones the first, which also gets the gradient. NaN
    /// if the window has one.
    fn max_pool(&self, windows: Windows, x: &Buffer) -> Result<Buffer>;

    /// The images' gradient from that of [`max_pool`](Self::max_pool).
    fn max_pool_grad(&self, windows: Windows, dy: &Buffer, x: &Buffer) -> Result<Buffer>;

    /// `[rows, channels]`: the sum over each window, divided by its number of pixels, padding counted.
    fn average_pool(&self, windows: Windows, x: &Buffer) -> Result<Buffer>;

    /// The images' gradient from that of [`average_pool`](Self::average_pool).
    fn average_pool_grad(&self, windows: Windows, dy: &Buffer) -> Result<Buffer>;
}
