use super::kernels::windows as kernels;
use super::prelude::*;
use meshwork_tensor::kernel::{Window, Windows};

/// Runs `kernel` on pieces of whole images: (windows of the piece, its output, its input), each cut by elements of one
/// image.
fn by_images<T: Float + Send + Sync>(
    windows: Windows,
    writes: &mut [T],
    reads: &[&[T]],
    kernel: impl Fn(Windows, &mut [T], &[&[T]]) + Sync,
) {
    let samples = windows.samples.max(1);
    let per_image = |len: usize| len / samples;
    let largest = reads.iter().map(|x| x.len()).chain([writes.len()]).max().map_or(1, per_image);
    let piece = (PIECE / largest.max(1)).max(1);
    let of = per_image(writes.len());
    for_each(writes.chunks_mut((piece * of).max(1)).enumerate(), |(i, writes)| {
        let first = i * piece;
        let last = (first + piece).min(samples);
        let cut: Vec<&[T]> = reads.iter().map(|x| &x[first * per_image(x.len())..last * per_image(x.len())]).collect();
        kernel(windows.over(last - first), writes, &cut);
    });
}

impl Cpu {
    /// An output of `count` elements that `kernel` writes from buffers, image by image.
    fn windowed<T: Float + Element>(
        &self,
        windows: Windows,
        count: usize,
        reads: &[&Buffer],
        kernel: impl Fn(Windows, &mut [T], &[&[T]]) + Sync,
    ) -> Result<Buffer> {
        let reads = reads.iter().map(|x| Ok(x.as_slice::<T>()?)).collect::<Result<Vec<_>>>()?;
        self.output::<T>(count, |out| by_images(windows, out, &reads, kernel))
    }
}

/// For a max pool: elements of an image, elements of its windows, and images of a piece.
fn pieces(windows: Windows) -> [usize; 3] {
    let (pixels, of) = (windows.pixels().max(1), (windows.over(1).rows() * windows.channels).max(1));
    [pixels, of, (PIECE / pixels).max(1)]
}

impl Cpu {
    fn max_pool_placed<T: Float + Element, P: kernels::WindowPlace + Element>(
        &self,
        windows: Windows,
        x: &Buffer,
    ) -> Result<(Buffer, Buffer)> {
        let (x, count, [pixels, of, images]) = (x.as_slice::<T>()?, windows.rows() * windows.channels, pieces(windows));
        let mut places = self.alloc(P::DTYPE, count)?;
        let placed = places.as_mut_slice::<P>()?.chunks_mut(images * of);
        let y = self.output::<T>(count, |y| {
            for_each(y.chunks_mut(images * of).zip(placed).zip(x.chunks(images * pixels)), |((y, places), x)| {
                kernels::max_pool(&windows.over(x.len() / pixels), x, y, places);
            });
        })?;
        Ok((y, places))
    }

    fn max_pool_placed_grad<T: Float + Element, P: kernels::WindowPlace + Element>(
        &self,
        windows: Windows,
        dy: &Buffer,
        places: &Buffer,
    ) -> Result<Buffer> {
        let (dy, places, [pixels, of, images]) = (dy.as_slice::<T>()?, places.as_slice::<P>()?, pieces(windows));
        self.output::<T>(windows.samples * windows.pixels(), |dx| {
            let cut = dx.chunks_mut(images * pixels).zip(dy.chunks(images * of)).zip(places.chunks(images * of));
            for_each(cut, |((dx, dy), places)| {
                kernels::max_pool_backward(&windows.over(dx.len() / pixels), dy, places, dx);
            });
        })
    }
}

impl Window for Cpu {
    fn patches(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        for_float!(self, "conv2d", x, T => {
            self.windowed::<T>(windows, windows.rows() * windows.patch(), &[x], |w, out, x| kernels::patches(&w, x[0], out))
        })
    }

    fn patches_grad(&self, windows: Windows, dpatches: &Buffer) -> Result<Buffer> {
        let count = windows.samples * windows.pixels();
        for_float!(self, "conv2d", dpatches, T => {
            self.windowed::<T>(windows, count, &[dpatches], |w, dx, d| kernels::patches_backward(&w, d[0], dx))
        })
    }

    fn max_pool(&self, windows: Windows, x: &Buffer) -> Result<(Buffer, Buffer)> {
        for_float!(self, "max_pool", x, T => {
            match windows.place_dtype() {
                DType::U8 => self.max_pool_placed::<T, u8>(windows, x),
                _ => self.max_pool_placed::<T, i32>(windows, x),
            }
        })
    }

    fn max_pool_grad(&self, windows: Windows, dy: &Buffer, places: &Buffer) -> Result<Buffer> {
        for_float!(self, "max_pool", dy, T => {
            match windows.place_dtype() {
                DType::U8 => self.max_pool_placed_grad::<T, u8>(windows, dy, places),
                _ => self.max_pool_placed_grad::<T, i32>(windows, dy, places),
            }
        })
    }

    fn average_pool(&self, windows: Windows, x: &Buffer) -> Result<Buffer> {
        let count = windows.rows() * windows.channels;
        for_float!(self, "average_pool", x, T => {
            self.windowed::<T>(windows, count, &[x], |w, y, x| kernels::average_pool(&w, x[0], y))
        })
    }

    fn average_pool_grad(&self, windows: Windows, dy: &Buffer) -> Result<Buffer> {
        let count = windows.samples * windows.pixels();
        for_float!(self, "average_pool", dy, T => {
            self.windowed::<T>(windows, count, &[dy], |w, dx, dy| kernels::average_pool_backward(&w, dy[0], dx))
        })
    }
}
