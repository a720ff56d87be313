//! Ranks that are processes, for tests: the test program is started once for each rank, and hears which one it is and
//! where the ranks can meet. The backend that joins them is the caller's.

use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::process::{Child, Command, Stdio, id};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Tells a process that it is a rank: its number, how many there are, and a port.
const RANK: &str = "MESHWORK_TEST_RANK";

/// How long ranks may live, and how long after the first one has ended.
const LONGEST: Duration = Duration::from_secs(600);
const LAST: Duration = Duration::from_secs(60);

/// The place of a process among those of a test.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Its rank.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
    /// A [free port](free_port) of this host: the first one may listen there.
    pub port: u16,
}

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
    here().is_some()
}

fn here() -> Option<Place> {
    let numbers = std::env::var(RANK).ok()?;
    let mut numbers = numbers.split(' ').map(|number| number.parse().expect("a number"));
    let mut next = || numbers.next().expect("three numbers");
    Some(Place { rank: next(), ranks: next(), port: next() as u16 })
}

/// Runs `body` in `ranks` processes, each of them this test program with the one test `test`, which calls this function
/// with the same arguments. Returns how they ended; in the process of a rank `None`, when its body has returned.
///
/// # Panics
/// If the processes cannot be started.
pub fn run(ranks: usize, test: &str, body: impl FnOnce(Place)) -> Option<Vec<Exit>> {
    if let Some(place) = here() {
        body(place);
        return None;
    }
    let port = free_port();
    let place = |rank| Place { rank, ranks, port };
    let (mut children, reads): (Vec<_>, Vec<_>) = (0..ranks).map(|rank| start(test, place(rank))).unzip();
    let codes = wait(&mut children);
    let exit = |(code, read): (_, JoinHandle<_>)| Exit { code, errors: read.join().unwrap_or_default() };
    Some(codes.into_iter().zip(reads).map(exit).collect())
}

/// Where free ports are looked for: below those that the system gives to connections, from 32768 on with Linux and from
/// 49152 on elsewhere, and above those of services.
const PORTS: [u16; 2] = [10_000, 32_000];

/// A port of this host at which nobody listens, for a process that is started later. No connection gets it, and no
/// other caller in any process until this one ends, which holds the number as a port of UDP. A port that was bound and
/// given back would be anybody's before the process comes to it.
///
/// # Panics
/// If there is none.
pub fn free_port() -> u16 {
    static HELD: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());
    let [first, end] = PORTS;
    // Processes begin at different places.
    let begin = id() as u16 % (end - first);
    let free = (first..end).map(|port| first + (port - first + begin) % (end - first)).find_map(|port| {
        let held = UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
        let nobody_listens = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok();
        nobody_listens.then_some((port, held))
    });
    let (port, held) = free.expect("a free port");
    HELD.lock().unwrap_or_else(PoisonError::into_inner).push(held);
    port
}

/// The process of a rank, and a thread that reads its errors.
fn start(test: &str, Place { rank, ranks, port }: Place) -> (Child, JoinHandle<String>) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args([test, "--exact", "--nocapture"]).env(RANK, format!("{rank} {ranks} {port}"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("a process for a rank");
    let mut errors = child.stderr.take().expect("its errors");
    let read = thread::spawn(move || {
        let mut text = Vec::new();
        _ = errors.read_to_end(&mut text); // what was read before a failure is told
        String::from_utf8_lossy(&text).into_owned()
    });
    (child, read)
}

/// The codes of all processes, when they have ended. A rank whose test fails ends the others.
fn wait(children: &mut [Child]) -> Vec<Option<i32>> {
    let mut ends: Vec<Option<Option<i32>>> = vec![None; children.len()];
    let (begun, mut first) = (Instant::now(), None);
    while ends.iter().any(Option::is_none) {
        for (end, child) in ends.iter_mut().zip(&mut *children) {
            *end = end.or_else(|| child.try_wait().expect("the state of a process").map(|status| status.code()));
        }
        let failed = ends.iter().flatten().flatten().any(|&code| code != 0);
        let late = ends.iter().any(Option::is_some) && first.get_or_insert_with(Instant::now).elapsed() > LAST;
        if failed || late || begun.elapsed() > LONGEST {
            children.iter_mut().for_each(|child| _ = child.kill()); // one that has ended cannot be
        }
        thread::sleep(Duration::from_millis(5));
    }
    ends.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What failed once: a connection had got the port before the process of rank 0 came to listen there.
    #[test]
    fn a_free_port_is_kept_from_connections_and_from_others() {
        let ports = [free_port(), free_port()];
        assert_ne!(ports[0], ports[1]);
        for port in ports {
            assert!((PORTS[0]..PORTS[1]).contains(&port), "{port}");
            assert!(UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_err(), "{port} is not held");
            assert!(TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok(), "nobody can listen at {port}");
        }
        let given = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
        let lowest = given.ok().and_then(|range| range.split_whitespace().next()?.parse::<u16>().ok());
        assert!(
            lowest.is_none_or(|lowest| lowest >= PORTS[1]),
            "connections of this host get ports from {lowest:?} on"
        );
    }
}
