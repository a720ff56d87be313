//! The seam: all CUDA functions that a device needs.
//!
//! Everything above it is the same on a GPU and on the [emulator](crate::emulator). Calls that take a [`Stream`] queue
//! work and return; the work of a stream runs in order, work of two streams in any order that
//! [`record`](Driver::record) and [`wait`](Driver::wait) permit.
//!
//! More than 400 lines: the seam is one trait with its types and errors, which belong together.

use meshwork_kernels::{Kernel, Launch, Pass, Type};
use meshwork_tensor::Launches;
use std::any::Any;
use std::fmt::{self, Debug};
use std::hash::{Hash, Hasher};

/// An address in the memory of a device, in bytes; 0 is null.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// The null address, for optional arguments of kernels.
    pub const NULL: Address = Address(0);

    /// This address plus `bytes`.
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// A queue of work of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub usize);

/// An event in a stream: the moment when all work queued before it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Event(pub u64);

/// The properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Its name, as given by the vendor.
    pub name: String,
    /// Its number among the devices of its driver.
    pub ordinal: usize,
    /// Bytes of its memory.
    pub memory: u64,
    /// Bytes of shared memory that a block of threads may have.
    pub shared: u32,
    /// The architecture that kernels are compiled for, as `sm_90a`: the key of tables of [tuning](crate::tuning).
    pub architecture: String,
}

/// Captured work that can be queued again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Graph(pub u64);

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Argument {
    /// A number: its type, and its bits in the lowest bytes.
    Number(Type, u64),
    /// The address of elements, or of addresses.
    Place(Address),
}

macro_rules! numbers {
    ($($t:ty => $of:ident),*) => { $(impl From<$t> for Argument {
        fn from(value: $t) -> Self {
            let mut bytes = [0; 8];
            bytes[..size_of::<$t>()].copy_from_slice(&value.to_le_bytes());
            Self::Number(Type::$of, u64::from_le_bytes(bytes))
        }
    })* };
}
numbers!(f32 => F32, f64 => F64, i32 => I32, u32 => U32, i64 => I64, u64 => U64);

impl From<usize> for Argument {
    /// A size or an index, passed as `long long`.
    fn from(value: usize) -> Self {
        Self::from(value as i64)
    }
}

impl From<Address> for Argument {
    fn from(at: Address) -> Self {
        Self::Place(at)
    }
}

/// A matrix product `C[m, n] = op(A) · op(B)`, or `C += ..`, or `C = op(A) · op(B) + bias`, all row-major and
/// contiguous. Sums and additions to them are in f32, in an order of the library's own: a C of bf16 is rounded
/// once, to the nearest, subnormal numbers kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of C, columns of C, and the length of the sums.
    pub mnk: [usize; 3],
    /// A and B.
    pub operands: [Operand; 2],
    /// C.
    pub c: Address,
    /// C and the bias are of bf16 instead of f32; allowed if the operands are of bf16.
    pub rounded: bool,
    /// Add to C instead of overwriting it.
    pub accumulate: bool,
    /// `[n]`, of C's type, which is added to each row of C. Not allowed with `accumulate` or with empty sums. Aligned
    /// to [`BIAS_ALIGNED`] bytes.
    pub bias: Option<Address>,
}

/// Alignment of a bias in bytes. The epilogue of cuBLASLt reads the bias in chunks of 16 bytes, and no preference of
/// the library lowers this alignment.
pub const BIAS_ALIGNED: u64 = 16;

impl Product {
    /// Bytes of an element of C.
    pub fn size(&self) -> usize {
        if self.rounded { 2 } else { 4 }
    }

    /// Checks that a library accepts the product: the alignment of matrices to their elements and of the bias to
    /// [`BIAS_ALIGNED`], and the conditions on types and bias stated at the fields.
    ///
    /// # Errors
    /// The first violated condition.
    pub fn check(&self) -> Result<()> {
        const CALL: &str = "product";
        let Product { mnk: [.., k], operands: [a, b], c, rounded, accumulate, bias } = *self;
        let refused = |why: &str| Err(DriverError::Call { call: CALL, why: why.to_owned() });
        if a.bf16 != b.bf16 {
            return refused("operands of f32 and of bf16 in one product");
        }
        if rounded && !a.bf16 {
            return refused("a result of bf16 from operands of f32");
        }
        if bias.is_some() && (accumulate || k == 0) {
            return refused("a bias on what is added to C, or on sums of nothing");
        }
        let size = if a.bf16 { 2 } else { 4 };
        let places = [("a", Some(a.at), size), ("b", Some(b.at), size), ("c", Some(c), self.size() as u64)];
        for (name, at, multiple) in places.into_iter().chain([("bias", bias, BIAS_ALIGNED)]) {
            if let Some(at) = at.filter(|at| !at.0.is_multiple_of(multiple)) {
                return Err(DriverError::Misaligned { call: CALL, name, at: at.0, multiple });
            }
        }
        Ok(())
    }
}

