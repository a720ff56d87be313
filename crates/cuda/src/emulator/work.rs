//! Queues of work, and how each piece of work runs.
//!
//! More than 400 lines: one piece of work after the other.

use super::memory::{HOST, Memory};
use super::nccl::{Comms, crossed, run, stuck};
use super::order::{Draws, Order};
use super::processes::Processes;
use crate::driver::{Address, Argument, DriverError, Event, Exchange, NcclComm, Product, Result, Stream, Work};
use half::bf16;
use meshwork_core::DType;
use meshwork_kernels::host::{Host, HostError};
use meshwork_kernels::{F16, HEADERS, Kernel, Launch, Pass, SOURCES, TF32};
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::tf32;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// An entry of a queue.
#[derive(Debug)]
pub(super) enum Queued {
    /// A piece of work of the device.
    Work(Work),
    /// A copy of bytes from the host.
    Write {
        to: Address,
        bytes: Vec<u8>,
    },
    /// A copy between the memory of two devices.
    Between {
        from: (usize, Address),
        to: (usize, Address),
        bytes: usize,
    },
    Record(Event),
    Wait(Event),
}

/// A stream: its device, and its remaining work.
#[derive(Debug)]
struct Queue {
    device: usize,
    work: VecDeque<Queued>,
}

/// The queued work of all devices of a machine, and a record of work that ran. Streams and events are numbered over all
/// devices.
#[derive(Debug)]
pub(super) struct State {
    pub(super) memory: Memory,
    pub(super) comms: Comms,
    pub(super) processes: Processes,
    kernels: Arc<Host>,
    /// Compiled files of variants, by name.
    variants: HashMap<&'static str, Host>,
    queues: Vec<Queue>,
    /// Recorded events that have not been reached yet.
    ahead: HashSet<Event>,
    recorded: u64,
    /// Pieces of work that ran.
    pub(super) ran: u64,
    draws: Option<Draws>,
    fault: Option<DriverError>,
    /// Streams that stand still, because the members of the collective that is next in them differ; and how.
    differing: BTreeMap<usize, DriverError>,
    /// Whether no work runs any more.
    pub(super) stands_still: bool,
    /// How often each call of the seam was made.
    pub(super) calls: BTreeMap<&'static str, u64>,
    /// The waits of streams for events so far.
    pub(super) waits: u64,
    /// The wait that is left out.
    pub(super) skipped: Option<u64>,
    /// The waits of the host so far.
    pub(super) host_waits: u64,
    /// Kernels and copies of pinned memory that ran, once they are asked for.
    pub(super) launches: Option<Vec<(Stream, &'static str)>>,
}

impl State {
    pub(super) fn new(kernels: Arc<Host>, order: Order, devices: usize) -> Self {
        Self {
            memory: Memory::new(devices),
            comms: Comms::default(),
            processes: Processes::default(),
            kernels,
            variants: HashMap::new(),
            queues: Vec::new(),
            ahead: HashSet::new(),
            recorded: 0,
            ran: 0,
            draws: Draws::new(order),
            fault: None,
            differing: BTreeMap::new(),
            stands_still: false,
            calls: BTreeMap::new(),
            waits: 0,
            skipped: None,
            host_waits: 0,
            launches: None,
        }
    }

    pub(super) fn queued(&self) -> usize {
        self.queues.iter().map(|queue| queue.work.len()).sum()
    }

    pub(super) fn stream(&mut self, device: usize) -> Stream {
        self.queues.push(Queue { device, work: VecDeque::new() });
        Stream(self.queues.len() - 1)
    }

    /// Queues work of a device, and runs as much of all queued work as the order says.
    pub(super) fn push(&mut self, device: usize, stream: Stream, work: Queued) -> Result<()> {
        self.healthy()?;
        let queue = self.queues.get_mut(stream.0).filter(|queue| queue.device == device);
        let meets = matches!(work, Queued::Work(Work::Exchange { .. }));
        queue.ok_or_else(|| unknown("a queue of work", &stream))?.work.push_back(work);
        if meets {
            self.send_to_processes()?;
        }
        match &mut self.draws {
            None => self.finish_all(),
            Some(draws) => {
                for _ in 0..draws.ahead() {
                    if !self.advance()? {
                        break;
                    }
                }
                Ok(())
            }
        }
    }

