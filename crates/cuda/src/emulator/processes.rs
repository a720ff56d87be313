//! Emulated communicators of NCCL between processes, whose hosts find each other by name.
//!
//! ```text
//! process 0 ── its collectives, with their bytes ──▶ hub ── the parts of all members ──▶ each process, which computes
//! process 1 ──────────────────────────────────────▶ (a thread of the process that made the unique id)  its own result
//! ```
//! A unique id names the host and the port of a [hub](super::hub), as NCCL's names a socket of rank 0. The hub hands
//! the parts of a call to all members once each has come, and knows nothing else. A collective is sent when it is the
//! next work of its stream, and the stream goes on when the parts of all are here: so members wait for each other as
//! NCCL's kernels do. A circle of such waits is not found here, because no process sees the streams of another one.
//!
//! The work in front of a collective runs as soon as the collective is queued and what that work waits for is here: no
//! process knows when another one waits for it. Other work runs when the host waits, as everywhere in the emulator.

use super::Emulator;
use super::hub::{Hub, Sent, receive, send};
use super::memory::Memory;
use super::nccl::{Part, results, sources};
use crate::driver::{DriverError, Exchange, Nccl, NcclComm, Result, UniqueId};
use meshwork_core::hash::{combine, hash};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::io;
use std::net::Shutdown;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, PoisonError};
use std::thread;

/// The number of the first communicator between processes: others are those of one process.
const FIRST: u64 = 1 << 32;

/// The number of a communicator's first split among its calls.
const SPLITS: u64 = 1 << 32;

/// A call of a communicator, and a member: the communicator, the number of the call, the rank.
type Key = (u64, u64, u64);

/// The ends of communicators in this process, and what the hubs have sent.
#[derive(Debug, Default)]
pub(super) struct Processes {
    /// What goes to each hub, by its number: a thread writes it, because a hub may have to send before it reads on.
    hubs: HashMap<u64, Sender<Sent>>,
    ends: Vec<End>,
    heard: HashMap<Key, Vec<Vec<u8>>>,
    /// Hubs whose connection has ended, because a process that used them has ended.
    lost: HashSet<u64>,
}

#[derive(Clone, Debug)]
struct End {
    hub: u64,
    comm: u64,
    rank: usize,
    size: usize,
    device: usize,
    splits: u64,
    exchanges: u64,
    /// The exchange that was sent, and whose parts are not here yet.
    flying: Option<u64>,
    over: bool,
}

fn failed(call: &'static str, why: impl ToString) -> DriverError {
    DriverError::Call { call, why: why.to_string() }
}

fn packed(call: &'static str, value: &impl serde::Serialize) -> Result<Vec<u8>> {
    postcard::to_allocvec(value).map_err(|error| failed(call, error))
}

fn unpacked<T: serde::de::DeserializeOwned>(call: &'static str, bytes: &[u8]) -> Result<T> {
    postcard::from_bytes(bytes).map_err(|error| failed(call, error))
}

impl Processes {
    fn at(on: NcclComm) -> Option<usize> {
        usize::try_from(on.0.checked_sub(FIRST)?).ok()
    }

    fn end(&self, call: &'static str, on: NcclComm) -> Result<End> {
        let end = Self::at(on).and_then(|at| self.ends.get(at)).filter(|end| !end.over);
        end.cloned().ok_or_else(|| DriverError::Unknown { call, what: format!("{on:?}") })
    }

    fn end_mut(&mut self, on: NcclComm) -> Option<&mut End> {
        self.ends.get_mut(Self::at(on)?)
    }

    fn enter(&mut self, end: End) -> NcclComm {
        self.ends.push(end);
        NcclComm(FIRST + self.ends.len() as u64 - 1)
    }

    /// Checks that a device may use an end; `None` of a communicator of one process.
    pub(super) fn check(&self, call: &'static str, on: NcclComm, device: usize) -> Option<Result<()>> {
        Self::at(on)?;
        Some(self.end(call, on).and_then(|end| match end.device == device {
            true => Ok(()),
            false => Err(failed(call, format!("ncclInvalidUsage: {on:?} is of device {}", end.device))),
        }))
    }

    /// Whether it was left or aborted; `None` of a communicator of one process.
    pub(super) fn is_over(&self, on: NcclComm) -> Option<bool> {
        Some(self.ends.get(Self::at(on)?)?.over)
    }

    /// Whether the collective that is next in a stream can begin or end; `None` of a communicator of one process.
    pub(super) fn is_ready(&self, on: NcclComm) -> Option<bool> {
        let end = self.ends.get(Self::at(on)?)?;
        Some(end.flying.is_none_or(|number| self.heard.contains_key(&end.key(number))))
    }