/// An operand of a [`Product`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Its address.
    pub at: Address,
    /// Stored as [k, m] instead of [m, k], or as [n, k] instead of [k, n].
    pub transposed: bool,
    /// Of bf16 instead of f32.
    pub bf16: bool,
}

/// How work on one device can access the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Kernels access it directly: the same device, or a peer.
    Direct,
    /// Only by copies between the two ([`Driver::copy_between`]).
    Copies,
}

/// A place in the memory of a device, which may be another device than that of the call.
#[derive(Clone, Copy, Debug)]
pub struct Remote<'a> {
    /// The device.
    pub driver: &'a dyn Driver,
    /// The address.
    pub at: Address,
}

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
    /// Work that failed on a GPU that waits after each call ([`Driver`]), so that the fault is known to be of this
    /// work. The device does no more work.
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

/// One device and its queues of work. Host data is used only during a call: `write` has copied its bytes when it
/// returns.
///
/// An error of queued work is returned by a later call, and is permanent: the device does no more work, as with CUDA.
pub trait Driver: Any + Send + Sync + Debug {
    /// `cuda` or `cuda-emulated`.
    fn name(&self) -> &str;

    /// The properties of the device.
    fn properties(&self) -> &Properties;

    /// A new stream.
    fn stream(&self) -> Result<Stream>;

    /// Memory of at least `bytes` bytes at a multiple of 256, whose contents are unspecified.
    fn alloc(&self, bytes: usize) -> Result<Address>;

    /// Frees memory, once all queued work is done.
    fn free(&self, at: Address) -> Result<()>;

    /// Pinned host memory of `bytes` bytes, all zero: copies from and to it run concurrently with all other work, and
    /// only [`Work::Save`] and [`Work::Load`] use it.
    fn alloc_host(&self, bytes: usize) -> Result<Address>;

    /// Frees pinned memory, once all queued work is done.
    fn free_host(&self, at: Address) -> Result<()>;

    /// Queues a piece of work.
    fn queue(&self, stream: Stream, work: Work) -> Result<()>;

    /// An event after all work queued so far in `stream`.
    fn record(&self, stream: Stream) -> Result<Event>;

    /// Queues that later work of `stream` begins after `event`.
    fn wait(&self, stream: Stream, event: Event) -> Result<()>;

    /// How work of this device can access the memory of `other`. Must be called before the first access, which it
    /// enables.
    fn reach(&self, other: &dyn Driver) -> Result<Reach>;

    /// Queues that later work of `stream` begins after an event of `other`, which may be this device.
    fn wait_for(&self, stream: Stream, other: &dyn Driver, event: Event) -> Result<()>;

    /// Queues a copy of `bytes` bytes, from or to the memory of another device, whatever the result of
    /// [`reach`](Self::reach).
    fn copy_between(&self, stream: Stream, from: Remote<'_>, to: Remote<'_>, bytes: usize) -> Result<()>;

    /// Makes the host wait for an event.
    fn finish(&self, event: Event) -> Result<()>;

    /// Queues a copy from the host.
    fn write(&self, stream: Stream, to: Address, bytes: &[u8]) -> Result<()>;

    /// Copies bytes to the host after all that `stream` has queued, and waits for the copy.
    fn read(&self, stream: Stream, from: Address, into: &mut [u8]) -> Result<()>;

    /// Queues pieces of work in order, and captures them as one graph if possible; `None`: they were queued, but not
    /// captured.
    fn capture(&self, stream: Stream, work: &[Work]) -> Result<Option<Graph>>;

    /// Queues captured work once more. `changed` has new arguments of some of its kernels, by their places in the
    /// captured work; they hold until they are changed again.
    fn replay(&self, stream: Stream, graph: Graph, changed: &[(usize, &[Argument])]) -> Result<()>;

    /// Statistics of how the work of some streams was queued, if repeated work is queued as [graphs](crate::replay).
    fn launches(&self, streams: &[Stream]) -> Option<Launches> {
        _ = streams;
        None
    }

    /// Queues a kernel.
    fn launch(&self, stream: Stream, kernel: &'static Kernel, launch: Launch, args: &[Argument]) -> Result<()> {
        self.queue(stream, Work::Launch { kernel: Known(kernel), launch, args: args.to_vec() })
    }

    /// Queues a matrix product.
    fn product(&self, stream: Stream, product: Product) -> Result<()> {
        self.queue(stream, Work::Product(product))
    }

    /// Queues a copy within the device.
    fn copy(&self, stream: Stream, from: Address, to: Address, bytes: usize) -> Result<()> {
        self.queue(stream, Work::Copy { from, to, bytes })
    }

    /// Queues a fill with zeros.
    fn zero(&self, stream: Stream, at: Address, bytes: usize) -> Result<()> {
        self.queue(stream, Work::Zero { at, bytes })
    }

