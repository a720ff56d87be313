//! Queues repeated work as one graph, which saves launches in a steady step.
//!
//! ```text
//! the device's calls ─▶ pieces of each stream ─ cut at waits, or after 64 ─────────────▶ new: call by call
//!                                                                                      ├▶ seen before: captured, and queued
//!                                                                                      └▶ captured: numbers that differ set anew, then one launch
//! ```
//! A step does the same work at the same addresses as the step before, as long as its allocations are the same. Work is
//! the same if every kernel, grid and address is. Numbers that kernels take by value may differ: the step of an
//! optimizer, the key of a dropout. A graph gets those that changed before it is launched. Work that differs otherwise
//! is queued call by call, as without graphs, and [counted](Launches) with the reason.
//!
//! Several ranks may use it, each with its own streams. Work is held back until a piece is complete, so a later call
//! reports the error of an earlier one, as with all queued work.

use crate::driver::{
    Address, Argument, Driver, DriverError, Event, Graph, Nccl, Priority, Properties, Reach, Remote, Result, Stream,
    Watch, Work,
};
use meshwork_core::pass_on;
use meshwork_tensor::Launches;
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Most pieces of a graph: while the host collects them, the device runs the previous graph.
const MOST: usize = 64;
/// Fewest pieces of a graph, because a graph costs as much as several launches.
const FEWEST: usize = 4;
/// Number of cached graphs, and of remembered pieces of work that were seen once.
const GRAPHS: usize = 2048;
const SEEN: usize = 1 << 14;

/// A driver that queues repeated work as graphs.
#[derive(Debug)]
pub struct Replaying {
    inner: Arc<dyn Driver>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pending: HashMap<Stream, Vec<Work>>,
    /// Hashes of work that was queued once. A collision costs only a graph that is not used again.
    seen: HashSet<u64>,
    graphs: HashMap<(Stream, Repeated), Captured>,
    counts: HashMap<Stream, Launches>,
    /// The error of held-back work that could not be queued. The work is lost, so every later call returns this error.
    fault: Option<DriverError>,
}

/// Pieces of work, equal to others if they differ only in numbers.
#[derive(Debug)]
struct Repeated(Vec<Work>);

/// A graph, with the current arguments of its kernels.
#[derive(Debug)]
struct Captured {
    graph: Graph,
    args: Vec<Vec<Argument>>,
}

/// An argument without its number.
fn outline(of: &Argument) -> Argument {
    match *of {
        Argument::Number(of, _) => Argument::Number(of, 0),
        place @ Argument::Place(_) => place,
    }
}

/// The arguments of a kernel; none for other work.
fn args(of: &Work) -> &[Argument] {
    if let Work::Launch { args, .. } = of { args } else { &[] }
}

impl Hash for Repeated {
    fn hash<H: Hasher>(&self, state: &mut H) {
        for work in &self.0 {
            match work {
                Work::Launch { kernel, launch, args } => {
                    (kernel, launch).hash(state);
                    args.iter().for_each(|arg| outline(arg).hash(state));
                }
                other => other.hash(state),
            }
        }
    }
}

impl PartialEq for Repeated {
    fn eq(&self, other: &Self) -> bool {
        let same = |(a, b): (&Work, &Work)| match (a, b) {
            (Work::Launch { kernel, launch, args }, Work::Launch { kernel: other, launch: grid, args: others }) => {
                (kernel, launch) == (other, grid) && args.iter().map(outline).eq(others.iter().map(outline))
            }
            (a, b) => a == b,
        };
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(same)
    }
}

impl Eq for Repeated {}

impl Replaying {
    /// The same device, whose repeated work is queued as graphs.
    #[must_use]
    pub fn new(inner: Arc<dyn Driver>) -> Self {
        Self { inner, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues the held-back calls of a stream, and returns the locked state. A caller that queues its own calls keeps
    /// the guard meanwhile: a buffer dropped by another thread queues a wait, which must not get into a stream that is
    /// being captured.
    fn flushed(&self, stream: Stream) -> Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        state.flush(&*self.inner, stream)?;
        Ok(state)
    }
}

impl State {
    fn healthy(&self) -> Result<()> {
        self.fault.clone().map_or(Ok(()), Err)
    }

    fn flush(&mut self, driver: &dyn Driver, stream: Stream) -> Result<()> {
        self.healthy()?;
        self.queue(driver, stream).inspect_err(|fault| self.fault = Some(fault.clone()))
    }

