//! Offload: what a rank does not need at the moment leaves its memory and comes back before it is needed
//! (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857). States of the optimizer go page by page through the
//! update, gradients bucket by bucket from backward to the update, activations segment by segment from forward to
//! backward, and the activations of samples that AQ-SGD keeps leave for good, but for those of a micro-batch.
//!
//! | module | what it does |
//! |---|---|
//! | `folder` | a file of a rank in a folder |
//! | `disk` | reads and writes in the background, in the order in which they were asked for: by a thread, or by the device to its own host memory |
//! | `space` | which bytes of a store are in use |
//! | `pages` | the states of the optimizer, a few pages of them in memory |
//! | `rows` | activations of samples, some rows of them in memory |
//! | `saved` | what forward keeps for backward |
//! | `parked` | gradients to which nothing is added at the moment |
//!
//! Which bytes leave and come back, and which memory is alive when, follows from the program alone: a rank waits for
//! its file at fixed places, and frees memory there. So a dry run, which has no file, predicts a run to the byte.

pub(crate) mod disk;
mod folder;
pub(crate) mod pages;
pub(crate) mod parked;
pub(crate) mod rows;
pub(crate) mod saved;
mod space;

pub use folder::Folder;

use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// What leaves the memory of a rank, in a [`Plan`](crate::Plan).
#[derive(Clone, Debug)]
pub struct Offload {
    /// The states of the optimizer.
    pub optimizer: bool,
    /// The gradients of weights.
    pub gradients: bool,
    /// What forward keeps for backward.
    pub activations: bool,
    /// The activations of samples that [AQ-SGD](crate::Compress::aqsgd) keeps.
    pub samples: bool,
    /// Where they go; without one, to [host memory of the device](meshwork_tensor::Device::pinned).
    pub to: Option<Arc<dyn Backing>>,
}

/// Where memory goes that leaves a device: a [`Folder`], or a store of a user's own.
pub trait Backing: Debug + Send + Sync {
    /// Opens the store of a rank. No other rank, of this run or of another, writes to it.
    ///
    /// # Errors
    /// A folder that is missing or cannot be written.
    fn open(&self, rank: usize) -> Result<Box<dyn Store>, OffloadError>;
}

/// Bytes outside of a device. One thread uses it.
pub trait Store: Debug + Send {
    /// What messages call it.
    fn name(&self) -> String;

    /// Makes room for `bytes` bytes in all. Later writes of bytes before this end do not fail for lack of room.
    ///
    /// # Errors
    /// No room.
    fn reserve(&mut self, bytes: u64) -> io::Result<()>;

    /// Reads bytes from `at` on. What was never written is zero.
    ///
    /// # Errors
    /// Of the device below.
    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes bytes from `at` on.
    ///
    /// # Errors
    /// Of the device below.
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;
}

/// What went wrong with memory outside of the device. Weights in memory and checkpoints are not touched by it, but the
/// states of this run's optimizer are incomplete: start it again from a checkpoint.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// A folder in which no file can be made.
    #[error("offload to {}: {source}; name a folder that exists and that this process may write", path.display())]
    Open {
        /// The folder.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A device without host memory of its own.
    #[error("offload to host memory of the device: {device} has none; name a folder")]
    NoHostMemory {
        /// The device.
        device: String,
    },
    /// A store without enough room.
    #[error("offload to {store}: no room for {bytes} bytes: {source}; free as much, or name another folder")]
    Full {
        /// The store.
        store: String,
        /// Bytes that this rank offloads in all.
        bytes: u64,
        /// What the system or the device says.
        source: io::Error,
    },
    /// Bytes that cannot be read or written.
    #[error("offload to {store}: {what} {bytes} bytes at {at}: {source}; start again from the last checkpoint")]
    Io {
        /// The store.
        store: String,
        /// `reading` or `writing`.
        what: &'static str,
        /// How many.
        bytes: u64,
        /// From where on.
        at: u64,
        /// What the system says.
        source: io::Error,
    },
}

meshwork_core::debug_as_display!(OffloadError);

/// Bytes that a rank's offload moves and takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// The most room that was taken at once, in bytes.
    pub room: u64,
}

impl Traffic {
    /// What was moved since an earlier time.
    pub fn since(self, before: Self) -> Self {
        Self { read: self.read - before.read, written: self.written - before.written, room: self.room }
    }
}
