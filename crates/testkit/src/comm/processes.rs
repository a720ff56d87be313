//! Ranks that are processes, for tests: the test program is started once for each rank, and hears which one it is and
//! where the ranks can meet. The backend that joins them is the caller's.

use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
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
    /// A port of this host that was free before the processes started: the first one may listen there.
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
    let listener = TcpListener::bind("127.0.0.1:0").expect("a local port");
    let port = listener.local_addr().expect("its number").port();
    drop(listener);
    let place = |rank| Place { rank, ranks, port };
    let (mut children, reads): (Vec<_>, Vec<_>) = (0..ranks).map(|rank| start(test, place(rank))).unzip();
    let codes = wait(&mut children);
    let exit = |(code, read): (_, JoinHandle<_>)| Exit { code, errors: read.join().unwrap_or_default() };
    Some(codes.into_iter().zip(reads).map(exit).collect())
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
