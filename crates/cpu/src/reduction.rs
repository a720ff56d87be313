use super::kernels::reduction;
use super::prelude::*;
use meshwork_tensor::kernel::Reduction;

impl Reduction for Cpu {
    fn sum(&self, x: &Buffer, shape: [usize; 3], blocks: usize, scale: f64) -> Result<Buffer> {
        let [outer, extent, inner] = shape;
        for_float!(self, "sum", x, T => {
            let x = x.as_slice::<T>()?;
            self.output::<T>(blocks * outer * inner, |out| {
                if x.is_empty() {
                    return out.fill(0.0);
                }
                let rows = row_piece(extent * inner) / (extent * inner).max(1);
                for (block, out) in out.chunks_mut((outer * inner).max(1)).enumerate() {
                    let range = extent * block / blocks..extent * (block + 1) / blocks;
                    let pieces = out.chunks_mut((rows * inner).max(1)).zip(x.chunks((rows * extent * inner).max(1)));
                    for_each(pieces, |(out, x)| reduction::sum(x, extent, inner, range.clone(), scale, out));
                }
            })
        })
    }

    fn spread(&self, dy: &Buffer, shape: [usize; 3], scale: f64) -> Result<Buffer> {
        let [outer, extent, inner] = shape;
        for_float!(self, "sum", dy, T => {
            let dy = dy.as_slice::<T>()?;
            self.output::<T>(outer * extent * inner, |dx| {
                let blocks = row_piece(extent * inner) / (extent * inner).max(1);
                let pieces = dx.chunks_mut((blocks * extent * inner).max(1)).zip(dy.chunks((blocks * inner).max(1)));
                for_each(pieces, |(dx, dy)| reduction::spread(dy, extent, inner, scale, dx));
            })
        })
    }

    fn softmax(&self, x: &Buffer, n: usize) -> Result<Buffer> {
        for_float!(self, "softmax", x, T => self.elements::<T, 1>([x], n, |_, [x], y| reduction::softmax(x, n, y)))
    }

    fn softmax_grad(&self, dy: &Buffer, y: &Buffer, n: usize) -> Result<Buffer> {
        for_float!(self, "softmax", y, T => {
            self.elements::<T, 2>([y, dy], n, |_, [y, dy], dx| reduction::softmax_backward(y, dy, n, dx))
        })
    }

    fn squared_error(&self, x: &Buffer, targets: &Buffer, samples: usize, terms: Terms, scale: f64) -> Result<Buffer> {
        for_float!(self, "squared_error", x, T => {
            let (x, targets) = (x.as_slice::<T>()?, targets.as_slice::<T>()?);
            let elements = x.len() / samples.max(1);
            self.output::<f64>(terms.blocks * samples, |out| {
                let (piece, at_once) = (row_piece(elements), row_piece(elements) / elements.max(1));
                out.fill(0.0);
                for (runs, out) in terms.runs(elements).zip(out.chunks_mut(samples.max(1))) {
                    let runs: Vec<_> = runs.collect();
                    let pieces = out.chunks_mut(at_once).zip(x.chunks(piece).zip(targets.chunks(piece)));
                    for_each(pieces, |(out, (x, targets))| {
                        let samples = x.chunks(elements).zip(targets.chunks(elements));
                        for (out, (x, targets)) in out.iter_mut().zip(samples) {
                            let terms = runs.iter().map(|run| (&x[run.clone()], &targets[run.clone()]));
                            *out = scale * terms.fold(0.0, |sum, (x, targets)| reduction::squared_error(sum, x, targets));
                        }
                    });
                }
            })
        })
    }

    fn squared_error_grad(&self, x: &Buffer, targets: &Buffer, dloss: &Buffer, scale: f64) -> Result<Buffer> {
        for_float!(self, "squared_error", x, T => {
            let (x, targets, dloss) = (x.as_slice::<T>()?, targets.as_slice::<T>()?, dloss.as_slice::<f64>()?);
            let elements = (x.len() / dloss.len().max(1)).max(1);
            self.output::<T>(x.len(), |dx| {
                let samples = dx.chunks_mut(elements).zip(x.chunks(elements)).zip(targets.chunks(elements)).zip(dloss);
                let pieces = samples.flat_map(|(((dx, x), targets), &dloss)| {
                    let pieces = dx.chunks_mut(PIECE).zip(x.chunks(PIECE)).zip(targets.chunks(PIECE));
                    pieces.map(move |piece| (piece, T::from_f64(2.0 * scale * dloss)))
                });
                for_each(pieces, |(((dx, x), targets), scale)| {
                    reduction::squared_error_backward(x, targets, scale, dx);
                });
            })
        })
    }
}
