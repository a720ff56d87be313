use super::kernels::{dropout, gelu, pointwise, relu, round, swiglu};
use super::{Cpu, PIECE, RowSums, for_float, row_piece};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{DropoutMask, Pointwise};
use crate::tape::RowBlocks;
use meshwork_core::pool::share;
use meshwork_core::{Buffer, DType, Element};

impl Pointwise for Cpu {
    fn add(&self, a: &Buffer, b: &Buffer) -> Result<Buffer> {
        for_float!(self, "add", a, T => {
            let (a, b) = (a.as_slice::<T>()?, b.as_slice::<T>()?);
            self.output::<T>(a.len(), |out| {
                let pieces = out.chunks_mut(PIECE).zip(a.chunks(PIECE)).zip(b.chunks(PIECE));
                share(pieces, |((out, a), b)| pointwise::add(a, b, out));
            })
        })
    }

    fn add_assign(&self, a: &mut Buffer, at: usize, b: &Buffer) -> Result<()> {
        for_float!(self, "add", b, T => {
            let (a, b) = (&mut a.as_mut_slice::<T>()?[at..at + b.count()], b.as_slice::<T>()?);
            share(a.chunks_mut(PIECE).zip(b.chunks(PIECE)), |(a, b)| pointwise::add_assign(a, b));
            Ok(())
        })
    }

    fn bias(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        for_float!(self, "bias", x, T => {
            let (x, bias) = (x.as_slice::<T>()?, bias.as_slice::<T>()?);
            let piece = row_piece(bias.len());
            self.output::<T>(x.len(), |out| {
                share(out.chunks_mut(piece).zip(x.chunks(piece)), |(out, x)| pointwise::bias(x, bias, out));
            })
        })
    }

    fn tree_sum(&self, x: &mut Buffer, start: usize, count: usize, n: usize, to: usize) -> Result<()> {
        for_float!(self, "add", x, T => {
            let x = x.as_mut_slice::<T>()?;
            pointwise::tree_sum(&mut x[start..start + count * n], n, |left, right| {
                share(left.chunks_mut(PIECE).zip(right.chunks(PIECE)), |(left, right)| pointwise::add_assign(left, right));
            });
            if to != start {
                x.copy_within(start..start + n, to);
            }
            Ok(())
        })
    }

    fn bias_grad(&self, dy: &Buffer, n: usize, blocks: RowBlocks) -> Result<Buffer> {
        for_float!(self, "bias", dy, T => {
            let dy = dy.as_slice::<T>()?;
            let rows = RowSums::new(dy.len() / n, blocks);
            let parts = self.output::<T>(n * rows.parts(), |parts| {
                share(parts.chunks_mut(n).zip(rows.cut(dy, n)), |(part, dy)| {
                    part.fill(0.0);
                    pointwise::bias_backward(dy, part);
                });
            })?;
            rows.finish(self, parts.as_slice::<T>()?, n)
        })
    }

    fn bias_residual(&self, x: &Buffer, bias: &Buffer, residual: &Buffer) -> Result<Buffer> {
        for_float!(self, "bias_residual", x, T => {
            let (x, bias, residual) = (x.as_slice::<T>()?, bias.as_slice::<T>()?, residual.as_slice::<T>()?);
            let piece = row_piece(bias.len());
            self.output::<T>(x.len(), |out| {
                let pieces = out.chunks_mut(piece).zip(x.chunks(piece)).zip(residual.chunks(piece));
                share(pieces, |((out, x), residual)| pointwise::bias_residual(x, bias, residual, out));
            })
        })
    }

    fn bias_gelu(&self, x: &Buffer, bias: &Buffer, stored: DType) -> Result<Buffer> {
        for_float!(self, "gelu", x, T => {
            let (x, bias) = (x.as_slice::<T>()?, bias.as_slice::<T>()?);
            let piece = row_piece(bias.len());
            self.stored::<T>("gelu", stored, x.len(), |out| {
                share(out.chunks(piece).zip(x.chunks(piece)), |(out, x)| gelu::bias_gelu(x, bias, out));
                Ok(())
            })
        })
    }

    fn bias_gelu_grad(&self, dy: &mut Buffer, x: &Buffer, bias: &Buffer, blocks: RowBlocks) -> Result<Buffer> {
        for_float!(self, "gelu", x, T => {
            let (dy, x, bias) = (dy.as_mut_slice::<T>()?, x.as_slice::<T>()?, bias.as_slice::<T>()?);
            let n = bias.len();
            let rows = RowSums::new(x.len() / n, blocks);
            let parts = self.output::<T>(n * rows.parts(), |parts| {
                let cut = rows.cut_mut(dy, n).zip(rows.cut(x, n));
                share(cut.zip(parts.chunks_mut(n)), |((dy, x), part)| {
                    part.fill(0.0);
                    gelu::bias_gelu_backward(x, bias, dy, part);
                });
            })?;
            rows.finish(self, parts.as_slice::<T>()?, n)
        })
    }

