//! Messages between processes over MPI.
//!
//! Two communicators, copies of the world's: one carries the heads of messages, with their bytes if these are few; the
//! other carries the bytes of large messages, each under a tag of its own, straight from the sender's memory into the
//! receiver's. Nothing blocks: requests are tested when the wire is polled.
//!
//! MPI is initialised, and ended, by the thread that makes and drops the [`Wire`]. Any thread calls it in between, one
//! at a time, for which THREAD_SERIALIZED is enough.

use std::collections::{BTreeSet, HashMap, VecDeque};

use crate::error::MpiError;
use crate::ground::Claim;
use crate::library::{Handle, Library};
use crate::packet::Bytes;

/// Bytes up to which a message carries its bytes with its head.
pub(crate) const EAGER: usize = 16 << 10;

/// The longest first message: a head, and bytes. Longer heads (a fault of thousands of ranks) are sent as bytes.
pub(crate) const ROOM: usize = EAGER + 4096;

/// First messages that can arrive before this process looks.
const SLOTS: usize = 16;

/// What a first message begins with: its length, its process, and its number among those of the process to this one.
pub(crate) const FRAME: usize = 12;

/// Of so many polls one looks at all slots. A message of a process that was killed while it was sent may fill the first
/// one and never be complete: the library then says nothing of it, and others arrive behind it.
const ALL_SLOTS: usize = 16;

/// The largest message of the library. Counts are C `int`s; smaller messages let it do other things in between.
const CHUNK: usize = 8 << 20;

/// The tag of first messages.
const FIRST: usize = 0;

/// What happened on a wire.
pub(crate) enum Event<T> {
    /// A first message: its bytes.
    First(Vec<u8>),
    /// The bytes of a large message are here.
    Landed(T, Claim),
    /// A process cannot be reached any more, or a message of it failed.
    Lost(usize, String),
}

/// The connection of this process to the others. `T` names what a receive is for.
pub(crate) struct Wire<T> {
    library: Library,
    level: &'static str,
    process: usize,
    processes: usize,
    firsts: Handle,
    larges: Handle,
    largest_tag: usize,
    /// Receives of first messages, in the order in which they were started.
    slots: VecDeque<Slot>,
    polls: usize,
    /// The number of the next first message to each process, and from it.
    numbers: Vec<[u32; 2]>,
    /// First messages that arrived before an earlier one of their process.
    early: HashMap<(usize, u32), Vec<u8>>,
    sends: Vec<Send>,
    receives: Vec<Receive<T>>,
    /// The next tag of a large message to each process.
    tags: Vec<usize>,
    lost: Vec<bool>,
    /// What the library reported outside of polls.
    noticed: VecDeque<(usize, String)>,
}

struct Slot {
    request: Handle,
    /// The library has its address.
    memory: Vec<u8>,
}

struct Send {
    request: Handle,
    to: usize,
    /// Held until the request is over.
    _bytes: Held,
}

