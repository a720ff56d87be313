use super::prelude::*;
use crate::driver::{Operand, Product};
use meshwork_kernels::GROUPED_ROWS;
use meshwork_tensor::kernel::{GroupBlocks, Grouped, GroupedGemm, GroupedGrad};

const OP: &str = "grouped_linear";

/// The first row of each group, then the number of rows.
fn starts(rows: &[usize]) -> Vec<i64> {
    let ends = rows.iter().scan(0, |end, &rows| {
        *end += rows as i64;
        Some(*end)
    });
    [0].into_iter().chain(ends).collect()
}

impl CudaDevice {
    /// The bounds of the blocks of all groups, and the first bound of each group, then their number.
    fn bounds(&self, blocks: &GroupBlocks) -> Result<[Buffer; 2]> {
        let (mut first, mut bounds) = (vec![0], Vec::new());
        for blocks in blocks {
            bounds.extend(blocks.iter().map(|block| block.start as i64));
            bounds.push(blocks.last().map_or(0, |block| block.end as i64));
            first.push(bounds.len() as i64);
        }
        Ok([self.kept(first)?, self.kept(bounds)?])
    }

    /// Whether a tensor-core kernel can compute a product of groups at the `[items, width]` of its geometry: it reads
    /// and writes several neighbours at a time, and its tiles need shared memory that not every card has. The library
    /// computes the other products, and those for which the device's table says that the kernel is slower.
    fn groups_on_tensor_cores(
        &self,
        kernel: &str,
        sizes: [usize; 2],
        features: [usize; 2],
        operands: [Address; 2],
        result: Address,
    ) -> bool {
        let (sizes, most) = (sizes.map(|size| size as u64), self.pool.driver.properties().shared);
        self.precision == Precision::Bf16
            && self.form(kernel, sizes).is_some_and(|form| form.geometry.shared() <= most)
            && features.iter().all(|features| features.is_multiple_of(8))
            && operands.iter().all(|operand| operand.0.is_multiple_of(16))
            && result.0.is_multiple_of(8)
            && !self.tuning.is_of_library(kernel, sizes)
    }

    /// Library products, one for each non-empty group of rows; `product` gets a group's index and its first row.
    fn each_group(&self, rows: &[usize], product: impl Fn(usize, usize) -> Product) -> Result<()> {
        let mut first = 0;
        for (group, &rows) in rows.iter().enumerate() {
            if rows > 0 {
                let queued = self.pool.driver.product(self.pool.compute, product(group, first));
                queued.map_err(self.failed(OP))?;
            }
            first += rows;
        }
        Ok(())
    }

    /// An operand of a group's library product, from this element on.
    fn part(&self, at: Address, first: usize, transposed: bool) -> Operand {
        let size = self.precision.operand_dtype(DType::F32).size();
        Operand { at: at.offset(first * size), transposed }
    }

    /// The product of every group's rows with its matrix, stored as `[n, k]`, or with its transpose.
    fn of_groups(&self, spec: GroupedGemm<'_>, x: &Buffer, w: &Buffer, transposed: bool) -> Result<Buffer> {
        let GroupedGemm { rows, n, k, terms } = spec;
        self.meter().add_flops(Work::Matmul, spec.flops());
        let [from, to] = if transposed { [k, n] } else { [n, k] };
        let (dtype, count) = (GroupedGemm::result(x, w), rows.iter().sum::<usize>() * to);
        if count == 0 {
            return self.alloc(dtype, 0);
        }
        let fast = self.products == Products::OfTheLibrary && terms == Terms::WHOLE;
        let y = self.room(if fast { dtype } else { DType::F32 }, dtype, count)?;
        // Kept alive until the products are queued.
        let operands = [self.operand(OP, x, self.precision, fast)?, self.operand(OP, w, self.precision, fast)?];
        let [x, w, out] = [self.place(OP, &operands[0])?, self.place(OP, &operands[1])?, self.place(OP, &y)?];
        if fast {
            let rounded = dtype == DType::Bf16;
            let kernels = match transposed {
                true => ["grouped_tensor_forward", "grouped_tensor_forward_bf16"],
                false => ["grouped_tensor_backward_x", "grouped_tensor_backward_x_bf16"],
            };
            let kernel = kernels[usize::from(rounded)];
            let sizes = [rows.iter().map(|rows| rows.div_ceil(GROUPED_ROWS as usize)).sum(), to];
            if self.groups_on_tensor_cores(kernel, sizes, [n, k], [x, w], out) {
                let starts = self.kept(starts(rows))?;
                launch!(self, OP, kernel, sizes; x, w, &starts, rows.len(), out, n, k)?;
                return Ok(y);
            }
            let of = |at, first, transposed| self.part(at, first, transposed);
            self.each_group(rows, |group, first| Product {
                mnk: [rows[group], to, from],
                operands: [of(x, first * from, false), of(w, group * n * k, transposed)],
                precision: self.precision,
                c: out.offset(dtype.size() * first * to),
                rounded,
                accumulate: false,
                bias: None,
            })?;
            return Ok(y);
        }
        let (starts, strides) = (self.kept(starts(rows))?, if transposed { [1, k] } else { [k, 1] });
        let kernel = self.of_precision(self.precision, ["grouped_product_f32", "grouped_product_bf16"]);
        launch!(self, OP, kernel, [count, 0];
            x, w, strides, &starts, rows.len(), out, from, terms.segments, terms.blocks, count, to
        )?;
        self.settled(y, dtype)
    }
}

