//! Sums of gradients that are no all-reduce: of each rank's compressed part.

use crate::VectorError;
use meshwork_core::{Buffer, Group, Pending};
use std::fmt::Debug;

/// How the first round of a bucket is summed, in place of an all-reduce or a reduce-scatter. A sum begins with one
/// communication, which overlaps with backward; what it brings is turned into the sum later, in the order of the
/// buckets, with further communication.
///
/// Every rank of the round has one of the same kind.
pub trait Sum: Debug + Send {
    /// Begins the step or update of this number. False: this one is summed without it.
    fn begin(&mut self, number: u64) -> bool;

    /// Starts the sum of `gradients`, this rank's part.
    ///
    /// # Errors
    /// A failed communication, as a [`CommError`](meshwork_core::CommError), or a failure of the device.
    fn start(&mut self, group: &Group, gradients: Buffer) -> Result<Pending, VectorError>;

    /// Turns what was received into the sum; with [`scatter`](crate::Bucket::scatter) into this rank's slice of it,
    /// padding included.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    fn finish(&mut self, group: &Group, received: Buffer) -> Result<Buffer, VectorError>;

    /// Its states between sums, by name.
    fn states_mut(&mut self) -> Vec<(&'static str, &mut Buffer)> {
        Vec::new()
    }
}