    pub(super) fn record(&mut self, device: usize, stream: Stream) -> Result<Event> {
        let event = Event(self.recorded);
        self.recorded += 1;
        self.ahead.insert(event);
        self.push(device, stream, Queued::Record(event))?;
        Ok(event)
    }

    pub(super) fn wait(&mut self, device: usize, stream: Stream, event: Event) -> Result<()> {
        self.known(event)?;
        let nth = self.waits;
        self.waits += 1;
        if self.skipped == Some(nth) { self.healthy() } else { self.push(device, stream, Queued::Wait(event)) }
    }

    /// Runs work until an event is reached. False if that needs work which other ranks have not queued yet.
    pub(super) fn finish(&mut self, event: Event) -> Result<bool> {
        self.known(event)?;
        self.run_while(|state| state.ahead.contains(&event))
    }

    /// Runs all work of a device. False as in [`finish`](Self::finish).
    pub(super) fn finish_device(&mut self, device: usize) -> Result<bool> {
        self.run_while(|state| state.queues.iter().any(|queue| queue.device == device && !queue.work.is_empty()))
    }

    /// Runs the queued collectives of a rank's end of a communicator. False as in [`finish`](Self::finish).
    pub(super) fn finish_comm(&mut self, comm: NcclComm) -> Result<bool> {
        let of_it = |queued: &Queued| matches!(queued, Queued::Work(Work::Exchange { on, .. }) if *on == comm);
        self.run_while(|state| state.queues.iter().any(|queue| queue.work.iter().any(of_it)))
    }

    /// Runs work until each queued collective between processes has sent its part, or is behind one whose parts are not
    /// here yet. Another process may wait for that part while the host of this one waits for that process, not for
    /// work, and then runs none: a GPU goes on without its host.
    pub(super) fn send_to_processes(&mut self) -> Result<()> {
        let unsent = |state: &Self, at: usize, queued: &Queued| match queued {
            Queued::Work(Work::Exchange { on, .. }) => {
                state.processes.is_sent(*on).is_some_and(|sent| !(sent && at == 0))
            }
            _ => false,
        };
        let in_queue =
            |state: &Self, queue: &Queue| queue.work.iter().enumerate().any(|(at, queued)| unsent(state, at, queued));
        while self.queues.iter().any(|queue| in_queue(self, queue)) && self.advance()? {}
        Ok(())
    }

    fn run_while(&mut self, needed: impl Fn(&Self) -> bool) -> Result<bool> {
        self.healthy()?;
        while needed(self) {
            if !self.advance()? {
                self.check_waits()?;
                return self.differing.values().next().map_or(Ok(false), |differ| Err(differ.clone()));
            }
        }
        Ok(true)
    }

    /// Runs all work.
    fn finish_all(&mut self) -> Result<()> {
        while self.advance()? {}
        self.healthy()
    }

    fn known(&self, event: Event) -> Result<()> {
        if event.0 < self.recorded { Ok(()) } else { Err(unknown("wait", &event)) }
    }

    fn healthy(&self) -> Result<()> {
        self.fault.clone().map_or(Ok(()), Err)
    }

