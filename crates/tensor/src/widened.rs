//! Tensors in 16 bits on a device whose kernels compute in f32 (Micikevicius et al., "Mixed Precision Training", ICLR
//! 2018).
//!
//! Tensors have 16 bits an element in memory and between ranks. Every operation computes in f32: it widens its operands
//! and rounds its result once. The kernels that take most of a step widen and round inside the kernel, on every device
//! ([`crate::kernel`]); for the others, this module copies the operands to f32. Products take operands in 16 bits as
//! they are where the inner device has [such operands](Device::operand_dtype). The operands determine the type of the
//! result:
//!
//! | result | type |
//! |---|---|
//! | a value | the type of the operand that it replaces: x, or the weights of a product |
//! | statistics of rows (mean, rstd, log-sum-exp), sums over rows (gradients of biases and gains) | f32 |
//! | losses of samples | f64 |
//! | an output written into given memory | the type of the memory |
//!
//! Operands of f32 and f64 pass through, with the bits of the inner device.

use crate::device::{Device, Download, Kernels, Meter, Upload};
use crate::error::Result;
use crate::kernel::{Gemm, GroupedGrad, Matmul, Outcome, Precision, TableGrad};
use crate::launches::Launches;
use crate::pinned::Pinned;
use meshwork_core::{Buffer, DType, pass_on};
use std::ops::Range;
use std::sync::Arc;

/// Wraps an inner device and computes tensors of 16 bits in f32: operands are widened, results are rounded once. f32
/// and f64 pass through.
///
/// A result has the dtype of the operand that it replaces; statistics and sums over rows are f32, losses f64.
///
/// ```
/// use meshwork_core::bf16;
/// use meshwork_cpu::Cpu;
/// use meshwork_tensor::{Tensor, Widened};
///
/// let device = Widened::device(Cpu::device());
/// let x = Tensor::from_slice(&device, &[bf16::from_f32(1.0), bf16::from_f32(0.01)], [2])?;
/// let sum = x.clone().accumulate(&x)?; // added in f32, and rounded
/// assert_eq!(sum.to_vec::<bf16>()?[0].to_f32(), 2.0);
/// # Ok::<(), meshwork_tensor::Error>(())
/// ```
#[derive(Debug)]
pub struct Widened {
    pub(crate) inner: Arc<dyn Device>,
}

impl Widened {
    /// Wraps `inner` so that it also takes tensors of 16 bits.
    pub fn device(inner: Arc<dyn Device>) -> Arc<dyn Device> {
        Arc::new(Self { inner })
    }

    /// An operand in f32.
    pub(crate) fn wide(&self, x: &Buffer) -> Result<Buffer> {
        if x.dtype().is_half() { self.inner.pointwise()?.cast(x, DType::F32) } else { Ok(x.clone()) }
    }

    /// Operands in f32.
    pub(crate) fn all_wide<const N: usize>(&self, operands: [&Buffer; N]) -> Result<[Buffer; N]> {
        let mut wide = operands.map(Buffer::clone);
        for (x, operand) in wide.iter_mut().zip(operands) {
            *x = self.wide(operand)?;
        }
        Ok(wide)
    }

    /// An operand that the inner device casts to `to`: between two types of 16 bits, it casts from f32.
    pub(crate) fn castable(&self, x: &Buffer, to: DType) -> Result<Buffer> {
        if to.is_half() { self.wide(x) } else { Ok(x.clone()) }
    }

    /// Runs `work` on vectors in f32. If any has 16 bits, `work` gets one vector at a time, so that only one copy in
    /// f32 exists at once.
    pub(crate) fn wide_in_turn(&self, vectors: &[Buffer], mut work: impl FnMut(&[Buffer]) -> Result<()>) -> Result<()> {
        match vectors.iter().any(|vector| vector.dtype().is_half()) {
            true => vectors.iter().try_for_each(|vector| work(&[self.wide(vector)?])),
            false => work(vectors),
        }
    }

    /// Operands for kernels that read and write tensors of 16 bits directly: unchanged if all have one type, else
    /// converted to f32.
    pub(crate) fn alike<const N: usize>(&self, operands: [&Buffer; N]) -> Result<[Buffer; N]> {
        if are_alike(&operands) { Ok(operands.map(Buffer::clone)) } else { self.all_wide(operands) }
    }

    /// The same, with an operand to which the result is added.
    pub(crate) fn alike_with<const N: usize>(
        &self,
        operands: [&Buffer; N],
        sum: Option<Buffer>,
    ) -> Result<([Buffer; N], Option<Buffer>)> {
        let Some(sum) = sum else { return Ok((self.alike(operands)?, None)) };
        if are_alike(&[&operands[..], &[&sum]].concat()) {
            return Ok((operands.map(Buffer::clone), Some(sum)));
        }
        Ok((self.all_wide(operands)?, Some(self.wide(&sum)?)))
    }

