//! Collectives between ranks that are threads: kernels and copies in the ranks' streams for collectives, ordered by
//! events.
//!
//! A rank's stream waits until all members have started the operation, then executes the rank's pieces of it, reading
//! and writing the other ranks' buffers in place. The compute streams of all members wait for it. No thread waits for a
//! device.
//!
//! This works on one GPU and between several: [`Driver::reach`] tells whether kernels of one GPU can read the memory of
//! another. If not, the inputs of a reduction are copied first, in the same stream.

use super::memory::{DeviceMemory, Origin, Pool};
use crate::driver::{Address, Argument, Driver, DriverError, Event, Reach, Remote};
use meshwork_core::comm::device::{Carrier, DeviceWork, Moment, Piece};
use meshwork_kernels::{Kernel, kernel};
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError};

/// A rank's access to its device, for collectives.
#[derive(Debug)]
pub(super) struct Ranks(pub(super) Arc<Pool>);

impl Carrier for Ranks {
    fn moment(&self) -> Result<u64, String> {
        self.0.sound().map_err(text)?;
        Ok(self.0.driver.record(self.0.compute).map_err(text)?.0)
    }

    fn carry(&self, work: &DeviceWork) -> Result<Vec<Moment>, String> {
        let reduces = work.pieces.iter().any(|piece| piece.sources.len() > 1);
        let kernel = if reduces { Some(reduction(work)?) } else { None };
        let pools = work.members.iter().map(|member| pool(&member.ready)).collect::<Result<Vec<_>, _>>()?;
        let entered = vec![false; pools.len()];
        let mut queues = Queues { work, pools, entered, size: work.dtype.size() };
        for (index, piece) in work.pieces.iter().enumerate() {
            queues.piece(kernel, piece, piece.targets.start + index % piece.targets.len())?;
        }
        queues.done().map_err(text)
    }

    fn resume(&self, done: &[Moment]) -> Result<(), String> {
        let Pool { driver, compute, .. } = &*self.0;
        done.iter().try_for_each(|moment| {
            let waits = driver.wait_for(*compute, &*pool(moment)?.driver, Event(moment.number));
            // Without the wait, later work would read data that is not written yet.
            waits.map_err(|fault| text(self.0.keep(fault)))
        })
    }
}

/// The pool of a rank's device.
fn pool(of: &Moment) -> Result<&Arc<Pool>, String> {
    let carrier: &dyn Any = &*of.carrier;
    let ranks = carrier.downcast_ref::<Ranks>();
    ranks.map(|ranks| &ranks.0).ok_or_else(|| "the members' devices are of different kinds".to_owned())
}

/// The kernel that reduces elements of several ranks.
fn reduction(work: &DeviceWork) -> Result<&'static Kernel, String> {
    let (dtype, reduce) = (work.dtype, work.reduce.name());
    kernel(&format!("reduce_{reduce}_{dtype}"))
        .ok_or_else(|| format!("no kernel reduces {dtype} by {reduce}: f32, f64, bf16, f16, i32, i64 and u8 are valid"))
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

/// The streams for collectives of the members of an operation.
struct Queues<'a> {
    work: &'a DeviceWork,
    pools: Vec<&'a Arc<Pool>>,
    /// The members whose streams already wait for all members.
    entered: Vec<bool>,
    /// Bytes of an element.
    size: usize,
}