    /// Runs the next piece of work of one stream. False if there is none: an event is recorded before any wait for it,
    /// so some stream can continue unless a collective waits for other ranks, or has members that differ: a host that
    /// waits for it is told.
    fn advance(&mut self) -> Result<bool> {
        self.healthy()?;
        if self.stands_still {
            return Ok(false);
        }
        let can = |at: usize| match self.queues[at].work.front() {
            None => false,
            Some(Queued::Wait(event)) => !self.ahead.contains(event),
            Some(Queued::Work(Work::Exchange { on, .. })) => {
                let here = || self.parts(*on).is_some();
                self.is_aborted(*on)
                    || !self.differing.contains_key(&at) && self.processes.is_ready(*on).unwrap_or_else(here)
            }
            Some(_) => true,
        };
        let ready: Vec<usize> = (0..self.queues.len()).filter(|&at| can(at)).collect();
        let Some(&first) = ready.first() else { return Ok(false) };
        self.ran += 1;
        let chosen = self.draws.as_mut().map_or(first, |draws| draws.choose(&ready));
        if let Some(Queued::Work(Work::Exchange { on, .. })) = self.queues[chosen].work.front() {
            let on = *on;
            self.differing.remove(&chosen);
            match self.exchange(chosen, on) {
                Err(differ @ DriverError::Comm { .. }) => _ = self.differing.insert(chosen, differ),
                done => done.inspect_err(|fault| self.fault = Some(fault.clone()))?,
            }
            return Ok(true);
        }
        let Queue { device, work } = &mut self.queues[chosen];
        if let (device, Some(work)) = (*device, work.pop_front()) {
            if let (Some(launches), Queued::Work(work)) = (&mut self.launches, &work)
                && matches!(work, Work::Launch { .. } | Work::Save { .. } | Work::Load { .. })
            {
                launches.push((Stream(chosen), work.name()));
            }
            self.run(device, work).inspect_err(|fault| self.fault = Some(fault.clone()))?;
        }
        Ok(true)
    }

    fn is_aborted(&self, on: NcclComm) -> bool {
        self.processes.is_over(on).unwrap_or_else(|| self.comms.is_aborted(on))
    }

    /// The queues whose next work is a collective of the communicator of `on`, by rank; `None` if a member's is not.
    fn parts(&self, on: NcclComm) -> Option<Vec<usize>> {
        let next = |end: NcclComm| {
            let is_it = |queue: &Queue| matches!(queue.work.front(), Some(Queued::Work(Work::Exchange { on, .. })) if *on == end);
            self.queues.iter().position(is_it)
        };
        self.comms.members(on)?.into_iter().map(next).collect()
    }

    /// Runs the collective that is next in the queue `chosen`, for all members; nothing if it was aborted.
    fn exchange(&mut self, chosen: usize, on: NcclComm) -> Result<()> {
        if let Some(Queued::Work(Work::Exchange { exchange, .. })) = self.queues[chosen].work.front()
            && let Some(done) = self.processes.advance(on, exchange, &mut self.memory)
        {
            if done? {
                self.queues[chosen].work.pop_front();
            }
            return Ok(());
        }
        if self.comms.is_aborted(on) {
            self.queues[chosen].work.pop_front();
            return Ok(());
        }
        let queues = self.parts(on).unwrap_or_default();
        let part = |&queue: &usize| match self.queues[queue].work.front() {
            Some(Queued::Work(Work::Exchange { on, exchange })) => (self.comms.device(*on), exchange.clone()),
            _ => (0, Exchange::Messages(Vec::new())),
        };
        let parts: Vec<(usize, Exchange)> = queues.iter().map(part).collect();
        run(&mut self.memory, &parts)?;
        queues.into_iter().for_each(|queue| _ = self.queues[queue].work.pop_front());
        Ok(())
    }

