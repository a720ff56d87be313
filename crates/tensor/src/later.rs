//! Copies between a device and the host that are waited for later, so that computation goes on beside them.

use crate::device::Device;
use crate::error::Result;
use meshwork_core::Buffer;
use std::fmt;

/// A copy on its way to the host ([`Device::download_later`]). The memory that it is of is neither written nor dropped
/// before it is waited for.
pub struct Download(Box<dyn FnOnce() -> Result<Buffer> + Send>);

/// Memory that is ready for values from the host ([`Device::upload_later`]).
pub struct Upload(Box<CopyToDevice>);

/// Copies values to memory of a device, and gives the memory back.
type CopyToDevice = dyn FnOnce(&dyn Device, &Buffer) -> Result<Buffer>;

impl Download {
    /// One that `wait` waits for.
    pub fn new(wait: impl FnOnce() -> Result<Buffer> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// Waits for the copy. Any thread may do that.
    ///
    /// # Errors
    /// Of the device.
    pub fn wait(self) -> Result<Buffer> {
        self.0()
    }
}

impl Upload {
    /// One that `copy` copies, given its device and the values.
    pub fn new(copy: impl FnOnce(&dyn Device, &Buffer) -> Result<Buffer> + 'static) -> Self {
        Self(Box::new(copy))
    }

    /// Copies values to the memory, and gives it back: what is queued from now on has them.
    ///
    /// # Errors
    /// Values of another type or number, and those of the device.
    pub fn copy(self, device: &dyn Device, values: &Buffer) -> Result<Buffer> {
        self.0(device, values)
    }
}

impl fmt::Debug for Download {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Download")
    }
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Upload")
    }
}