/// Memory that a request reads.
enum Held {
    First { _memory: Vec<u8> },
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
        unlink_shared_memory();
        let largest_tag = library.largest_tag(world)?;
        let (tags, lost) = (vec![0; processes], vec![false; processes]);
        let (slots, noticed) = (VecDeque::new(), VecDeque::new());
        let (numbers, early) = (vec![[0; 2]; processes], HashMap::new());
        let (sends, receives) = (Vec::new(), Vec::new());
        let mut wire = Wire {
            library,
            level,
            process,
            processes,
            firsts,
            larges,
            largest_tag,
            slots,
            polls: 0,
            numbers,
            early,
            sends,
            receives,
            tags,
            lost,
            noticed,
        };
        for _ in 0..SLOTS {
            wire.listen(vec![0; ROOM]);
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

    /// Receives one more first message, into this memory.
    fn listen(&mut self, mut memory: Vec<u8>) {
        // SAFETY: the slot holds the memory, whose bytes do not move with it, until the request is over.
        let request = unsafe { self.library.receive(&mut memory, None, FIRST, self.firsts) };
        match request {
            Ok(request) => self.slots.push_back(Slot { request, memory }),
            Err(code) => self.failed(None, code),
        }
    }

    /// Takes note of the code of a call about a process, or about any.
    fn failed(&mut self, process: Option<usize>, code: i32) {
        let (is_failure, words) = self.library.failure(code);
        let mut lost: Vec<usize> = process.into_iter().collect();
        if is_failure {
            for comm in [self.firsts, self.larges] {
                lost.extend(self.library.failed(comm));
            }
        }
        let words = if is_failure { "its process ended".to_owned() } else { words };
        for process in lost {
            if !std::mem::replace(&mut self.lost[process], true) {
                self.noticed.push_back((process, words.clone()));
            }
        }
    }

    /// Sends a first message: at most [`ROOM`] bytes.
    pub(crate) fn first(&mut self, to: usize, mut memory: Vec<u8>) {
        debug_assert!(memory.len() <= ROOM);
        if self.lost[to] {
            return;
        }
        let [number, _] = &mut self.numbers[to];
        memory[4..8].copy_from_slice(&(self.process as u32).to_le_bytes());
        memory[8..FRAME].copy_from_slice(&number.to_le_bytes());
        *number = number.wrapping_add(1);
        // SAFETY: `sends` holds the memory, whose bytes do not move with it, until the request is over.
        match unsafe { self.library.send(&memory, to, FIRST, self.firsts) } {
            Ok(request) => self.sends.push(Send { request, to, _bytes: Held::First { _memory: memory } }),
            Err(code) => self.failed(Some(to), code),
        }
    }

    /// The tag of the next large message to a process.
    pub(crate) fn tag(&mut self, to: usize) -> usize {
        let tag = self.tags[to];
        self.tags[to] = if tag == self.largest_tag { 0 } else { tag + 1 };
        tag
    }

    /// Sends the bytes of a large message, whose first message has told the receiver the tag.
    pub(crate) fn large(&mut self, to: usize, tag: usize, bytes: &Bytes) {
        if self.lost[to] {
            return;
        }
        for chunk in bytes.as_ref().chunks(CHUNK) {
            // SAFETY: `sends` holds the bytes until the request is over, and nothing writes them while they are held.
            match unsafe { self.library.send(chunk, to, tag, self.larges) } {
                Ok(request) => self.sends.push(Send { request, to, _bytes: Held::Large { _bytes: bytes.clone() } }),
                Err(code) => return self.failed(Some(to), code),
            }
        }
    }

    /// Receives the bytes of a large message.
    pub(crate) fn receive(&mut self, from: usize, tag: usize, mut into: Claim, what: T) {
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

    /// What has happened since the last poll. Whether there was anything.
    pub(crate) fn poll(&mut self, mut event: impl FnMut(Event<T>)) -> bool {
        let (mut any, mut failed) = (false, Vec::new());
        self.polls = self.polls.wrapping_add(1);
        let (looks_at_all, mut at) = (self.polls.is_multiple_of(ALL_SLOTS), 0);
        while let Some(slot) = self.slots.get_mut(at) {
            match self.library.test(&mut slot.request) {
                Ok(true) => {
                    any = true;
                    let Some(slot) = self.slots.remove(at) else { break };
                    self.arrived(&slot.memory, &mut event);
                    self.listen(slot.memory);
                    continue;
                }
                Ok(false) => {}
                // The receive goes on when the failure has been noted.
                Err(code) => failed.push((None, code)),
            }
            at += 1;
            if !looks_at_all {
                break;
            }
        }
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

    /// Passes on a first message, once those of its process before it are here.
    fn arrived(&mut self, memory: &[u8], event: &mut impl FnMut(Event<T>)) {
        let [length, process, number] = frame(memory);
        let (process, message) = (process as usize, &memory[FRAME..(length as usize).clamp(FRAME, memory.len())]);
        if process >= self.numbers.len() {
            return; // of another program
        }
        self.early.insert((process, number), message.to_vec());
        loop {
            let [_, next] = &mut self.numbers[process];
            let Some(message) = self.early.remove(&(process, *next)) else { break };
            *next = next.wrapping_add(1);
            event(Event::First(message));
        }
    }

    /// Whether messages are under way, in either direction, that this process must wait for.
    pub(crate) fn is_busy(&self) -> bool {
        !(self.sends.is_empty() && self.receives.is_empty())
    }

    /// Ends MPI, on the thread that initialised it. After a loss, or with messages under way that nobody takes, the
    /// library would wait for ever, as for a process that is `abandoned`: then it is left as it is, and the launcher
    /// finds out when this process ends.
    pub(crate) fn close(mut self, abandoned: bool) {
        if abandoned || self.lost.contains(&true) || self.is_busy() {
            // The library may still write to this memory.
            std::mem::forget((self.slots, self.sends, self.receives));
            return;
        }
        self.slots.iter_mut().for_each(|slot| self.library.cancel(&mut slot.request));
        [self.firsts, self.larges].into_iter().for_each(|comm| self.library.free(comm));
        self.library.finalize();
    }
}

/// Removes the names of the shared memory that MPICH has mapped, so that none is left if this process is killed. All
/// processes have mapped it: they have made a communicator together.
fn unlink_shared_memory() {
    // Elsewhere there is no such file, and MPICH removes its own at the end.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let names: BTreeSet<&str> =
        maps.lines().filter_map(|line| Some(&line[line.find("/dev/shm/mpich_shm")?..])).collect();
    names.into_iter().for_each(|name| _ = std::fs::remove_file(name)); // another process may have been first
}

/// The memory of a first message of this many bytes, to be filled behind its frame.
pub(crate) fn framed(bytes: usize) -> Vec<u8> {
    let mut memory = Vec::with_capacity(FRAME + bytes);
    memory.extend_from_slice(&[0; FRAME]);
    memory
}

/// Writes the length of a first message into it.
pub(crate) fn sealed(mut memory: Vec<u8>) -> Vec<u8> {
    let length = memory.len() as u32;
    memory[..4].copy_from_slice(&length.to_le_bytes());
    memory
}

/// The numbers that a first message begins with.
fn frame(memory: &[u8]) -> [u32; FRAME / 4] {
    [0, 1, 2].map(|at| {
        let mut number = [0; 4];
        number.copy_from_slice(&memory[4 * at..4 * at + 4]);
        u32::from_le_bytes(number)
    })
}
