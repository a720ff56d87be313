//! Pinned host memory for offload: copies in a stream of their own, beside computation, batches and
//! collectives.
//!
//! A copy starts after the work queued so far in the compute stream. The compute stream continues concurrently until
//! `wait` is called; the host never waits.

use super::memory::{Origin, Pool};
use super::prelude::*;
use crate::driver::{Event, Work};
use meshwork_tensor::pinned::Pinned;

const OP: &str = "offload";

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
        let Pool { driver, room, .. } = &*self.pool;
        room.reserve(bytes, |bytes| driver.alloc_host(bytes)).map_err(self.failed(OP))
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