    /// Checks that work which cannot go on waits for work that may still be queued, and not in a circle of queues.
    fn check_waits(&mut self) -> Result<()> {
        let holds = |at: usize, what: &dyn Fn(&Queued) -> bool| self.queues[at].work.iter().any(what);
        // The queues that the next work of a queue waits for; `None` if it waits for work that is not queued.
        let waits_for = |at: usize| -> Option<Vec<usize>> {
            let queued_in = |what: &dyn Fn(&Queued) -> bool| (0..self.queues.len()).find(|&at| holds(at, what));
            match self.queues[at].work.front()? {
                Queued::Wait(event) => {
                    Some(vec![queued_in(&|work| matches!(work, Queued::Record(other) if other == event))?])
                }
                Queued::Work(Work::Exchange { on, .. }) => {
                    let of = |end: NcclComm| {
                        queued_in(&|work| matches!(work, Queued::Work(Work::Exchange { on, .. }) if *on == end))
                    };
                    let mut all = self.comms.members(*on)?.into_iter().map(of).collect::<Option<Vec<_>>>()?;
                    all.retain(|&other| other != at);
                    Some(all)
                }
                _ => None,
            }
        };
        let waits: Vec<Option<Vec<usize>>> = (0..self.queues.len()).map(waits_for).collect();
        let name = |at: usize| match self.queues[at].work.front() {
            Some(Queued::Work(work)) => {
                let Queue { device, .. } = self.queues[at];
                Some(format!("stream {at} of device {device} in {}", work.name()))
            }
            _ => None,
        };
        let names: Vec<String> = stuck(&waits).into_iter().filter_map(name).collect();
        if names.is_empty() {
            return Ok(());
        }
        let fault = crossed(&names);
        self.fault = Some(fault.clone());
        Err(fault)
    }

    fn run(&mut self, by: usize, work: Queued) -> Result<()> {
        match work {
            Queued::Work(work) => self.work(by, work),
            Queued::Write { to, bytes } => {
                self.memory.write(by, to, bytes.len(), "write")?.copy_from_slice(&bytes);
                Ok(())
            }
            Queued::Between { from, to, bytes } => self.copy(from, to, bytes, "copy_between"),
            Queued::Record(event) => {
                self.ahead.remove(&event);
                Ok(())
            }
            Queued::Wait(_) => Ok(()),
        }
    }

    fn work(&mut self, by: usize, work: Work) -> Result<()> {
        let call = work.name();
        match work {
            Work::Launch { kernel, launch, args } => self.launch(by, kernel.0, launch, &args),
            Work::Product(product) => self.product(by, product),
            Work::Copy { from, to, bytes } => self.copy((by, from), (by, to), bytes, call),
            Work::Save { from, to, bytes } => self.copy((by, from), (HOST, to), bytes, "copy_between"),
            Work::Load { from, to, bytes } => self.copy((HOST, from), (by, to), bytes, "copy_between"),
            Work::Zero { at, bytes } => {
                self.memory.write(by, at, bytes, call)?.fill(0);
                Ok(())
            }
            Work::Discard { at, bytes } => self.memory.poison(by, at, bytes),
            Work::Exchange { .. } => Ok(()), // runs for all members at once, see `exchange`
        }
    }

    /// Copies bytes between places, each with the device whose memory it is in.
    fn copy(&mut self, from: (usize, Address), to: (usize, Address), bytes: usize, call: &'static str) -> Result<()> {
        let source = self.memory.read(from.0, from.1, bytes, call)?.to_vec();
        self.memory.write(to.0, to.1, bytes, call)?.copy_from_slice(&source);
        Ok(())
    }

    fn launch(&mut self, by: usize, kernel: &'static Kernel, launch: Launch, args: &[Argument]) -> Result<()> {
        let mut places: Vec<Address> = args.iter().filter_map(Argument::place).collect();
        places.extend(self.in_tables(by, kernel, args)?);
        places.iter().try_for_each(|&at| self.memory.check(by, at, kernel.name))?;
        let mut values: Vec<u64> = args.iter().map(Argument::bits).collect();
        // SAFETY: the arguments have the types of the table, and each address lies in an allocation. Those who launch
        // answer for the sizes; writes of a kernel beyond an allocation change its fence.
        let run = unsafe { library(&self.kernels, &mut self.variants, kernel)?.launch(kernel, launch, &mut values, 0) };
        run.map_err(|why| DriverError::Kernel { kernel: kernel.name, why })?;
        places.iter().try_for_each(|&at| self.memory.check(by, at, kernel.name))
    }

