//! Messages between processes over TCP, where there is no MPI: a connection for each pair of processes.
//!
//! It is made for what ranks tell each other beside the elements of their GPUs, and for a few processes: a poll asks
//! each connection. Between [neighbours](crate::neighbour) the connection carries only where the bytes of a large
//! message lie: its receiver reads them there, and says when it has. A process that ends, however it does, closes its
//! connections, so that the others hear of it at once. Nothing is encrypted, and any process that reaches the ports can
//! join: as with MPI and NCCL, the network must belong to the job.
//!
//! More than 400 lines: a quarter of them send to each other over connections between threads.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::block::{Block, ROOM};
use crate::carrier::{Carrier, Event};
use crate::ground::Claim;
use crate::lookout::Source;
use crate::native::Natives;
use crate::neighbour::Neighbour;
use crate::packet::Bytes;
use crate::watch::{Connection, Watch};

/// Before each message: what it is, and how long.
const HEAD: usize = 16;

/// The place of a first message among tags.
const FIRST: u64 = u64::MAX;

/// Added to the tag of a large message whose bytes lie in the sender's memory: what follows is their address.
const LENT: u64 = 1 << 62;

/// Added to the tag of a message that was lent: its receiver has read it.
const READ: u64 = 1 << 61;

/// The connections of this process. `T` names what a receive is for.
pub(crate) struct Sockets<T> {
    watch: Arc<Watch>,
    /// By process; none to this one, and to those that are lost.
    lines: Vec<Option<Line<T>>>,
    tags: Vec<usize>,
    /// Large messages that are awaited, and those that came before they were: by process and tag.
    awaited: HashMap<(usize, usize), (Claim, T)>,
    early: HashMap<(usize, usize), Early>,
    /// Events that the next poll reports.
    noticed: VecDeque<Event<T>>,
}

struct Line<T> {
    connection: Arc<Connection>,
    neighbour: Option<Neighbour>,
    /// What it may read, by tag.
    lent: HashMap<u64, Bytes>,
    out: VecDeque<Outgoing>,
    head: [u8; HEAD],
    /// Bytes of the head, or behind it of the body, that are here.
    here: usize,
    body: Option<Body<T>>,
}

struct Outgoing {
    head: [u8; HEAD],
    body: Held,
    sent: usize,
}

enum Held {
    First(Block),
    Large(Bytes),
    /// The bytes and the address of a large message.
    Lent([u8; HEAD]),
    Nothing,
}

/// Where a message goes.
enum Body<T> {
    First(Block, usize),
    Awaited(Claim, T),
    Early(usize, Vec<u8>),
    Lent(usize, [u8; HEAD]),
    Read(u64),
}

/// The bytes of a large message that is complete.
enum Early {
    Here(Vec<u8>),
    /// At a neighbour: how many, and their address.
    There(usize, u64),
}

impl Early {
    /// Brings them to where they are awaited.
    fn land(self, neighbour: Option<&Neighbour>, into: &mut Claim) -> io::Result<()> {
        match (self, neighbour) {
            (Early::Here(bytes), _) if bytes.len() == into.len() => into.copy_from_slice(&bytes),
            (Early::There(bytes, at), Some(neighbour)) if bytes == into.len() => neighbour.read(at, into)?,
            _ => return Err(strange()),
        }
        Ok(())
    }
}

impl Held {
    fn bytes(&self) -> &[u8] {
        match self {
            Held::First(block) => block,
            Held::Large(bytes) => bytes.as_ref(),
            Held::Lent(words) => words,
            Held::Nothing => &[],
        }
    }
}

impl<T> Body<T> {
    fn memory(&mut self) -> &mut [u8] {
        match self {
            Body::First(block, bytes) => &mut block.memory()[..*bytes],
            Body::Awaited(claim, _) => claim,
            Body::Early(_, bytes) => bytes,
            Body::Lent(_, words) => words,
            Body::Read(_) => &mut [],
        }
    }
}

