//! Collectives on the memory of devices, for ranks that are threads of one process.
//!
//! The communicator of [`threads`](super::thread) lets the ranks meet, compares what they do and finds faults, as in
//! host memory. It exchanges only addresses and moments: a [`Carrier`] queues the work on the devices, and no thread
//! waits for it there.

use super::ReduceOp;
use crate::dtype::DType;
use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// A moment in the work of a rank's device: after all work that was queued there before.
#[derive(Clone, Debug)]
pub struct Moment {
    /// The rank's end of that device.
    pub carrier: Arc<dyn Carrier>,
    /// Which moment, as the device counts them.
    pub number: u64,
}

/// Where memory lies on a device.
#[derive(Clone, Debug)]
pub struct DevicePlace {
    /// The rank's end of the device.
    pub carrier: Arc<dyn Carrier>,
    /// The address of the first byte.
    pub at: u64,
}

/// One rank's end of a device whose memory takes part in collectives. Messages of errors say what the device refused.
pub trait Carrier: Any + Send + Sync + Debug {
    /// The number of the moment after all that this rank has queued so far: then its buffers may be read and written.
    fn moment(&self) -> Result<u64, String>;

    /// Queues the work of an operation that every member has started, and does not wait for it. The last member to
    /// arrive calls it, on its own thread, on the carrier of the first member. The moments after which all members'
    /// buffers are their own again.
    fn carry(&self, work: &DeviceWork) -> Result<Vec<Moment>, String>;

    /// Lets the work that this rank queues from now on begin after these moments, of its own device or of another. Any
    /// thread may call it, also the thread of another rank that drops its buffers, whatever the rank does with its
    /// device meanwhile. An error stays with the device, whose every later use returns it: what follows would not wait.
    fn resume(&self, done: &[Moment]) -> Result<(), String>;
}

/// One member's part in an operation.
#[derive(Clone, Debug)]
pub struct Member {
    /// When its buffers may be read and written; its end of the device.
    pub ready: Moment,
    /// The address of its elements; `target`'s if it works in place.
    pub source: u64,
    /// The address where its result goes; 0 if it gets none.
    pub target: u64,
}

/// A range of elements that some members give and some get. Several sources are reduced to one value; every target gets
/// the result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkPiece {
    /// The members that give.
    pub sources: Range<usize>,
    /// The first element, in the buffer of each of them.
    pub read_at: usize,
    /// The members that get; at least one.
    pub targets: Range<usize>,
    /// The first element, in the buffer of each of them.
    pub write_at: usize,
    /// Their number.
    pub count: usize,
}

/// The work of an operation. Pieces write disjoint elements, and none reads what another one writes, so that each may
/// be queued by itself.
#[derive(Clone, Debug)]
pub struct DeviceWork {
    /// The type of the elements.
    pub dtype: DType,
    /// How elements of several sources become one, in the balanced tree of [`tree`](crate::tree) over the sources.
    pub reduce: ReduceOp,
    /// The members, in the order of the group; of a message the sender and the receiver.
    pub members: Vec<Member>,
    /// The work.
    pub pieces: Vec<WorkPiece>,
}
