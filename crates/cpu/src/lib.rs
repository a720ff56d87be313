#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

mod arena;
mod attention;
mod channel_norm;
mod compression;
mod elementwise;
mod embedding;
mod grouped;
mod indexing;
pub mod kernels;
mod layout;
mod loss;
mod matmul;
mod norm;
mod optim;
mod permutation;
mod pointwise;
mod reduction;
mod routing;
mod whole;
mod windows;

/// Items that most kernels use.
mod prelude {
    pub(crate) use crate::kernels::Float;
    pub(crate) use crate::kernels::round::{Stored, read};
    pub(crate) use crate::{Cpu, PIECE, RowSums, for_float, for_widened, loaded};
    pub(crate) use crate::{row_piece, row_piece_of, rows_at_once, stored};
    pub(crate) use meshwork_core::pool::for_each;
    pub(crate) use meshwork_core::{Buffer, DType, Element};
    pub(crate) use meshwork_tensor::tape::{RowBlocks, Terms};
    pub(crate) use meshwork_tensor::{Device, Error, Result};
    pub(crate) use std::ops::Range;
}

use arena::Arena;
use kernels::Float;
use kernels::round::{Cut, Loaded, Stored, read};
use meshwork_core::pool::for_each;
use meshwork_core::{Buffer, DType, Element};
use meshwork_tensor::tape::RowBlocks;
use meshwork_tensor::{Device, Error, Kernels, Meter, Precision, Result, kernel};
use std::sync::Arc;

/// One rank's CPU device. Dead memory returns to its arena, so that after the first step no memory comes from the
/// system.
#[derive(Debug, Default)]
pub struct Cpu {
    arena: Arc<Arena>,
    meter: Arc<Meter>,
    precision: Precision,
    angles: attention::LastAngles,
}

impl Cpu {
    /// A device with an empty arena that computes products of `f32` tensors in this precision.
    pub fn new(precision: Precision) -> Self {
        Self { precision, ..Self::default() }
    }

    /// A device with an empty arena that computes in the precision of its tensors.
    pub fn device() -> Arc<dyn Device> {
        Arc::new(Self::default())
    }

    /// Number of blocks that the arena has allocated from the system.
    pub fn system_allocations(&self) -> u64 {
        self.arena.system_allocations()
    }
}

impl Device for Cpu {
    fn name(&self) -> &str {
        "cpu"
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer> {
        let memory = arena::memory(&self.arena, &self.meter, count * dtype.size(), false)?;
        Ok(Buffer::from_memory(Arc::new(memory), dtype, count)?)
    }

    fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer> {
        let memory = arena::memory(&self.arena, &self.meter, count * dtype.size(), true)?;
        Ok(Buffer::from_memory(Arc::new(memory), dtype, count)?)
    }

    fn upload(&self, host: &Buffer) -> Result<Buffer> {
        self.meter.add_upload(host.bytes());
        let mut copy = self.alloc(host.dtype(), host.count())?;
        copy.as_bytes_mut()?.copy_from_slice(host.as_bytes()?);
        Ok(copy)
    }

    fn upload_into(&self, host: &Buffer, dst: &mut Buffer, at: usize) -> Result<()> {
        self.meter.add_upload(host.bytes());
        kernel::Layout::copy_into(self, host, 0..host.count(), dst, at)
    }

    /// Returns the memory itself, shared, because it is host memory.
    fn download(&self, buffer: &Buffer) -> Result<Buffer> {
        self.meter.add_download(buffer.bytes());
        Ok(buffer.clone())
    }

    fn meter(&self) -> &Meter {
        &self.meter
    }

    fn precision(&self) -> Precision {
        self.precision
    }

    fn kernels(&self) -> Kernels<'_> {
        Kernels::all(self)
    }
}

/// Number of elements in a piece of shared work: enough for tens of microseconds, few enough for a core's cache.
const PIECE: usize = 1 << 15;

