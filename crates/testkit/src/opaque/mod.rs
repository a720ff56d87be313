//! A device whose memory the host cannot read. It has the arithmetic of another device, on opaque buffers.
//!
//! A program that trains on it with the bits of the inner device does not depend on host slices, so it can run on a
//! GPU. Host access to its buffers is an error; [`Device::upload`], [`Device::upload_into`] and [`Device::download`]
//! are the only ways in and out, and the [`Meter`] counts them. Update rules run as data; a user-written rule is
//! refused, as on any device that cannot call the host's code. Collectives need [`communicator`].
//!
//! ```
//! use meshwork_tensor::cpu::Cpu;
//! use meshwork_tensor::Tensor;
//! use meshwork_testkit::opaque::Opaque;
//!
//! let device = Opaque::device(Cpu::device());
//! let x = Tensor::from_slice(&device, &[1.0f32, 2.0], [2])?;
//! assert!(x.buffer().as_slice::<f32>().is_err()); // out of the host's reach
//! assert_eq!(x.clone().accumulate(&x)?.to_vec::<f32>()?, [2.0, 4.0]); // brought to the host
//! # Ok::<(), meshwork_tensor::Error>(())
//! ```

mod communicator;
mod kernels;
mod memory;

pub use communicator::communicator;

use memory::{copy, hide, with_host};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::kernel::*;
use meshwork_tensor::{Device, Meter, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub struct Opaque {
    inner: Arc<dyn Device>,
    selections: AtomicUsize,
}

impl Opaque {
    /// A device that computes as `inner` does, which must compute on host memory.
    pub fn device(inner: Arc<dyn Device>) -> Arc<dyn Device> {
        Arc::new(Self::new(inner))
    }

    /// The same, by its own type.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        Self { inner, selections: AtomicUsize::new(0) }
    }

    /// How often a router chose experts on it.
    pub fn selections(&self) -> usize {
        self.selections.load(Ordering::Relaxed)
    }
}

impl Device for Opaque {
    fn name(&self) -> &str {
        "opaque"
    }

    fn alloc(&self, dtype: DType, count: usize) -> Result<Buffer> {
        Ok(hide(self.inner.alloc(dtype, count)?))
    }

    fn zeros(&self, dtype: DType, count: usize) -> Result<Buffer> {
        Ok(hide(self.inner.zeros(dtype, count)?))
    }

    fn upload(&self, host: &Buffer) -> Result<Buffer> {
        Ok(hide(self.inner.upload(host)?))
    }

    fn upload_into(&self, host: &Buffer, dst: &mut Buffer, at: usize) -> Result<()> {
        with_host(dst, |dst| self.inner.upload_into(host, dst, at))
    }

    fn download(&self, buffer: &Buffer) -> Result<Buffer> {
        self.inner.meter().add_download(buffer.bytes());
        Ok(copy(buffer)?)
    }

    fn meter(&self) -> &Meter {
        self.inner.meter()
    }

    fn operand_dtype(&self, dtype: DType) -> DType {
        self.inner.operand_dtype(dtype)
    }

    fn matmul(&self) -> Result<&dyn Matmul> {
        Ok(self)
    }

    fn pointwise(&self) -> Result<&dyn Pointwise> {
        Ok(self)
    }

    fn elementwise(&self) -> Result<&dyn Elementwise> {
        Ok(self)
    }

    fn reduction(&self) -> Result<&dyn Reduction> {
        Ok(self)
    }

    fn norm(&self) -> Result<&dyn Norm> {
        Ok(self)
    }

    fn channel_norm(&self) -> Result<&dyn ChannelNorm> {
        Ok(self)
    }

    fn window(&self) -> Result<&dyn Window> {
        Ok(self)
    }

    fn attention(&self) -> Result<&dyn Attention> {
        Ok(self)
    }

    fn embedding(&self) -> Result<&dyn Embedding> {
        Ok(self)
    }

    fn loss(&self) -> Result<&dyn Loss> {
        Ok(self)
    }

    fn grouped_matmul(&self) -> Result<&dyn Grouped> {
        Ok(self)
    }

    fn permutation(&self) -> Result<&dyn Permutation> {
        Ok(self)
    }

    fn routing(&self) -> Result<&dyn Routing> {
        Ok(self)
    }

    fn layout(&self) -> Result<&dyn Layout> {
        Ok(self)
    }

    fn optim(&self) -> Result<&dyn Optim> {
        Ok(self)
    }

    fn compression(&self) -> Result<&dyn Compression> {
        Ok(self)
    }
}