    /// Whether a collective was sent whose parts are not here yet; `None` of a communicator of one process.
    pub(super) fn is_sent(&self, on: NcclComm) -> Option<bool> {
        Some(self.ends.get(Self::at(on)?)?.flying.is_some())
    }

    /// Sends the collective that is next in a stream; once the parts of all are here, writes its results. Whether it is
    /// done; `None` of a communicator of one process.
    pub(super) fn advance(&mut self, on: NcclComm, exchange: &Exchange, memory: &mut Memory) -> Option<Result<bool>> {
        let end = self.ends.get(Self::at(on)?)?.clone();
        Some(if end.over { Ok(true) } else { self.exchange(on, &end, exchange, memory) })
    }

    fn exchange(&mut self, on: NcclComm, end: &End, exchange: &Exchange, memory: &mut Memory) -> Result<bool> {
        let call = exchange.name();
        let Some(number) = end.flying else {
            let read = sources(exchange, end.rank, end.size).into_iter();
            let read = read.map(|(at, bytes)| Ok(memory.read(end.device, at, bytes, call)?.to_vec()));
            let part = Part { exchange: exchange.clone(), read: read.collect::<Result<_>>()? };
            self.send(end, end.exchanges, packed(call, &part)?);
            if let Some(end) = self.end_mut(on) {
                end.flying = Some(end.exchanges);
                end.exchanges += 1;
            }
            return Ok(false);
        };
        let parts = self.heard.get(&end.key(number)).into_iter().flatten();
        let parts = parts.map(|part| unpacked(call, part)).collect::<Result<Vec<Part>>>()?;
        let mut written = results(&parts)?;
        // A collective in which members differ stays as it is.
        self.heard.remove(&end.key(number));
        if let Some(end) = self.end_mut(on) {
            end.flying = None;
        }
        for (at, bytes) in written.swap_remove(end.rank) {
            memory.write(end.device, at, bytes.len(), call)?.copy_from_slice(&bytes);
        }
        Ok(true)
    }

    /// Sends something to all members of a communicator. If the hub has gone, nothing comes back.
    fn send(&mut self, end: &End, number: u64, bytes: Vec<u8>) {
        let (comm, number, rank) = end.key(number);
        let sent = self.hubs.get(&end.hub).map(|hub| hub.send(([comm, number, rank, end.size as u64], bytes)));
        if !matches!(sent, Some(Ok(()))) {
            self.lost.insert(end.hub);
        }
    }

    /// Whether the processes of a communicator are there.
    fn health(&self, call: &'static str, end: &End) -> Result<()> {
        match self.lost.contains(&end.hub) {
            true => Err(DriverError::Comm {
                call,
                why: "ncclRemoteError: a process of the communicator has gone".to_owned(),
            }),
            false => Ok(()),
        }
    }
}

impl End {
    fn key(&self, number: u64) -> Key {
        (self.comm, number, self.rank as u64)
    }
}

/// The communicators of a device whose peers are in other processes.
#[derive(Debug)]
pub(super) struct Between(pub(super) Emulator);

impl Between {
    /// Sends something to all members of a communicator, and waits for theirs.
    fn gather(&self, call: &'static str, end: &End, number: u64, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.0.lock().processes.send(end, number, bytes);
        let key = end.key(number);
        let mut state = self.0.wait_until(call, |state| match state.processes.heard.contains_key(&key) {
            true => Ok(true),
            false => state.processes.health(call, end).map(|()| false),
        })?;
        Ok(state.processes.heard.remove(&key).unwrap_or_default())
    }

