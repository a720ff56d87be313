use super::kernels::{dropout, gelu, pointwise, relu, round, swiglu};
use super::prelude::*;
use meshwork_tensor::kernel::{DropoutMask, Pointwise};

impl Pointwise for Cpu {
    fn add(&self, a: &Buffer, b: &Buffer) -> Result<Buffer> {
        for_widened!(self, "add", a, T => self.elements::<T, 2>([a, b], 1, |_, [a, b], out| pointwise::add(a, b, out)))
    }

    fn add_assign(&self, a: &mut Buffer, at: usize, b: &Buffer) -> Result<()> {
        for_widened!(self, "add", b, T => {
            let piece = row_piece_of(b.dtype(), 1);
            let (a, b) = (stored::<T>(a)?.part(at..at + b.count()), loaded::<T>(b)?);
            for_each(a.chunks(piece).zip(b.chunks(piece)), |(a, b)| read([b], |[b]| a.update(|a| pointwise::add_assign(a, b))));
            Ok(())
        })
    }

    fn bias(&self, x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        for_widened!(self, "bias", x, T => {
            let bias = loaded::<T>(bias)?.whole();
            self.elements([x], bias.len(), |_, [x], out| pointwise::bias(x, &bias, out))
        })
    }

    fn tree_sum(&self, x: &mut Buffer, start: usize, count: usize, n: usize, to: usize) -> Result<()> {
        for_float!(self, "add", x, T => {
            let x = x.as_mut_slice::<T>()?;
            pointwise::tree_sum(&mut x[start..start + count * n], n, |left, right| {
                for_each(left.chunks_mut(PIECE).zip(right.chunks(PIECE)), |(left, right)| pointwise::add_assign(left, right));
            });
            if to != start {
                x.copy_within(start..start + n, to);
            }
            Ok(())
        })
    }

    fn bias_grad(&self, dy: &Buffer, n: usize, blocks: RowBlocks) -> Result<Buffer> {
        for_widened!(self, "bias", dy, T => {
            let dy = loaded::<T>(dy)?;
            let rows = RowSums::new(dy.len() / n, blocks);
            let parts = self.output::<T>(n * rows.parts(), |parts| {
                for_each(parts.chunks_mut(n).zip(rows.cut(dy, n)), |(part, dy)| {
                    part.fill(0.0);
                    for dy in dy.chunks(n * rows_at_once(n)) {
                        read([dy], |[dy]| pointwise::bias_backward(dy, part));
                    }
                });
            })?;
            rows.finish(self, parts.as_slice::<T>()?, n)
        })
    }

    fn bias_residual(&self, x: &Buffer, bias: &Buffer, residual: &Buffer) -> Result<Buffer> {
        for_widened!(self, "bias_residual", x, T => {
            let bias = loaded::<T>(bias)?.whole();
            let sum = |_, [x, residual]: [&[T]; 2], out: &mut [T]| pointwise::bias_residual(x, &bias, residual, out);
            self.elements([x, residual], bias.len(), sum)
        })
    }

    fn bias_gelu(&self, x: &Buffer, bias: &Buffer, stored: DType) -> Result<Buffer> {
        for_widened!(self, "gelu", x, T => {
            let (all, bias) = (loaded::<T>(x)?, loaded::<T>(bias)?.whole());
            let piece = row_piece_of(x.dtype(), bias.len());
            self.stored::<T>("gelu", (x.dtype(), stored), x.count(), |out| {
                let pieces = out.chunks(piece).zip(all.chunks(piece));
                for_each(pieces, |(out, x)| read([x], |[x]| gelu::bias_gelu(x, &bias, out)));
                Ok(())
            })
        })
    }

    fn bias_gelu_grad(&self, dy: &mut Buffer, x: &Buffer, bias: &Buffer, blocks: RowBlocks) -> Result<Buffer> {
        for_widened!(self, "gelu", x, T => {
            let (dy, x, bias) = (stored::<T>(dy)?, loaded::<T>(x)?, loaded::<T>(bias)?.whole());
            let n = bias.len();
            let (rows, piece) = (RowSums::new(x.len() / n, blocks), n * rows_at_once(n));
            let parts = self.output::<T>(n * rows.parts(), |parts| {
                let cut = rows.cut(dy, n).zip(rows.cut(x, n));
                for_each(cut.zip(parts.chunks_mut(n)), |((dy, x), part)| {
                    part.fill(0.0);
                    for (dy, x) in dy.chunks(piece).zip(x.chunks(piece)) {
                        read([x], |[x]| dy.update(|dy| gelu::bias_gelu_backward(x, &bias, dy, part)));
                    }
                });
            })?;
            rows.finish(self, parts.as_slice::<T>()?, n)
        })
    }

