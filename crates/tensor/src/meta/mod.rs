//! The meta device: shapes only. A step run on it with recording communicators shows the computation, memory and
//! communication of any rank of any mesh, without data and without the other ranks. Values do not exist; downloads give
//! zeros.
//!
//! Each operation allocates the same buffers as its CPU sibling, in the same order, so that peak memory agrees.

mod attention;
mod channel_norm;
mod compression;
mod elementwise;
mod embedding;
mod grouped;
mod layout;
mod loss;
mod matmul;
mod norm;
mod optim;
mod permutation;
mod pointwise;
mod reduction;
mod routing;
mod windows;

use crate::device::{Device, Kernels, Meter};
use crate::error::Result;
use crate::kernel::{self, Precision};
use crate::memory::Category;
use meshwork_core::{Buffer, DType, HostMemory, Memory};
use std::sync::Arc;

/// A device that tracks shapes and memory, without values.
#[derive(Debug, Default)]
pub struct Meta {
    meter: Arc<Meter>,
    precision: Precision,
    /// Whether uploaded tensors keep their values.
    keeps_uploads: bool,
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

    fn host(&self) -> Option<&HostMemory> {
        None
    }

    fn host_mut(&mut self) -> Option<&mut HostMemory> {
        None
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

    fn meter(&self) -> &Meter {
        &self.meter
    }

    fn operand_dtype(&self, dtype: DType) -> DType {
        self.precision.operand_dtype(dtype)
    }

    fn kernels(&self) -> Kernels<'_> {
        Kernels::all(self)
    }
}