impl Grouped for CudaDevice {
    fn grouped_linear(&self, spec: GroupedGemm<'_>, x: &Buffer, w: &Buffer) -> Result<Buffer> {
        self.of_groups(spec, x, w, true)
    }

    fn grouped_linear_swiglu(
        &self,
        spec: GroupedGemm<'_>,
        x: &Buffer,
        w: &Buffer,
        stored: DType,
    ) -> Result<(Buffer, Buffer)> {
        let y = self.of_groups(spec, x, w, true)?;
        let activated = self.swiglu_of(&y, stored)?;
        Ok((y, activated))
    }

    fn grouped_input_grad(&self, spec: GroupedGemm<'_>, dy: &Buffer, w: &Buffer) -> Result<Buffer> {
        self.of_groups(spec, dy, w, false)
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
        let GroupedGrad { buffer, start, accumulate } = dw;
        self.f32s(OP, &[buffer])?;
        let rows: Vec<usize> = blocks.iter().map(|blocks| blocks.iter().map(ExactSizeIterator::len).sum()).collect();
        self.meter().add_flops(Work::Matmul, GroupedGemm { rows: &rows, ..spec }.flops());
        let count = blocks.len() * n * k;
        buffer.slice(start..start + count)?;
        let whole = blocks.iter().all(|blocks| blocks.len() == 1);
        let of_library = self.products == Products::OfTheLibrary && whole;
        // Kept alive until the products are queued.
        let operand = |x| self.operand(OP, x, self.precision, of_library);
        let operands = [operand(dy)?, operand(x)?];
        let (dy, x) = (self.place(OP, &operands[0])?, self.place(OP, &operands[1])?);
        let to = self.place_mut(OP, buffer)?.offset(4 * start);
        let kernel = "grouped_tensor_backward_w";
        let sizes = [blocks.len() * n.div_ceil(GROUPED_ROWS as usize), k];
        let on_tensor_cores = of_library && self.groups_on_tensor_cores(kernel, sizes, [n, k], [dy, x], to);
        if of_library && !on_tensor_cores {
            if !accumulate {
                let empty = rows.iter().enumerate().filter(|(_, rows)| **rows == 0);
                for at in empty.map(|(group, _)| start + group * n * k) {
                    meshwork_tensor::kernel::Optim::zero(self, buffer, at..at + n * k)?;
                }
            }
            let of = |at, first, transposed| self.part(at, first, transposed);
            return self.each_group(&rows, |group, _| {
                let first = blocks[group][0].start;
                Product {
                    mnk: [n, k, rows[group]],
                    operands: [of(dy, first * n, true), of(x, first * k, false)],
                    precision: self.precision,
                    c: to.offset(4 * group * n * k),
                    rounded: false,
                    accumulate,
                    bias: None,
                }
            });
        }
        let [first, bounds] = self.bounds(blocks)?;
        if on_tensor_cores {
            return launch!(self, OP, kernel, sizes; dy, x, &first, &bounds, to, accumulate, n, k);
        }
        let kernels = ["grouped_product_backward_f32", "grouped_product_backward_bf16"];
        let kernel = self.of_precision(self.precision, kernels);
        launch!(self, OP, kernel, [count, 0]; dy, x, &first, &bounds, to, accumulate, n, k, count)
    }

    fn grouped_bias(&self, rows: &[usize], x: &Buffer, bias: &Buffer) -> Result<Buffer> {
        const OP: &str = "grouped_bias";
        let (n, y) = (bias.count() / rows.len().max(1), self.alloc(DType::F32, x.count())?);
        let starts = self.kept(starts(rows))?;
        launch!(self, OP, "grouped_bias", [x.count(), 0]; x, bias, &starts, rows.len(), &y, x.count(), n)?;
        Ok(y)
    }

    fn grouped_bias_grad(&self, blocks: &GroupBlocks, n: usize, dy: &Buffer, db: GroupedGrad<'_>) -> Result<()> {
        const OP: &str = "grouped_bias";
        let GroupedGrad { buffer, start, accumulate } = db;
        self.f32s(OP, &[buffer])?;
        buffer.slice(start..start + blocks.len() * n)?;
        let ([first, bounds], to) = (self.bounds(blocks)?, self.place_mut(OP, buffer)?.offset(4 * start));
        launch!(self, OP, "grouped_bias_backward", [blocks.len(), n]; dy, &first, &bounds, to, accumulate, n)
    }
}
