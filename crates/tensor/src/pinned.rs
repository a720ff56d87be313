//! Host memory of a device, for what leaves its memory for a while.

use crate::error::Result;
use meshwork_core::Buffer;
use std::fmt::Debug;

/// Host memory to and from which a device copies beside its own work ("pinned"): room of so many bytes, addressed from
/// 0.
///
/// Copies run in the order in which they are queued, and the host waits for none. What is given to a copy must live
/// until the device was told to [`wait`](Self::wait) for it.
pub trait Pinned: Debug {
    /// Makes room for `bytes` bytes in all. What was never written is zero.
    ///
    /// # Errors
    /// When the host has no such memory.
    fn reserve(&self, bytes: u64) -> Result<()>;

    /// Queues a copy of memory of the device to the room, from byte `at` on, behind what the device has been given to
    /// do so far. The copy's number.
    ///
    /// # Errors
    /// An error of the device; room that was not reserved.
    fn save(&self, from: &Buffer, at: u64) -> Result<u64>;

    /// Queues a copy back, in the same way.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    fn load(&self, at: u64, into: &mut Buffer) -> Result<u64>;

    /// Queues that what the device is given to do from now on begins after a copy.
    ///
    /// # Errors
    /// An error of the device.
    fn wait(&self, copy: u64) -> Result<()>;

    /// Bytes of the room from `at` on, behind all copies: to host memory, for which the host waits.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    fn read(&self, at: u64, into: &mut Buffer) -> Result<()>;

    /// Writes host memory to the room, behind all copies.
    ///
    /// # Errors
    /// As [`save`](Self::save).
    fn write(&self, from: &Buffer, at: u64) -> Result<()>;
}