impl<T> Sockets<T> {
    /// Of connections to the other processes.
    pub(crate) fn new(mut streams: Vec<Option<TcpStream>>) -> io::Result<Sockets<T>> {
        let neighbours = Neighbour::find(&mut streams)?;
        let line = |(stream, neighbour): (Option<TcpStream>, _)| {
            let Some(stream) = stream else { return Ok(None) };
            stream.set_nonblocking(true)?;
            let connection = Arc::new(Connection { stream, is_full: AtomicBool::new(false) });
            let (lent, out) = (HashMap::new(), VecDeque::new());
            Ok(Some(Line { connection, neighbour, lent, out, head: [0; HEAD], here: 0, body: None }))
        };
        let tags = vec![0; streams.len()];
        let lines = streams.into_iter().zip(neighbours).map(line).collect::<io::Result<Vec<Option<Line<T>>>>>()?;
        let watch = Arc::new(Watch::new(lines.iter().flatten().map(|line| &line.connection))?);
        Ok(Sockets { watch, lines, tags, awaited: HashMap::new(), early: HashMap::new(), noticed: VecDeque::new() })
    }

    fn send(&mut self, to: usize, tag: u64, body: Held) {
        let Some(line) = &mut self.lines[to] else { return };
        line.queue(tag, body);
        // A failure shows in the next poll too, which first reads what the process had sent.
        _ = self.write(to);
    }

    /// Writes to a process as much as the system takes. Whether it took anything.
    fn write(&mut self, to: usize) -> io::Result<bool> {
        let Some(line) = &mut self.lines[to] else { return Ok(false) };
        let wrote = line.write();
        let is_full = !line.out.is_empty();
        if !line.connection.is_full.swap(is_full, Ordering::SeqCst) && is_full {
            self.watch.call(); // a thread that sleeps at the connections does not know it yet
        }
        wrote
    }

