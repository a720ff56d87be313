//! Messages between processes over MPI.
//!
//! Two communicators, copies of the world's: one carries the heads of messages, with their bytes if these are few; the
//! other carries the bytes of large messages, each under a tag of its own, straight from the sender's memory into the
//! receiver's. Nothing blocks: requests are tested when the wire is polled.
//!
//! First messages are received from any process, so that the memory and the work of a poll do not grow with their
//! number. Where processes may be lost and the others go on, they are received from each process by itself: after a
//! loss Open MPI 5.0.11 leaves receives from any process pending, and those of the lost process report the loss.
//!
//! MPI is initialised, and ended, by the thread that makes and drops the [`Wire`]. Any thread calls it in between, one
//! at a time, for which THREAD_SERIALIZED is enough.

use std::collections::{BTreeSet, VecDeque};

use crate::block::{Block, ROOM};
use crate::carrier::{Carrier, Event};
use crate::error::MpiError;
use crate::ground::Claim;
use crate::library::{Handle, Library};
use crate::lookout::Source;
use crate::native::Natives;
use crate::packet::Bytes;

/// First messages that can arrive in place before this process looks: from any process, and from each.
const SLOTS: [usize; 2] = [16, 2];

/// Bytes of the length of a first message, with which it begins.
pub(crate) const LENGTH: usize = 4;

/// What a first message begins with: its length, and what it is.
pub(crate) const FRAME: usize = 8;

/// The largest message of the library. Counts are C `int`s; smaller messages let it do other things in between.
const CHUNK: usize = 8 << 20;

/// The tag of first messages.
const FIRST: usize = 0;

/// The connection of this process to the others. `T` names what a receive is for.
pub(crate) struct Wire<T> {
    library: Library,
    level: &'static str,
    process: usize,
    processes: usize,
    firsts: Handle,
    larges: Handle,
    largest_tag: usize,
    lines: Vec<Line>,
    sends: Vec<Send>,
    receives: Vec<Receive<T>>,
    /// The next tag of a large message to each process.
    tags: Vec<usize>,
    lost: Vec<bool>,
    natives: Natives<T>,
    /// What the library reported outside of polls.
    noticed: VecDeque<(usize, String)>,
}

/// Receives of first messages, in the order in which they were started: from this process, or any.
struct Line {
    from: Option<usize>,
    slots: VecDeque<Slot>,
}

struct Slot {
    request: Handle,
    /// The library has its address.
    block: Block,
}

struct Send {
    request: Handle,
    to: usize,
    /// Until the request is over.
    _held: Held,
}

/// Memory that a request reads.
enum Held {
    First { _block: Block },
    Large { _bytes: Bytes },
}

struct Receive<T> {
    /// Of chunks that have not arrived.
    requests: Vec<Handle>,
    from: usize,
    into: Claim,
    /// Taken when it is over.
    what: Option<T>,
}

impl<T> Wire<T> {
    /// Initialises MPI on this thread.
    pub(crate) fn new(library: Library) -> Result<Wire<T>, MpiError> {
        let level = library.init()?;
        let world = library.abi().world;
        library.return_errors(world)?;
        library.compare()?;
        let (process, processes) = library.place(world)?;
        if processes > 1 {
            library.die_with_launcher();
        }
        let (firsts, larges) = (library.duplicate(world)?, library.duplicate(world)?);
        unlink_shared_memory(processes == 1);
        let largest_tag = library.largest_tag(world);
        let (tags, lost) = (vec![0; processes], vec![false; processes]);
        let (sends, receives, noticed) = (Vec::new(), Vec::new(), VecDeque::new());
        let others = || (0..processes).filter(|&other| other != process).map(Some).collect();
        let (sources, slots): (Vec<Option<usize>>, _) = match library.goes_on_after_losses(world) {
            true => (others(), SLOTS[1]),
            false => (vec![None], SLOTS[0]),
        };
        let lines = sources.into_iter().map(|from| Line { from, slots: VecDeque::new() }).collect();
        let natives = Natives::new(library.clone(), largest_tag);
        let mut wire = Wire {
            library,
            level,
            process,
            processes,
            firsts,
            larges,
            largest_tag,
            lines,
            sends,
            receives,
            tags,
            lost,
            natives,
            noticed,
        };
        for line in (0..wire.lines.len()).flat_map(|line| std::iter::repeat_n(line, slots)) {
            wire.listen(line);
        }
        Ok(wire)
    }