    /// An operand of a product.
    pub(crate) fn factor(&self, x: &Buffer) -> Result<Buffer> {
        if self.is_factor(x.dtype()) { Ok(x.clone()) } else { self.wide(x) }
    }

    /// Whether products of the inner device take operands of this type.
    fn is_factor(&self, dtype: DType) -> bool {
        self.inner.operand_dtype(DType::F32) == dtype
    }

    /// The type in which the inner device stores a result that becomes `dtype`, for an operand of type `of`.
    pub(crate) fn stored(&self, of: DType, dtype: DType) -> DType {
        if dtype.is_half() && dtype != of && !self.is_factor(dtype) { DType::F32 } else { dtype }
    }

    /// Rounds a result of the inner device to `to`, if `to` has 16 bits.
    pub(crate) fn rounded<T: Outcome>(&self, result: T, to: DType) -> Result<T> {
        result.map(&mut |y, is_value| match is_value && to.is_half() && y.dtype() == DType::F32 {
            true => self.inner.pointwise()?.cast(&y, to),
            false => Ok(y),
        })
    }

    /// Writes elements of `x`: `write` gets the memory and the index of the first element. `read`: the memory must hold
    /// the old values.
    pub(crate) fn write<T>(
        &self,
        x: &mut Buffer,
        range: Range<usize>,
        read: bool,
        write: impl FnOnce(&mut Buffer, usize) -> Result<T>,
    ) -> Result<T> {
        if !x.dtype().is_half() {
            return write(x, range.start);
        }
        let mut wide = match read {
            true => self.wide(&x.slice(range.clone())?)?,
            false => self.inner.alloc(DType::F32, range.len())?,
        };
        let result = write(&mut wide, 0)?;
        self.inner.pointwise()?.cast_into(&wide, x, range.start)?;
        Ok(result)
    }

    /// `x · wᵀ`, rounded.
    pub(crate) fn product(&self, [m, n, k]: [usize; 3], x: &Buffer, w: &Buffer) -> Result<Buffer> {
        let mut product = self.inner.alloc(w.dtype(), m * n)?;
        self.gemm(Gemm::linear(m, n, k), x, w, &mut product, 0)?;
        Ok(product)
    }

    /// Writes the gradient of a table.
    pub(crate) fn write_table(&self, to: TableGrad<'_>, write: impl FnOnce(TableGrad<'_>) -> Result<()>) -> Result<()> {
        let TableGrad { buffer, start, rows, width, accumulate, blocks } = to;
        self.write(buffer, start..start + rows * width, accumulate, |buffer, start| {
            write(TableGrad { buffer, start, rows, width, accumulate, blocks })
        })
    }

    /// Writes `count` elements of the gradients of groups.
    pub(crate) fn write_groups(
        &self,
        grad: GroupedGrad<'_>,
        count: usize,
        write: impl FnOnce(GroupedGrad<'_>) -> Result<()>,
    ) -> Result<()> {
        let GroupedGrad { buffer, start, accumulate } = grad;
        self.write(buffer, start..start + count, accumulate, |buffer, start| {
            write(GroupedGrad { buffer, start, accumulate })
        })
    }
}

/// Whether all operands have the same type.
pub(crate) fn are_alike(operands: &[&Buffer]) -> bool {
    operands.windows(2).all(|two| two[0].dtype() == two[1].dtype())
}

impl Device for Widened {
    pass_on! {
        self.inner =>
        fn name(&self) -> &str;
        fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer>;
        fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer>;
        fn upload(&self, host: &Buffer) -> Result<Buffer>;
        fn upload_into(&self, host: &Buffer, dst: &mut Buffer, at: usize) -> Result<()>;
        fn download(&self, buffer: &Buffer) -> Result<Buffer>;
        fn download_later(&self, buffer: &Buffer) -> Result<Download>;
        fn upload_later(&self, into: Buffer) -> Result<Upload>;
        fn has_values(&self) -> bool;
        fn takes_all(&self) -> bool;
        fn synchronize(&self) -> Result<()>;
        fn pinned(&self) -> Option<&dyn Pinned>;
        fn meter(&self) -> &Meter;
        fn launches(&self) -> Option<Launches>;
        fn precision(&self) -> Precision;
    }

    // Values stored in f32 here need f32, and operands of 16 bits keep their type.
    fn operand_dtype(&self, dtype: DType) -> DType {
        dtype
    }

    fn kernels(&self) -> Kernels<'_> {
        self.inner.kernels().through(self)
    }
}
