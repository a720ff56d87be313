use super::kernels::matmul::{Epilogue, Factors, Update, gemm_blocks, gemm_runs, gemm_shared};
use super::kernels::pointwise;
use super::matmul::in_blocks;
use super::prelude::*;
use meshwork_tensor::device::Work;
use meshwork_tensor::kernel::{GroupBlocks, Grouped, GroupedGemm, GroupedGrad};

/// A product with fewer multiplications is computed by one thread, concurrently with others.
const SMALL: usize = 1 << 22;

/// Runs `product(group, first row, out)` for every group, with its destination from `outs`. Small products are
/// distributed over the threads; a large one is computed by all threads together, so that no thread waits for the
/// largest group.
fn each_group<Out: Send>(
    rows: &[usize],
    outs: impl IntoIterator<Item = Out>,
    work: impl Fn(usize) -> usize,
    product: impl Fn(usize, usize, Out) + Sync,
) {
    let (mut small, mut first) = (Vec::new(), 0);
    for ((group, &count), out) in rows.iter().enumerate().zip(outs) {
        if work(group) < SMALL {
            small.push((group, first, out))
        } else {
            product(group, first, out)
        }
        first += count;
    }
    for_each(small, |(group, first, out)| product(group, first, out));
}

/// Splits memory into one destination of `size(group)` elements for each of `groups` groups.
fn parts<T>(mut out: &mut [T], groups: usize, size: impl Fn(usize) -> usize) -> impl Iterator<Item = &mut [T]> {
    (0..groups).map(move |group| out.split_off_mut(..size(group)).unwrap_or_default())
}

/// The same for memory of any type.
fn stored_parts<'a, T>(
    mut out: Stored<'a, T>,
    sizes: impl Iterator<Item = usize>,
) -> impl Iterator<Item = Stored<'a, T>> {
    sizes.map(move |size| {
        let (first, rest) = std::mem::replace(&mut out, Stored::Full(&mut [])).split_at(size);
        out = rest;
        first
    })
}

impl Cpu {
    /// The product of every group's rows with its matrix, stored as `[n, k]`, or with its transpose.
    fn of_groups<T: Float + Element>(
        &self,
        spec: GroupedGemm<'_>,
        x: &Buffer,
        w: &Buffer,
        transposed: bool,
    ) -> Result<Buffer> {
        let GroupedGemm { rows, n, k, terms } = spec;
        let ([from, to], strides) = if transposed { ([k, n], (1, k)) } else { ([n, k], (k, 1)) };
        self.meter().add_flops(Work::Matmul, spec.flops());
        let dtype = GroupedGemm::result(x, w);
        let (x, w) = (self.operand_of::<T>(x, (from, 1))?, self.operand_of::<T>(w, strides)?);
        self.stored::<T>("grouped_linear", (T::DTYPE, dtype), rows.iter().sum::<usize>() * to, |y| {
            let outs = stored_parts(y, rows.iter().map(|rows| rows * to));
            each_group(
                rows,
                outs,
                |group| rows[group] * n * k,
                |group, first, y| {
                    // Matrices are `n · k` elements apart: `n` rows or columns.
                    let (x, w) = (x.part(first * from), w.part(group * n * k));
                    in_blocks([rows[group], to], false, y, |[rows, columns], y| {
                        let (precision, dims) = (self.precision, [rows.len(), columns.len(), from]);
                        let factors =
                            Factors { precision, dims, a: x.from(rows.start, 0), b: w.from(0, columns.start) };
                        match terms {
                            Terms::WHOLE => gemm_shared(factors, y, Update::Overwrite, Epilogue::Nothing),
                            _ => gemm_blocks(factors, y, terms),
                        }
                    });
                },
            );
            Ok(())
        })
    }
}

impl Grouped for Cpu {
    fn grouped_linear(&self, spec: GroupedGemm<'_>, x: &Buffer, w: &Buffer) -> Result<Buffer> {
        for_widened!(self, "grouped_linear", w, T => self.of_groups::<T>(spec, x, w, true))
    }