    pub(crate) fn library(&self) -> &Library {
        &self.library
    }

    /// The level of threads that the library grants.
    pub(crate) fn level(&self) -> &'static str {
        self.level
    }

    pub(crate) fn process(&self) -> usize {
        self.process
    }

    pub(crate) fn processes(&self) -> usize {
        self.processes
    }

    /// Receives one more first message of a line.
    fn listen(&mut self, line: usize) {
        let Line { from, slots } = &mut self.lines[line];
        if from.is_some_and(|from| self.lost[from]) {
            return;
        }
        let mut block = Block::new(ROOM);
        block.memory()[..FRAME].fill(0); // so that a receive that is over without a message is known
        // SAFETY: the slot holds the block, whose bytes do not move with it, until the request is over.
        let request = unsafe { self.library.receive(block.memory(), *from, FIRST, self.firsts) };
        match request {
            Ok(request) => slots.push_back(Slot { request, block }),
            Err(code) => self.failed(self.lines[line].from, code),
        }
    }

    /// Takes note of the code of a call about a process; of one about any nothing follows.
    fn failed(&mut self, process: Option<usize>, code: i32) {
        let Some(process) = process else { return };
        if !std::mem::replace(&mut self.lost[process], true) {
            let words = self.library.failure(code).unwrap_or_else(|| "its process ended".to_owned());
            self.noticed.push_back((process, words));
        }
    }
}

impl<T: std::marker::Send> Carrier<T> for Wire<T> {
    fn first(&mut self, to: usize, mut block: Block) {
        debug_assert!(block.len() <= ROOM);
        if self.lost[to] {
            return;
        }
        let length = block.len() as u32;
        block.memory()[..LENGTH].copy_from_slice(&length.to_le_bytes());
        // SAFETY: `sends` holds the block, whose bytes do not move with it, until the request is over.
        match unsafe { self.library.send(&block, to, FIRST, self.firsts) } {
            Ok(request) => self.sends.push(Send { request, to, _held: Held::First { _block: block } }),
            Err(code) => self.failed(Some(to), code),
        }
    }

    fn tag(&mut self, to: usize) -> usize {
        let tag = self.tags[to];
        self.tags[to] = if tag == self.largest_tag { 0 } else { tag + 1 };
        tag
    }

    fn large(&mut self, to: usize, tag: usize, bytes: &Bytes) {
        if self.lost[to] {
            return;
        }
        for chunk in bytes.as_ref().chunks(CHUNK) {
            // SAFETY: `sends` holds the bytes until the request is over, and nothing writes them while they are held.
            match unsafe { self.library.send(chunk, to, tag, self.larges) } {
                Ok(request) => self.sends.push(Send { request, to, _held: Held::Large { _bytes: bytes.clone() } }),
                Err(code) => return self.failed(Some(to), code),
            }
        }
    }

    fn receive(&mut self, from: usize, tag: usize, mut into: Claim, what: T) {
        let mut requests = Vec::with_capacity(into.len().div_ceil(CHUNK));
        for chunk in into.chunks_mut(CHUNK) {
            // SAFETY: `receives` holds the claim, whose bytes do not move with it and are its own, until all requests
            // are over.
            match unsafe { self.library.receive(chunk, Some(from), tag, self.larges) } {
                Ok(request) => requests.push(request),
                Err(code) => self.failed(Some(from), code),
            }
        }
        self.receives.push(Receive { requests, from, into, what: Some(what) });
    }

