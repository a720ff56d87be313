//! Places in the memory of a device.

use serde::{Deserialize, Serialize};

/// An address in the memory of a device, in bytes; 0 is null.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Address(pub u64);

impl Address {
    /// The null address, for optional arguments of kernels.
    pub const NULL: Address = Address(0);

    /// This address plus `bytes`.
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}