    /// Queues a note that some bytes are no longer needed.
    fn discard(&self, stream: Stream, at: Address, bytes: usize) -> Result<()> {
        self.queue(stream, Work::Discard { at, bytes })
    }
}

/// A piece of work of a stream, as data.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// A kernel.
    Launch {
        /// The kernel.
        kernel: Known,
        /// Its grid.
        launch: Launch,
        /// Its arguments.
        args: Vec<Argument>,
    },
    /// A matrix product.
    Product(Product),
    /// A copy within the device, between ranges that do not overlap. Strided rows are copied by a kernel: the driver
    /// guarantees its strided copies only for strides that it chose itself.
    Copy {
        /// Source.
        from: Address,
        /// Destination.
        to: Address,
        /// Number of bytes.
        bytes: usize,
    },
    /// A copy from the device to pinned memory.
    Save {
        /// Source.
        from: Address,
        /// Destination.
        to: Address,
        /// Number of bytes.
        bytes: usize,
    },
    /// A copy from pinned memory to the device.
    Load {
        /// Source.
        from: Address,
        /// Destination.
        to: Address,
        /// Number of bytes.
        bytes: usize,
    },
    /// A fill with zeros.
    Zero {
        /// The first byte.
        at: Address,
        /// Number of bytes.
        bytes: usize,
    },
    /// Bytes that nobody needs any more. A GPU does nothing; the emulator fills them with NaN.
    Discard {
        /// The first byte.
        at: Address,
        /// Number of bytes.
        bytes: usize,
    },
}

/// A kernel of the table or a variant, known by its name and file.
#[derive(Clone, Copy, Debug)]
pub struct Known(pub &'static Kernel);

impl PartialEq for Known {
    fn eq(&self, other: &Self) -> bool {
        (self.0.name, self.0.source.name) == (other.0.name, other.0.source.name)
    }
}

impl Eq for Known {}

impl Hash for Known {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.name.hash(state);
    }
}

impl Work {
    /// Whether it causes work on a GPU.
    pub fn is_launch(&self) -> bool {
        !matches!(self, Self::Discard { .. })
    }

    /// The name of a kernel or of another piece of work.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Launch { kernel, .. } => kernel.0.name,
            Self::Product(_) => "product",
            Self::Copy { .. } => "copy",
            Self::Save { .. } => "save",
            Self::Load { .. } => "load",
            Self::Zero { .. } => "zero",
            Self::Discard { .. } => "discard",
        }
    }

    /// Checks the arguments of a kernel or product.
    ///
    /// # Errors
    /// The first argument that does not fit.
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Launch { kernel, args, .. } => check_arguments(kernel.0, args),
            Self::Product(product) => product.check(),
            _ => Ok(()),
        }
    }
}

/// Checks arguments against the table of a kernel.
///
/// # Errors
/// The first argument that does not fit.
pub fn check_arguments(kernel: &'static Kernel, args: &[Argument]) -> Result<()> {
    if args.len() != kernel.args.len() {
        return Err(DriverError::Arguments { kernel: kernel.name, given: args.len(), expected: kernel.args.len() });
    }
    for (at, (given, expected)) in args.iter().zip(kernel.args).enumerate() {
        let fits = match given {
            Argument::Number(of, _) => expected.pass.is_number() && expected.of == *of,
            Argument::Place(_) => !expected.pass.is_number(),
        };
        if fits && expected.pass == Pass::Divisor && given.bits() == 0 {
            return Err(DriverError::Zero { kernel: kernel.name, at, name: expected.name });
        }
        if !fits {
            let (given, name) = (given.to_string(), expected.name);
            return Err(DriverError::Argument { kernel: kernel.name, at, name, given, expected: expected.c_type() });
        }
        let (name, multiple) = (expected.name, expected.multiple());
        if given.bits().is_multiple_of(multiple) {
            continue;
        }
        if given.place().is_some() {
            return Err(DriverError::Misaligned { call: kernel.name, name, at: given.bits(), multiple });
        }
        let (given, expected) = (given.bits().to_string(), format!("a multiple of {multiple}"));
        return Err(DriverError::Argument { kernel: kernel.name, at, name, given, expected });
    }
    Ok(())
}

impl Argument {
    /// The address, unless this is a number or null.
    pub fn place(&self) -> Option<Address> {
        match self {
            Self::Place(at) if *at != Address::NULL => Some(*at),
            _ => None,
        }
    }

    /// The bits of the number or of the address, as passed to a kernel.
    pub fn bits(&self) -> u64 {
        match self {
            Self::Number(_, bits) => *bits,
            Self::Place(at) => at.0,
        }
    }
}

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(of, _) => write!(f, "a number of type {}", of.c_name()),
            Self::Place(at) => write!(f, "the address {:#x}", at.0),
        }
    }
}
