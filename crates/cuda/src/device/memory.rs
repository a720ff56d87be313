//! Memory of a device, which the host cannot read, from a caching allocator.
//!
//! A block returns to the allocator when its last buffer is dropped, even if the device still works on it. This is
//! safe, because the next owner's work is queued later in the same stream. A block that another stream wrote first
//! keeps an event for which this stream must wait. Blocks are cut from segments, and joined again, in `blocks.rs`; at
//! the limit, segments that nobody uses go back to the driver, in one call.

use super::address_tables::AddressTables;
use super::blocks::{Block, Blocks};
use super::prelude::*;
use super::room::Room;
use crate::driver::{Driver, DriverError, Priority, Stream, Watched};
use meshwork_core::comm::device::DevicePlace;
use meshwork_core::{CommError, Memory};
use meshwork_tensor::{Category, Meter};
use std::sync::{Arc, MutexGuard, OnceLock};

/// The stream that writes a block first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Kernels.
    Compute,
    /// Copies from the host.
    Copies,
    /// Collectives, the only users of such a block.
    Collectives,
}

/// The memory and the streams of a device.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) compute: Stream,
    pub(super) copies: Stream,
    pub(super) collectives: Stream,
    /// Copies for offload.
    pub(super) offload: Stream,
    pub(super) meter: Arc<Meter>,
    /// By the stream that writes them first.
    free: Mutex<[Blocks; 3]>,
    /// Addresses that kernels of collectives take.
    pub(super) tables: Mutex<AddressTables>,
    /// The pinned memory of offload.
    pub(super) room: Room,
    /// The first error without a caller to return it to, as while a buffer was dropped.
    fault: OnceLock<DriverError>,
    /// Who knows of other processes that take part in the work.
    pub(super) watched: Watched,
}

/// A block owned by buffers.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    pool: Arc<Pool>,
    at: Address,
    bytes: usize,
    origin: Origin,
    /// The category and the bytes that the meter counts; none for memory that the device needs for itself.
    counted: Option<(Category, usize)>,
}

impl Pool {
    pub(super) fn new(driver: Arc<dyn Driver>) -> Result<Self, DriverError> {
        let (compute, copies) = (driver.stream()?, driver.stream()?);
        let collectives = driver.stream_with(Priority::Highest)?;
        let offload = driver.stream()?;
        let free = Mutex::new([(); 3].map(|()| Blocks::new(driver.properties().granule)));
        let (meter, tables, room) = (Arc::default(), Mutex::default(), Room::default());
        let (fault, watched) = (OnceLock::new(), Watched::default());
        Ok(Self { driver, compute, copies, collectives, offload, meter, free, tables, room, fault, watched })
    }

    /// Stores an error that cannot be returned now: every later use of the device returns the first such error.
    pub(super) fn keep(&self, fault: DriverError) -> DriverError {
        self.fault.get_or_init(|| fault).clone()
    }

    /// Checks that no error was stored.
    pub(super) fn sound(&self) -> Result<(), DriverError> {
        self.fault.get().map_or(Ok(()), |fault| Err(fault.clone()))
    }

    /// The error that the device reports for an error of the driver. For an error of communication the control group is
    /// asked first, and its answer is reported if it has one. Ranks that are threads have no control group.
    pub(super) fn reason(&self, fault: DriverError) -> DriverError {
        match (&fault, self.watched.get()) {
            (DriverError::Comm { .. }, Some(watch)) => watch.reason(fault),
            _ => fault,
        }
    }

    /// The words of that error.
    pub(super) fn told(&self, fault: DriverError) -> String {
        self.reason(fault).to_string()
    }

    fn free(&self) -> MutexGuard<'_, [Blocks; 3]> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory of at least `bytes` bytes, for work queued in the stream of `origin` from now on. If `counted`, the meter
    /// counts it in the current category.
    pub(super) fn memory(
        self: &Arc<Self>,
        bytes: usize,
        origin: Origin,
        counted: bool,
    ) -> meshwork_tensor::Result<DeviceMemory> {
        let counted = if counted { Some((self.meter.grow(bytes)?, bytes)) } else { None };
        match self.take(Blocks::size(bytes), origin) {
            Ok(Block { at, bytes, .. }) => Ok(DeviceMemory { pool: self.clone(), at, bytes, origin, counted }),
            Err(fault) => {
                if let Some((category, bytes)) = counted {
                    self.meter.shrink(bytes, category);
                }
                Err(self.refused("alloc", counted.map_or_else(Category::default, |(category, _)| category), fault))
            }
        }
    }

