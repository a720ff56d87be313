//! How processes that talk over sockets find each other: where the first one listens is known from the launcher.
//!
//! ```text
//! rank 0   listens at MASTER_ADDR:MASTER_PORT; under torchrun, whose agent has that port for its store, at a port of
//!          its own, which it puts into the store
//! others   say to rank 0 who they are and where they listen, and hear where all listen
//! rank i   connects to ranks 1 to i - 1, and is connected to by those above
//! ```

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use meshwork_core::launcher::{Environment, Launch, Launcher};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::MpiError;
use crate::stream;

/// Where the processes of a job meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meeting {
    /// Number of this process.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// The host of rank 0: `MASTER_ADDR`.
    pub host: String,
    /// The port at which rank 0 listens, or that of torchrun's store: `MASTER_PORT`.
    pub port: u16,
    /// The key in torchrun's store under which rank 0 says where it listens. `None` without a store.
    pub key: Option<String>,
}

impl fmt::Display for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}, which meets the others at {}:{}", self.rank, self.size, self.host, self.port)
    }
}

/// The first words of a process.
#[derive(Serialize, Deserialize)]
struct Hello {
    job: [u8; 8],
    rank: usize,
    size: usize,
    port: u16,
}

/// Of this version of what processes say.
const JOB: [u8; 8] = *b"meshwrk2";

/// Where all processes listen, or why they do not meet.
type Table = Result<Vec<(String, u16)>, String>;

/// Between two looks for others.
const LOOK: Duration = Duration::from_millis(5);

/// How long a process that connects may take to say who it is.
const GREETING: Duration = Duration::from_secs(5);

/// The longest first words in bytes.
const LONGEST: u32 = 1 << 24;

impl Meeting {
    /// Of the process that a launcher started. The variables `MASTER_ADDR` and `MASTER_PORT` say where rank 0 is;
    /// without them all processes must be on one host.
    ///
    /// # Errors
    /// A variable that is missing, or is no port.
    pub fn of(launch: &Launch, environment: &Environment) -> Result<Meeting, MpiError> {
        let text = |name: &str| environment.get(name).map(|value| value.trim()).filter(|value| !value.is_empty());
        let fail = |problem: String| MpiError::Meeting { place: launch.place(), problem };
        let size = launch.size.ok_or_else(|| fail("the launcher does not say how many processes there are".into()))?;
        let missing = |name: &str| fail(format!("{name} is not set: it says where rank 0 is"));
        let host = text("MASTER_ADDR").ok_or_else(|| missing("MASTER_ADDR"))?.to_owned();
        let port = text("MASTER_PORT").ok_or_else(|| missing("MASTER_PORT"))?;
        let port = port.parse().map_err(|_| fail(format!("MASTER_PORT is {port}, and no port")))?;
        let of_agent = launch.launcher == Launcher::Torchrun && text("TORCHELASTIC_USE_AGENT_STORE") != Some("False");
        let number = text("TORCHELASTIC_RESTART_COUNT").unwrap_or("0");
        let key = of_agent.then(|| format!("/meshwork/{}/{number}", text("TORCHELASTIC_RUN_ID").unwrap_or("none")));
        Ok(Meeting { rank: launch.rank, size, host, port, key })
    }

    /// Connects to all other processes: the connections by rank. It waits for them until `longest` is over.
    pub(crate) fn meet(&self, longest: Duration) -> Result<Vec<Option<TcpStream>>, MpiError> {
        let wait = Wait { until: Instant::now() + longest, longest };
        let met = if self.rank == 0 { self.host_all(&wait) } else { self.join(&wait) };
        met.map_err(|problem| MpiError::Meeting { place: self.to_string(), problem })
    }

