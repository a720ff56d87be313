//! Errors of a driver, which say what of a kernel, a place or a call does not fit.

use meshwork_core::comm::{Fault, Site};
use std::sync::Arc;

/// The error of a call, or of work that was queued earlier.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum DriverError {
    /// Out of memory.
    #[error("the device has no memory for {bytes} bytes more: {held} of its {memory} are in use by all ranks")]
    OutOfMemory { bytes: usize, held: u64, memory: u64 },
    /// An address or range outside all allocations.
    #[error("{call}: {bytes} bytes at {at:#x} lie in no allocation of the device")]
    Place { call: &'static str, at: u64, bytes: usize },
    /// Memory of another device that this device cannot access.
    #[error("{call}: device {by} has no access to the memory of device {of}, where {at:#x} lies")]
    NoAccess { call: &'static str, by: usize, of: usize, at: u64 },
    /// Two unrelated devices.
    #[error("{call}: no work of {one} reaches {other}: they are devices of different machines or drivers")]
    Apart { call: &'static str, one: String, other: String },
    /// A stream or event that does not belong to the driver.
    #[error("{call}: {what} is not one of this device")]
    Unknown { call: &'static str, what: String },
    /// An argument of another type than the kernel's table has.
    #[error("kernel {kernel}: argument {at} ({name}) is {given}, and {expected} was expected")]
    Argument { kernel: &'static str, at: usize, name: &'static str, given: String, expected: String },
    /// A misaligned address, at which a GPU would fault.
    #[error("{call}: {name} lies at {at:#x}, which is no multiple of {multiple} bytes, as this work needs it")]
    Misaligned { call: &'static str, name: &'static str, at: u64, multiple: u64 },
    /// A size of zero by which a kernel divides.
    #[error(
        "kernel {kernel}: argument {at} ({name}) is 0, and the kernel divides by it: a size of at least 1 was expected"
    )]
    Zero { kernel: &'static str, at: usize, name: &'static str },
    /// A wrong number of arguments.
    #[error("kernel {kernel} takes {expected} arguments and was given {given}")]
    Arguments { kernel: &'static str, given: usize, expected: usize },
    /// An error of queued work, found at a later call: a GPU does not say which work it was. The
    /// device does no more work.
    #[error(
        "found at {at}: {why}; it is of that or of work that was queued before, and cuda.launch_blocking=true names whose"
    )]
    Found { at: String, why: String },
    /// Work that failed on a GPU that waits after each call (`cuda.launch_blocking`), so that the fault is known to be
    /// of this work. The device does no more work.
    #[error("{work} failed: {why}")]
    Culprit { work: String, why: String },
    /// A kernel that failed while it ran. The device does no more work.
    #[error("kernel {kernel}: {why}")]
    Kernel { kernel: &'static str, why: String },
    /// Kernels that do not compile.
    #[error("{source_name} does not compile: {why}")]
    Compile { source_name: &'static str, why: String },
    /// A function of a library that failed.
    #[error("{call}: {why}")]
    Call { call: &'static str, why: String },
    /// A collective or a communicator that failed, mostly because of another process: one that is gone, or in another
    /// call. The device may find that before the control group does, which is [asked](super::Watch::reason) first.
    #[error("{call}: {why}")]
    Comm { call: &'static str, why: String },
    /// Collectives that were ended, because the world of their ranks has stopped.
    #[error("{}", fault.describe(site))]
    Stopped { site: Site, fault: Arc<Fault> },
    /// A write beyond an allocation.
    #[error("{call} wrote beyond the {bytes} bytes at {at:#x}")]
    Beyond { call: &'static str, at: u64, bytes: usize },
}

meshwork_core::debug_as_display!(DriverError);

/// The result of a call of a driver.
pub type Result<T> = std::result::Result<T, DriverError>;