/// Elements of a piece of whole rows of `n`.
fn row_piece(n: usize) -> usize {
    row_piece_of(DType::F32, n)
}

/// Elements of a piece of whole rows of `n`, for a type: half as many in 16 bits, because f32 copies of all operands of
/// a piece must stay in the cache too.
fn row_piece_of(dtype: DType, n: usize) -> usize {
    let (piece, n) = (if dtype.is_half() { PIECE / 2 } else { PIECE }, n.max(1));
    (piece / n).max(1) * n
}

/// In a sum over rows, the number of rows of `n` elements that are widened at once, and then added.
fn rows_at_once(n: usize) -> usize {
    (PIECE / 4 / n.max(1)).max(1)
}

/// In a sum over rows, the rows of a part.
const PART: usize = RowBlocks::PART_ROWS;

/// The order of sums over rows, for the gradients of biases and gains: each block in [parts](RowBlocks::PART_ROWS) of
/// up to 64 rows, one row after another, from zero, and then the parts one after another. The order depends only on the
/// number of rows of a block, and different threads can sum the parts.
struct RowSums {
    /// Rows of each part.
    parts: Vec<usize>,
    /// Parts of each block.
    blocks: Vec<usize>,
}

impl RowSums {
    fn new(rows: usize, blocks: RowBlocks) -> Self {
        let mut sums = Self { parts: Vec::new(), blocks: Vec::new() };
        for rows in blocks.rows(rows) {
            sums.blocks.push(rows.div_ceil(PART));
            sums.parts.extend((0..rows).step_by(PART).map(|at| PART.min(rows - at)));
        }
        sums
    }

    /// The number of parts.
    fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Rows of `n` elements, cut into parts.
    fn cut<C: Cut>(&self, rows: C, n: usize) -> impl Iterator<Item = C> {
        self.parts.iter().scan(Some(rows), move |rest, part| {
            let (first, after) = rest.take()?.cut_at(part * n);
            *rest = Some(after);
            Some(first)
        })
    }

    /// The sums of all blocks from the sums of their parts, of `n` elements each.
    fn finish<T: Element + Float>(&self, cpu: &Cpu, mut parts: &[T], n: usize) -> Result<Buffer> {
        cpu.output::<T>(n * self.blocks.len(), |sums| {
            sums.fill(T::ZERO);
            for (count, sum) in self.blocks.iter().zip(sums.chunks_mut(n.max(1))) {
                kernels::pointwise::bias_backward(parts.split_off(..count * n).unwrap_or_default(), sum);
            }
        })
    }
}

impl Cpu {
    /// An output of `count` elements written by `fill`.
    fn output<T: Element>(&self, count: usize, fill: impl FnOnce(&mut [T])) -> Result<Buffer> {
        let mut fill = Some(fill);
        self.written(count, &mut |out| {
            if let Some(fill) = fill.take() {
                fill(out);
            }
        })
    }

    /// [`output`](Self::output), compiled once for an element type.
    fn written<T: Element>(&self, count: usize, fill: &mut dyn FnMut(&mut [T])) -> Result<Buffer> {
        let mut out = self.alloc(T::DTYPE, count)?;
        fill(out.as_mut_slice()?);
        Ok(out)
    }

