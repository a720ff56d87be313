//! The elements of a collective over NCCL, queued in a stream: what NCCL does itself, and our tree by its messages.

use super::collectives::{reduce, reduction};
use super::memory::{Origin, Pool};
use super::prelude::*;
use crate::driver::{Exchange, Message, NcclComm, Stream, Work as Queued};
use meshwork_core::ReduceOp;
use std::result::Result as Outcome;
use std::sync::Arc;

/// The round in which two of n ranks meet, if each round has each rank at most once and all meet in n rounds.
pub(super) fn round(n: usize, one: usize, other: usize) -> usize {
    let rounds = n - 1 + n % 2;
    match (one.min(other), one.max(other)) {
        (low, high) if high == rounds => 2 * low % rounds,
        (low, high) => (low + high) % rounds,
    }
}

/// Where the parts of a buffer lie, in bytes.
pub(super) fn places(counts: &[usize], size: usize) -> Vec<Range<usize>> {
    let mut end = 0;
    let place = |count: &usize| {
        let start = end;
        end += count * size;
        start..end
    };
    counts.iter().map(place).collect()
}

/// A stream of a device, and the communicator whose work it gets.
pub(super) struct Queue<'a> {
    pub(super) pool: &'a Arc<Pool>,
    /// This rank in its group, and the size of that.
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) comm: NcclComm,
    pub(super) stream: Stream,
}

impl Queue<'_> {
    pub(super) fn exchange(&self, exchange: Exchange) -> Outcome<(), String> {
        let driver = &self.pool.driver;
        driver.queue(self.stream, Queued::Exchange { on: self.comm, exchange }).map_err(|fault| self.pool.told(fault))
    }

    fn copy(&self, from: Address, to: Address, bytes: usize) -> Outcome<(), String> {
        if from == to || bytes == 0 {
            return Ok(());
        }
        self.pool.driver.copy(self.stream, from, to, bytes).map_err(|fault| self.pool.told(fault))
    }

    /// Sends each rank its part of `from`, and receives the parts of all into `to`; the own one is copied.
    pub(super) fn all_to_all(
        &self,
        from: Address,
        sent: &[Range<usize>],
        to: Address,
        received: &[Range<usize>],
    ) -> Outcome<(), String> {
        let rank = self.rank;
        self.copy(from.offset(sent[rank].start), to.offset(received[rank].start), sent[rank].len())?;
        let messages = |sends, base: Address, parts: &[Range<usize>]| {
            let of = |(peer, part): (usize, &Range<usize>)| {
                let (at, bytes) = (base.offset(part.start), part.len());
                (peer != rank && bytes > 0).then_some(Message { peer, sends, at, bytes })
            };
            parts.iter().enumerate().filter_map(of).collect::<Vec<_>>()
        };
        self.exchange(Exchange::Messages([messages(true, from, sent), messages(false, to, received)].concat()))
    }

    /// The parts of `bytes` bytes, one for each rank.
    fn parts(&self, bytes: usize, size: usize) -> Vec<Range<usize>> {
        let (n, count) = (self.size, bytes / size);
        (0..n).map(|rank| count * rank / n * size..count * (rank + 1) / n * size).collect()
    }

    /// Reduces this rank's part of the elements at `from` of all ranks, in the balanced tree, to the place that `to`
    /// says. Returns the part.
    pub(super) fn reduce_parts(
        &self,
        from: Address,
        bytes: usize,
        dtype: DType,
        by: ReduceOp,
        to: impl Fn(&Range<usize>) -> Address,
    ) -> Outcome<Range<usize>, String> {
        let (rank, n, pool) = (self.rank, self.size, self.pool);
        let sent = self.parts(bytes, dtype.size());
        let own = sent[rank].clone();
        // One place for each other rank; the memory is released before it is used, which is safe in the same stream.
        let others =
            pool.memory((n * own.len()).max(1), Origin::Collectives, false).map_err(|error| error.to_string())?;
        let received: Vec<_> = (0..n).map(|rank| rank * own.len()..(rank + 1) * own.len()).collect();
        self.all_to_all(from, &sent, others.at(), &received)?;
        if !own.is_empty() {
            let places = received.iter().map(|part| others.at().offset(part.start).0).collect();
            reduce(pool, reduction(dtype, by)?, places, to(&own), own.len() / dtype.size())?;
        }
        Ok(own)
    }

    /// Sends this rank's part of the bytes at `at` to all ranks, and receives theirs.
    pub(super) fn share(&self, at: Address, bytes: usize, size: usize, own: Range<usize>) -> Outcome<(), String> {
        let parts = self.parts(bytes, size);
        self.all_to_all(at, &vec![own; parts.len()], at, &parts)
    }
}