    fn queue(&mut self, driver: &dyn Driver, stream: Stream) -> Result<()> {
        let Some(work) = self.pending.remove(&stream).filter(|work| !work.is_empty()) else { return Ok(()) };
        let count = work.iter().filter(|work| work.is_launch()).count() as u64;
        let counts = self.counts.entry(stream).or_default();
        counts.asked += count;
        if count < FEWEST as u64 {
            counts.short += count;
            counts.launches += count;
            return call_by_call(driver, stream, work);
        }
        let key = (stream, Repeated(work));
        if let Some(known) = self.graphs.get_mut(&key) {
            counts.launches += 1;
            counts.graphs += 1;
            return known.replay(driver, stream, &key.1.0, &mut counts.changed);
        }
        let mut hash = DefaultHasher::new();
        key.hash(&mut hash);
        let full = self.graphs.len() >= GRAPHS;
        if self.seen.len() >= SEEN {
            self.seen.clear();
        }
        let first = self.seen.insert(hash.finish());
        if full || first {
            counts.launches += count;
            *(if full { &mut counts.refused } else { &mut counts.new }) += count;
            return call_by_call(driver, stream, key.1.0);
        }
        match driver.capture(stream, &key.1.0)? {
            Some(graph) => {
                counts.launches += 1;
                counts.graphs += 1;
                counts.captured += 1;
                let args = key.1.0.iter().map(|work| args(work).to_vec()).collect();
                self.graphs.insert(key, Captured { graph, args });
            }
            None => {
                counts.launches += count;
                counts.refused += count;
            }
        }
        Ok(())
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

impl Captured {
    /// Queues the graph with the numbers of `work`; adds to `count` the number of kernels whose numbers changed.
    fn replay(&mut self, driver: &dyn Driver, stream: Stream, work: &[Work], count: &mut u64) -> Result<()> {
        let differs = |&(at, new): &(usize, &[Argument])| self.args[at] != new;
        let changed: Vec<_> = work.iter().map(args).enumerate().filter(differs).collect();
        *count += changed.len() as u64;
        driver.replay(stream, self.graph, &changed)?;
        changed.into_iter().for_each(|(at, new)| self.args[at] = new.to_vec());
        Ok(())
    }
}

fn call_by_call(driver: &dyn Driver, stream: Stream, work: Vec<Work>) -> Result<()> {
    work.into_iter().try_for_each(|work| driver.queue(stream, work))
}

impl Driver for Replaying {
    pass_on! {
        self.inner =>
        fn name(&self) -> &str;
        fn properties(&self) -> &Properties;
        fn stream_with(&self, priority: Priority) -> Result<Stream>;
        fn alloc(&self, bytes: usize) -> Result<Address>;
        fn alloc_host(&self, bytes: usize) -> Result<Address>;
        fn finish(&self, event: Event) -> Result<()>;
        fn nccl(&self) -> Result<&dyn Nccl>;
        fn watch(&self, watch: Weak<dyn Watch>);
    }

    fn free_all(&self, all: &[Address]) -> Result<()> {
        // Under the lock, because nobody may wait for a GPU while another thread captures.
        let mut state = self.lock();
        state.flush_all(&*self.inner)?;
        self.inner.free_all(all)
    }

    fn free_host(&self, at: Address) -> Result<()> {
        let mut state = self.lock(); // as in `free_all`
        state.flush_all(&*self.inner)?;
        self.inner.free_host(at)
    }

    /// Holds work back until its stream has enough for a graph. Copies of pinned memory are in no graph.
    fn queue(&self, stream: Stream, work: Work) -> Result<()> {
        work.check()?;
        if matches!(work, Work::Save { .. } | Work::Load { .. }) {
            let _held = self.flushed(stream)?;
            return self.inner.queue(stream, work);
        }
        let mut state = self.lock();
        state.healthy()?;
        let pending = state.pending.entry(stream).or_default();
        pending.push(work);
        if pending.len() < MOST { Ok(()) } else { state.flush(&*self.inner, stream) }
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        let _held = self.flushed(stream)?;
        self.inner.record(stream)
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        let _held = self.flushed(stream)?;
        self.inner.wait(stream, event)
    }

    fn reach(&self, other: &dyn Driver) -> Result<Reach> {
        self.inner.reach(device(other))
    }

    fn wait_for(&self, stream: Stream, other: &dyn Driver, event: Event) -> Result<()> {
        let _held = self.flushed(stream)?;
        self.inner.wait_for(stream, device(other), event)
    }

    fn copy_between(&self, stream: Stream, from: Remote<'_>, to: Remote<'_>, bytes: usize) -> Result<()> {
        let _held = self.flushed(stream)?;
        let [from, to] = [from, to].map(|end| Remote { driver: device(end.driver), ..end });
        self.inner.copy_between(stream, from, to, bytes)
    }

    fn write(&self, stream: Stream, to: Address, bytes: &[u8]) -> Result<()> {
        let _held = self.flushed(stream)?;
        self.inner.write(stream, to, bytes)
    }

    fn read_all(&self, stream: Stream, places: &mut [(Address, &mut [u8])]) -> Result<()> {
        drop(self.flushed(stream)?); // other threads continue while this one waits
        self.inner.read_all(stream, places)
    }

    fn capture(&self, stream: Stream, work: &[Work]) -> Result<Option<Graph>> {
        let _held = self.flushed(stream)?;
        self.inner.capture(stream, work)
    }

    fn replay(&self, stream: Stream, graph: Graph, changed: &[(usize, &[Argument])]) -> Result<()> {
        let _held = self.flushed(stream)?;
        self.inner.replay(stream, graph, changed)
    }

    fn launches(&self, streams: &[Stream]) -> Option<Launches> {
        let counts = &self.lock().counts;
        let of = |stream: &Stream| counts.get(stream).copied();
        Some(streams.iter().filter_map(of).fold(Launches::default(), |sum, of| sum + of))
    }
}
