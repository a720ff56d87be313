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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cpu;
    use meshwork_core::tree;
    use meshwork_tensor::Precision;
    use meshwork_tensor::kernel::{Gemm, Matmul};
    use meshwork_tensor::random::{key, normal};
    use std::ops::Range;

    fn values(name: &str, count: usize) -> Buffer {
        Buffer::from_vec((0..count as u64).map(|i| normal(key(1, name), i)).collect::<Vec<f32>>())
    }

    fn part(x: &Buffer, range: Range<usize>) -> Buffer {
        Buffer::from_vec(x.as_slice::<f32>().unwrap()[range].to_vec())
    }

    fn one(cpu: &Cpu, spec: Gemm, a: &Buffer, b: &Buffer) -> Vec<f32> {
        let mut c = cpu.alloc(meshwork_core::DType::F32, spec.m * spec.n).unwrap();
        cpu.gemm(spec, a, b, &mut c, 0).unwrap();
        c.as_slice::<f32>().unwrap().to_vec()
    }

    /// Uneven groups, one of them empty and one large enough to be shared: the bits of a product for each group.
    #[test]
    fn groups_have_the_bits_of_products_of_their_own() {
        let cpu = Cpu::default();
        for (n, k, scale) in [(5, 3, 1), (96, 80, 40)] {
            let rows = [3 * scale, 0, 17 * scale, 1];
            let total: usize = rows.iter().sum();
            let (x, w, dy) = (values("x", total * k), values("w", rows.len() * n * k), values("dy", total * n));
            for blocks in [1, 4] {
                let spec = GroupedGemm { rows: &rows, n, k, terms: Terms { segments: 1, blocks } };
                let y = cpu.grouped_linear(spec, &x, &w).unwrap();
                let dx = cpu.grouped_input_grad(spec, &dy, &w).unwrap();
                let mut first = 0;
                for (g, &m) in rows.iter().enumerate() {
                    let w = part(&w, g * n * k..(g + 1) * n * k);
                    let mine = part(&x, first * k..(first + m) * k);
                    let want = one(&cpu, Gemm::linear(m, n, k).over(spec.terms), &mine, &w);
                    assert_eq!(y.as_slice::<f32>().unwrap()[first * n..(first + m) * n], want, "group {g}");
                    let mine = part(&dy, first * n..(first + m) * n);
                    let want = one(&cpu, Gemm::linear_input_grad(m, n, k).over(spec.terms), &mine, &w);
                    assert_eq!(dx.as_slice::<f32>().unwrap()[first * k..(first + m) * k], want, "group {g}");
                    first += m;
                }
            }
        }
    }

    /// A fused activation is bitwise identical to one after the product, in each type in which it may be stored.
    #[test]
    fn the_swiglu_of_groups_has_the_bits_of_both_operations() {
        use meshwork_tensor::kernel::Pointwise;
        for (precision, n, k, scale) in [
            (Precision::F32, 6, 3, 1),
            (Precision::F32, 96, 80, 40),
            (Precision::Bf16, 6, 4, 1),
            (Precision::Bf16, 96, 80, 40),
        ] {
            let cpu = Cpu::new(precision);
            let rows = [3 * scale, 0, 17 * scale, 1];
            let total: usize = rows.iter().sum();
            let (x, w) = (values("x", total * k), values("w", rows.len() * n * k));
            let spec = GroupedGemm { rows: &rows, n, k, terms: Terms::WHOLE };
            let product = cpu.grouped_linear(spec, &x, &w).unwrap();
            for stored in [DType::F32, cpu.operand_dtype(DType::F32)] {
                let (y, activated) = cpu.grouped_linear_swiglu(spec, &x, &w, stored).unwrap();
                let want = cpu.swiglu(&product, stored).unwrap();
                assert_eq!(y.as_slice::<f32>().unwrap(), product.as_slice::<f32>().unwrap());
                match stored {
                    DType::F32 => assert_eq!(activated.as_slice::<f32>().unwrap(), want.as_slice::<f32>().unwrap()),
                    _ => {
                        assert_eq!(activated.as_slice::<half::bf16>().unwrap(), want.as_slice::<half::bf16>().unwrap())
                    }
                }
            }
        }
    }

    /// Blocks of any length, some without rows, whose sums are added in the tree.
    #[test]
    fn gradients_sum_blocks_in_the_tree() {
        let cpu = Cpu::default();
        for (n, k, scale) in [(6, 4, 1), (64, 48, 300)] {
            let blocks: [Vec<Range<usize>>; 3] = [
                vec![0..2 * scale, 2 * scale..2 * scale, 2 * scale..7 * scale],
                vec![7 * scale..7 * scale, 7 * scale..7 * scale, 7 * scale..7 * scale],
                vec![7 * scale..8 * scale, 8 * scale..9 * scale, 9 * scale..11 * scale],
            ];
            let total = 11 * scale;
            let (x, dy) = (values("x", total * k), values("dy", total * n));
            let spec = GroupedGemm { rows: &[], n, k, terms: Terms::WHOLE };
            let run = |blocks: &GroupBlocks, accumulate: bool, old: f32| {
                let (mut dw, mut db) =
                    (Buffer::from_vec(vec![old; 1 + 3 * n * k]), Buffer::from_vec(vec![old; 1 + 3 * n]));
                let slot = |buffer| GroupedGrad { buffer, start: 1, accumulate };
                cpu.grouped_weight_grad(spec, blocks, &dy, &x, slot(&mut dw)).unwrap();
                cpu.grouped_bias_grad(blocks, n, &dy, slot(&mut db)).unwrap();
                [dw, db].map(|buffer| buffer.as_slice::<f32>().unwrap()[1..].to_vec())
            };
            let [dw, db] = run(&blocks, false, 9.0);
            for (g, blocks) in blocks.iter().enumerate() {
                let of_block = |rows: &Range<usize>| {
                    let (dy, x) = (part(&dy, rows.start * n..rows.end * n), part(&x, rows.start * k..rows.end * k));
                    one(&cpu, Gemm::linear_weight_grad(rows.len(), n, k), &dy, &x)
                };
                let products: Vec<Vec<f32>> = blocks.iter().map(of_block).collect();
                for i in 0..n * k {
                    let terms: Vec<f32> = products.iter().map(|product| product[i]).collect();
                    assert_eq!(Some(dw[g * n * k + i]), tree::sum(&terms, |a, b| a + b), "group {g}, element {i}");
                }
                for j in 0..n {
                    let dy = dy.as_slice::<f32>().unwrap();
                    let sum = |rows: &Range<usize>| rows.clone().fold(0.0, |sum, row| sum + dy[row * n + j]);
                    let terms: Vec<f32> = blocks.iter().map(sum).collect();
                    assert_eq!(Some(db[g * n + j]), tree::sum(&terms, |a, b| a + b), "group {g}, bias {j}");
                }
            }
            // One block each, added to the old contents.
            let whole = [[0, 7], [7, 7], [7, 11]].map(|[from, to]| {
                let all = from * scale..to * scale;
                vec![all]
            });
            let [fresh, added] = [run(&whole, false, 9.0), run(&whole, true, 1.0)];
            for (fresh, added) in fresh.iter().flatten().zip(added.iter().flatten()) {
                assert!((fresh + 1.0 - added).abs() <= 1e-4 * fresh.abs().max(1.0));
            }
            assert!(fresh[0][n * k..2 * n * k].iter().all(|&dw| dw == 0.0), "a group without rows");
        }
    }

    /// The device rounds operands.
    #[test]
    fn stored_operands_give_the_same_bits() {
        let cpu = Cpu::new(Precision::Bf16);
        let (rows, n, k) = ([2, 3], 4, 6);
        let (x, w) = (values("x", 5 * k), values("w", 2 * n * k));
        let stored: Vec<half::bf16> = {
            let mut to = vec![half::bf16::ZERO; 5 * k];
            crate::kernels::round::round(x.as_slice().unwrap(), &mut to);
            to
        };
        let spec = GroupedGemm { rows: &rows, n, k, terms: Terms::WHOLE };
        let got = cpu.grouped_linear(spec, &Buffer::from_vec(stored), &w).unwrap();
        assert_eq!(
            got.as_slice::<f32>().unwrap(),
            cpu.grouped_linear(spec, &x, &w).unwrap().as_slice::<f32>().unwrap()
        );
    }

    /// Operands of 16 bits are read directly, and each result is rounded once: for small groups and for a group that
    /// threads share in blocks, for whole sums and for cut ones.
    #[test]
    fn results_have_the_16_bits_of_both_operands() {
        use meshwork_tensor::kernel::Pointwise;
        let cpu = Cpu::new(Precision::Bf16);
        for (n, k, scale) in [(6, 4, 1), (800, 24, 150)] {
            let rows = [3 * scale, 0, 17 * scale, 1];
            let total: usize = rows.iter().sum();
            let [x, dy] = [values("x", total * k), values("dy", total * n)].map(|x| cpu.cast(&x, DType::Bf16).unwrap());
            let w = cpu.cast(&values("w", rows.len() * n * k), DType::Bf16).unwrap();
            let wide = cpu.cast(&w, DType::F32).unwrap();
            for blocks in [1, 4] {
                let spec = GroupedGemm { rows: &rows, n, k, terms: Terms { segments: 1, blocks } };
                for (got, want) in [
                    (cpu.grouped_linear(spec, &x, &w), cpu.grouped_linear(spec, &x, &wide)),
                    (cpu.grouped_input_grad(spec, &dy, &w), cpu.grouped_input_grad(spec, &dy, &wide)),
                ] {
                    let (got, want) = (got.unwrap(), want.unwrap());
                    assert_eq!([got.dtype(), want.dtype()], [DType::Bf16, DType::F32]);
                    let want = cpu.cast(&want, DType::Bf16).unwrap();
                    assert!(got.as_bytes().unwrap() == want.as_bytes().unwrap(), "{n} {k} {blocks}");
                }
            }
        }
    }
}