    fn gelu(&self, x: &Buffer) -> Result<Buffer> {
        for_widened!(self, "gelu", x, T => self.elements::<T, 1>([x], 1, |_, [x], out| gelu::gelu(x, out)))
    }

    fn gelu_grad(&self, dy: &Buffer, x: &Buffer) -> Result<Buffer> {
        for_widened!(self, "gelu", x, T => {
            self.elements::<T, 2>([x, dy], 1, |_, [x, dy], dx| gelu::gelu_backward(x, dy, dx))
        })
    }

    fn swiglu(&self, x: &Buffer, stored: DType) -> Result<Buffer> {
        for_widened!(self, "swiglu", x, T => {
            let (all, piece) = (loaded::<T>(x)?, row_piece_of(x.dtype(), 2));
            self.stored::<T>("swiglu", (x.dtype(), stored), x.count() / 2, |out| {
                let pieces = out.chunks(piece / 2).zip(all.chunks(piece));
                for_each(pieces, |(out, x)| read([x], |[x]| swiglu::swiglu(x, out)));
                Ok(())
            })
        })
    }

    fn swiglu_grad(&self, dy: &Buffer, x: &mut Buffer) -> Result<()> {
        for_widened!(self, "swiglu", dy, T => {
            let (piece, dy) = (row_piece_of(dy.dtype(), 2), loaded::<T>(dy)?);
            let pieces = stored::<T>(x)?.chunks(piece).zip(dy.chunks(piece / 2));
            for_each(pieces, |(x, dy)| read([dy], |[dy]| x.update(|x| swiglu::swiglu_backward(dy, x))));
            Ok(())
        })
    }

    fn relu(&self, x: &Buffer) -> Result<(Buffer, Buffer)> {
        for_float!(self, "relu", x, T => {
            let x = x.as_slice::<T>()?;
            let mut above = self.alloc(DType::U8, x.len().div_ceil(relu::PER_BYTE))?;
            let bits = above.as_mut_slice::<u8>()?.chunks_mut(PIECE / relu::PER_BYTE);
            let out = self.output::<T>(x.len(), |out| {
                for_each(out.chunks_mut(PIECE).zip(x.chunks(PIECE)).zip(bits), |((out, x), bits)| relu::relu(x, out, bits));
            })?;
            Ok((out, above))
        })
    }

    fn relu_grad(&self, dy: &Buffer, above: &Buffer) -> Result<Buffer> {
        for_float!(self, "relu", dy, T => {
            let (dy, bits) = (dy.as_slice::<T>()?, above.as_slice::<u8>()?.chunks(PIECE / relu::PER_BYTE));
            self.output::<T>(dy.len(), |dx| {
                let pieces = dx.chunks_mut(PIECE).zip(dy.chunks(PIECE)).zip(bits);
                for_each(pieces, |((dx, dy), bits)| relu::relu_backward(bits, dy, dx));
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
        for_widened!(self, "dropout", x, T => {
            let (mask, region) = (dropout::Mask::from(mask), dropout::Region::from(mask));
            self.elements::<T, 1>([x], 1, |first, [x], y| dropout::dropout(mask, region, first, x, y))
        })
    }
}

/// Writes the result of `convert` for each piece of x to the elements of `out` from `at` on.
fn each<T: Element, U: Element>(x: &Buffer, out: &mut Buffer, at: usize, convert: fn(&[T], &mut [U])) -> Result<()> {
    out.slice(at..at + x.count())?;
    let x = x.as_slice::<T>()?;
    let out = &mut out.as_mut_slice::<U>()?[at..at + x.len()];
    for_each(out.chunks_mut(PIECE).zip(x.chunks(PIECE)), |(out, x)| convert(x, out));
    Ok(())
}
