//! The port of a process: brings messages to ranks, through memory within the process and over the wire to others.
//!
//! More than 400 lines: whatever arrives, in memory or over the wire, is brought to its rank here, under two locks.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use meshwork_core::{Buffer, DType};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::{Deserialize, Serialize};

use crate::block::{Block, EAGER, ROOM};
use crate::carrier::{Carrier, Event};
use crate::ground::Ground;
use crate::lookout::{Bell, Lookout, Source};
use crate::native::{Reduction, Sum};
use crate::packet::{Arrival, Body, Bytes, Head, Judge, Part, What};
use crate::pause::Pause;
use crate::wire;

/// How long processes that are alive may take to end.
pub(crate) const LAST: Duration = Duration::from_secs(5);

/// How long messages are moved at the end of MPI where some are for a process that does not answer.
const BRIEF: Duration = Duration::from_millis(300);

/// This process among all that were launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) process: usize,
    pub(crate) processes: usize,
    pub(crate) ranks_per_process: usize,
}

/// The ranks of a world, and the processes that have them, in the order of the ranks. Each has as many.
#[derive(Clone, Debug)]
pub(crate) struct Hosts {
    pub(crate) ranks: usize,
    pub(crate) processes: Arc<[usize]>,
    pub(crate) ranks_per_process: usize,
}

impl Hosts {
    pub(crate) fn process_of(&self, rank: usize) -> usize {
        self.processes[rank / self.ranks_per_process]
    }
}

/// What has arrived at a rank, and it has not looked at.
#[derive(Debug)]
pub(crate) struct Inbox {
    arrivals: Mutex<VecDeque<Arrival>>,
    pub(crate) bell: Arc<Bell>,
}

impl Inbox {
    pub(crate) fn new(lookout: &Arc<Lookout>) -> Inbox {
        Inbox { arrivals: Mutex::default(), bell: Arc::new(Bell::new(lookout)) }
    }

    pub(crate) fn put(&self, arrival: Arrival) {
        let is_for_now = matches!(arrival, Arrival::Told(_) | Arrival::Failed(..) | Arrival::Lost(..));
        lock(&self.arrivals).push_back(arrival);
        self.bell.ring(is_for_now);
    }

    pub(crate) fn next(&self) -> Option<Arrival> {
        lock(&self.arrivals).pop_front()
    }
}

/// A rank's end of a world, as the port of its process sees it.
pub(crate) trait Station: Send + Sync {
    /// The world, and the rank in it.
    fn place(&self) -> (u64, usize);

    /// Where its messages go.
    fn inbox(&self) -> &Inbox;

    /// Goes through what has arrived, and does what can be done, unless the rank waits, and does it itself. Whether
    /// anything has arrived.
    fn advance(&self) -> bool;

    /// Whether the world is over.
    fn is_over(&self) -> bool;
}

/// The port of a process.
pub(crate) struct Port {
    pub(crate) layout: Layout,
    pub(crate) reduction: Reduction,
    /// None if there is no other process, or the connection has ended.
    wire: Mutex<Option<Box<dyn Carrier<Landing>>>>,
    desk: Mutex<Desk>,
    /// Whether a process may never end MPI, so that this one must not wait for it.
    abandoned: AtomicBool,
    /// How its ranks sleep.
    pub(crate) lookout: Arc<Lookout>,
}

/// What a large message is for.
pub(crate) enum Landing {
    /// A rank, which knows it by this number.
    Rank(Arc<Inbox>, u64),
    /// A head that is too long for a first message.
    Head,
    /// Nobody: it belongs to a world that is over.
    Nobody,
}

#[derive(Default)]
struct Desk {
    /// By world, and rank in it.
    endpoints: FxHashMap<(u64, usize), Arc<dyn Station>>,
    /// Messages to ranks that have not come yet.
    early: FxHashMap<(u64, usize), Vec<Arrival>>,
    over: FxHashSet<u64>,
    lost: Vec<(usize, String)>,
    /// Processes that are about to end MPI.
    byes: FxHashSet<usize>,
    /// Processes without which the others went on.
    gone: FxHashSet<usize>,
    /// Processes that did not answer at the end of a world, and do not come to the end of MPI.
    silent: FxHashSet<usize>,
}

/// What a first message is, by its first byte: a [`Part`], or a [`Cover`].
const PART: u8 = 1;
const COVER: u8 = 2;

