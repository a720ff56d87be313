//! The meta device: shapes only. A step run on it with recording communicators shows the computation, memory and
//! communication of any rank of any mesh, without data and without the other ranks. Values do not exist; downloads give
//! zeros.
//!
//! Each operation allocates the buffers that its CPU sibling does, so that peak memory agrees: the
//! [table of kernels](crate::kernel) says which.

use crate::device::{Device, Kernels, Meter};
use crate::error::Result;
use crate::kernel::{self, Pick, Precision, Routing, Selected, Selection};
use crate::memory::Category;
use crate::tape::RowBlocks;
use meshwork_core::{Buffer, DType, Memory};
use std::sync::Arc;

/// A device that tracks shapes and memory, without values.
#[derive(Debug, Default)]
pub struct Meta {
    meter: Arc<Meter>,
    precision: Precision,
    /// Whether uploaded tensors keep their values.
    keeps_uploads: bool,
    takes_all: bool,
}

impl Meta {
    /// A meta device on which tensors uploaded from the host keep their values, in host memory; all other tensors have
    /// none.
    pub fn keeping_uploads() -> Arc<dyn Device> {
        Arc::new(Self { keeps_uploads: true, ..Self::default() })
    }

    /// A meta device that stands for a device with products of `f32` tensors in this precision.
    pub fn new(precision: Precision) -> Self {
        Self { precision, ..Self::default() }
    }

    /// The same, on a rank that [takes all](Device::takes_all).
    #[must_use]
    pub fn taking_all(self) -> Self {
        Self { takes_all: true, ..self }
    }

    /// A meta device that stands for a device that computes in the precision of its tensors.
    pub fn device() -> Arc<dyn Device> {
        Arc::new(Self::default())
    }
}

/// Memory that has a size and no bytes.
#[derive(Debug)]
struct Phantom {
    bytes: usize,
    category: Category,
    meter: Arc<Meter>,
}

impl Memory for Phantom {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Phantom {
    fn drop(&mut self) {
        self.meter.shrink(self.bytes, self.category);
    }
}

impl Device for Meta {
    fn name(&self) -> &str {
        "meta"
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer> {
        let bytes = count * dtype.size();
        let category = self.meter.grow(bytes)?;
        let memory = Phantom { bytes, category, meter: Arc::clone(&self.meter) };
        Ok(Buffer::from_memory(Arc::new(memory), dtype, count)?)
    }

    fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer> {
        self.alloc(dtype, count)
    }

    fn upload(&self, host: &Buffer) -> Result<Buffer> {
        self.meter.add_upload(host.bytes());
        if self.keeps_uploads {
            return Ok(host.clone());
        }
        self.alloc(host.dtype(), host.count())
    }

    fn upload_into(&self, host: &Buffer, dst: &mut Buffer, at: usize) -> Result<()> {
        self.meter.add_upload(host.bytes());
        kernel::check_copy(host, &(0..host.count()), dst, at)
    }

    fn download(&self, buffer: &Buffer) -> Result<Buffer> {
        self.meter.add_download(buffer.bytes());
        Ok(Buffer::zeros(buffer.dtype(), buffer.count()))
    }

    fn has_values(&self) -> bool {
        false
    }

    fn takes_all(&self) -> bool {
        self.takes_all
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

/// A type of elements, or a buffer that has it.
pub(crate) trait Typed {
    fn typed(&self) -> DType;
}

impl Typed for DType {
    fn typed(&self) -> DType {
        *self
    }
}

impl Typed for Buffer {
    fn typed(&self) -> DType {
        self.dtype()
    }
}

/// Results that the table of kernels does not state.
impl Meta {
    /// The gradient of x of a norm over rows of `n`, in the memory of `sum` if there is one, and the gradients of
    /// the norm's parameters.
    pub(crate) fn norm_grad<const PARAMS: usize>(
        &self,
        x: &Buffer,
        n: usize,
        blocks: RowBlocks,
        sum: Option<Buffer>,
    ) -> Result<(Buffer, [Buffer; PARAMS])> {
        let sums = x.dtype().widened();
        let _parts = self.alloc(sums, PARAMS * n * blocks.parts(x.count() / n))?;
        let dx = sum.map_or_else(|| self.alloc(x.dtype(), x.count()), Ok)?;
        let mut params = std::array::from_fn(|_| Buffer::empty());
        for param in &mut params {
            *param = self.alloc(sums, n * blocks.count())?;
        }
        Ok((dx, params))
    }

    /// The worst case: the largest packed form that is still smaller than `x`.
    pub(crate) fn packed_nonzeros(&self, x: &Buffer) -> Result<Option<[Buffer; 2]>> {
        let bits = x.count().div_ceil(u8::BITS as usize);
        let values = (x.bytes() - bits.min(x.bytes())).div_ceil(x.dtype().size());
        Ok(Some([self.alloc(DType::U8, bits)?, self.alloc(x.dtype(), values)?]))
    }

    /// The choices of tokens: ranked and chosen ones are the same buffer if no choice is rerouted.
    pub(crate) fn selected(&self, scores: &Buffer, selection: &Selection, pick: Pick) -> Result<Selected> {
        let tokens = scores.count() / selection.experts;
        let choices = || self.alloc(DType::I32, tokens * selection.k);
        let ranked = self.alloc(DType::I32, tokens * selection.ranked())?;
        let (kept, weights) = (choices()?, self.pick(scores, None, pick)?);
        let (chosen, routed) = match selection.ranked() == selection.k {
            true => (ranked.clone(), ranked),
            false => (choices()?, choices()?),
        };
        Ok(Selected { chosen, routed, kept, weights })
    }
}
