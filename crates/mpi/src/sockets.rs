//! Messages between processes over TCP, where there is no MPI: a connection for each pair of processes.
//!
//! It is made for what ranks tell each other beside the elements of their GPUs, and for a few processes: a poll asks
//! each connection. A process that ends, however it does, closes its connections, so that the others hear of it at
//! once. Nothing is encrypted, and any process that reaches the ports can join: as with MPI and NCCL, the network must
//! belong to the job.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;

use crate::block::{Block, ROOM};
use crate::carrier::{Carrier, Event};
use crate::ground::Claim;
use crate::native::Natives;
use crate::packet::Bytes;

/// Before each message: what it is, and how long.
const HEAD: usize = 16;

/// The place of a first message among tags.
const FIRST: u64 = u64::MAX;

/// The connections of this process. `T` names what a receive is for.
pub(crate) struct Sockets<T> {
    /// By process; none to this one, and to those that are lost.
    lines: Vec<Option<Line<T>>>,
    tags: Vec<usize>,
    /// Large messages that are awaited, and those that came before they were: by process and tag.
    awaited: HashMap<(usize, usize), (Claim, T)>,
    early: HashMap<(usize, usize), Vec<u8>>,
    /// Events that the next poll reports.
    noticed: VecDeque<Event<T>>,
}

struct Line<T> {
    stream: TcpStream,
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
}

/// Where a message goes.
enum Body<T> {
    First(Block, usize),
    Awaited(Claim, T),
    Early(usize, Vec<u8>),
}

impl Held {
    fn bytes(&self) -> &[u8] {
        match self {
            Held::First(block) => block,
            Held::Large(bytes) => bytes.as_ref(),
        }
    }
}

impl<T> Body<T> {
    fn memory(&mut self) -> &mut [u8] {
        match self {
            Body::First(block, bytes) => &mut block.memory()[..*bytes],
            Body::Awaited(claim, _) => claim,
            Body::Early(_, bytes) => bytes,
        }
    }
}

impl<T> Sockets<T> {
    /// Of connections to the other processes.
    pub(crate) fn new(streams: Vec<Option<TcpStream>>) -> io::Result<Sockets<T>> {
        let line = |stream: TcpStream| {
            stream.set_nonblocking(true)?;
            Ok(Line { stream, out: VecDeque::new(), head: [0; HEAD], here: 0, body: None })
        };
        let tags = vec![0; streams.len()];
        let lines = streams.into_iter().map(|stream| stream.map(line).transpose()).collect::<io::Result<_>>()?;
        Ok(Sockets { lines, tags, awaited: HashMap::new(), early: HashMap::new(), noticed: VecDeque::new() })
    }

    fn send(&mut self, to: usize, tag: u64, body: Held) {
        let Some(line) = &mut self.lines[to] else { return };
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(&tag.to_le_bytes());
        head[8..].copy_from_slice(&(body.bytes().len() as u64).to_le_bytes());
        line.out.push_back(Outgoing { head, body, sent: 0 });
        // A failure shows in the next poll too, which first reads what the process had sent.
        _ = line.write();
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
            let Line { stream, head, here, body, .. } = &mut *line;
            let into = body.as_mut().map_or(&mut head[..], Body::memory);
            if *here < into.len() {
                match stream.read(&mut into[*here..]) {
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
                None => {
                    let word = |at: usize| head[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
                    *body = Some(opened(awaited, from, word(0), word(8) as usize)?);
                }
                Some(Body::First(mut block, bytes)) => {
                    block.fill(bytes);
                    noticed.push_back(Event::First(block));
                }
                Some(Body::Awaited(claim, what)) => noticed.push_back(Event::Landed(what, claim)),
                // It may be awaited by now.
                Some(Body::Early(tag, bytes)) => match awaited.remove(&(from, tag)) {
                    Some((mut claim, what)) if claim.len() == bytes.len() => {
                        claim.copy_from_slice(&bytes);
                        noticed.push_back(Event::Landed(what, claim));
                    }
                    Some(_) => return Err(strange()),
                    None => _ = early.insert((from, tag), bytes),
                },
            }
        }
    }
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
    /// Writes as much as the system takes. Whether it took anything.
    fn write(&mut self) -> io::Result<bool> {
        let mut any = false;
        while let Some(Outgoing { head, body, sent }) = self.out.front_mut() {
            let bytes = body.bytes();
            let parts = [&head[(*sent).min(HEAD)..], &bytes[sent.saturating_sub(HEAD)..]].map(IoSlice::new);
            match self.stream.write_vectored(&parts) {
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
        self.send(to, tag as u64, Held::Large(bytes.clone()));
    }

    fn receive(&mut self, from: usize, tag: usize, mut into: Claim, what: T) {
        match self.early.remove(&(from, tag)) {
            Some(bytes) if bytes.len() == into.len() => {
                into.copy_from_slice(&bytes);
                self.noticed.push_back(Event::Landed(what, into));
            }
            Some(_) => self.lose(from, &strange()),
            None if self.lines[from].is_some() => _ = self.awaited.insert((from, tag), (into, what)),
            None => {}
        }
    }

    fn poll(&mut self, event: &mut dyn FnMut(Event<T>)) -> bool {
        let mut any = false;
        for process in 0..self.lines.len() {
            // What a process sent before it ended is read before its end is found.
            let read = self.read(process);
            let wrote = self.lines[process].as_mut().map_or(Ok(false), Line::write);
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
        let busy = |line: &Line<T>| !line.out.is_empty() || line.body.is_some() || line.here > 0;
        !self.awaited.is_empty() || self.lines.iter().flatten().any(busy)
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
    use crate::stream::{accept, connect};
    use std::net::TcpListener;
    use std::thread;
    use std::time::Duration;

    /// A process that ends resets its connection where it has not read everything. What it had sent before is not lost,
    /// whatever is sent to it meanwhile.
    #[test]
    fn the_last_message_of_a_process_arrives_before_its_end() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = connect(listener.local_addr().unwrap(), Duration::from_secs(60)).unwrap();
        let (stream, _) = accept(&listener).unwrap();
        let mut sockets: Sockets<()> = Sockets::new(vec![None, Some(stream)]).unwrap();
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
