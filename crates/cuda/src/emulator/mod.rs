//! A device in host memory, for machines without a GPU: it runs the kernels that g++ compiled ([`meshwork_kernels::host`]).
//!
//! Work is queued as on a GPU, and runs when somebody waits for it or when chance has it run earlier. Which stream goes on is drawn from a
//! seed, within what streams and events permit: a host program that lacks a wait gets wrong numbers in some orders. Memory that nobody
//! wrote, or whose owner is gone, holds what is no number; writes beyond an allocation and addresses in none are errors.
//!
//! What it does not show: time, and work that runs at the same time. Two pieces of work that no event orders run one after the other.
//! A kernel that goes wrong in the way of a host program, by a division by zero or an address that it has read itself, ends the process.

mod memory;
mod order;
mod work;

use crate::driver::{
    Address, Argument, Driver, DriverError, Event, Graph, Place, Product, Properties, Result, Stream, Work as Captured,
    check_arguments,
};
use meshwork_kernels::{Kernel, Launch};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use work::{State, Work};

pub use meshwork_kernels::host::{Host, HostError};
pub use order::Order;

/// An emulated device.
#[derive(Debug)]
pub struct Emulator {
    properties: Properties,
    state: Mutex<State>,
    /// What was captured, by number.
    graphs: Mutex<Vec<Vec<Captured>>>,
}

impl Emulator {
    /// A device of `memory` bytes that runs `kernels`.
    pub fn new(kernels: Arc<Host>, memory: u64, order: Order) -> Self {
        let (name, architecture) = ("emulated in host memory".to_owned(), "emulated".to_owned());
        let properties = Properties { name, ordinal: 0, memory, architecture };
        Self { properties, state: Mutex::new(State::new(kernels, order)), graphs: Mutex::default() }
    }

    /// Lets the stream of the `nth` wait for an event, from 0, go on without it: what a forgotten wait does. For tests.
    pub fn skip_wait(&self, nth: u64) {
        self.lock().skip_wait(nth);
    }

    /// The waits of streams for events so far.
    pub fn waits(&self) -> u64 {
        self.lock().waits()
    }

    /// Bytes of memory that are allocated.
    pub fn held(&self) -> u64 {
        self.lock().held()
    }

    /// Pieces of work that are queued and have not run.
    pub fn queued(&self) -> usize {
        self.lock().queued()
    }

    /// How often the host has waited for work: to read, to free, for an event.
    pub fn host_waits(&self) -> u64 {
        self.lock().host_waits()
    }

    /// From now on notes which kernels ran, in which order. For tests.
    pub fn note_launches(&self) {
        self.lock().note_launches();
    }

    /// The kernels that ran since then, each with its stream.
    pub fn launches(&self) -> Vec<(Stream, &'static str)> {
        self.lock().launches()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Driver for Emulator {
    fn name(&self) -> &str {
        "cuda-emulated"
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn stream(&self) -> Result<Stream> {
        Ok(self.lock().stream())
    }

    fn alloc(&self, bytes: usize) -> Result<Address> {
        self.lock().memory.alloc(bytes, self.properties.memory)
    }

    fn free(&self, at: Address) -> Result<()> {
        let mut state = self.lock();
        state.host_waits_now();
        state.finish_all()?;
        state.memory.free(at)
    }

    fn discard(&self, stream: Stream, at: Address, bytes: usize) -> Result<()> {
        self.lock().push(stream, Work::Discard { at, bytes })
    }

    fn record(&self, stream: Stream) -> Result<Event> {
        self.lock().record(stream)
    }

    fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.lock().wait(stream, event)
    }

    fn finish(&self, event: Event) -> Result<()> {
        let mut state = self.lock();
        state.host_waits_now();
        state.finish(event)
    }

    fn write(&self, stream: Stream, to: Address, bytes: &[u8]) -> Result<()> {
        self.lock().push(stream, Work::Write { to, bytes: bytes.to_vec() })
    }

    fn read(&self, stream: Stream, from: Address, into: &mut [u8]) -> Result<()> {
        let mut state = self.lock();
        state.host_waits_now();
        let event = state.record(stream)?;
        state.finish(event)?;
        into.copy_from_slice(state.memory.read(from, into.len(), "read")?);
        Ok(())
    }

    fn copy(&self, stream: Stream, from: Place, to: Place, bytes: usize, rows: usize) -> Result<()> {
        self.lock().push(stream, Work::Copy { from, to, bytes, rows })
    }

    fn zero(&self, stream: Stream, at: Address, bytes: usize) -> Result<()> {
        self.lock().push(stream, Work::Zero { at, bytes })
    }

    fn launch(&self, stream: Stream, kernel: &'static Kernel, launch: Launch, args: &[Argument]) -> Result<()> {
        check_arguments(kernel, args)?;
        self.lock().push(stream, Work::Launch { kernel, launch, args: args.to_vec() })
    }

    fn product(&self, stream: Stream, product: Product) -> Result<()> {
        self.lock().push(stream, Work::Product(product))
    }

    fn capture(&self, stream: Stream, work: &[Captured]) -> Result<Option<Graph>> {
        let graph = {
            let mut graphs = self.graphs.lock().unwrap_or_else(PoisonError::into_inner);
            graphs.push(work.into());
            Graph(graphs.len() as u64 - 1)
        };
        self.replay(stream, graph, &[])?;
        Ok(Some(graph))
    }

    fn replay(&self, stream: Stream, graph: Graph, changed: &[(usize, &[Argument])]) -> Result<()> {
        let unknown = |what| DriverError::Unknown { call: "replay", what };
        let work = {
            let mut graphs = self.graphs.lock().unwrap_or_else(PoisonError::into_inner);
            let work = graphs.get_mut(graph.0 as usize).ok_or_else(|| unknown(format!("{graph:?}")))?;
            for &(at, new) in changed {
                let Some(Captured::Launch { args, .. }) = work.get_mut(at) else {
                    return Err(unknown(format!("kernel {at} of {graph:?}")));
                };
                *args = new.to_vec();
            }
            work.clone()
        };
        work.iter().try_for_each(|work| work.queue(self, stream))
    }
}
