//! Pinned host memory for offloading: its copies have a separate stream, concurrent with computation, batches and
//! collectives.
//!
//! A copy starts after the work queued so far in the compute stream. The compute stream continues concurrently until
//! `wait` is called; the host never waits.

use super::CudaDevice;
use super::memory::{Origin, Pool};
use crate::driver::{self, Address, DriverError, Event, Work};
use meshwork_core::{Buffer, DType};
use meshwork_tensor::pinned::Pinned;
use meshwork_tensor::{Error, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};

const OP: &str = "offload";

/// A rank's pinned memory: consecutive blocks. Each growth adds a block.
#[derive(Debug, Default)]
pub(super) struct Room(Mutex<Vec<Block>>);

#[derive(Clone, Copy, Debug)]
struct Block {
    /// Its first byte in the room.
    first: u64,
    bytes: u64,
    at: Address,
}

impl Room {
    fn blocks(&self) -> MutexGuard<'_, Vec<Block>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the addresses of all blocks, when they are no longer needed.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Address> + use<> {
        std::mem::take(self.0.get_mut().unwrap_or_else(PoisonError::into_inner)).into_iter().map(|block| block.at)
    }

    /// The parts of the range of `bytes` bytes from `at` on: for each its offset in the range, its address and its
    /// length.
    fn parts(&self, at: u64, bytes: usize) -> driver::Result<Vec<(usize, Address, usize)>> {
        let (mut parts, end) = (Vec::new(), at + bytes as u64);
        for block in &*self.blocks() {
            let (from, to) = (at.max(block.first), end.min(block.first + block.bytes));
            if from < to {
                let address = block.at.offset((from - block.first) as usize);
                parts.push(((from - at) as usize, address, (to - from) as usize));
            }
        }
        let there: usize = parts.iter().map(|(_, _, bytes)| bytes).sum();
        if there < bytes {
            let why = format!("{bytes} bytes at {at} lie beyond the room that was reserved");
            return Err(DriverError::Call { call: OP, why });
        }
        Ok(parts)
    }
}

impl CudaDevice {
    /// Queues copies between the room and memory of the device, after the work queued so far in the compute stream.
    /// `copy` creates one copy from a device address, a room address and a length.
    fn parked(
        &self,
        room: u64,
        memory: Address,
        bytes: usize,
        copy: fn(Address, Address, usize) -> Work,
    ) -> Result<u64> {
        let Pool { driver, compute, offload, room: of, .. } = &*self.pool;
        let queue = || {
            driver.wait(*offload, driver.record(*compute)?)?;
            for (first, at, bytes) in of.parts(room, bytes)? {
                driver.queue(*offload, copy(memory.offset(first), at, bytes))?;
            }
            driver.record(*offload)
        };
        Ok(queue().map_err(self.failed(OP))?.0)
    }
}

impl Pinned for CudaDevice {
    fn reserve(&self, bytes: u64) -> Result<()> {
        let mut blocks = self.pool.room.blocks();
        let first = blocks.last().map_or(0, |last| last.first + last.bytes);
        if bytes > first {
            let bytes = bytes - first;
            let at = self.pool.driver.alloc_host(bytes as usize).map_err(self.failed(OP))?;
            blocks.push(Block { first, bytes, at });
        }
        Ok(())
    }

    fn save(&self, from: &Buffer, at: u64) -> Result<u64> {
        let memory = self.place(OP, from)?;
        self.pool.meter.add_download(from.bytes());
        self.parked(at, memory, from.bytes(), |memory, room, bytes| Work::Save { from: memory, to: room, bytes })
    }

    fn load(&self, at: u64, into: &mut Buffer) -> Result<u64> {
        let memory = self.place_mut(OP, into)?;
        self.pool.meter.add_upload(into.bytes());
        self.parked(at, memory, into.bytes(), |memory, room, bytes| Work::Load { from: room, to: memory, bytes })
    }

    fn wait(&self, copy: u64) -> Result<()> {
        let Pool { driver, compute, .. } = &*self.pool;
        driver.wait(*compute, Event(copy)).map_err(self.failed(OP))
    }

    fn read(&self, at: u64, into: &mut Buffer) -> Result<()> {
        let mut copy = self.buffer(DType::U8, into.bytes(), Origin::Compute, false)?;
        self.wait(self.load(at, &mut copy)?)?;
        let copy = self.fetch(&copy)?;
        into.as_bytes_mut().map_err(Error::from)?.copy_from_slice(copy.as_bytes().map_err(Error::from)?);
        Ok(())
    }

    fn write(&self, from: &Buffer, at: u64) -> Result<()> {
        let copy = self.uploaded(from, false)?;
        self.wait(self.save(&copy, at)?)
    }
}
