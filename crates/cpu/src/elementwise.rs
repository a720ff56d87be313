use super::kernels::elementwise;
use super::prelude::*;
use meshwork_tensor::kernel::{Elementwise, HostFn, Map, Zip};

/// Number of elements that a function of the host processes at a time.
const HOST_PIECE: usize = 1 << 12;

impl Elementwise for Cpu {
    fn map(&self, f: Map, x: &Buffer) -> Result<Buffer> {
        for_float!(self, "map", x, T => self.elements::<T, 1>([x], 1, |_, [x], out| elementwise::map(f, x, out)))
    }

    fn map_grad(&self, f: Map, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        for_float!(self, "map", x, T => {
            self.elements::<T, 2>([x, dy], 1, |_, [x, dy], dx| elementwise::map_backward(f, x, dy, dx))
        })
    }

    fn zip(&self, f: Zip, x: &Buffer, y: &Buffer, [outer, extent, inner]: [usize; 3]) -> Result<Buffer> {
        for_float!(self, "zip", x, T => {
            // Pieces of both.
            if extent == 1 {
                return self.elements::<T, 2>([x, y], 1, |_, [x, y], out| elementwise::zip(f, x, y, [1, out.len()], out));
            }
            // Pieces of x, all with the same y.
            if outer == 1 {
                let y = y.as_slice::<T>()?;
                let rows = |len: usize| [len / inner.max(1), inner];
                return self.elements([x], inner, |_, [x], out| elementwise::zip(f, x, y, rows(out.len()), out));
            }
            let (x, y, slab) = (x.as_slice::<T>()?, y.as_slice::<T>()?, extent * inner);
            let slabs = row_piece(slab) / slab.max(1);
            self.output::<T>(x.len(), |out| {
                let [of_x, of_y] = [slabs * slab, slabs * inner].map(|piece| piece.max(1));
                let pieces = out.chunks_mut(of_x).zip(x.chunks(of_x)).zip(y.chunks(of_y));
                for_each(pieces, |((out, x), y)| elementwise::zip(f, x, y, [extent, inner], out));
            })
        })
    }

    fn host_map(&self, inputs: &[&Buffer], f: &HostFn<'_>) -> Result<Option<Buffer>> {
        let Some(first) = inputs.first() else { return Ok(None) };
        let out = for_float!(self, "map", first, T => {
            let inputs = inputs.iter().map(|input| Ok(input.as_slice::<T>()?)).collect::<Result<Vec<&[T]>>>()?;
            self.output::<T>(first.count(), |out| {
                for_each(out.chunks_mut(HOST_PIECE).enumerate(), |(piece, out)| {
                    let mut arguments = vec![0.0; inputs.len()];
                    for (i, out) in out.iter_mut().enumerate() {
                        for (argument, input) in arguments.iter_mut().zip(&inputs) {
                            *argument = input[piece * HOST_PIECE + i].to_f64();
                        }
                        *out = T::from_f64(f(&arguments));
                    }
                });
            })
        });
        out.map(Some)
    }
}
