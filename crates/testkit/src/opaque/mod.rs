//! A device whose memory the host cannot read. It has the arithmetic of another device, on opaque buffers.
//!
//! A program that trains on it with the bits of the inner device does not depend on host slices, so it can run on a
//! GPU. Host access to its buffers is an error; [`Device::upload`], [`Device::upload_into`] and [`Device::download`]
//! are the only ways in and out, and the [`Meter`] counts them. Update rules run as data; a user-written rule is
//! refused, as on any device that cannot call the host's code. Collectives need [`communicator`].
//!
//! ```
//! use meshwork_cpu::Cpu;
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
mod memory;

pub use communicator::communicator;

use memory::{copy, give_back, hide, host, into_host, take, with_host};
use meshwork_core::{Buffer, DType, pass_on};
use meshwork_optim::Rule;
use meshwork_tensor::{Device, Error, Kernels, Meter, Precision, Proxy, Result};
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
    pass_on! {
        self.inner =>
        fn meter(&self) -> &Meter;
        fn precision(&self) -> Precision;
        fn operand_dtype(&self, dtype: DType) -> DType;
    }

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

    fn kernels(&self) -> Kernels<'_> {
        Kernels::all(self)
    }
}

impl Proxy for Opaque {
    fn inner(&self) -> &dyn Device {
        &*self.inner
    }

    fn read(&self, x: &Buffer) -> Buffer {
        host(x)
    }

    fn take(&self, x: &mut Buffer) -> Buffer {
        take(x)
    }

    fn give_back(&self, x: &mut Buffer, inner: Buffer) {
        give_back(x, inner);
    }

    fn keep(&self, x: Buffer) -> Buffer {
        into_host(x)
    }

    fn hide(&self, inner: Buffer) -> Buffer {
        hide(inner)
    }

    fn begin(&self, kernel: &'static str) {
        if kernel == "select" {
            self.selections.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Like a device that has kernels for our rules and cannot run the host's code.
    fn accepts(&self, rule: &Rule) -> Result<()> {
        if rule.is_users() {
            let (device, rule) = (self.name().to_owned(), rule.name().to_owned());
            return Err(Error::UpdateRule { device, rule, valid: "a rule of meshwork-optim" });
        }
        Ok(())
    }
}
