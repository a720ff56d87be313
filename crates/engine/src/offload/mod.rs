//! Offload: memory that a rank does not need at the moment is written to a store and read back before it is needed
//! (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857). States of the optimizer are in memory page by page
//! during the update. Gradients are in the store from backward to the update, bucket by bucket, and activations from
//! forward to backward, segment by segment. Of the activations of samples that AQ-SGD keeps, one micro-batch is in
//! memory.
//!
//! | module | contents |
//! |---|---|
//! | `folder` | a file of a rank in a folder |
//! | `disk` | reads and writes in the background, in the order of the calls: by a thread, or by the device to its own host memory |
//! | `space` | the bytes of a store that are in use |
//! | `pages` | the states of the optimizer, a few pages of them in memory |
//! | `rows` | activations of samples, some rows of them in memory |
//! | `saved` | tensors that forward saves for backward |
//! | `parked` | gradients between two uses |
//!
//! Which bytes are moved, and which memory is alive when, follows from the program alone: a rank waits for its file at
//! fixed places, and frees memory there. So a dry run, which has no file, predicts a run to the byte.

pub(crate) mod disk;
mod folder;
pub(crate) mod pages;
pub(crate) mod parked;
pub(crate) mod rows;
pub(crate) mod saved;
mod space;

pub use folder::Folder;

use crate::prelude::*;
use std::fmt::Debug;
use std::io;
use std::path::PathBuf;

/// The memory of a rank that is offloaded, in a [`Plan`].
#[derive(Clone, Debug)]
pub struct Offload {
    /// The states of the optimizer.
    pub optimizer: bool,
    /// The gradients of weights.
    pub gradients: bool,
    /// The tensors that forward saves for backward.
    pub activations: bool,
    /// The activations of samples that [AQ-SGD](crate::Compress::aqsgd) keeps.
    pub samples: bool,
    /// Where they go; without one, to [host memory of the device](meshwork_tensor::Device::pinned).
    pub to: Option<Arc<dyn Backing>>,
}

/// The stores of offloaded memory: a [`Folder`], or a store of a user's own.
pub trait Backing: Debug + Send + Sync {
    /// Opens the store of a rank. No other rank, of this run or of another, writes to it.
    ///
    /// # Errors
    /// A folder that is missing or cannot be written.
    fn open(&self, rank: usize) -> Result<Box<dyn Store>, OffloadError>;
}

/// Bytes outside of a device. One thread uses it.
pub trait Store: Debug + Send {
    /// Its name in messages.
    fn name(&self) -> String;

    /// Makes room for `bytes` bytes in all. Later writes of bytes before this end do not fail for lack of room.
    fn reserve(&mut self, bytes: u64) -> io::Result<()>;

    /// Reads bytes from `at` on. Bytes that were never written are zero.
    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()>;

    /// Writes bytes from `at` on.
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;
}

/// An error of offload. Weights in memory and checkpoints are not touched by it, but the
/// states of this run's optimizer are incomplete: start it again from a checkpoint.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum OffloadError {
    /// A folder in which no file can be made.
    #[error("offload to {}: {source}; name a folder that exists and that this process may write", path.display())]
    Open { path: PathBuf, source: io::Error },
    /// A device without host memory of its own.
    #[error("offload to host memory of the device: {device} has none; name a folder")]
    NoHostMemory { device: String },
    /// A store without enough room.
    #[error("offload to {store}: no room for {bytes} bytes: {source}; free as much, or name another folder")]
    Full { store: String, bytes: u64, source: io::Error },
    /// Bytes that cannot be read or written.
    #[error("offload to {store}: {what} {bytes} bytes at {at}: {source}; start again from the last checkpoint")]
    Io { store: String, what: &'static str, bytes: u64, at: u64, source: io::Error },
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
    /// The bytes that were moved since an earlier time.
    pub fn since(self, before: Self) -> Self {
        Self { read: self.read - before.read, written: self.written - before.written, room: self.room }
    }
}