    /// Rank 0: hears of all, and tells all where the others are.
    fn host_all(&self, wait: &Wait) -> Result<Vec<Option<TcpStream>>, String> {
        let port = if self.key.is_some() { 0 } else { self.port };
        let listener = listen(port).map_err(|error| format!("it cannot listen at port {port}: {error}"))?;
        let port = listener.local_addr().map_err(|error| error.to_string())?.port();
        if let Some(key) = &self.key {
            let mut store = wait.connect(&self.host, self.port)?;
            set(&mut store, key, port.to_string().as_bytes()).map_err(|error| of_store(&error))?;
        }
        let mut table = vec![(self.host.clone(), port); self.size];
        let mut streams: Vec<Option<TcpStream>> = (0..self.size).map(|_| None).collect();
        let accepted = (1..self.size).try_for_each(|_| {
            let missing = |streams: &[Option<TcpStream>]| {
                let missing = (1..self.size).filter(|&rank| streams[rank].is_none()).map(|rank| rank.to_string());
                format!("it has waited {:?} for rank {}", wait.longest, missing.collect::<Vec<_>>().join(", "))
            };
            let (stream, address, hello) = wait.accept(&listener)?.ok_or_else(|| missing(&streams))?;
            let Hello { rank, size, port, .. } = hello;
            if size != self.size || rank == 0 || rank >= size {
                return Err(format!("a process says that it is rank {rank} of {size}"));
            }
            // Others reach a process of this host as they reach this one.
            let host = if address.is_loopback() { self.host.clone() } else { address.to_string() };
            table[rank] = (host, port);
            match streams[rank].replace(stream) {
                Some(_) => Err(format!("two processes say that they are rank {rank}")),
                None => Ok(()),
            }
        });
        let told: Table = accepted.clone().map(|()| table);
        for stream in streams.iter_mut().flatten() {
            write(stream, &told).map_err(|error| error.to_string())?;
        }
        accepted.map(|()| streams)
    }

    /// Another rank: says who it is, and hears where the others are.
    fn join(&self, wait: &Wait) -> Result<Vec<Option<TcpStream>>, String> {
        let text = |error: io::Error| error.to_string();
        let listener = listen(0).map_err(text)?;
        let port = match &self.key {
            None => self.port,
            Some(key) => {
                let mut store = wait.connect(&self.host, self.port)?;
                let said = get(&mut store, key, wait.left()).map_err(|error| of_store(&error))?;
                String::from_utf8_lossy(&said).parse().map_err(|_| "torchrun's store has no port".to_owned())?
            }
        };
        let here = listener.local_addr().map_err(text)?.port();
        let hello = Hello { job: JOB, rank: self.rank, size: self.size, port: here };
        let mut first = wait.connect(&self.host, port)?;
        write(&mut first, &hello).map_err(text)?;
        // Rank 0 listens already, so it knows within `longest` from now who is missing: its word names them.
        first.set_read_timeout(Some(wait.longest + wait.longest / 8)).map_err(text)?;
        let told: Table = read(&mut first).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                format!("rank 0 has not said within {:?} where the others are", wait.longest)
            }
            _ => format!("rank 0 has gone, or is no process of this job: {error}"),
        })?;
        let table = told.map_err(|why| format!("rank 0 says that {why}"))?;
        first.set_read_timeout(None).map_err(text)?;
        let mut streams: Vec<Option<TcpStream>> = (0..self.size).map(|_| None).collect();
        streams[0] = Some(first);
        for (rank, (host, port)) in table.iter().enumerate().take(self.rank).skip(1) {
            let mut stream = wait.connect(host, *port)?;
            write(&mut stream, &hello).map_err(text)?;
            streams[rank] = Some(stream);
        }
        for _ in self.rank + 1..self.size {
            let late = || format!("it has waited {:?} for ranks above it", wait.longest);
            let (stream, _, Hello { rank, .. }) = wait.accept(&listener)?.ok_or_else(late)?;
            if rank <= self.rank || rank >= self.size || streams[rank].replace(stream).is_some() {
                return Err(format!("a process says that it is rank {rank}, which it cannot be"));
            }
        }
        Ok(streams)
    }
}

/// A port of every address of this host.
fn listen(port: u16) -> io::Result<TcpListener> {
    let both = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port));
    let listener = both.or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// How long others are waited for.
struct Wait {
    until: Instant,
    longest: Duration,
}