    /// An output of `count` results in `T` written by `fill`, in the type `of` or its operand type.
    fn stored<T: Element>(
        &self,
        op: &'static str,
        (of, dtype): (DType, DType),
        count: usize,
        fill: impl FnOnce(Stored<'_, T>) -> Result<()>,
    ) -> Result<Buffer> {
        if dtype != of && dtype != self.operand_dtype(of) {
            return Err(self.unsupported(op, dtype));
        }
        let mut out = self.alloc(dtype, count)?;
        fill(stored(&mut out)?)?;
        Ok(out)
    }

    /// An output of `count` results in `T` written by `fill`, in the type of x.
    fn like<T: Element>(&self, x: &Buffer, count: usize, fill: impl FnOnce(Stored<'_, T>)) -> Result<Buffer> {
        let mut out = self.alloc(x.dtype(), count)?;
        fill(stored(&mut out)?);
        Ok(out)
    }

    /// A result of the type and number of the first input: `f(first, inputs, out)` computes it in `T` in pieces of
    /// whole rows of `n` elements, from element `first` on.
    fn elements<T: Element + Float, const N: usize>(
        &self,
        inputs: [&Buffer; N],
        n: usize,
        f: impl Fn(usize, [&[T]; N], &mut [T]) + Sync,
    ) -> Result<Buffer> {
        let (x, piece) = (inputs[0], row_piece_of(inputs[0].dtype(), n));
        let mut all = [Loaded::Full(&[][..]); N];
        for (all, input) in all.iter_mut().zip(inputs) {
            *all = loaded::<T>(input)?;
        }
        self.like::<T>(x, x.count(), |out| {
            for_each(out.chunks(piece).enumerate(), |(i, out)| {
                let range = i * piece..i * piece + out.len();
                let mut inputs = all;
                inputs.iter_mut().for_each(|input| *input = input.part(range.clone()));
                read(inputs, |inputs| out.write(|out| f(range.start, inputs, out)));
            });
        })
    }

    fn unsupported(&self, op: &'static str, dtype: DType) -> Error {
        Error::DType { op, device: self.name().to_owned(), dtype, valid: "f32 or f64" }
    }
}

/// The elements of a buffer, to be computed in `T`.
fn loaded<T: Element>(x: &Buffer) -> Result<Loaded<'_, T>> {
    Ok(match x.dtype() {
        DType::Bf16 => Loaded::Bf16(x.as_slice()?),
        DType::F16 => Loaded::F16(x.as_slice()?),
        _ => Loaded::Full(x.as_slice()?),
    })
}

/// The same, for writing.
fn stored<T: Element>(x: &mut Buffer) -> Result<Stored<'_, T>> {
    Ok(match x.dtype() {
        DType::Bf16 => Stored::Bf16(x.as_mut_slice()?),
        DType::F16 => Stored::F16(x.as_mut_slice()?),
        _ => Stored::Full(x.as_mut_slice()?),
    })
}

/// Runs `$body` with `$T` standing for the float type of `$buffer`.
macro_rules! for_float {
    ($cpu:expr, $op:literal, $buffer:expr, $T:ident => $body:expr) => {
        super::for_dtype!($cpu, $op, $buffer.dtype(), $T => $body)
    };
}
use for_float;

/// Runs `$body` with `$T` standing for the compute type of the floats in `$buffer`: f32 for 16 bits, which [`loaded`]
/// reads and [`stored`] writes.
macro_rules! for_widened {
    ($cpu:expr, $op:expr, $buffer:expr, $T:ident => $body:expr) => {
        super::for_dtype!($cpu, $op, $buffer.dtype().widened(), $T => $body)
    };
}
use for_widened;

/// The same with `$S` standing for the stored type of the elements, for kernels that are generic over it.
macro_rules! for_stored {
    ($cpu:expr, $op:literal, $buffer:expr, $S:ident, $T:ident => $body:expr) => {
        match $buffer.dtype() {
            meshwork_core::DType::Bf16 => {
                type $S = meshwork_core::bf16;
                type $T = f32;
                $body
            }
            meshwork_core::DType::F16 => {
                type $S = meshwork_core::f16;
                type $T = f32;
                $body
            }
            dtype => super::for_dtype!($cpu, $op, dtype, $S => {
                type $T = $S;
                $body
            }),
        }
    };
}
use for_stored;

/// Runs `$body` with `$T` standing for this float type.
macro_rules! for_dtype {
    ($cpu:expr, $op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            meshwork_core::DType::F32 => {
                type $T = f32;
                $body
            }
            meshwork_core::DType::F64 => {
                type $T = f64;
                $body
            }
            other => Err($cpu.unsupported($op, other)),
        }
    };
}
use for_dtype;
