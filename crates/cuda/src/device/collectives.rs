//! Collectives between ranks that are threads: kernels and copies in the ranks' streams for collectives, ordered by events.
//!
//! A rank's stream waits for the moments at which all members started the operation, does that rank's pieces of it, reading and writing the buffers of
//! the others where they lie, and is waited for by the streams of computation of all members. No thread waits for a device.
//!
//! That holds between ranks that share a [`Driver`](crate::Driver): those on one GPU. Between ranks of several drivers bytes go by way of the host, and the last rank
//! to arrive waits for them; which GPUs can read each other's memory is not asked.

use super::memory::{DeviceMemory, Origin, Pool};
use crate::driver::{Address, Argument, DriverError, Event, Place};
use meshwork_core::comm::device::{Carrier, DeviceWork, Moment, Piece};
use meshwork_kernels::{Kernel, kernel};
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError};

/// A rank's end of its device, for collectives.
#[derive(Debug)]
pub(super) struct Ranks(pub(super) Arc<Pool>);

impl Carrier for Ranks {
    fn moment(&self) -> Result<Moment, String> {
        Ok(self.0.driver.record(self.0.compute).map_err(text)?.0)
    }

    fn carry(&self, work: &DeviceWork) -> Result<Vec<Vec<Moment>>, String> {
        let reduces = work.pieces.iter().any(|piece| piece.sources.len() > 1);
        let kernel = if reduces { Some(reduction(work)?) } else { None };
        let pools = work.members.iter().map(|member| {
            let carrier: &dyn Any = &*member.carrier;
            carrier.downcast_ref::<Ranks>().map(|ranks| &ranks.0)
        });
        let pools = pools.collect::<Option<Vec<_>>>().ok_or("the members' devices are of different kinds")?;
        let entered = vec![false; pools.len()];
        let mut queues = Queues { work, pools, entered, size: work.dtype.size() };
        for (index, piece) in work.pieces.iter().enumerate() {
            queues.piece(kernel, piece, piece.targets.start + index % piece.targets.len())?;
        }
        queues.done().map_err(text)
    }

    fn resume(&self, done: &[Moment]) -> Result<(), String> {
        done.iter().try_for_each(|&moment| self.0.driver.wait(self.0.compute, Event(moment))).map_err(text)
    }
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
    /// Whose stream waits already for all members that it can reach.
    entered: Vec<bool>,
    /// Bytes of an element.
    size: usize,
}

impl Queues<'_> {
    /// Whether two members share a driver, and so a memory.
    fn together(&self, a: usize, b: usize) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.pools[a].driver), Arc::as_ptr(&self.pools[b].driver))
    }

    /// The pool of a member, whose stream begins after all members of its driver have started the operation.
    fn enter(&mut self, member: usize) -> Result<Arc<Pool>, DriverError> {
        let pool = self.pools[member].clone();
        if !std::mem::replace(&mut self.entered[member], true) {
            for other in (0..self.pools.len()).filter(|&other| self.together(member, other)) {
                pool.driver.wait(pool.collectives, Event(self.work.members[other].ready))?;
            }
        }
        Ok(pool)
    }

    /// Queues a piece in the stream of `by`, one of its targets.
    fn piece(&mut self, kernel: Option<&'static Kernel>, piece: &Piece, by: usize) -> Result<(), String> {
        let (work, size, pool) = (self.work, self.size, self.enter(by).map_err(text)?);
        let (driver, stream, bytes) = (&*pool.driver, pool.collectives, piece.count * size);
        let source = |member: usize| Address(work.members[member].source).offset(piece.read_at * size);
        let target = |member: usize| Address(work.members[member].target).offset(piece.write_at * size);
        let (mut scratch, own) = (Vec::new(), target(by));
        let result = match (piece.sources.len(), kernel) {
            (1, _) | (_, None) => {
                let from = piece.sources.start;
                if self.together(by, from) {
                    source(from)
                } else {
                    driver.write(stream, own, &self.read(from, source(from), bytes)?).map_err(text)?;
                    own
                }
            }
            (ranks, Some(kernel)) => {
                let mut places = Vec::with_capacity(ranks);
                for from in piece.sources.clone() {
                    places.push(if self.together(by, from) {
                        source(from).0
                    } else {
                        let copy = pool.memory(bytes, Origin::Collectives, false).map_err(text)?;
                        driver.write(stream, copy.at(), &self.read(from, source(from), bytes)?).map_err(text)?;
                        let at = copy.at().0;
                        scratch.push(copy);
                        at
                    });
                }
                reduce(&pool, kernel, places, own, piece.count)?;
                own
            }
        };
        drop::<Vec<DeviceMemory>>(scratch);
        for member in piece.targets.clone() {
            let to = target(member);
            if self.together(by, member) {
                if to != result {
                    let [from, to] = [result, to].map(|at| Place { at, pitch: 0 });
                    driver.copy(stream, from, to, bytes, 1).map_err(text)?;
                }
            } else {
                let copy = self.read(by, result, bytes)?;
                let pool = self.enter(member).map_err(text)?;
                pool.driver.write(pool.collectives, to, &copy).map_err(text)?;
            }
        }
        Ok(())
    }

    /// A copy in host memory, for which the thread waits.
    fn read(&mut self, member: usize, from: Address, bytes: usize) -> Result<Vec<u8>, String> {
        let pool = self.enter(member).map_err(text)?;
        let mut copy = vec![0; bytes];
        pool.driver.read(pool.collectives, from, &mut copy).map_err(text)?;
        Ok(copy)
    }

    /// For each member, when the streams of its driver are done.
    fn done(&self) -> Result<Vec<Vec<Moment>>, DriverError> {
        let mut done = vec![Vec::new(); self.pools.len()];
        for member in (0..self.pools.len()).filter(|&member| self.entered[member]) {
            let moment = self.pools[member].driver.record(self.pools[member].collectives)?.0;
            let others = done.iter_mut().enumerate().filter(|(other, _)| self.together(member, *other));
            others.for_each(|(_, done)| done.push(moment));
        }
        Ok(done)
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

/// Tables of addresses on the device, which reductions read: written once for each set of buffers, which come again in each step, because the allocator gives
/// the same blocks.
#[derive(Debug, Default)]
pub(super) struct Tables {
    known: HashMap<Vec<u64>, Address>,
    /// Those of a length, the oldest first.
    ages: HashMap<usize, VecDeque<Vec<u64>>>,
}

impl Tables {
    /// Tables of one length that are kept. A program whose buffers never come again writes one of them anew for each reduction.
    const MOST: usize = 1024;

    /// Where these addresses lie. A table that is given up is written again behind what reads it, in the same stream.
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

    /// All of them, when nobody needs them any more.
    pub(super) fn take(&mut self) -> impl Iterator<Item = Address> + use<> {
        std::mem::take(self).known.into_values()
    }
}