impl Wait {
    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now()).max(LOOK)
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.until
    }

    /// Connects to a process that may not listen yet.
    fn connect(&self, host: &str, port: u16) -> Result<TcpStream, String> {
        loop {
            let addresses = (host, port).to_socket_addrs().map(Iterator::collect::<Vec<SocketAddr>>);
            let tried = addresses.and_then(|all| {
                let mut last = io::Error::from(ErrorKind::AddrNotAvailable);
                for address in all {
                    match stream::connect(address, self.left().min(GREETING)) {
                        Ok(stream) => return Ok(stream),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            });
            match tried {
                Ok(stream) => return Ok(stream),
                Err(error) if self.is_over() => {
                    return Err(format!("it has tried to reach {host}:{port} for {:?}: {error}", self.longest));
                }
                Err(_) => thread::sleep(10 * LOOK),
            }
        }
    }

    /// The next process that connects and says who it is; `None` if there is none in time. Others are turned away.
    fn accept(&self, listener: &TcpListener) -> Result<Option<(TcpStream, IpAddr, Hello)>, String> {
        while !self.is_over() {
            match stream::accept(listener) {
                Ok((mut stream, address)) => {
                    let greeted = stream.set_nonblocking(false).and_then(|()| {
                        stream.set_read_timeout(Some(GREETING))?;
                        let hello = read::<Hello>(&mut stream)?;
                        stream.set_read_timeout(None)?;
                        Ok(hello)
                    });
                    if let Some(hello) = greeted.ok().filter(|hello| hello.job == JOB) {
                        return Ok(Some((stream, address.ip().to_canonical(), hello)));
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(LOOK),
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(None)
    }
}

fn write(to: &mut TcpStream, value: &impl Serialize) -> io::Result<()> {
    let bytes = postcard::to_allocvec(value).map_err(io::Error::other)?;
    to.write_all(&[&(bytes.len() as u32).to_le_bytes(), &bytes[..]].concat())
}

fn read<V: DeserializeOwned>(from: &mut TcpStream) -> io::Result<V> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > LONGEST {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length as usize];
    from.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(io::Error::other)
}

// The store of torchrun's agent, `TCPStore` of PyTorch: requests begin with a byte, numbers are as the machine has
// them, texts begin with their length in 8 bytes. Keys of others begin with a slash.

const VALIDATE: u8 = 0;
const SET: u8 = 1;
const GET: u8 = 3;
const WAIT: u8 = 6;
/// What a client says first.
const MAGIC: u32 = 0x3C85_F7CE;

fn of_store(error: &io::Error) -> String {
    format!("torchrun's store at MASTER_ADDR:MASTER_PORT does not answer: {error}")
}

fn texts<'a>(of: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    of.into_iter().flat_map(|text| [&(text.len() as u64).to_ne_bytes(), text].concat()).collect()
}

fn request(what: u8, rest: &[u8]) -> Vec<u8> {
    [&[VALIDATE][..], &MAGIC.to_ne_bytes(), &[what], rest].concat()
}

fn set(store: &mut TcpStream, key: &str, value: &[u8]) -> io::Result<()> {
    store.write_all(&request(SET, &texts([key.as_bytes(), value])))
}

/// The value of a key, once it has one.
fn get(store: &mut TcpStream, key: &str, longest: Duration) -> io::Result<Vec<u8>> {
    store.set_read_timeout(Some(longest))?;
    let one = 1u64.to_ne_bytes();
    store.write_all(&request(WAIT, &[&one[..], &texts([key.as_bytes()])].concat()))?;
    let mut answer = [1];
    store.read_exact(&mut answer)?;
    if answer != [0] {
        return Err(io::Error::other("it stopped to wait"));
    }
    store.write_all(&[&[GET][..], &texts([key.as_bytes()])].concat())?;
    let mut length = [0; 8];
    store.read_exact(&mut length)?;
    let length = u64::from_ne_bytes(length);
    if length > u64::from(LONGEST) {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut value = vec![0; length as usize];
    store.read_exact(&mut value)?;
    Ok(value)
}