/// A first message that is no part of an operation.
#[derive(Serialize, Deserialize)]
enum Cover {
    Head(Box<Head>),
    /// A first message that is too long: from this process, under a tag.
    Long {
        process: usize,
        tag: usize,
        bytes: usize,
    },
    /// This process is about to end MPI.
    Bye {
        process: usize,
    },
}

/// A first message.
fn cover(cover: &Cover) -> Block {
    // Plain data in memory can always be written.
    let bytes = postcard::to_allocvec(cover).unwrap_or_default();
    let mut block = wire::framed(COVER, bytes.len());
    block.push(&bytes);
    block
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is under these locks is whole between calls, and no call panics halfway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Port {
    pub(crate) fn new(layout: Layout, reduction: Reduction, wire: Option<Box<dyn Carrier<Landing>>>) -> Port {
        let source = wire.as_ref().map_or(Source::Nothing, |wire| wire.source());
        let lookout = Arc::new(Lookout::new(source, layout.processes * layout.ranks_per_process));
        let (wire, desk, abandoned) = (Mutex::new(wire), Mutex::default(), AtomicBool::new(false));
        Port { layout, reduction, wire, desk, abandoned, lookout }
    }

    /// Sends a message to a rank of a process.
    pub(crate) fn tell(&self, process: usize, head: Head) {
        let head = Box::new(head);
        if process == self.layout.process {
            self.deliver(Arrival::Told(head));
            self.lookout.call_if_unattended();
        } else if let Some(wire) = lock(&self.wire).as_mut() {
            self.first(&mut **wire, process, cover(&Cover::Head(head)));
        }
    }

    /// Sends a message of an operation, and its bytes, to a rank of a process.
    pub(crate) fn send(&self, process: usize, part: Part, bytes: &Bytes) {
        let content = bytes.as_ref();
        if process == self.layout.process {
            let body = match content.len() {
                0..=EAGER => Body::Here(Block::from(content), 0),
                _ => Body::Near(bytes.clone()),
            };
            self.deliver(Arrival::Part(part, body));
            return self.lookout.call_if_unattended();
        }
        let mut wire = lock(&self.wire);
        let Some(wire) = wire.as_mut() else { return };
        let far = (content.len() > EAGER).then(|| (self.layout.process, wire.tag(process), content.len()));
        let with_it = if far.is_none() { content } else { &[] };
        let mut block = wire::framed(PART, part.len() + with_it.len());
        part.write(far, &mut block);
        block.push(with_it);
        self.first(&mut **wire, process, block);
        if let Some((_, tag, _)) = far {
            wire.large(process, tag, bytes);
        }
    }

    /// Sends a first message, or where it is too long, another one that says so.
    fn first(&self, wire: &mut dyn Carrier<Landing>, process: usize, block: Block) {
        if block.len() <= ROOM {
            return wire.first(process, block);
        }
        let (tag, bytes) = (wire.tag(process), block.len());
        wire.first(process, cover(&Cover::Long { process: self.layout.process, tag, bytes }));
        wire.large(process, tag, &Bytes::of(block.into_vec()));
    }

    /// Receives the bytes of a message into `into`, for the rank with this inbox.
    pub(crate) fn receive(&self, process: usize, tag: usize, into: crate::ground::Claim, what: Landing) {
        if let Some(wire) = lock(&self.wire).as_mut() {
            wire.receive(process, tag, into, what);
        }
    }

    /// The library will take this sum of a group.
    pub(crate) fn announce(&self, group: (u64, u64), seq: u64) {
        if let Some(natives) = lock(&self.wire).as_mut().and_then(|wire| wire.natives()) {
            natives.announce(group, seq);
        }
    }

    /// Has the library take a sum of members in these processes, for a rank.
    pub(crate) fn sum(&self, sum: Sum<Landing>, processes: impl FnOnce() -> Vec<usize>) {
        if let Some(natives) = lock(&self.wire).as_mut().and_then(|wire| wire.natives()) {
            natives.start(sum, processes);
        }
    }

    /// Receives bytes that nobody wants, so that their sender need not keep them.
    pub(crate) fn discard(&self, body: Body) {
        if let (Body::Far { process, tag, bytes }, Some(wire)) = (body, lock(&self.wire).as_mut()) {
            discard(&mut **wire, process, tag, bytes);
        }
    }

    /// Brings a message to its rank: its bytes, if nobody wants them.
    fn deliver(&self, arrival: Arrival) -> Option<Body> {
        let place = match &arrival {
            Arrival::Part(part, _) => (part.world, part.to),
            Arrival::Told(head) => (head.world, head.to),
            Arrival::Landed(..) | Arrival::Failed(..) | Arrival::Lost(..) => return None,
        };
        let mut desk = lock(&self.desk);
        match (desk.endpoints.get(&place), arrival) {
            (Some(endpoint), arrival) => endpoint.inbox().put(arrival),
            (None, Arrival::Part(_, body)) if desk.over.contains(&place.0) => return Some(body),
            (None, _) if desk.over.contains(&place.0) => {}
            // A fork to which this rank never came.
            (None, Arrival::Told(head)) if matches!(head.what, What::Judge(Judge::Over(_))) => {
                desk.over.insert(head.world);
                desk.early.remove(&place);
            }
            (None, arrival) => desk.early.entry(place).or_default().push(arrival),
        }
        None
    }

    /// Brings what has arrived to the ranks. Whether anything has.
    pub(crate) fn poll(&self) -> bool {
        let Ok(mut wire) = self.wire.try_lock() else { return false };
        let Some(wire) = wire.as_mut() else { return false };
        let (mut unwanted, mut long) = (Vec::new(), Vec::new());
        let mut opened = |message: Block| match message.get(wire::LENGTH..).and_then(|kind| kind.first()) {
            Some(&PART) => {
                let part = Part::read(message, wire::FRAME);
                unwanted.extend(part.and_then(|(part, body)| self.deliver(Arrival::Part(part, body))));
            }
            Some(&COVER) => match postcard::from_bytes(&message[wire::FRAME..]) {
                Ok(Cover::Head(head)) => _ = self.deliver(Arrival::Told(head)),
                Ok(Cover::Long { process, tag, bytes }) => long.push((process, tag, bytes)),
                Ok(Cover::Bye { process }) => _ = lock(&self.desk).byes.insert(process),
                Err(_) => {}
            },
            // Another program than this one; the handshake of a run tells it.
            _ => {}
        };
        let any = wire.poll(&mut |event| match event {
            Event::First(message) => opened(message),
            Event::Landed(Landing::Rank(inbox, number), claim) => inbox.put(Arrival::Landed(number, claim)),
            Event::Failed(Landing::Rank(inbox, number), why) => inbox.put(Arrival::Failed(number, why)),
            Event::Failed(Landing::Head | Landing::Nobody, _) => {}
            Event::Landed(Landing::Head, claim) => opened(Block::from(&*claim)),
            Event::Landed(Landing::Nobody, _) => {}
            Event::Lost(process, why) => {
                let mut desk = lock(&self.desk);
                for endpoint in desk.endpoints.values() {
                    endpoint.inbox().put(Arrival::Lost(process, why.clone()));
                }
                desk.lost.push((process, why));
            }
        });
        for (process, tag, bytes) in long {
            if let Some(into) = room(bytes) {
                wire.receive(process, tag, into, Landing::Head);
            }
        }
        for body in unwanted {
            if let Body::Far { process, tag, bytes } = body {
                discard(&mut **wire, process, tag, bytes);
            }
        }
        any
    }

    /// Adds a rank's end of a world.
    pub(crate) fn enter(&self, endpoint: Arc<dyn Station>) {
        let mut desk = lock(&self.desk);
        let place = endpoint.place();
        let early = desk.early.remove(&place).unwrap_or_default();
        let lost = desk.lost.iter().map(|(process, why)| Arrival::Lost(*process, why.clone()));
        early.into_iter().chain(lost).for_each(|arrival| endpoint.inbox().put(arrival));
        desk.endpoints.insert(place, endpoint);
    }

    /// Removes a rank's end of a world that is over.
    pub(crate) fn leave(&self, place: (u64, usize)) {
        let unwanted = {
            let mut desk = lock(&self.desk);
            desk.endpoints.remove(&place);
            desk.over.insert(place.0);
            desk.early.remove(&place)
        };
        if let Some(natives) = lock(&self.wire).as_mut().and_then(|wire| wire.natives()) {
            natives.leave(place.0);
        }
        for arrival in unwanted.into_iter().flatten() {
            if let Arrival::Part(_, body) = arrival {
                self.discard(body);
            }
        }
    }

    /// The ranks of all worlds that are not over.
    pub(crate) fn endpoints(&self) -> Vec<Arc<dyn Station>> {
        lock(&self.desk).endpoints.values().cloned().collect()
    }

    /// Whether messages are under way.
    pub(crate) fn is_busy(&self) -> bool {
        lock(&self.wire).as_ref().is_some_and(|wire| wire.is_busy())
    }

    /// A rank that waits looks again at once, yields, or sleeps until something may have come for it since its bell was
    /// `heard`. First it attends to operations of ranks that compute.
    pub(crate) fn rest(&self, bell: &Arc<Bell>, heard: u32, pause: &mut Pause) {
        if pause.is_brief() {
            return;
        }
        if self.lookout.take_unattended() {
            self.attend();
            return; // it took some time
        }
        self.lookout.sleep(bell, heard, pause);
    }

    /// Goes on with the operations of ranks that compute. Whether anything has arrived for them.
    pub(crate) fn attend(&self) -> bool {
        self.endpoints().iter().fold(false, |any, endpoint| any | endpoint.advance())
    }

    /// Takes note that the process of some rank may never end MPI.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// Whether some process may never end MPI.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Takes note of processes that did not answer at the end of a world: nobody waits for them at the end of MPI.
    pub(crate) fn give_up(&self, processes: impl Iterator<Item = usize>) {
        lock(&self.desk).silent.extend(processes);
    }

    /// Ends MPI, on the thread that initialised it, if all processes come to this.
    pub(crate) fn close(&self) {
        let met = self.meet();
        lock(&self.desk).endpoints.clear();
        if let Some(wire) = lock(&self.wire).take() {
            wire.close(!met);
        }
    }

    /// Goes on without processes that are lost. Only losses from now on are a reason not to wait.
    pub(crate) fn go_on_without(&self, lost: &[usize]) {
        lock(&self.desk).gone.extend(lost);
        self.abandoned.store(false, Ordering::Relaxed);
    }

    /// Waits until every process is about to end MPI: the first one hears of all, and tells them. False if some process
    /// does not come; where one may not, the wait is short.
    fn meet(&self) -> bool {
        let process = self.layout.process;
        let (there, is_silent) = {
            let Desk { gone, silent, .. } = &*lock(&self.desk);
            let there: Vec<usize> = (0..self.layout.processes).filter(|process| !gone.contains(process)).collect();
            let is_silent = there.iter().any(|process| silent.contains(process));
            (there, is_silent)
        };
        let first = there.first().copied().unwrap_or(process);
        let say = |to: usize| {
            if let Some(wire) = lock(&self.wire).as_mut() {
                wire.first(to, cover(&Cover::Bye { process }));
            }
        };
        let longest = if self.is_abandoned() { LAST } else { 12 * LAST };
        let (begun, mut pause) = (Instant::now(), Pause::of_thread(Duration::from_millis(1)));
        if process != first {
            say(first);
        }
        let all = |desk: &Desk| {
            // A lost process does not come.
            let lost = |other: &usize| desk.silent.contains(other) || desk.lost.iter().any(|(lost, _)| lost == other);
            let came = |other: &usize| desk.byes.contains(other) || lost(other);
            if process == first { there.iter().all(|other| *other == first || came(other)) } else { came(&first) }
        };
        while !all(&lock(&self.desk)) {
            if begun.elapsed() > longest {
                return false;
            }
            if !self.poll() {
                pause.rest();
            }
        }
        if process == first {
            there.into_iter().skip(1).for_each(say);
        }
        // What is for a process that does not answer stays under way; the rest is over soon.
        let longest = if is_silent { begun.elapsed() + BRIEF } else { longest };
        while self.is_busy() {
            if begun.elapsed() > longest {
                return false;
            }
            if !self.poll() {
                pause.rest();
            }
        }
        !is_silent
    }
}

/// Memory for a message of this many bytes.
fn room(bytes: usize) -> Option<crate::ground::Claim> {
    // Fresh memory has no other owner.
    Ground::new(Buffer::zeros(DType::U8, bytes)).ok()?.claim(0..bytes)
}

fn discard(wire: &mut dyn Carrier<Landing>, process: usize, tag: usize, bytes: usize) {
    if let Some(into) = room(bytes) {
        wire.receive(process, tag, into, Landing::Nobody);
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Port({:?})", self.layout)
    }
}
