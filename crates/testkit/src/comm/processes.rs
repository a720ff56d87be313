//! Ranks that are processes, for tests alone. The test program is started once for each rank, and the processes are
//! joined by local connections.
//!
//! The first process is the hub. It holds a communicator of a world of threads for each rank, and carries out the
//! requests of that rank's process on it, one at a time. So this backend is slow, and its results and faults are the
//! ones of threads, but ranks share no memory.
//!
//! ```text
//! rank's process: World::Joined(Remote) ── Ask, bytes ──▶ hub: rank's communicator of threads
//!                                       ◀── Told, bytes ──
//! ```
//!
//! More than 400 lines: both ends of the protocol.

use super::Worlds;
use meshwork_core::comm::thread::{self as threads, Options};
use meshwork_core::comm::{Activity, Ended, Fault, Membership, PendingOp, Site, check_members};
use meshwork_core::{Buffer, Call, Caller, CommError, Communicator, DType, Op, OpKind, Pending, ReductionOrder, World};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Tells a process that it is a rank: the port of the hub, its number, and how many there are.
const RANK: &str = "MESHWORK_TEST_RANK";

/// How long ranks may live after rank 0 has ended.
const LAST: Duration = Duration::from_secs(30);

/// How the process of a rank ended.
#[derive(Debug)]
pub struct Exit {
    /// Its code; none if it was killed.
    pub code: Option<i32>,
    /// Its standard error.
    pub errors: String,
}

/// Whether this process is a rank that [`run`] started.
pub fn is_rank() -> bool {
    std::env::var(RANK).is_ok()
}

