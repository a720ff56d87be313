//! A device in host memory, for machines without a GPU: it runs the kernels compiled by g++
//! ([`meshwork_kernels::host`]).
//!
//! Work is queued as on a GPU, and runs when somebody waits for it or when chance has it run earlier; what another
//! process needs runs without a wait. Which stream goes on is drawn from a seed, within what streams and events permit:
//! a host program that lacks a wait gets wrong numbers in some orders. Memory that was not written, or whose owner is
//! gone, holds NaN; writes beyond an allocation and addresses in none are errors.
//!
//! Several devices are one machine ([`Emulator::machine`]): one seed orders the streams of all, and work that uses the
//! memory of another device is an error unless the two are peers and access was requested ([`Driver::reach`]).
//!
//! It does not show time, nor work that runs at the same time. Two pieces of work that no event orders run one
//! after the other. A kernel that goes wrong in the way of a host program, by a division by zero or an address that it
//! has read itself, ends the process.

mod hub;
mod memory;
mod nccl;
mod order;
mod processes;
mod work;

use crate::driver::{
    Address, Argument, Driver, DriverError, Event, Graph, Nccl, NcclComm, Priority, Properties, Reach, Remote, Result,
    Stream, UniqueId, Watch, Watched, Work,
};
use memory::HOST;
use meshwork_kernels::Launch;
use processes::Between;
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use work::{Queued, State};

pub use meshwork_kernels::host::{Host, HostError};
pub use order::Order;

/// An emulated device. A clone is the same device.
#[derive(Clone, Debug)]
pub struct Emulator {
    properties: Properties,
    machine: Arc<Machine>,
    /// The communicators of NCCL, where their ranks are in several processes.
    between: Option<Arc<Between>>,
    watched: Arc<Watched>,
}

/// The state that the devices of a machine share.
#[derive(Debug)]
struct Machine {
    state: Mutex<State>,
    /// Notified when work is queued or has run, for hosts that wait in a collective for other ranks.
    queued: Condvar,
    /// Whether two devices can be peers.
    peers: fn(usize, usize) -> bool,
    /// Captured work, by number.
    graphs: Mutex<Vec<Vec<Work>>>,
}

impl Emulator {
    /// A device of `memory` bytes that runs `kernels`.
    pub fn new(kernels: Arc<Host>, memory: u64, order: Order) -> Self {
        let machine = Machine::new(kernels, order, 1, |_, _| true);
        Self::numbered(machine, memory, 0)
    }

    /// `devices` devices of one machine, each of `memory` bytes. `peers` says which pairs can read each other's memory.
    pub fn machine(
        kernels: Arc<Host>,
        memory: u64,
        order: Order,
        devices: usize,
        peers: fn(usize, usize) -> bool,
    ) -> Vec<Self> {
        let machine = Machine::new(kernels, order, devices, peers);
        (0..devices).map(|ordinal| Self::numbered(machine.clone(), memory, ordinal)).collect()
    }

    fn numbered(machine: Arc<Machine>, memory: u64, ordinal: usize) -> Self {
        let (name, architecture) = ("emulated in host memory".to_owned(), "emulated".to_owned());
        let shared = 227 << 10; // as on an H100
        Self {
            properties: Properties { name, ordinal, memory, shared, granule: 1, architecture },
            machine,
            between: None,
            watched: Arc::default(),
        }
    }

    /// The same device with an allocation granularity of `bytes`, as a GPU has one. By default an allocation has
    /// exactly the requested size, so that a write beyond its end is found.
    #[must_use]
    pub fn granule(mut self, bytes: usize) -> Self {
        self.properties.granule = bytes;
        self
    }

    /// The same device with `bytes` of shared memory for a block of threads, where an H100 has 227 KiB.
    #[must_use]
    pub fn shared(mut self, bytes: u32) -> Self {
        self.properties.shared = bytes;
        self
    }

    /// The same device, whose communicators of NCCL have ranks in other processes. Every process has a machine of its
    /// own, and devices with the same number are the same card: NCCL refuses two ranks on one.
    #[must_use]
    pub fn among_processes(mut self) -> Self {
        self.between = Some(Arc::new(Between(self.clone())));
        self
    }

    fn ordinal(&self) -> usize {
        self.properties.ordinal
    }

    /// Another device of the same machine.
    fn neighbour<'a>(&self, call: &'static str, other: &'a dyn Driver) -> Result<&'a Self> {
        let any: &dyn Any = other;
        let same = any.downcast_ref::<Self>().filter(|other| Arc::ptr_eq(&other.machine, &self.machine));
        let [one, other] =
            [self as &dyn Driver, other].map(|driver| format!("{} {}", driver.name(), driver.properties().ordinal));
        same.ok_or(DriverError::Apart { call, one, other })
    }