    fn grouped_linear_swiglu(
        &self,
        spec: GroupedGemm<'_>,
        x: &Buffer,
        w: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        let GroupedGemm { rows, n, k, terms } = spec;
        debug_assert!(terms == Terms::WHOLE, "an epilogue reads sums of one block");
        for_float!(self, "grouped_linear", w, T => {
            self.meter().add_flops(Work::Matmul, spec.flops());
            let total = rows.iter().sum::<usize>();
            let mut y = self.alloc(T::DTYPE, total * n)?;
            let (x, w) = (self.operand_of::<T>(x, (k, 1))?, self.operand_of::<T>(w, (1, k))?);
            let products = parts(y.as_mut_slice::<T>()?, rows.len(), |group| rows[group] * n);
            let activated = self.stored::<T>("grouped_linear", (T::DTYPE, stored), total * n / 2, |out| {
                let activated = stored_parts(out, rows.iter().map(|rows| rows * n / 2));
                each_group(rows, products.zip(activated), |group| rows[group] * n * k, |group, first, (y, out)| {
                    let (a, b, precision) = (x.part(first * k), w.part(group * n * k), self.precision);
                    let factors = Factors { precision, dims: [rows[group], n, k], a, b };
                    gemm_shared(factors, y, Update::Overwrite, Epilogue::Swiglu(out));
                });
                Ok(())
            })?;
            Ok((y, activated))
        })
    }

    fn grouped_input_grad(&self, spec: GroupedGemm<'_>, dy: &Buffer, w: &Buffer) -> Result<Buffer> {
        for_widened!(self, "grouped_linear", w, T => self.of_groups::<T>(spec, dy, w, false))
    }

    fn grouped_weight_grad(
        &self,
        spec: GroupedGemm<'_>,
        blocks: &GroupBlocks,
        dy: &Buffer,
        x: &Buffer,
        dw: GroupedGrad<'_>,
    ) -> Result<()> {
        let GroupedGemm { n, k, .. } = spec;
        for_float!(self, "grouped_linear", dw.buffer, T => {
            let GroupedGrad { buffer, start, accumulate } = dw;
            let rows: Vec<usize> = blocks.iter().map(|blocks| blocks.iter().map(ExactSizeIterator::len).sum()).collect();
            self.meter().add_flops(Work::Matmul, GroupedGemm { rows: &rows, ..spec }.flops());
            let (dy, x) = (self.operand_of::<T>(dy, (1, n))?, self.operand_of::<T>(x, (k, 1))?);
            let dw = &mut buffer.as_mut_slice::<T>()?[start..start + blocks.len() * n * k];
            let outs = parts(dw, rows.len(), |_| n * k);
            let factors = |first: usize, terms: usize| {
                let (a, b) = (dy.part(first * n), x.part(first * k));
                Factors { precision: self.precision, dims: [n, k, terms], a, b }
            };
            each_group(&rows, outs, |group| rows[group] * n * k, |group, _, dw| match &blocks[group][..] {
                [all] => {
                    let update = if accumulate { Update::Accumulate } else { Update::Overwrite };
                    gemm_shared(factors(all.start, all.len()), dw, update, Epilogue::Nothing);
                }
                blocks => {
                    debug_assert!(!accumulate, "only sums of one block go on");
                    gemm_runs(factors(0, blocks.iter().map(|block| block.end).max().unwrap_or(0)), dw, blocks);
                }
            });
            Ok(())
        })
    }

    fn grouped_bias(&self, rows: &[usize], x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        for_float!(self, "grouped_bias", x, T => {
            let (x, bias) = (x.as_slice::<T>()?, bias.as_slice::<T>()?);
            let n = bias.len() / rows.len().max(1);
            self.output::<T>(x.len(), |y| {
                let piece = row_piece(n);
                let mut parts = Vec::new();
                let (mut x, mut y) = (x, y);
                for (&rows, bias) in rows.iter().zip(bias.chunks(n.max(1))) {
                    let y = y.split_off_mut(..rows * n).unwrap_or_default();
                    let x = x.split_off(..rows * n).unwrap_or_default();
                    parts.extend(y.chunks_mut(piece).zip(x.chunks(piece)).map(|(y, x)| (y, x, bias)));
                }
                for_each(parts, |(y, x, bias)| pointwise::bias(x, bias, y));
            })
        })
    }

    fn grouped_bias_grad(&self, blocks: &GroupBlocks, n: usize, dy: &Buffer, db: GroupedGrad<'_>) -> Result<()> {
        for_float!(self, "grouped_bias", dy, T => {
            let GroupedGrad { buffer, start, accumulate } = db;
            let dy = dy.as_slice::<T>()?;
            let db = &mut buffer.as_mut_slice::<T>()?[start..start + blocks.len() * n];
            for_each(db.chunks_mut(n.max(1)).zip(blocks), |(db, blocks)| {
                let mut sums = vec![T::ZERO; blocks.len() * n];
                for (rows, sum) in blocks.iter().zip(sums.chunks_mut(n.max(1))) {
                    pointwise::bias_backward(&dy[rows.start * n..rows.end * n], sum);
                }
                pointwise::tree_sum(&mut sums, n, pointwise::add_assign);
                if !accumulate {
                    db.fill(T::ZERO);
                }
                if !blocks.is_empty() {
                    pointwise::add_assign(db, &sums[..n]);
                }
            });
            Ok(())
        })
    }
}