/// Runs `body` in `ranks` processes, each of them this test program with the one test `test`, which calls this function
/// with the same arguments. Returns how they ended; in the process of a rank `None`, when its body has returned.
///
/// # Panics
/// If the processes cannot be started or joined.
pub fn run(ranks: usize, test: &str, body: impl FnOnce(&dyn Worlds)) -> Option<Vec<Exit>> {
    if let Ok(place) = std::env::var(RANK) {
        let numbers: Vec<usize> = place.split(' ').map(|number| number.parse().expect("a number")).collect();
        body(&Processes { port: numbers[0] as u16, rank: numbers[1], ranks: numbers[2], made: Mutex::default() });
        return None;
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("a local port");
    let port = listener.local_addr().expect("its number").port();
    thread::spawn(move || serve(&listener));
    let start = |rank: usize| {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.args([test, "--exact", "--nocapture"]).env(RANK, format!("{port} {rank} {ranks}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("a process for a rank");
        let mut errors = child.stderr.take().expect("its errors");
        let read = thread::spawn(move || {
            let mut text = Vec::new();
            _ = errors.read_to_end(&mut text); // what was read before a failure is told
            String::from_utf8_lossy(&text).into_owned()
        });
        (child, read)
    };
    let (mut children, reads): (Vec<_>, Vec<_>) = (0..ranks).map(start).unzip();
    let codes = wait(&mut children);
    let exit = |(code, read): (_, thread::JoinHandle<_>)| Exit { code, errors: read.join().unwrap_or_default() };
    Some(codes.into_iter().zip(reads).map(exit).collect())
}

/// The codes of all processes, when they have ended. A rank whose test fails ends the others.
fn wait(children: &mut [Child]) -> Vec<Option<i32>> {
    let mut ends: Vec<Option<Option<i32>>> = vec![None; children.len()];
    let mut last = None;
    while ends.iter().any(Option::is_none) {
        for (end, child) in ends.iter_mut().zip(&mut *children) {
            *end = end.or_else(|| child.try_wait().expect("the state of a process").map(|status| status.code()));
        }
        let failed = ends.iter().flatten().flatten().any(|&code| code != 0);
        if failed || ends[0].is_some() && last.get_or_insert_with(Instant::now).elapsed() > LAST {
            children.iter_mut().for_each(|child| _ = child.kill()); // one that has ended cannot be
        }
        thread::sleep(Duration::from_millis(5));
    }
    ends.into_iter().flatten().collect()
}

/// The process of a rank.
struct Processes {
    port: u16,
    rank: usize,
    ranks: usize,
    /// How many worlds of each size it made: all processes that have ranks of these made as many.
    made: Mutex<HashMap<usize, u64>>,
}

impl Worlds for Processes {
    fn most(&self) -> usize {
        self.ranks
    }

    fn programs(&self) -> u64 {
        40
    }

    fn short(&self) -> Duration {
        Duration::from_secs(1)
    }

    fn world(&self, ranks: usize, timeout: Duration) -> Option<World> {
        if self.rank >= ranks {
            return None;
        }
        let number = {
            let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            let number = made.entry(ranks).or_default();
            *number += 1;
            *number
        };
        let join = Ask::Join { number, ranks, rank: self.rank, millis: timeout.as_millis() as u64 };
        Some(World::Joined(vec![join_hub(self.port, &join).expect("the hub is there")]))
    }
}

/// A question of a rank to the hub.
#[derive(Serialize, Deserialize)]
enum Ask {
    /// Joins a world of `ranks` ranks: the one with this number among the worlds of its size.
    Join {
        number: u64,
        ranks: usize,
        rank: usize,
        millis: u64,
    },
    /// Joins a fork, by the number that the hub gave it.
    Attach(u64),
    Clock,
    Heartbeat,
    Start {
        group: usize,
        op: Op,
        caller: Option<Arc<Caller>>,
        buffers: [Option<(DType, usize)>; 2],
    },
    Wait(u64),
    IsDone(u64),
    Drop(u64),
    Split {
        group: usize,
        name: String,
        members: Vec<usize>,
    },
    Fork(String),
    End(Activity),
    /// It dropped all of its communicators.
    Leave,
}

/// The hub's answer.
#[derive(Serialize, Deserialize)]
enum Told {
    Done,
    /// A group, an operation, a fork, or nanoseconds.
    Number(u64),
    Group {
        name: String,
        rank: usize,
        world_ranks: Vec<usize>,
    },
    Is(bool),
    Ended(Ended),
    Stopped(Site, Arc<Fault>),
    Failed(String),
}

/// Sends a message, and bytes behind it.
fn send(stream: &mut TcpStream, message: &impl Serialize, bytes: &[&[u8]]) -> io::Result<()> {
    let mut head = serde_json::to_vec(message)?;
    let count: usize = bytes.iter().map(|part| part.len()).sum();
    head.extend_from_slice(format!("\n{count}\n").as_bytes());
    let parts = [&*head].into_iter().chain(bytes.iter().copied());
    stream.write_all(&parts.collect::<Vec<_>>().concat())
}

/// Receives a message, and the bytes behind it.
fn receive<T: for<'a> Deserialize<'a>>(stream: &mut BufReader<TcpStream>) -> io::Result<(T, Vec<u8>)> {
    let (mut head, mut count) = (String::new(), String::new());
    stream.read_line(&mut head)?;
    stream.read_line(&mut count)?;
    let gone = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let mut bytes = vec![0; count.trim().parse().map_err(|_| gone())?];
    stream.read_exact(&mut bytes)?;
    Ok((serde_json::from_str(&head)?, bytes))
}

/// A connection to the hub, and the rank that errors name.
#[derive(Debug)]
struct Line {
    port: u16,
    world_rank: usize,
    origin: Instant,
    stream: Mutex<BufReader<TcpStream>>,
}

/// Joins a world by the first question of a new connection.
fn join_hub(port: u16, join: &Ask) -> io::Result<Arc<dyn Communicator>> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    let (stream, now) = (Mutex::new(BufReader::new(stream)), Instant::now());
    let mut line = Line { port, world_rank: 0, origin: now, stream };
    let (Told::Group { name, rank, world_ranks }, _) = line.ask(join, &[])? else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    line.world_rank = rank;
    let mut shortest = Duration::MAX;
    for _ in 0..8 {
        let begun = Instant::now();
        if let (Told::Number(nanos), _) = line.ask(&Ask::Clock, &[])? {
            let took = begun.elapsed();
            if took < shortest {
                (shortest, line.origin) = (took, begun + took / 2 - Duration::from_nanos(nanos));
            }
        }
    }
    Ok(Arc::new(Remote { line: Arc::new(line), group: 0, name, rank, world_ranks }))
}

impl Line {
    fn ask(&self, ask: &Ask, bytes: &[&[u8]]) -> io::Result<(Told, Vec<u8>)> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        send(stream.get_mut(), ask, bytes)?;
        receive(&mut stream)
    }

    /// The same for an operation of a group, whose errors say so.
    fn ask_for(&self, group: &str, op: OpKind, ask: &Ask, bytes: &[&[u8]]) -> Result<(Told, Vec<u8>), CommError> {
        let failed =
            |message: String| CommError::Backend { op, group: group.to_owned(), world_rank: self.world_rank, message };
        match self.ask(ask, bytes).map_err(|error| failed(error.to_string()))? {
            (Told::Stopped(site, fault), _) => Err(CommError::Stopped { site, fault }),
            (Told::Failed(message), _) => Err(failed(message)),
            told => Ok(told),
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        _ = self.ask(&Ask::Leave, &[]); // a hub that is gone need not know
    }
}

impl Membership for Line {
    fn heartbeat(&self) {
        _ = self.ask(&Ask::Heartbeat, &[]); // a lost connection is told by the next operation
    }

    fn origin(&self) -> Instant {
        self.origin
    }

    fn fork(&self, name: &str) -> Result<Arc<dyn Communicator>, CommError> {
        let (told, _) = self.ask_for(name, OpKind::Barrier, &Ask::Fork(name.to_owned()), &[])?;
        let Told::Number(number) = told else { unreachable!("the hub answers with a number") };
        join_hub(self.port, &Ask::Attach(number)).map_err(|error| CommError::Backend {
            op: OpKind::Barrier,
            group: name.to_owned(),
            world_rank: self.world_rank,
            message: error.to_string(),
        })
    }

    fn end(&self, how: Activity) -> Ended {
        match self.ask(&Ask::End(how), &[]) {
            Ok((Told::Ended(ended), _)) => ended,
            _ => Ended { first: Some((self.world_rank, "the hub is gone".to_owned())), ..Ended::default() },
        }
    }
}

/// A rank's end of a group whose work is done in the hub.
#[derive(Debug)]
struct Remote {
    line: Arc<Line>,
    /// The number of the group in the hub.
    group: usize,
    name: String,
    rank: usize,
    world_ranks: Vec<usize>,
}

impl Communicator for Remote {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.world_ranks.len()
    }

    fn world_ranks(&self) -> &[usize] {
        &self.world_ranks
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn start(&self, call: Call) -> Result<Pending, CommError> {
        let kind = call.op.kind();
        call.check(self.rank, self.size()).map_err(|error| error.on(self, kind))?;
        let of = |buffer: &Option<Buffer>| buffer.as_ref().map(|buffer| (buffer.dtype(), buffer.count()));
        let bytes =
            |buffer: &Option<Buffer>| buffer.as_ref().map_or(Ok(Vec::new()), |b| b.as_bytes().map(<[u8]>::to_vec));
        let (caller, buffers) = (call.caller.clone(), [of(&call.input), of(&call.output)]);
        let ask = Ask::Start { group: self.group, op: call.op.clone(), caller, buffers };
        let (input, output) = (bytes(&call.input)?, bytes(&call.output)?);
        let (told, _) = self.line.ask_for(&self.name, kind, &ask, &[&input, &output])?;
        let Told::Number(id) = told else { unreachable!("the hub answers with a number") };
        let (line, name) = (self.line.clone(), self.name.clone());
        Ok(Pending::new(Flight { line, name, id, call: Some(call) }))
    }

    fn split(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Communicator>, CommError> {
        let world_ranks = check_members(self, name, members)?;
        let rank = members.iter().position(|&member| member == self.rank).unwrap_or_default();
        let (group, line, name) = (self.group, self.line.clone(), name.to_owned());
        let ask = Ask::Split { group, name: name.clone(), members: members.to_vec() };
        let (told, _) = self.line.ask_for(&self.name, OpKind::Barrier, &ask, &[])?;
        let Told::Number(group) = told else { unreachable!("the hub answers with a number") };
        Ok(Arc::new(Remote { line, group: group as usize, name, rank, world_ranks }))
    }

    fn membership(&self) -> &dyn Membership {
        &*self.line
    }

    fn reduction_order(&self) -> ReductionOrder {
        ReductionOrder::BalancedTree
    }
}

/// An operation under way in the hub, which has copies of its buffers.
struct Flight {
    line: Arc<Line>,
    name: String,
    id: u64,
    /// Until it is waited for.
    call: Option<Call>,
}

impl PendingOp for Flight {
    fn wait(mut self: Box<Self>) -> Result<Buffer, CommError> {
        let Some(Call { op, input, output, .. }) = self.call.take() else { return Ok(Buffer::empty()) };
        let (_, bytes) = self.line.ask_for(&self.name, op.kind(), &Ask::Wait(self.id), &[])?;
        if op.kind() == OpKind::Send {
            return Ok(input.unwrap_or_else(Buffer::empty));
        }
        let mut buffer = output.unwrap_or_else(Buffer::empty);
        if !bytes.is_empty() {
            buffer.as_bytes_mut()?.copy_from_slice(&bytes);
        }
        Ok(buffer)
    }

    fn is_done(&self) -> bool {
        // A lost connection is told by the wait.
        !matches!(self.line.ask(&Ask::IsDone(self.id), &[]), Ok((Told::Is(false), _)))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.call.is_some() {
            _ = self.line.ask(&Ask::Drop(self.id), &[]); // a hub that is gone has dropped it
        }
    }
}

/// A communicator, until its rank comes for it.
type Waiting = Option<Arc<dyn Communicator>>;

/// Communicators of ranks that have not come yet.
#[derive(Default)]
struct Hub {
    worlds: HashMap<(usize, u64), Vec<Waiting>>,
    forks: Vec<Waiting>,
}

/// Serves every connection on a thread of its own.
fn serve(listener: &TcpListener) {
    let hub = Arc::new(Mutex::new(Hub::default()));
    for stream in listener.incoming().flatten() {
        let hub = hub.clone();
        thread::spawn(move || {
            // A connection that cannot be served is the end of a process.
            _ = serve_rank(&hub, stream);
        });
    }
}

fn lock(hub: &Mutex<Hub>) -> MutexGuard<'_, Hub> {
    hub.lock().unwrap_or_else(PoisonError::into_inner)
}

fn serve_rank(hub: &Mutex<Hub>, stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    let comm = match receive(&mut stream)?.0 {
        Ask::Join { number, ranks, rank, millis } => {
            let options = Options { timeout: Duration::from_millis(millis) };
            let make = || threads::world(ranks, options).into_iter().map(Some).collect();
            lock(hub).worlds.entry((ranks, number)).or_insert_with(make).get_mut(rank).and_then(Option::take)
        }
        Ask::Attach(number) => lock(hub).forks.get_mut(number as usize).and_then(Option::take),
        _ => None,
    };
    let comm = comm.ok_or(io::ErrorKind::InvalidData)?;
    let (name, rank, world_ranks) = (comm.name().to_owned(), comm.rank(), comm.world_ranks().to_vec());
    send(stream.get_mut(), &Told::Group { name, rank, world_ranks }, &[])?;
    let mut groups = vec![comm.clone()];
    let (mut flights, mut next) = (HashMap::new(), 0);
    loop {
        let Ok((ask, bytes)) = receive(&mut stream) else {
            comm.membership().end(Activity::Lost("its process ended".to_owned()));
            return Ok(());
        };
        let mut result = Vec::new();
        let told = match ask {
            Ask::Clock => Ok(Told::Number(comm.membership().origin().elapsed().as_nanos() as u64)),
            Ask::Heartbeat => {
                comm.membership().heartbeat();
                Ok(Told::Done)
            }
            Ask::Start { group, op, caller, buffers } => {
                start(&*groups[group], op, caller, buffers, &bytes).map(|op| {
                    next += 1;
                    flights.insert(next, op);
                    Told::Number(next)
                })
            }
            Ask::Wait(id) => match flights.remove(&id).map(Pending::wait) {
                Some(done) => done.map(|buffer| {
                    result = buffer.as_bytes().map(<[u8]>::to_vec).unwrap_or_default();
                    Told::Done
                }),
                None => Ok(Told::Failed(format!("no operation {id}"))),
            },
            Ask::IsDone(id) => Ok(Told::Is(flights.get(&id).is_none_or(Pending::is_done))),
            Ask::Drop(id) => {
                flights.remove(&id);
                Ok(Told::Done)
            }
            Ask::Split { group, name, members } => groups[group].split(&name, &members).map(|part| {
                groups.push(part);
                Told::Number(groups.len() as u64 - 1)
            }),
            Ask::Fork(name) => comm.membership().fork(&name).map(|fork| {
                let forks = &mut lock(hub).forks;
                forks.push(Some(fork));
                Told::Number(forks.len() as u64 - 1)
            }),
            Ask::End(how) => Ok(Told::Ended(comm.membership().end(how))),
            Ask::Leave => return send(stream.get_mut(), &Told::Done, &[]),
            Ask::Join { .. } | Ask::Attach(_) => Ok(Told::Failed("it has joined".to_owned())),
        };
        let told = told.unwrap_or_else(|error| match error {
            CommError::Stopped { site, fault } => Told::Stopped(site, fault),
            other => Told::Failed(other.to_string()),
        });
        send(stream.get_mut(), &told, &[&result])?;
    }
}

/// Starts an operation on copies of a rank's buffers.
fn start(
    comm: &dyn Communicator,
    op: Op,
    caller: Option<Arc<Caller>>,
    buffers: [Option<(DType, usize)>; 2],
    mut bytes: &[u8],
) -> Result<Pending, CommError> {
    let mut copy = |of: Option<(DType, usize)>| {
        of.map(|(dtype, count)| {
            let mut buffer = Buffer::zeros(dtype, count);
            let (own, rest) = bytes.split_at(count * dtype.size());
            bytes = rest;
            buffer.as_bytes_mut()?.copy_from_slice(own);
            Ok::<_, CommError>(buffer)
        })
        .transpose()
    };
    let [input, output] = buffers;
    let (input, output) = (copy(input)?, copy(output)?);
    comm.start(Call { op, input, output, caller })
}