    fn gelu(&self, x: &Buffer) -> Result<Buffer> {
        for_float!(self, "gelu", x, T => {
            let x = x.as_slice::<T>()?;
            self.output::<T>(x.len(), |out| {
                share(out.chunks_mut(PIECE).zip(x.chunks(PIECE)), |(out, x)| gelu::gelu(x, out));
            })
        })
    }

    fn gelu_grad(&self, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        for_float!(self, "gelu", x, T => {
            let (dy, x) = (dy.as_slice::<T>()?, x.as_slice::<T>()?);
            self.output::<T>(x.len(), |dx| {
                let pieces = dx.chunks_mut(PIECE).zip(x.chunks(PIECE)).zip(dy.chunks(PIECE));
                share(pieces, |((dx, x), dy)| gelu::gelu_backward(x, dy, dx));
            })
        })
    }

    fn swiglu(&self, x: &Buffer, stored: DType) -> Result<Buffer> {
        for_float!(self, "swiglu", x, T => {
            let x = x.as_slice::<T>()?;
            self.stored::<T>("swiglu", stored, x.len() / 2, |out| {
                share(out.chunks(PIECE / 2).zip(x.chunks(PIECE)), |(out, x)| swiglu::swiglu(x, out));
                Ok(())
            })
        })
    }

    fn swiglu_grad(&self, dy: &Buffer, x: &mut Buffer) -> Result<()> {
        for_float!(self, "swiglu", dy, T => {
            let (dy, x) = (dy.as_slice::<T>()?, x.as_mut_slice::<T>()?);
            share(x.chunks_mut(PIECE).zip(dy.chunks(PIECE / 2)), |(x, dy)| swiglu::swiglu_backward(dy, x));
            Ok(())
        })
    }

    fn relu(&self, x: &Buffer) -> Result<(Buffer, Buffer)> {
        for_float!(self, "relu", x, T => {
            let x = x.as_slice::<T>()?;
            let mut above = self.alloc(DType::U8, x.len().div_ceil(relu::PER_BYTE))?;
            let bits = above.as_mut_slice::<u8>()?.chunks_mut(PIECE / relu::PER_BYTE);
            let out = self.output::<T>(x.len(), |out| {
                share(out.chunks_mut(PIECE).zip(x.chunks(PIECE)).zip(bits), |((out, x), bits)| relu::relu(x, out, bits));
            })?;
            Ok((out, above))
        })
    }

    fn relu_grad(&self, dy: &Buffer, above: &Buffer) -> Result<Buffer> {
        for_float!(self, "relu", dy, T => {
            let (dy, bits) = (dy.as_slice::<T>()?, above.as_slice::<u8>()?.chunks(PIECE / relu::PER_BYTE));
            self.output::<T>(dy.len(), |dx| {
                let pieces = dx.chunks_mut(PIECE).zip(dy.chunks(PIECE)).zip(bits);
                share(pieces, |((dx, dy), bits)| relu::relu_backward(bits, dy, dx));
            })
        })
    }

    fn cast(&self, x: &Buffer, to: DType) -> Result<Buffer> {
        let mut out = self.alloc(to, x.count())?;
        self.cast_into(x, &mut out, 0)?;
        Ok(out)
    }

    fn cast_into(&self, x: &Buffer, out: &mut Buffer, at: usize) -> Result<()> {
        match (x.dtype(), out.dtype()) {
            (DType::F32, DType::Bf16) => each(x, out, at, round::round),
            (DType::F32, DType::F16) => each(x, out, at, round::to_f16),
            (DType::Bf16, DType::F32) => each(x, out, at, round::from_bf16),
            (DType::F16, DType::F32) => each(x, out, at, round::from_f16),
            (from, to) => {
                let dtype = if from == DType::F32 { to } else { from };
                Err(Error::DType {
                    op: "cast",
                    device: self.name().to_owned(),
                    dtype,
                    valid: "f32 to bf16 or f16, and back",
                })
            }
        }
    }

    fn dropout(&self, x: &Buffer, mask: &DropoutMask) -> Result<Buffer> {
        let region = dropout::Region {
            shape: &mask.local[..mask.ndim],
            offset: &mask.offset[..mask.ndim],
            global: &mask.global[..mask.ndim],
        };
        for_float!(self, "dropout", x, T => {
            let x = x.as_slice::<T>()?;
            let mask = dropout::Mask { key: mask.key, p: mask.p };
            self.output::<T>(x.len(), |y| {
                share(y.chunks_mut(PIECE).zip(x.chunks(PIECE)).enumerate(), |(i, (y, x))| {
                    dropout::dropout(mask, region, i * PIECE, x, y);
                });
            })
        })
    }
}

/// Writes the result of `convert` for each piece of x to the elements of `out` from `at` on.
fn each<T: Element, U: Element>(x: &Buffer, out: &mut Buffer, at: usize, convert: fn(&[T], &mut [U])) -> Result<()> {
    out.slice(at..at + x.count())?;
    let x = x.as_slice::<T>()?;
    let out = &mut out.as_mut_slice::<U>()?[at..at + x.len()];
    share(out.chunks_mut(PIECE).zip(x.chunks(PIECE)), |(out, x)| convert(x, out));
    Ok(())
}
