//! Work that comes again is queued as one graph: fewer launches in a steady step.
//!
//! ```text
//! the device's calls ─▶ pieces of each stream ─ cut where somebody waits, or after 64 ─▶ new: call by call
//!                                                                                      ├▶ seen before: captured, and queued
//!                                                                                      └▶ captured: the graph, by one launch
//! ```
//! A step does the same work at the same addresses as the step before, as long as its allocations are the same and numbers that change from step to
//! step (the step of an optimizer, the key of a dropout) are no arguments of it. Work is the same if every kernel, size, address and number is: nothing is
//! patched, so a graph can do nothing but what its calls did. What differs is queued call by call, as without graphs, and [counted](Counts).
//!
//! Several ranks may use it, each with its own streams. A piece of work is held back until it is cut, so a later call reports the error of an earlier one, as
//! with all queued work.

use crate::driver::{
    Address, Argument, Driver, Event, Graph, Known, Place, Product, Properties, Reach, Remote, Result, Stream, Work,
    check_arguments,
};
use meshwork_kernels::{Kernel, Launch};
use std::any::Any;
use std::collections::{HashMap, HashSet, hash_map::Entry};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The most pieces of a graph: while the host collects them, the device has the graph before.
const MOST: usize = 64;
/// The fewest: a graph costs as much as some launches.
const FEWEST: usize = 4;
/// Graphs that are kept, and pieces of work that are remembered as seen once.
const GRAPHS: usize = 2048;
const SEEN: usize = 1 << 14;

/// How work was queued since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Kernels, products, copies and fillings that the program asked for: launches without graphs.
    pub asked: u64,
    /// Launches: graphs, and work that was queued call by call.
    pub launches: u64,
    /// Graphs among them.
    pub replayed: u64,
    /// Work that was queued call by call, because it was not seen before: the first steps, and numbers that change.
    pub new: u64,
    /// The same, because there was too little of it between two waits.
    pub short: u64,
    /// The same, because the driver captures no graphs, or there are as many as are kept.
    pub refused: u64,
}

/// A driver that queues repeated work as graphs.
#[derive(Debug)]
pub struct Replaying {
    inner: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pending: HashMap<Stream, Vec<Work>>,
    /// Hashes of work that was queued once. One that is wrong costs a graph that is not used again.
    seen: HashSet<u64>,
    graphs: HashMap<(Stream, Vec<Work>), Graph>,
    counts: Counts,
}

impl Replaying {
    /// The same device, whose repeated work is queued as graphs.
    #[must_use]
    pub fn new(inner: Arc<dyn Driver>) -> Self {
        Self { inner, state: Mutex::default() }
    }

    /// How work was queued so far.
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds a piece of work back, or queues what there is of its stream if that is enough.
    fn add(&self, stream: Stream, work: Work) -> Result<()> {
        let mut state = self.lock();
        let pending = state.pending.entry(stream).or_default();
        pending.push(work);
        if pending.len() < MOST { Ok(()) } else { state.flush(&*self.inner, stream) }
    }

    /// Queues what was held back of a stream.
    fn flush(&self, stream: Stream) -> Result<()> {
        self.lock().flush(&*self.inner, stream)
    }
}

impl State {
    fn flush(&mut self, driver: &dyn Driver, stream: Stream) -> Result<()> {
        let Some(work) = self.pending.remove(&stream).filter(|work| !work.is_empty()) else { return Ok(()) };
        let count = work.iter().filter(|work| work.is_launch()).count() as u64;
        self.counts.asked += count;
        if count < FEWEST as u64 {
            self.counts.short += count;
            return self.call_by_call(driver, stream, &work, count);
        }
        let mut hash = DefaultHasher::new();
        (stream, &work).hash(&mut hash);
        let hash = hash.finish();
        let full = self.graphs.len() >= GRAPHS;
        match self.graphs.entry((stream, work)) {
            Entry::Occupied(known) => {
                self.counts.launches += 1;
                self.counts.replayed += 1;
                driver.replay(stream, *known.get())
            }
            Entry::Vacant(unknown) if self.seen.contains(&hash) && !full => {
                match driver.capture(stream, &unknown.key().1)? {
                    Some(graph) => {
                        unknown.insert(graph);
                        self.counts.launches += 1;
                        self.counts.replayed += 1;
                    }
                    None => {
                        self.counts.launches += count;
                        self.counts.refused += count;
                    }
                }
                Ok(())
            }
            Entry::Vacant(unknown) => {
                let (_, work) = unknown.into_key();
                if full {
                    self.counts.refused += count;
                } else {
                    self.counts.new += count;
                }
                if self.seen.len() >= SEEN {
                    self.seen.clear();
                }
                self.seen.insert(hash);
                self.call_by_call(driver, stream, &work, count)
            }
        }
    }