    /// Leaves out the `nth` wait of a stream for an event, from 0, as if it had been forgotten. For tests.
    pub fn skip_wait(&self, nth: u64) {
        self.lock().skipped = Some(nth);
    }

    /// From now on no work of the machine runs, as behind a kernel that never ends. For tests.
    pub fn stand_still(&self) {
        self.lock().stands_still = true;
    }

    /// The waits of streams for events so far, on all devices of the machine.
    pub fn waits(&self) -> u64 {
        self.lock().waits
    }

    /// How often each call of the seam that reaches the machine was made, by its name, on all of its devices.
    pub fn calls(&self) -> BTreeMap<&'static str, u64> {
        self.lock().calls.clone()
    }

    /// Allocated bytes of its memory.
    pub fn held(&self) -> u64 {
        self.lock().memory.held(self.ordinal())
    }

    /// Pieces of work that are queued on the machine but have not run.
    pub fn queued(&self) -> usize {
        self.lock().queued()
    }

    /// How often the host has waited for work of the machine: to read, to free, for an event.
    pub fn host_waits(&self) -> u64 {
        self.lock().host_waits
    }

    /// Records, from now on, the kernels and copies of pinned memory (`save`, `load`) that run, in order. For tests.
    pub fn note_launches(&self) {
        self.lock().launches = Some(Vec::new());
    }

    /// The names of work that ran since then, each with its stream.
    pub fn launches(&self) -> Vec<(Stream, &'static str)> {
        self.lock().launches.clone().unwrap_or_default()
    }

    /// The state of the machine, for a call of the seam, which is counted.
    fn call(&self, name: &'static str) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        *state.calls.entry(name).or_default() += 1;
        state
    }

    /// The state for a call that waits, once `done` says so: the host waits for work of this device, and it for other
    /// ranks.
    fn wait_until(
        &self,
        name: &'static str,
        done: impl Fn(&mut State) -> Result<bool>,
    ) -> Result<MutexGuard<'_, State>> {
        let mut state = self.call(name);
        state.host_waits += 1;
        let look = |state: &mut State| {
            let before = state.ran;
            let is_done = done(state);
            if state.ran > before {
                self.machine.queued.notify_all(); // maybe what another host waits for
            }
            is_done
        };
        if let Some(watch) = self.watched.get() {
            drop(state);
            watch.attend(&mut || look(&mut self.lock()))?;
            return Ok(self.lock());
        }
        while !look(&mut state)? {
            state = self.machine.queued.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state)
    }

    /// Queues something by a call, and tells hosts that wait.
    fn tell<T>(&self, name: &'static str, queue: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        let queued = queue(&mut self.call(name));
        self.machine.queued.notify_all();
        queued
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.machine.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Machine {
    fn new(kernels: Arc<Host>, order: Order, devices: usize, peers: fn(usize, usize) -> bool) -> Arc<Self> {
        let state = Mutex::new(State::new(kernels, order, devices));
        Arc::new(Self { state, queued: Condvar::new(), peers, graphs: Mutex::default() })
    }
}

impl Driver for Emulator {
    fn name(&self) -> &str {
        "cuda-emulated"
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn stream_with(&self, _: Priority) -> Result<Stream> {
        Ok(self.call("stream_with").stream(self.ordinal()))
    }

    fn alloc(&self, bytes: usize) -> Result<Address> {
        self.call("alloc").memory.alloc(self.ordinal(), bytes, self.properties.memory)
    }

    fn free_all(&self, all: &[Address]) -> Result<()> {
        let mut state = self.wait_until("free_all", |state| state.finish_device(self.ordinal()))?;
        all.iter().try_for_each(|&at| state.memory.free(self.ordinal(), at))
    }

    fn alloc_host(&self, bytes: usize) -> Result<Address> {
        self.call("alloc_host").memory.alloc_host(bytes)
    }

    fn free_host(&self, at: Address) -> Result<()> {
        self.wait_until("free_host", |state| state.finish_device(self.ordinal()))?.memory.free(HOST, at)
    }

    fn queue(&self, stream: Stream, work: Work) -> Result<()> {
        work.check()?;
        if let Work::Exchange { on, exchange } = &work {
            let (state, call, device) = (self.lock(), exchange.name(), self.ordinal());
            state.processes.check(call, *on, device).unwrap_or_else(|| state.comms.check(call, *on, device))?;
        }
        if let Work::Launch { kernel, launch, .. } = &work {
            let (most, &Launch { grid: [x, y, z], block, shared }) = (self.properties.shared, launch);
            let threads: u64 = block.into_iter().map(u64::from).product();
            let grid = (1..1 << 31).contains(&x) && [y, z].iter().all(|blocks| (1..1 << 16).contains(blocks));
            if !grid || !(1..=1024).contains(&threads) || shared > most {
                let why = format!(
                    "{launch:?} is refused: blocks are up to 2147483647 × 65535 × 65535, of up to 1024 threads and {most} bytes of shared memory"
                );
                return Err(DriverError::Kernel { kernel: kernel.0.name, why });
            }
        }
        self.tell("queue", |state| state.push(self.ordinal(), stream, Queued::Work(work)))
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        self.tell("record", |state| state.record(self.ordinal(), stream))
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.tell("wait", |state| state.wait(self.ordinal(), stream, event))
    }

    fn reach(&self, other: &dyn Driver) -> Result<Reach> {
        let (by, of) = (self.ordinal(), self.neighbour("reach", other)?.ordinal());
        if by != of && !(self.machine.peers)(by, of) {
            return Ok(Reach::Copies);
        }
        self.call("reach").memory.open(by, of);
        Ok(Reach::Direct)
    }

    fn wait_for(&self, stream: Stream, other: &dyn Driver, event: Event) -> Result<()> {
        self.neighbour("wait_for", other)?;
        self.wait(stream, event)
    }

    fn copy_between(&self, stream: Stream, from: Remote<'_>, to: Remote<'_>, bytes: usize) -> Result<()> {
        let of = |end: Remote<'_>| Ok((self.neighbour("copy_between", end.driver)?.ordinal(), end.at));
        let (from, to) = (of(from)?, of(to)?);
        self.tell("copy_between", |state| state.push(self.ordinal(), stream, Queued::Between { from, to, bytes }))
    }

    fn finish(&self, event: Event) -> Result<()> {
        self.wait_until("finish", |state| state.finish(event)).map(drop)
    }

    fn write(&self, stream: Stream, to: Address, bytes: &[u8]) -> Result<()> {
        self.tell("write", |state| state.push(self.ordinal(), stream, Queued::Write { to, bytes: bytes.to_vec() }))
    }

    fn read_all(&self, stream: Stream, places: &mut [(Address, &mut [u8])]) -> Result<()> {
        let event = self.lock().record(self.ordinal(), stream)?;
        let state = self.wait_until("read", |state| state.finish(event))?;
        for (from, into) in places {
            into.copy_from_slice(state.memory.read(self.ordinal(), *from, into.len(), "read")?);
        }
        Ok(())
    }

    fn nccl(&self) -> Result<&dyn Nccl> {
        Ok(self.between.as_deref().map_or(self as &dyn Nccl, |between| between))
    }

    fn watch(&self, watch: Weak<dyn Watch>) {
        self.watched.set(watch);
    }

    fn capture(&self, stream: Stream, work: &[Work]) -> Result<Option<Graph>> {
        let graph = {
            let mut graphs = self.machine.graphs.lock().unwrap_or_else(PoisonError::into_inner);
            graphs.push(work.into());
            Graph(graphs.len() as u64 - 1)
        };
        self.replay(stream, graph, &[])?;
        Ok(Some(graph))
    }

    fn replay(&self, stream: Stream, graph: Graph, changed: &[(usize, &[Argument])]) -> Result<()> {
        let unknown = |what| DriverError::Unknown { call: "replay", what };
        let work = {
            let mut graphs = self.machine.graphs.lock().unwrap_or_else(PoisonError::into_inner);
            let work = graphs.get_mut(graph.0 as usize).ok_or_else(|| unknown(format!("{graph:?}")))?;
            for &(at, new) in changed {
                let Some(Work::Launch { args, .. }) = work.get_mut(at) else {
                    return Err(unknown(format!("kernel {at} of {graph:?}")));
                };
                *args = new.to_vec();
            }
            work.clone()
        };
        work.into_iter().try_for_each(|work| self.queue(stream, work))
    }
}

impl Nccl for Emulator {
    fn unique_id(&self) -> Result<UniqueId> {
        Ok(self.lock().comms.unique_id())
    }

    fn join(&self, id: &UniqueId, rank: usize, size: usize) -> Result<NcclComm> {
        self.lock().comms.join(id, rank, size, self.ordinal())
    }

    fn split(&self, of: NcclComm, color: Option<usize>, key: usize) -> Result<Option<NcclComm>> {
        self.lock().comms.split(of, color, key)
    }

    fn leave(&self, of: NcclComm) -> Result<()> {
        self.wait_until("ncclCommFinalize", |state| state.finish_comm(of))?.comms.leave(of)
    }

    fn abort(&self, of: NcclComm) -> Result<()> {
        let aborted = self.lock().comms.abort(of);
        self.machine.queued.notify_all();
        aborted
    }

    fn health(&self, _: NcclComm) -> Result<()> {
        Ok(()) // ranks of one process end together
    }
}