    /// Connects this process to a hub, and hears what it sends. The first of its ranks does, and others may send before
    /// it has.
    fn connect(&self, call: &'static str, hub: &Hub) -> Result<()> {
        let number = hub.number;
        let (sender, sent) = mpsc::channel::<Sent>();
        match self.0.lock().processes.hubs.entry(number) {
            Entry::Occupied(_) => return Ok(()),
            Entry::Vacant(new) => _ = new.insert(sender),
        }
        let fail = |error: io::Error| {
            self.0.lock().processes.lost.insert(number);
            self.0.machine.queued.notify_all();
            DriverError::Comm { call, why: format!("ncclSystemError: {error}") }
        };
        let stream = hub.connect().map_err(fail)?;
        let (mut from, mut to) = (stream.try_clone().map_err(fail)?, stream);
        // It ends with the machine.
        let tell = move || {
            let told = sent.iter().try_for_each(|(head, bytes)| send(&mut to, head, &bytes));
            _ = told.and_then(|()| to.shutdown(Shutdown::Both));
        };
        thread::Builder::new().name("emulated nccl".to_owned()).spawn(tell).map_err(fail)?;
        let machine = Arc::downgrade(&self.0.machine);
        let hear = move || {
            loop {
                let heard = receive(&mut from);
                let Some(machine) = machine.upgrade() else { return };
                let mut state = machine.state.lock().unwrap_or_else(PoisonError::into_inner);
                let over = heard.is_err();
                match heard
                    .and_then(|(head, bytes)| Ok((head, postcard::from_bytes(&bytes).map_err(io::Error::other)?)))
                {
                    Ok(([comm, call, rank, _], parts)) => {
                        state.processes.heard.insert((comm, call, rank), parts);
                        // The host's next call returns this error.
                        _ = state.send_to_processes();
                    }
                    Err(_) => _ = state.processes.lost.insert(number),
                }
                drop(state);
                machine.queued.notify_all();
                if over {
                    return;
                }
            }
        };
        thread::Builder::new().name("emulated nccl".to_owned()).spawn(hear).map_err(fail).map(drop)
    }
}

impl Nccl for Between {
    fn unique_id(&self) -> Result<UniqueId> {
        let call = "ncclGetUniqueId";
        let hub = Hub::start().map_err(|error| failed(call, format!("ncclSystemError: {error}")))?;
        hub.id().ok_or_else(|| failed(call, "the name of this host is too long"))
    }

    fn join(&self, id: &UniqueId, rank: usize, size: usize) -> Result<NcclComm> {
        let call = "ncclCommInitRankConfig";
        let (hub, device) = (Hub::of(id), self.0.ordinal());
        self.connect(call, &hub)?;
        let (hub, comm) = (hub.number, hash(&id.0));
        let end = End { hub, comm, rank, size, device, splits: 0, exchanges: 0, flying: None, over: false };
        let devices = self.gather(call, &end, SPLITS - 1, packed(call, &device)?)?;
        let devices = devices.iter().map(|bytes| unpacked(call, bytes)).collect::<Result<Vec<usize>>>()?;
        if let Some(other) = (0..size).find(|&other| other != rank && devices.get(other) == Some(&device)) {
            let why = format!("Duplicate GPU detected: rank {rank} and rank {other} both on device {device}");
            return Err(failed(call, format!("ncclInvalidUsage: {why}")));
        }
        Ok(self.0.lock().processes.enter(end))
    }

    fn split(&self, of: NcclComm, color: Option<usize>, key: usize) -> Result<Option<NcclComm>> {
        let call = "ncclCommSplit";
        let parent = self.0.lock().processes.end(call, of)?;
        let number = SPLITS + parent.splits;
        if let Some(end) = self.0.lock().processes.end_mut(of) {
            end.splits += 1;
        }
        let all = self.gather(call, &parent, number, packed(call, &(color, key))?)?;
        let Some(color) = color else { return Ok(None) };
        let all = all.iter().map(|bytes| unpacked(call, bytes)).collect::<Result<Vec<(Option<usize>, usize)>>>()?;
        let mut keys: Vec<usize> = all.iter().filter(|(of, _)| *of == Some(color)).map(|(_, key)| *key).collect();
        keys.sort_unstable();
        let (rank, size) = (keys.iter().position(|other| *other == key).unwrap_or(0), keys.len());
        let comm = combine(combine(parent.comm, number), color as u64);
        let end = End { comm, rank, size, splits: 0, exchanges: 0, flying: None, ..parent };
        Ok(Some(self.0.lock().processes.enter(end)))
    }

    fn leave(&self, of: NcclComm) -> Result<()> {
        let mut state = self.0.wait_until("ncclCommFinalize", |state| state.finish_comm(of))?;
        state.processes.end("ncclCommFinalize", of)?;
        state.processes.end_mut(of).into_iter().for_each(|end| end.over = true);
        Ok(())
    }

    fn abort(&self, of: NcclComm) -> Result<()> {
        let mut state = self.0.lock();
        state.processes.end("ncclCommAbort", of)?;
        state.processes.end_mut(of).into_iter().for_each(|end| end.over = true);
        drop(state);
        self.0.machine.queued.notify_all();
        Ok(())
    }

    fn health(&self, of: NcclComm) -> Result<()> {
        let (call, state) = ("ncclCommGetAsyncError", self.0.lock());
        state.processes.end(call, of).and_then(|end| state.processes.health(call, &end))
    }
}