    /// A process is not reached any more.
    fn lose(&mut self, process: usize, why: &io::Error) {
        if self.lines[process].take().is_some() {
            let words = match why.kind() {
                ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                    "its process ended".to_owned()
                }
                _ => format!("its connection failed: {why}"),
            };
            self.awaited.retain(|(from, _), _| *from != process);
            self.noticed.push_back(Event::Lost(process, words));
        }
    }

    /// Reads what has come from a process. Whether anything has.
    fn read(&mut self, from: usize) -> io::Result<bool> {
        let Sockets { lines, awaited, early, noticed, .. } = self;
        let Some(line) = &mut lines[from] else { return Ok(false) };
        let mut any = false;
        loop {
            let Line { connection, head, here, body, .. } = &mut *line;
            let into = body.as_mut().map_or(&mut head[..], Body::memory);
            if *here < into.len() {
                match (&connection.stream).read(&mut into[*here..]) {
                    Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                    Ok(read) => {
                        any = true;
                        *here += read;
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(any),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
                continue;
            }
            *here = 0;
            match body.take() {
                None => *body = Some(opened(awaited, from, word(head, 0), word(head, 8) as usize)?),
                Some(Body::First(mut block, bytes)) => {
                    block.fill(bytes);
                    noticed.push_back(Event::First(block));
                }
                Some(Body::Awaited(claim, what)) => noticed.push_back(Event::Landed(what, claim)),
                // It may be awaited by now.
                Some(Body::Early(tag, bytes)) => match awaited.remove(&(from, tag)) {
                    Some((mut claim, what)) => {
                        Early::Here(bytes).land(None, &mut claim)?;
                        noticed.push_back(Event::Landed(what, claim));
                    }
                    None => _ = early.insert((from, tag), Early::Here(bytes)),
                },
                Some(Body::Lent(tag, words)) => {
                    let lent = Early::There(word(&words, 0) as usize, word(&words, 8));
                    match awaited.remove(&(from, tag)) {
                        Some((mut claim, what)) => {
                            lent.land(line.neighbour.as_ref(), &mut claim)?;
                            line.queue(READ | tag as u64, Held::Nothing);
                            noticed.push_back(Event::Landed(what, claim));
                        }
                        None => _ = early.insert((from, tag), lent),
                    }
                }
                Some(Body::Read(tag)) => _ = line.lent.remove(&tag),
            }
        }
    }
}

/// Two numbers: the head of a message, or what is said of one that is lent.
fn words(first: u64, second: u64) -> [u8; HEAD] {
    let mut words = [0; HEAD];
    words.as_chunks_mut().0.copy_from_slice(&[first.to_le_bytes(), second.to_le_bytes()]);
    words
}

/// One of them, at this byte.
fn word(words: &[u8; HEAD], at: usize) -> u64 {
    words[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

/// The place of a message that begins.
fn opened<T>(
    awaited: &mut HashMap<(usize, usize), (Claim, T)>,
    from: usize,
    tag: u64,
    bytes: usize,
) -> io::Result<Body<T>> {
    if tag == FIRST {
        return if bytes <= ROOM { Ok(Body::First(Block::new(bytes), bytes)) } else { Err(strange()) };
    }
    if tag & LENT > 0 {
        return if bytes == HEAD { Ok(Body::Lent((tag & !LENT) as usize, [0; HEAD])) } else { Err(strange()) };
    }
    if tag & READ > 0 {
        return if bytes == 0 { Ok(Body::Read(tag & !READ)) } else { Err(strange()) };
    }
    match awaited.remove(&(from, tag as usize)) {
        Some((claim, what)) if claim.len() == bytes => Ok(Body::Awaited(claim, what)),
        Some(_) => Err(strange()),
        None => {
            let mut room = Vec::new();
            room.try_reserve_exact(bytes).map_err(|_| strange())?;
            room.resize(bytes, 0);
            Ok(Body::Early(tag as usize, room))
        }
    }
}

fn strange() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "a message that no process of this job sends")
}

impl<T> Line<T> {
    fn queue(&mut self, tag: u64, body: Held) {
        let head = words(tag, body.bytes().len() as u64);
        self.out.push_back(Outgoing { head, body, sent: 0 });
    }

    /// Writes as much as the system takes. Whether it took anything.
    fn write(&mut self) -> io::Result<bool> {
        let mut any = false;
        while let Some(Outgoing { head, body, sent }) = self.out.front_mut() {
            let bytes = body.bytes();
            let parts = [&head[(*sent).min(HEAD)..], &bytes[sent.saturating_sub(HEAD)..]].map(IoSlice::new);
            match (&self.connection.stream).write_vectored(&parts) {
                Ok(0) => return Err(ErrorKind::BrokenPipe.into()),
                Ok(written) => {
                    any = true;
                    *sent += written;
                    if *sent == HEAD + bytes.len() {
                        self.out.pop_front();
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(any)
    }
}

impl<T: Send> Carrier<T> for Sockets<T> {
    fn first(&mut self, to: usize, block: Block) {
        self.send(to, FIRST, Held::First(block));
    }

    fn tag(&mut self, to: usize) -> usize {
        self.tags[to] += 1;
        self.tags[to]
    }

    fn large(&mut self, to: usize, tag: usize, bytes: &Bytes) {
        let Some(line) = &mut self.lines[to] else { return };
        if line.neighbour.is_none() {
            return self.send(to, tag as u64, Held::Large(bytes.clone()));
        }
        line.lent.insert(tag as u64, bytes.clone());
        let bytes = bytes.as_ref();
        self.send(to, LENT | tag as u64, Held::Lent(words(bytes.len() as u64, bytes.as_ptr() as u64)));
    }

    fn receive(&mut self, from: usize, tag: usize, mut into: Claim, what: T) {
        let line = self.lines[from].as_mut();
        let Some(early) = self.early.remove(&(from, tag)) else {
            line.map(|_| self.awaited.insert((from, tag), (into, what)));
            return;
        };
        let is_there = matches!(early, Early::There(..));
        match early.land(line.and_then(|line| line.neighbour.as_ref()), &mut into) {
            Ok(()) => self.noticed.push_back(Event::Landed(what, into)),
            Err(why) => return self.lose(from, &why),
        }
        if is_there {
            self.send(from, READ | tag as u64, Held::Nothing);
        }
    }

    fn poll(&mut self, event: &mut dyn FnMut(Event<T>)) -> bool {
        let mut any = false;
        for process in 0..self.lines.len() {
            // What a process sent before it ended is read before its end is found.
            let read = self.read(process);
            let wrote = self.write(process);
            match read.and_then(|read| Ok(read | wrote?)) {
                Ok(moved) => any |= moved,
                Err(why) => self.lose(process, &why),
            }
        }
        while let Some(noticed) = self.noticed.pop_front() {
            any = true;
            event(noticed);
        }
        any
    }

    fn is_busy(&self) -> bool {
        let busy =
            |line: &Line<T>| !(line.out.is_empty() && line.lent.is_empty()) || line.body.is_some() || line.here > 0;
        !self.awaited.is_empty() || self.lines.iter().flatten().any(busy)
    }

    fn source(&self) -> Source {
        Source::Connections(self.watch.clone())
    }

    fn natives(&mut self) -> Option<&mut Natives<T>> {
        None
    }

    /// The system sends what is left.
    fn close(self: Box<Self>, _: bool) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ground::Ground;
    use crate::stream::{accept, connect};
    use meshwork_core::Buffer;
    use std::net::TcpListener;
    use std::thread;
    use std::time::{Duration, Instant};

    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = connect(listener.local_addr().unwrap(), Duration::from_secs(60)).unwrap();
        (one, accept(&listener).unwrap().0)
    }

    /// Asks `is_done` for at most a minute.
    fn until(mut is_done: impl FnMut() -> bool) {
        let begun = Instant::now();
        while !is_done() {
            assert!(begun.elapsed() < Duration::from_secs(60));
            thread::yield_now();
        }
    }

    /// Polls until a message lands, and returns where. The system may take only a part of it at once, so its sender is
    /// polled too.
    fn landed(receiver: &mut Sockets<u32>, sender: &mut Sockets<u32>) -> (u32, Claim) {
        let mut found = None;
        until(|| {
            sender.poll(&mut |_| unreachable!("nothing is sent to it"));
            receiver.poll(&mut |event| match event {
                Event::Landed(what, claim) => found = Some((what, claim)),
                _ => unreachable!("there are large messages alone"),
            });
            found.is_some()
        });
        found.unwrap()
    }

    /// Over the connection, and between neighbours, which hold what they lend until the other one has read it.
    #[test]
    fn large_messages_land_whether_they_are_awaited_or_not() {
        let (one, other) = connection();
        let met = thread::spawn(move || Sockets::new(vec![Some(other), None]).unwrap());
        let mut sender: Sockets<u32> = Sockets::new(vec![None, Some(one)]).unwrap();
        let mut receiver = met.join().unwrap();
        let bytes: Vec<u8> = (0..10_000_000).map(|at| at as u8).collect();
        for lends in [cfg!(target_os = "linux"), false] {
            if !lends {
                sender.lines[1].as_mut().unwrap().neighbour = None;
                receiver.lines[0].as_mut().unwrap().neighbour = None;
            }
            for is_early in [false, true] {
                let ground = Ground::new(Buffer::from_vec(vec![0_u8; bytes.len()])).unwrap();
                let tag = sender.tag(1);
                let into = ground.claim(0..bytes.len()).unwrap();
                if is_early {
                    sender.large(1, tag, &Bytes::of(bytes.clone()));
                    until(|| {
                        sender.poll(&mut |_| unreachable!("nothing is sent to it"));
                        receiver.poll(&mut |_| unreachable!("nobody awaits it"));
                        !receiver.early.is_empty()
                    });
                    receiver.receive(0, tag, into, 7);
                } else {
                    receiver.receive(0, tag, into, 7);
                    sender.large(1, tag, &Bytes::of(bytes.clone()));
                }
                assert_eq!(sender.lines[1].as_ref().unwrap().lent.len(), usize::from(lends));
                let (what, claim) = landed(&mut receiver, &mut sender);
                assert_eq!((what, &*claim), (7, &*bytes));
                until(|| {
                    sender.poll(&mut |_| unreachable!("nothing is sent to it"));
                    !sender.is_busy()
                });
            }
        }
    }

    /// A process that ends resets its connection where it has not read everything. What it had sent before is not lost,
    /// whatever is sent to it meanwhile.
    #[test]
    fn the_last_message_of_a_process_arrives_before_its_end() {
        let (other, stream) = connection();
        let met = thread::spawn(move || {
            let mut streams = [Some(other)];
            Neighbour::find(&mut streams).unwrap();
            streams[0].take().unwrap()
        });
        let mut sockets: Sockets<()> = Sockets::new(vec![None, Some(stream)]).unwrap();
        let mut other = met.join().unwrap();
        other.write_all(&[&FIRST.to_le_bytes(), &4_u64.to_le_bytes(), &b"last"[..]].concat()).unwrap();
        sockets.first(1, Block::from(&b"unread"[..]));
        drop(other);
        for _ in 0..3 {
            thread::sleep(Duration::from_millis(20));
            sockets.first(1, Block::from(&b"too late"[..]));
        }
        let mut events = Vec::new();
        for _ in 0..10 {
            thread::sleep(Duration::from_millis(5));
            sockets.poll(&mut |event| {
                events.push(match event {
                    Event::First(block) => String::from_utf8(block.into_vec()).unwrap(),
                    Event::Lost(process, why) => format!("{process} is lost: {why}"),
                    Event::Landed(..) | Event::Failed(..) => unreachable!("there is no large message and no sum"),
                });
            });
        }
        assert_eq!(events, ["last", "1 is lost: its process ended"]);
    }
}
