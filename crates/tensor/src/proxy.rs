//! A device in front of another one, whose kernels run on the other device's memory.

use crate::device::Device;
use crate::error::Result;
use crate::kernel::Outcome;
use meshwork_core::Buffer;
use meshwork_optim::Rule;
use std::fmt::Debug;

/// A device that computes as an inner one does, on memory of its own kind. It says how its memory becomes memory of the
/// inner device and back, and so has all [kernels](crate::kernel) of the inner device.
///
/// testkit's opaque device is one: the CPU behind memory that the host cannot read.
pub trait Proxy: Debug + Send + Sync {
    /// The device that computes.
    fn inner(&self) -> &dyn Device;

    /// The inner memory of an operand that a kernel reads.
    fn read(&self, x: &Buffer) -> Buffer;

    /// The inner memory of an operand that a kernel writes, until it is [given back](Self::give_back).
    fn take(&self, x: &mut Buffer) -> Buffer;

    /// Ends the writing of memory that was [taken](Self::take).
    fn give_back(&self, x: &mut Buffer, inner: Buffer);

    /// The inner memory of an operand that a kernel keeps, and may write where nothing else refers to it.
    fn keep(&self, x: Buffer) -> Buffer;

    /// The memory of this device that a result of the inner one becomes.
    fn hide(&self, inner: Buffer) -> Buffer;

    /// Called before each kernel, by the name of its method.
    fn begin(&self, kernel: &'static str) {
        _ = kernel;
    }

    /// Refuses update rules that this device does not run.
    ///
    /// # Errors
    /// [`Error::UpdateRule`](crate::Error::UpdateRule).
    fn accepts(&self, rule: &Rule) -> Result<()> {
        _ = rule;
        Ok(())
    }
}

/// A result of the inner device as one of `proxy`.
pub(crate) fn hidden<T: Outcome>(proxy: &impl Proxy, result: Result<T>) -> Result<T> {
    result?.map(&mut |buffer, _| Ok(proxy.hide(buffer)))
}
