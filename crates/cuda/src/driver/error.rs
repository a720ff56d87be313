//! Errors of a driver, which say what of a kernel, a place or a call does not fit.

/// The error of a call, or of work that was queued earlier.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// Out of memory.
    #[error("the device has no memory for {bytes} bytes more: {held} of its {memory} are in use by all ranks")]
    OutOfMemory {
        /// Requested bytes.
        bytes: usize,
        /// Bytes in use.
        held: u64,
        /// Bytes of the device's memory.
        memory: u64,
    },
    /// An address or range outside all allocations.
    #[error("{call}: {bytes} bytes at {at:#x} lie in no allocation of the device")]
    Place {
        /// The call, or the kernel.
        call: &'static str,
        /// The first byte.
        at: u64,
        /// Number of bytes.
        bytes: usize,
    },
    /// Memory of another device that this device cannot access.
    #[error("{call}: device {by} has no access to the memory of device {of}, where {at:#x} lies")]
    NoAccess {
        /// The call, or the kernel.
        call: &'static str,
        /// The device whose work it is.
        by: usize,
        /// The device whose memory it is.
        of: usize,
        /// The address.
        at: u64,
    },
    /// Two unrelated devices.
    #[error("{call}: no work of {one} reaches {other}: they are devices of different machines or drivers")]
    Apart {
        /// The call.
        call: &'static str,
        /// The device.
        one: String,
        /// The other one.
        other: String,
    },
    /// A stream or event that does not belong to the driver.
    #[error("{call}: {what} is not one of this device")]
    Unknown {
        /// The call.
        call: &'static str,
        /// The stream or event.
        what: String,
    },
    /// An argument of another type than the kernel's table has.
    #[error("kernel {kernel}: argument {at} ({name}) is {given}, and {expected} was expected")]
    Argument {
        /// The kernel.
        kernel: &'static str,
        /// The position of the argument.
        at: usize,
        /// Its name.
        name: &'static str,
        /// The given argument.
        given: String,
        /// The type in the table.
        expected: String,
    },
    /// A misaligned address, at which a GPU would fault.
    #[error("{call}: {name} lies at {at:#x}, which is no multiple of {multiple} bytes, as this work needs it")]
    Misaligned {
        /// The kernel or call.
        call: &'static str,
        /// The argument.
        name: &'static str,
        /// The address.
        at: u64,
        /// The address must be a multiple of this.
        multiple: u64,
    },
    /// A size of zero by which a kernel divides.
    #[error(
        "kernel {kernel}: argument {at} ({name}) is 0, and the kernel divides by it: a size of at least 1 was expected"
    )]
    Zero {
        /// The kernel.
        kernel: &'static str,
        /// The position of the argument.
        at: usize,
        /// Its name.
        name: &'static str,
    },
    /// A wrong number of arguments.
    #[error("kernel {kernel} takes {expected} arguments and was given {given}")]
    Arguments {
        /// The kernel.
        kernel: &'static str,
        /// The given number.
        given: usize,
        /// The number that it takes.
        expected: usize,
    },
    /// An error of queued work, found at a later call: a GPU does not say which work it was. The
    /// device does no more work.
    #[error(
        "found at {at}: {why}; it is of that or of work that was queued before, and cuda.launch_blocking=true names whose"
    )]
    Found {
        /// The call that reported it.
        at: String,
        /// The driver's error code, with its meaning.
        why: String,
    },
    /// Work that failed on a GPU that waits after each call (`cuda.launch_blocking`), so that the fault is known to be
    /// of this work. The device does no more work.
    #[error("{work} failed: {why}")]
    Culprit {
        /// The kernel or call.
        work: String,
        /// The driver's error code, with its meaning.
        why: String,
    },
    /// A kernel that failed while it ran. The device does no more work.
    #[error("kernel {kernel}: {why}")]
    Kernel {
        /// The kernel.
        kernel: &'static str,
        /// The fault.
        why: String,
    },
    /// Kernels that do not compile.
    #[error("{source_name} does not compile: {why}")]
    Compile {
        /// The file of kernels.
        source_name: &'static str,
        /// The compiler's message.
        why: String,
    },
    /// A function of a library that failed.
    #[error("{call}: {why}")]
    Call {
        /// The function.
        call: &'static str,
        /// The returned error code, with its meaning.
        why: String,
    },
    /// A write beyond an allocation.
    #[error("{call} wrote beyond the {bytes} bytes at {at:#x}")]
    Beyond {
        /// The call, or the kernel.
        call: &'static str,
        /// The allocation.
        at: u64,
        /// Its size.
        bytes: usize,
    },
}

meshwork_core::debug_as_display!(DriverError);

/// The result of a call of a driver.
pub type Result<T> = std::result::Result<T, DriverError>;