    fn poll(&mut self, event: &mut dyn FnMut(Event<T>)) -> bool {
        let (mut any, mut failed) = (false, Vec::new());
        for line in 0..self.lines.len() {
            while let Some(slot) = self.lines[line].slots.front_mut() {
                let tested = self.library.test(&mut slot.request);
                if tested == Ok(false) {
                    break;
                }
                any = true;
                let Some(slot) = self.lines[line].slots.pop_front() else { break };
                match tested {
                    Ok(_) => {
                        message(slot.block).into_iter().for_each(|message| event(Event::First(message)));
                        self.listen(line);
                    }
                    Err(code) => failed.push((self.lines[line].from, code)),
                }
            }
        }
        any |= self.natives.poll(|what, sum| {
            event(match sum {
                Ok(sum) => Event::Landed(what, sum),
                Err(why) => Event::Failed(what, why),
            });
        });
        let library = &self.library;
        self.sends.retain_mut(|send| match library.test(&mut send.request) {
            Ok(over) => {
                any |= over;
                !over
            }
            Err(code) => {
                failed.push((Some(send.to), code));
                false
            }
        });
        for receive in self.receives.extract_if(.., |receive| {
            receive.requests.retain_mut(|request| match library.test(request) {
                Ok(over) => !over,
                Err(code) => {
                    failed.push((Some(receive.from), code));
                    receive.what = None;
                    false
                }
            });
            receive.requests.is_empty()
        }) {
            any = true;
            if let Some(what) = receive.what {
                event(Event::Landed(what, receive.into));
            }
        }
        failed.into_iter().for_each(|(process, code)| self.failed(process, code));
        while let Some((process, why)) = self.noticed.pop_front() {
            any = true;
            event(Event::Lost(process, why));
        }
        any
    }

    fn source(&self) -> Source {
        Source::Asked
    }

    fn natives(&mut self) -> Option<&mut Natives<T>> {
        Some(&mut self.natives)
    }

    fn is_busy(&self) -> bool {
        !(self.sends.is_empty() && self.receives.is_empty())
    }

    /// Ends MPI, on the thread that initialised it. After a loss, or with messages under way that nobody takes, the
    /// library would wait for ever, as for a process that is `abandoned`: then it is left as it is, and the launcher
    /// finds out when this process ends.
    fn close(mut self: Box<Self>, abandoned: bool) {
        if abandoned || self.lost.contains(&true) || self.is_busy() || !self.natives.is_idle() {
            // The library may still write to this memory.
            let wire = *self;
            std::mem::forget((wire.lines, wire.sends, wire.receives));
            return wire.natives.forget();
        }
        let slots = self.lines.iter_mut().flat_map(|line| &mut line.slots);
        slots.for_each(|slot| self.library.cancel(&mut slot.request));
        [self.firsts, self.larges].into_iter().for_each(|comm| self.library.free(comm));
        self.library.finalize();
    }
}

/// Removes the names of the shared memory that MPICH has mapped, so that none is left if this process is killed. All
/// processes have mapped it: they have made a communicator together. Open MPI's processes map each other's later, and
/// their launcher removes it; of a process that is `alone`, as under another library's launcher, nobody does.
fn unlink_shared_memory(alone: bool) {
    // Elsewhere there is no such file, and MPICH removes its own at the end.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let prefixes: &[&str] =
        if alone { &["/dev/shm/mpich_shm", "/dev/shm/sm_segment"] } else { &["/dev/shm/mpich_shm"] };
    let name = |line| prefixes.iter().find_map(|prefix| Some(&line[str::find(line, prefix)?..]));
    let names: BTreeSet<&str> = maps.lines().filter_map(name).collect();
    names.into_iter().for_each(|name| _ = std::fs::remove_file(name)); // another process may have been first
}

/// A block for a first message of this kind, to be filled behind its frame with so many bytes.
pub(crate) fn framed(kind: u8, bytes: usize) -> Block {
    let mut block = Block::new(FRAME + bytes);
    block.push(&[0, 0, 0, 0, kind, 0, 0, 0]);
    block
}

/// The first message in the block of a receive that is over, if there is one.
fn message(mut block: Block) -> Option<Block> {
    let length = u32::from_le_bytes(*block.memory().first_chunk()?) as usize;
    block.fill(length);
    (length >= FRAME).then_some(block)
}
