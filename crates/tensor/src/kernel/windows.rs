//! Windows that slide over images: the parts of a convolution besides the product, and pooling.
//!
//! Images are `[samples, height, width, channels]`, the channels last. So a window is a few contiguous runs, a
//! convolution is one product of patches `[pixels, window]` with weights `[features, window]` whose result has the
//! layout that the next layer reads, and biases and norms repeat over rows as everywhere else.

use super::table::*;
use meshwork_core::{Buffer, DType};

/// Extents of images and of the windows over them. Pixels beyond the edges are zero, and a maximum never sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Images.
    pub samples: usize,
    /// Height and width of an image.
    pub image: [usize; 2],
    /// Channels of a pixel.
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

    /// The type of a pixel's index in a window: a byte where that suffices.
    pub fn place_dtype(&self) -> DType {
        if self.kernel.iter().product::<usize>() <= 1 << u8::BITS { DType::U8 } else { DType::I32 }
    }

    /// Elements of an image.
    pub fn pixels(&self) -> usize {
        self.image.iter().product::<usize>() * self.channels
    }

    /// The same windows over `samples` images.
    pub fn over(self, samples: usize) -> Self {
        Self { samples, ..self }
    }

    /// Whether patches equal the images: windows of one pixel, at every pixel.
    pub fn are_pixels(&self) -> bool {
        (self.kernel, self.stride, self.padding) == ([1, 1], 1, 0)
    }
}

kernels! {
    /// Patches and pooling. Each result is summed in one order, window by window, whatever the number of samples.
    pub trait Window at window {
        /// `[rows, patch]`: each window, row by row (im2col).
        fn patches(&self, windows: Windows, x: &Buffer) -> Result<Buffer>
            | profile(Memory: x), halves(wide x -> x), meta(x => windows.rows() * windows.patch());

        /// The gradient of the images from the gradient of their patches: for each pixel the sum over the windows that
        /// hold it, in order.
        fn patches_grad(&self, windows: Windows, dpatches: &Buffer) -> Result<Buffer>
            | profile(Memory: dpatches), halves(wide dpatches -> dpatches),
              meta(dpatches => windows.samples * windows.pixels());

        /// (the largest pixel of each window, its place in the window), `[rows, channels]` each. Ties go to the first
        /// pixel, and NaN is larger than all numbers. Places count the pixels of a window row by row, padding included,
        /// in [`place_dtype`](Windows::place_dtype).
        fn max_pool(&self, windows: Windows, x: &Buffer) -> Result<(Buffer, Buffer)>
            | profile(Pointwise: x), halves(wide x -> x),
              meta(x => windows.rows() * windows.channels, windows.place_dtype() => windows.rows() * windows.channels);

        /// The gradient of the images from the gradient of [`max_pool`](Self::max_pool)'s output and the places.
        fn max_pool_grad(&self, windows: Windows, dy: &Buffer, places: &Buffer) -> Result<Buffer>
            | profile(Pointwise: dy, places), halves(wide dy -> dy), meta(dy => windows.samples * windows.pixels());

        /// `[rows, channels]`: the sum over each window, divided by its number of pixels, including padding.
        fn average_pool(&self, windows: Windows, x: &Buffer) -> Result<Buffer>
            | profile(Pointwise: x), halves(wide x -> x), meta(x => windows.rows() * windows.channels);

        /// The gradient of the images from the gradient of [`average_pool`](Self::average_pool)'s output.
        fn average_pool_grad(&self, windows: Windows, dy: &Buffer) -> Result<Buffer>
            | profile(Pointwise: dy), halves(wide dy -> dy), meta(dy => windows.samples * windows.pixels());
    }
}
