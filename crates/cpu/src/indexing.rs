use super::kernels::indexing;
use super::prelude::*;
use meshwork_tensor::kernel::{Indexing, Picks};

/// Reads the indices, and refuses one that is outside of the dim.
fn checked(index: &Buffer, picks: Picks) -> Result<&[i32]> {
    let index = index.as_slice::<i32>()?;
    match indexing::outside(index, picks.extent) {
        None => Ok(index),
        Some((place, found)) => Err(Error::Shape {
            op: picks.op(),
            problem: format!("index {found} at place {place}: indices are from 0 to {}", picks.extent as i64 - 1),
            shapes: Vec::new(),
        }),
    }
}

impl Indexing for Cpu {
    fn argmax(&self, x: &Buffer, [outer, extent, inner]: [usize; 3]) -> Result<Buffer> {
        for_float!(self, "argmax", x, T => {
            let (x, slab) = (x.as_slice::<T>()?, extent * inner);
            let slabs = row_piece(slab) / slab.max(1);
            self.output::<i32>(outer * inner, |out| {
                let [of_x, of_out] = [slabs * slab, slabs * inner].map(|piece| piece.max(1));
                for_each(out.chunks_mut(of_out).zip(x.chunks(of_x)), |(out, x)| {
                    indexing::argmax(x, extent, inner, out);
                });
            })
        })
    }

    fn pick(&self, x: &Buffer, index: &Buffer, picks: Picks) -> Result<Buffer> {
        for_float!(self, "pick", x, T => {
            let (x, index, slab) = (x.as_slice::<T>()?, checked(index, picks)?, picks.count * picks.inner);
            let slabs = row_piece(slab) / slab.max(1);
            self.output::<T>(picks.taken(), |out| {
                for_each(out.chunks_mut((slabs * slab).max(1)).enumerate(), |(piece, out)| {
                    indexing::pick(x, index, picks, piece * slabs, out);
                });
            })
        })
    }

    fn pick_grad(&self, dy: &Buffer, index: &Buffer, picks: Picks) -> Result<Buffer> {
        for_float!(self, "pick", dy, T => {
            let (dy, index, slab) = (dy.as_slice::<T>()?, checked(index, picks)?, picks.extent * picks.inner);
            let slabs = row_piece(slab) / slab.max(1);
            self.output::<T>(picks.from(), |dx| {
                for_each(dx.chunks_mut((slabs * slab).max(1)).enumerate(), |(piece, dx)| {
                    indexing::pick_backward(dy, index, picks, piece * slabs, dx);
                });
            })
        })
    }
}