    fn call_by_call(&mut self, driver: &dyn Driver, stream: Stream, work: &[Work], count: u64) -> Result<()> {
        self.counts.launches += count;
        work.iter().try_for_each(|work| work.queue(driver, stream))
    }

    fn flush_all(&mut self, driver: &dyn Driver) -> Result<()> {
        let streams: Vec<Stream> = self.pending.keys().copied().collect();
        streams.into_iter().try_for_each(|stream| self.flush(driver, stream))
    }
}

/// The device behind a driver that queues graphs.
fn device(driver: &dyn Driver) -> &dyn Driver {
    let any: &dyn Any = driver;
    any.downcast_ref::<Replaying>().map_or(driver, |replaying| &*replaying.inner)
}

impl Driver for Replaying {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn properties(&self) -> &Properties {
        self.inner.properties()
    }

    fn stream(&self) -> Result<Stream> {
        self.inner.stream()
    }

    fn alloc(&self, bytes: usize) -> Result<Address> {
        self.inner.alloc(bytes)
    }

    fn free(&self, at: Address) -> Result<()> {
        // Under the lock: a GPU must not be waited for while another thread captures.
        let mut state = self.lock();
        state.flush_all(&*self.inner)?;
        self.inner.free(at)
    }

    fn alloc_host(&self, bytes: usize) -> Result<Address> {
        self.inner.alloc_host(bytes)
    }

    fn free_host(&self, at: Address) -> Result<()> {
        let mut state = self.lock(); // as in `free`
        state.flush_all(&*self.inner)?;
        self.inner.free_host(at)
    }

    fn save(&self, stream: Stream, from: Address, to: Address, bytes: usize) -> Result<()> {
        self.flush(stream)?;
        self.inner.save(stream, from, to, bytes)
    }

    fn load(&self, stream: Stream, from: Address, to: Address, bytes: usize) -> Result<()> {
        self.flush(stream)?;
        self.inner.load(stream, from, to, bytes)
    }

    fn discard(&self, stream: Stream, at: Address, bytes: usize) -> Result<()> {
        self.add(stream, Work::Discard { at, bytes })
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        self.flush(stream)?;
        self.inner.record(stream)
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.flush(stream)?;
        self.inner.wait(stream, event)
    }

    fn reach(&self, other: &dyn Driver) -> Result<Reach> {
        self.inner.reach(device(other))
    }

    fn wait_for(&self, stream: Stream, other: &dyn Driver, event: Event) -> Result<()> {
        self.flush(stream)?;
        self.inner.wait_for(stream, device(other), event)
    }

    fn copy_between(&self, stream: Stream, from: Remote<'_>, to: Remote<'_>, bytes: usize) -> Result<()> {
        self.flush(stream)?;
        let [from, to] = [from, to].map(|end| Remote { driver: device(end.driver), ..end });
        self.inner.copy_between(stream, from, to, bytes)
    }

    fn finish(&self, event: Event) -> Result<()> {
        self.inner.finish(event)
    }

    fn write(&self, stream: Stream, to: Address, bytes: &[u8]) -> Result<()> {
        self.flush(stream)?;
        self.inner.write(stream, to, bytes)
    }

    fn read(&self, stream: Stream, from: Address, into: &mut [u8]) -> Result<()> {
        self.flush(stream)?;
        self.inner.read(stream, from, into)
    }

    fn copy(&self, stream: Stream, from: Place, to: Place, bytes: usize, rows: usize) -> Result<()> {
        self.add(stream, Work::Copy { from, to, bytes, rows })
    }

    fn zero(&self, stream: Stream, at: Address, bytes: usize) -> Result<()> {
        self.add(stream, Work::Zero { at, bytes })
    }

    fn launch(&self, stream: Stream, kernel: &'static Kernel, launch: Launch, args: &[Argument]) -> Result<()> {
        check_arguments(kernel, args)?;
        self.add(stream, Work::Launch { kernel: Known(kernel), launch, args: args.to_vec() })
    }

    fn product(&self, stream: Stream, product: Product) -> Result<()> {
        self.add(stream, Work::Product(product))
    }

    fn capture(&self, stream: Stream, work: &[Work]) -> Result<Option<Graph>> {
        self.flush(stream)?;
        self.inner.capture(stream, work)
    }

    fn replay(&self, stream: Stream, graph: Graph) -> Result<()> {
        self.flush(stream)?;
        self.inner.replay(stream, graph)
    }
}