    /// The error of a call that the driver refused. If there is no memory for it, the error lists the memory in use.
    pub(super) fn refused(&self, op: &'static str, category: Category, fault: DriverError) -> Error {
        let (device, fault) = (self.driver.name().to_owned(), self.reason(fault));
        match fault {
            DriverError::OutOfMemory { bytes, .. } => {
                let held = Box::new(self.meter.live());
                Error::OutOfMemory { device, bytes: bytes as u64, category, fault: fault.into(), held }
            }
            DriverError::Stopped { site, fault } => CommError::Stopped { site, fault }.into(),
            fault => Error::Device { op, device, fault: fault.into() },
        }
    }

    fn take(&self, bytes: usize, origin: Origin) -> Result<Block, DriverError> {
        let mut free = self.free();
        if let Some(block) = free[origin as usize].take(bytes) {
            if let Some(done) = block.done {
                self.driver.wait(self.copies, done)?;
            }
            return Ok(block);
        }
        let (at, segment) = self.segment(bytes, origin, &mut free)?;
        Ok(free[origin as usize].add(at, segment, bytes))
    }

    /// A new segment for a block of `bytes` bytes, and its size. If there is no memory for it, segments that nobody
    /// uses are given back: as many as the block needs, and then, because free memory of a device may lie in pieces,
    /// all.
    fn segment(&self, bytes: usize, origin: Origin, free: &mut [Blocks; 3]) -> Result<(Address, usize), DriverError> {
        let segment = free[origin as usize].segment(bytes);
        let mut enough = bytes;
        loop {
            let alloc = |size| self.driver.alloc(size).map(|at| (at, size));
            let full = match alloc(segment) {
                Err(DriverError::OutOfMemory { .. }) => match alloc(bytes) {
                    Err(full @ DriverError::OutOfMemory { .. }) => full,
                    block => return block,
                },
                segment => return segment,
            };
            if self.give_back(enough, free)? == 0 {
                return Err(full);
            }
            enough = usize::MAX;
        }
    }

    /// Gives unused segments back, the largest first, until they have `enough` bytes. Returns their bytes.
    fn give_back(&self, enough: usize, free: &mut [Blocks; 3]) -> Result<usize, DriverError> {
        let unused = |of: usize| free[of].unused().map(move |(bytes, at)| (bytes, at, of));
        let mut unused: Vec<_> = (0..free.len()).flat_map(unused).collect();
        unused.sort_unstable();
        let (mut bytes, mut given) = (0, Vec::new());
        for (size, at, of) in unused.into_iter().rev() {
            if bytes >= enough {
                break;
            }
            free[of].forget(at);
            given.push(at);
            bytes += size;
        }
        if bytes > 0 {
            self.driver.free_all(&given)?;
        }
        Ok(bytes)
    }

    /// Takes back memory whose last work is queued in the stream of computation, or of collectives.
    fn retire(&self, at: Address, bytes: usize, origin: Origin) -> Result<(), DriverError> {
        let last = if origin == Origin::Collectives { self.collectives } else { self.compute };
        self.driver.discard(last, at, bytes)?;
        let done = match origin {
            Origin::Compute | Origin::Collectives => None,
            Origin::Copies => Some(self.driver.record(self.compute)?),
        };
        self.free()[origin as usize].give(Block { at, bytes, done });
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let free = self.free.get_mut().unwrap_or_else(PoisonError::into_inner);
        let tables = self.tables.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let all: Vec<Address> = free.iter_mut().flat_map(Blocks::drain).chain(tables).collect();
        _ = self.driver.free_all(&all); // a device that failed keeps its memory
        for at in self.room.take() {
            _ = self.driver.free_host(at);
        }
    }
}

impl DeviceMemory {
    pub(super) fn at(&self) -> Address {
        self.at
    }

    /// Whether it belongs to the device of this pool.
    pub(super) fn is_of(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }
}

impl Memory for DeviceMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn on_device(&self) -> Option<DevicePlace> {
        Some(DevicePlace { carrier: self.pool.clone(), at: self.at.0 })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some((category, bytes)) = self.counted {
            self.pool.meter.shrink(bytes, category);
        }
        if let Err(fault) = self.pool.retire(self.at, self.bytes, self.origin) {
            self.pool.keep(fault);
        }
    }
}