impl<'a> Queues<'a> {
    fn driver(&self, member: usize) -> &'a dyn Driver {
        &*self.pools[member].driver
    }

    /// The pool of a member. Its stream first waits until all members have started the operation.
    fn enter(&mut self, member: usize) -> Result<&'a Arc<Pool>, DriverError> {
        let pool = self.pools[member];
        if !std::mem::replace(&mut self.entered[member], true) {
            for (other, of) in self.work.members.iter().enumerate() {
                pool.driver.wait_for(pool.collectives, self.driver(other), Event(of.ready.number))?;
            }
        }
        Ok(pool)
    }

    /// Queues a piece in the stream of `by`, one of its targets: data of the sources goes to `by`, and from there to
    /// the other targets.
    fn piece(&mut self, kernel: Option<&'static Kernel>, piece: &Piece, by: usize) -> Result<(), String> {
        let (work, size, pool) = (self.work, self.size, self.enter(by).map_err(text)?);
        let bytes = piece.count * size;
        let source = |member: usize| Address(work.members[member].source).offset(piece.read_at * size);
        let target = |member: usize| Address(work.members[member].target).offset(piece.write_at * size);
        let own = target(by);
        let unreduced = match (piece.sources.len(), kernel) {
            (1, _) | (_, None) => {
                let from = piece.sources.start;
                self.copy(by, (from, source(from)), (by, own), bytes)?;
                Some(source(from))
            }
            (ranks, Some(kernel)) => {
                let (mut places, mut copies) = (Vec::with_capacity(ranks), Vec::new());
                for from in piece.sources.clone() {
                    places.push(self.readable(by, (from, source(from)), bytes, &mut copies)?.0);
                }
                reduce(pool, kernel, places, own, piece.count)?;
                None
            }
        };
        // A rank that contributes its data in place already has it.
        let others = piece.targets.clone().filter(|&member| member != by && Some(target(member)) != unreduced);
        others.into_iter().try_for_each(|member| self.copy(by, (by, own), (member, target(member)), bytes))
    }

    /// Bytes of a member at an address that a kernel of `by` can read: in place, or in a copy. The copy's memory is
    /// released before it is used, which is safe in the same stream.
    fn readable(
        &self,
        by: usize,
        from: (usize, Address),
        bytes: usize,
        copies: &mut Vec<DeviceMemory>,
    ) -> Result<Address, String> {
        match self.driver(by).reach(self.driver(from.0)).map_err(text)? {
            Reach::Direct => Ok(from.1),
            Reach::Copies => {
                let copy = self.pools[by].memory(bytes, Origin::Collectives, false).map_err(text)?;
                let at = copy.at();
                copies.push(copy);
                self.copy(by, from, (by, at), bytes)?;
                Ok(at)
            }
        }
    }

    /// Queues a copy in the stream of `by` between memory of members, unless source and destination are the same.
    fn copy(&self, by: usize, from: (usize, Address), to: (usize, Address), bytes: usize) -> Result<(), String> {
        if from.1 == to.1 {
            return Ok(());
        }
        let (driver, stream) = (self.driver(by), self.pools[by].collectives);
        let [from, to] = [from, to].map(|(member, at)| Remote { driver: self.driver(member), at });
        let is_own = |end: &Remote<'_>| std::ptr::addr_eq(end.driver, driver);
        let queued = if is_own(&from) && is_own(&to) {
            driver.copy(stream, from.at, to.at, bytes)
        } else {
            driver.copy_between(stream, from, to, bytes)
        };
        queued.map_err(text)
    }

    /// The moments at which the streams are done.
    fn done(&self) -> Result<Vec<Moment>, DriverError> {
        let entered = self.work.members.iter().zip(&self.pools).zip(&self.entered).filter(|(_, entered)| **entered);
        let done = entered.map(|((member, pool), _)| {
            let number = pool.driver.record(pool.collectives)?.0;
            Ok(Moment { carrier: member.ready.carrier.clone(), number })
        });
        done.collect()
    }
}

/// Queues a reduction of the elements at `places`.
fn reduce(pool: &Pool, kernel: &'static Kernel, places: Vec<u64>, out: Address, count: usize) -> Result<(), String> {
    let ranks = places.len();
    let table = pool.tables.lock().unwrap_or_else(PoisonError::into_inner).place(pool, places).map_err(text)?;
    let args: [Argument; 4] = [table.into(), ranks.into(), out.into(), count.into()];
    let launch = kernel.geometry.launch(count as u64, 0).ok_or_else(|| format!("no grid has {count} elements"))?;
    pool.driver.launch(pool.collectives, kernel, launch, &args).map_err(text)
}

/// Tables of addresses on the device, which reductions read: written once for each set of buffers. The sets recur in
/// each step, because the allocator returns the same blocks.
#[derive(Debug, Default)]
pub(super) struct Tables {
    known: HashMap<Vec<u64>, Address>,
    /// The tables of each length, the oldest first.
    ages: HashMap<usize, VecDeque<Vec<u64>>>,
}

impl Tables {
    /// Number of cached tables per length. A program whose buffers never recur rewrites one of them for each reduction.
    const MOST: usize = 1024;

    /// The table of these addresses. An evicted table is overwritten after its last reader, in the same stream.
    fn place(&mut self, pool: &Pool, places: Vec<u64>) -> Result<Address, DriverError> {
        if let Some(known) = self.known.get(&places) {
            return Ok(*known);
        }
        let bytes: Vec<u8> = places.iter().flat_map(|place| place.to_le_bytes()).collect();
        let ages = self.ages.entry(places.len()).or_default();
        let oldest = if ages.len() < Self::MOST { None } else { ages.pop_front() };
        let at = match oldest.and_then(|oldest| self.known.remove(&oldest)) {
            Some(at) => at,
            None => pool.driver.alloc(bytes.len())?,
        };
        pool.driver.write(pool.collectives, at, &bytes)?;
        ages.push_back(places.clone());
        self.known.insert(places, at);
        Ok(at)
    }

    /// Removes all tables, when they are no longer needed.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Address> + use<> {
        std::mem::take(self).known.into_values()
    }
}
