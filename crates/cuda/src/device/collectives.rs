//! Collectives between ranks that are threads: kernels and copies in the ranks' streams for collectives, ordered by
//! events.
//!
//! A rank's stream executes the rank's pieces of an operation, reading and writing the other ranks' buffers in place.
//! The first of these streams waits until all members have started the operation, and one event tells the others; at
//! the end it waits for the others, and one event tells the compute streams of all members. So n members take 4n - 2
//! waits and n + 1 events beside their own, and not n² waits. No thread waits for a device.
//!
//! So it is on one GPU and between several: [`Driver::reach`] says whether kernels of one read the memory of another.
//! Where they do not, the sources of a reduction are copied first, in the same stream.

use super::memory::{DeviceMemory, Origin, Pool};
use super::prelude::*;
use crate::driver::{Argument, Driver, DriverError, Event, Reach, Remote};
use meshwork_core::ReduceOp;
use meshwork_core::comm::device::{Carrier, DeviceWork, Moment, WorkPiece};
use meshwork_kernels::{Kernel, kernel};
use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;

impl Carrier for Pool {
    fn moment(&self) -> Result<u64, String> {
        self.sound().map_err(text)?;
        Ok(self.driver.record(self.compute).map_err(text)?.0)
    }

    fn carry(&self, work: &DeviceWork) -> Result<Vec<Moment>, String> {
        let reduces = work.pieces.iter().any(|piece| piece.sources.len() > 1);
        let kernel = if reduces { Some(reduction(work.dtype, work.reduce)?) } else { None };
        let pools: Vec<_> = work.members.iter().map(|member| pool(&member.ready)).collect::<Result<_, _>>()?;
        let by = |(index, piece): (usize, &WorkPiece)| piece.targets.start + index % piece.targets.len();
        let workers: BTreeSet<usize> = work.pieces.iter().enumerate().map(by).collect();
        let Some(&first) = workers.first() else { return Ok(Vec::new()) };
        let others: Vec<usize> = workers.into_iter().skip(1).collect();
        let queues = Queues { work, pools: &pools, size: work.dtype.size() };
        queues.begin(first, &others).map_err(text)?;
        for (index, piece) in work.pieces.iter().enumerate() {
            queues.piece(kernel, piece, by((index, piece)))?;
        }
        Ok(vec![queues.end(first, &others).map_err(text)?])
    }

    fn resume(&self, done: &[Moment]) -> Result<(), String> {
        done.iter().try_for_each(|moment| {
            let waits = self.driver.wait_for(self.compute, &*pool(moment)?.driver, Event(moment.number));
            // Without the wait, later work would read elements that are not written yet.
            waits.map_err(|fault| text(self.keep(fault)))
        })
    }
}

/// The memory and the streams of a member.
fn pool(of: &Moment) -> Result<Arc<Pool>, String> {
    let carrier: Arc<dyn Any + Send + Sync> = of.carrier.clone();
    carrier.downcast().map_err(|_| "the members' devices are of different kinds".to_owned())
}

/// The kernel that reduces elements of several ranks.
pub(super) fn reduction(dtype: DType, reduce: ReduceOp) -> Result<&'static Kernel, String> {
    let reduce = reduce.name();
    kernel(&format!("reduce_{reduce}_{dtype}"))
        .ok_or_else(|| format!("no kernel reduces {dtype} by {reduce}: f32, f64, bf16, f16, i32, i64 and u8 are valid"))
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

/// The members' streams for collectives.
struct Queues<'a> {
    work: &'a DeviceWork,
    pools: &'a [Arc<Pool>],
    /// Bytes of an element.
    size: usize,
}

impl Queues<'_> {
    fn driver(&self, member: usize) -> &dyn Driver {
        &*self.pools[member].driver
    }

    /// The stream of `first` waits until all members have started the operation; those of `others` wait for it.
    fn begin(&self, first: usize, others: &[usize]) -> Result<(), DriverError> {
        let Pool { driver, collectives, .. } = &*self.pools[first];
        for (member, of) in self.work.members.iter().enumerate() {
            driver.wait_for(*collectives, self.driver(member), Event(of.ready.number))?;
        }
        if others.is_empty() {
            return Ok(());
        }
        let begun = driver.record(*collectives)?;
        others.iter().try_for_each(|&other| {
            let pool = &self.pools[other];
            pool.driver.wait_for(pool.collectives, &**driver, begun)
        })
    }

    /// The moment at which the streams of all are done: that of `first` waits for those of `others`.
    fn end(&self, first: usize, others: &[usize]) -> Result<Moment, DriverError> {
        let Pool { driver, collectives, .. } = &*self.pools[first];
        for &other in others {
            let pool = &self.pools[other];
            driver.wait_for(*collectives, &*pool.driver, pool.driver.record(pool.collectives)?)?;
        }
        let carrier = self.work.members[first].ready.carrier.clone();
        Ok(Moment { carrier, number: driver.record(*collectives)?.0 })
    }

    /// Queues a piece in the stream of `by`, one of its targets: the sources' elements come to `by`, and go from
    /// there to the other targets.
    fn piece(&self, kernel: Option<&'static Kernel>, piece: &WorkPiece, by: usize) -> Result<(), String> {
        let (work, size, pool) = (self.work, self.size, &self.pools[by]);
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
        // A rank that works in place has its own elements already.
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
}

/// Queues a reduction of the elements at `places`.
pub(super) fn reduce(
    pool: &Pool,
    kernel: &'static Kernel,
    places: Vec<u64>,
    out: Address,
    count: usize,
) -> Result<(), String> {
    let ranks = places.len();
    let table = {
        let mut tables = pool.tables.lock().unwrap_or_else(PoisonError::into_inner);
        tables.place(&*pool.driver, pool.collectives, places).map_err(text)?
    };
    let args: [Argument; 4] = [table.into(), ranks.into(), out.into(), count.into()];
    let launch = kernel.geometry.launch(count as u64, 0).ok_or_else(|| format!("no grid has {count} elements"))?;
    pool.driver.launch(pool.collectives, kernel, launch, &args).map_err(text)
}
