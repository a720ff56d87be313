//! The seam: all CUDA functions that a device needs.
//!
//! Everything above it is the same on a GPU and on the [emulator](crate::emulator). Calls that take a [`Stream`] queue
//! work and return; the work of a stream runs in order, work of two streams in any order that
//! [`record`](Driver::record) and [`wait`](Driver::wait) permit.

mod address;
mod error;
mod nccl;
mod watch;
mod work;

pub use address::Address;
pub use error::{DriverError, Result};
pub use nccl::{Exchange, Message, Nccl, NcclComm, UniqueId};
pub use watch::{Watch, Watched};
pub use work::{Argument, BIAS_ALIGNED, Known, Operand, Product, Work, check_arguments};

use meshwork_kernels::{Kernel, Launch};
use meshwork_tensor::Launches;
use std::any::Any;
use std::fmt::Debug;
use std::sync::Weak;

/// A queue of work of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub usize);

/// Which stream's kernels a device begins first, of those that could begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Priority {
    /// That of computation.
    Usual,
    /// Before all others: ranks wait for it.
    Highest,
}

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
    /// The allocation granularity in bytes: an allocation takes a multiple of it. 2 MiB on a GPU; 1 where an allocation
    /// has exactly the requested size.
    pub granule: usize,
    /// The architecture that kernels are compiled for, as `sm_90a`: the key of tables of [tuning](crate::tuning).
    pub architecture: String,
}

/// Captured work that can be queued again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Graph(pub u64);

/// How work on one device can access the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Kernels access it directly: the same device, or a peer.
    Direct,
    /// Only by copies between the two ([`Driver::copy_between`]).
    Copies,
}

/// A place in the memory of a device, which may be another device than the caller's.
#[derive(Clone, Copy, Debug)]
pub struct Remote<'a> {
    /// The device.
    pub driver: &'a dyn Driver,
    /// The address.
    pub at: Address,
}

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
    fn stream_with(&self, priority: Priority) -> Result<Stream>;

    /// Memory of at least `bytes` bytes at a multiple of 256, whose contents are unspecified.
    fn alloc(&self, bytes: usize) -> Result<Address>;

    /// Frees allocations, once all queued work is done: the host waits for it once.
    fn free_all(&self, all: &[Address]) -> Result<()>;

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

    /// Copies the bytes at each place to the host after all that `stream` has queued, and waits for the copies: once if
    /// they are small.
    fn read_all(&self, stream: Stream, places: &mut [(Address, &mut [u8])]) -> Result<()>;

    /// The same of one place.
    fn read(&self, stream: Stream, from: Address, into: &mut [u8]) -> Result<()> {
        self.read_all(stream, &mut [(from, into)])
    }

    /// Queues pieces of work in order, and captures them as one graph if possible; `None`: they were queued, but not
    /// captured.
    fn capture(&self, stream: Stream, work: &[Work]) -> Result<Option<Graph>>;

    /// Queues captured work once more. `changed` has new arguments of some of its kernels, by their places in the
    /// captured work; they hold until they are changed again.
    fn replay(&self, stream: Stream, graph: Graph, changed: &[(usize, &[Argument])]) -> Result<()>;

    /// The communicators of NCCL.
    ///
    /// # Errors
    /// A device without them, with the reason.
    fn nccl(&self) -> Result<&dyn Nccl> {
        Err(DriverError::Call { call: "nccl", why: format!("{} has no communicators", self.name()) })
    }

    /// From now on hosts that wait for work of this device do so by `watch`, as long as it lives: ranks in other
    /// processes take part in that work. A device without communicators has no such work.
    fn watch(&self, watch: Weak<dyn Watch>) {
        _ = watch;
    }

    /// Statistics of how the work of some streams was queued, if repeated work is queued as [graphs](crate::replay).
    fn launches(&self, streams: &[Stream]) -> Option<Launches> {
        _ = streams;
        None
    }

    /// A new stream of the usual priority.
    fn stream(&self) -> Result<Stream> {
        self.stream_with(Priority::Usual)
    }

    /// Frees one allocation, once all queued work is done.
    fn free(&self, at: Address) -> Result<()> {
        self.free_all(&[at])
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