    /// The addresses that a kernel reads from tables, whose length is the next number among its arguments.
    fn in_tables(&self, by: usize, kernel: &'static Kernel, args: &[Argument]) -> Result<Vec<Address>> {
        let mut found = Vec::new();
        for (at, table) in args.iter().enumerate().filter_map(|(at, argument)| Some((at, argument.place()?))) {
            if matches!(kernel.args[at].pass, Pass::Ins | Pass::Outs) {
                let count = args[at..].iter().find(|argument| matches!(argument, Argument::Number(..)));
                let bytes = count.map_or(0, |count| 8 * count.bits() as usize);
                let addresses = self.memory.read(by, table, bytes, kernel.name)?.chunks_exact(8);
                found.extend(
                    addresses.map(|at| Address(at.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte)))),
                );
            }
        }
        found.retain(|&at| at != Address::NULL);
        Ok(found)
    }

    fn product(&mut self, by: usize, product: Product) -> Result<()> {
        let Product { mnk: [m, n, k], operands: [a, b], precision, c, rounded, accumulate, bias } = product;
        let a_at = |i: usize, p: usize| if a.transposed { p * m + i } else { i * k + p };
        let b_at = |p: usize, j: usize| if b.transposed { j * k + p } else { p * n + j };
        let (mut a, mut b) =
            (self.numbers(by, a.at, m * k, product.dtype())?, self.numbers(by, b.at, k * n, product.dtype())?);
        if precision == Precision::Tf32 {
            a.iter_mut().chain(&mut b).for_each(|x| *x = tf32(*x));
        }
        let bias = bias.map(|at| self.numbers(by, at, n, product.result())).transpose()?;
        let size = product.result().size();
        let bytes = self.memory.write(by, c, m * n * size, "product")?;
        for (at, out) in bytes.chunks_exact_mut(size).enumerate() {
            let (i, j) = (at / n, at % n);
            let old = if accumulate { number(out) } else { 0.0 };
            let sum = (0..k).map(|p| f64::from(a[a_at(i, p)]) * f64::from(b[b_at(p, j)])).sum::<f64>();
            let sum = bias.as_ref().map_or(old, |bias| bias[j]) + sum as f32;
            match rounded {
                true => out.copy_from_slice(&bf16::from_f32(sum).to_le_bytes()),
                false => out.copy_from_slice(&sum.to_le_bytes()),
            }
        }
        Ok(())
    }

    /// Numbers of f32 or bf16 that a product reads.
    fn numbers(&self, by: usize, at: Address, count: usize, dtype: DType) -> Result<Vec<f32>> {
        let size = dtype.size();
        Ok(self.memory.read(by, at, count * size, "product")?.chunks_exact(size).map(number).collect())
    }
}

/// The number in two bytes of bf16, or in four bytes of f32.
fn number(bytes: &[u8]) -> f32 {
    match *bytes {
        [low, high] => bf16::from_le_bytes([low, high]).to_f32(),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

/// The library that has a kernel: one for all usual forms, and one for each variant and each file of f16 and TF32,
/// which is compiled at its first use.
fn library<'a>(
    all: &'a Host,
    compiled: &'a mut HashMap<&'static str, Host>,
    kernel: &'static Kernel,
) -> Result<&'a Host> {
    let source = kernel.source;
    if SOURCES.iter().any(|known| known.name == source.name) {
        return Ok(all);
    }
    Ok(match compiled.entry(source.name) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(new) => {
            let headers = HEADERS.iter().map(|header| (header.name, header.text));
            let files: Vec<_> = headers.chain([(source.name, source.text)]).collect();
            let folder = all.path().ancestors().nth(2).unwrap_or(all.path());
            let of_file: Vec<Kernel> = F16.iter().chain(&*TF32).filter(|form| form.source == source).copied().collect();
            let kernels = if of_file.is_empty() { std::slice::from_ref(kernel) } else { &of_file };
            let made = Host::compile(folder, &files, kernels, false);
            let refused = |why: HostError| DriverError::Compile { source_name: source.name, why: why.to_string() };
            new.insert(made.map_err(refused)?)
        }
    })
}

fn unknown(call: &'static str, what: &dyn std::fmt::Debug) -> DriverError {
    DriverError::Unknown { call, what: format!("{what:?}") }
}
