//! The hub of emulated communicators between processes: where each process sends the part of a call, and hears those of
//! all.

use crate::driver::UniqueId;
use meshwork_core::hash::combine;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;
use std::{fs, process, thread};

/// The communicator, the number of the call, the rank and the size of the communicator; and bytes.
pub(super) type Sent = ([u64; 4], Vec<u8>);

/// Where a hub listens. Its number tells it from others that have its port on other hosts.
#[derive(Debug, PartialEq)]
pub(super) struct Hub {
    pub(super) number: u64,
    host: String,
    port: u16,
}

impl Hub {
    /// Starts a hub in this process.
    pub(super) fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        let port = listener.local_addr()?.port();
        thread::Builder::new().name("emulated nccl".to_owned()).spawn(move || relay(&listener))?;
        let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
        Ok(Self { number: combine(u64::from(process::id()), moment), host: this_host(), port })
    }

    /// The name of a communicator that meets here; `None` if it has no room for the name of the host.
    pub(super) fn id(&self) -> Option<UniqueId> {
        let mut id = [0; UniqueId::BYTES];
        id[..8].copy_from_slice(&self.number.to_le_bytes());
        id[8..10].copy_from_slice(&self.port.to_le_bytes());
        id[10..].get_mut(..self.host.len())?.copy_from_slice(self.host.as_bytes());
        Some(UniqueId(id))
    }

    /// The hub of a communicator.
    pub(super) fn of(UniqueId(id): &UniqueId) -> Self {
        let number = id.iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let host = String::from_utf8_lossy(&id[10..]).trim_end_matches('\0').to_owned();
        Self { number, host, port: u16::from_le_bytes([id[8], id[9]]) }
    }

    /// A connection to it; one of this host is found without a look at its name.
    #[expect(clippy::disallowed_methods, reason = "this is the constructor of streams")]
    pub(super) fn connect(&self) -> io::Result<TcpStream> {
        let host = if self.host == this_host() { "127.0.0.1" } else { &self.host };
        prompt(TcpStream::connect((host, self.port))?)
    }
}

/// The name of this host; empty where the system does not say it.
fn this_host() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// The next connection to a hub.
#[expect(clippy::disallowed_methods, reason = "this is the constructor of streams")]
fn accept(hub: &TcpListener) -> io::Result<TcpStream> {
    prompt(hub.accept()?.0)
}

/// A stream that keeps no short part back until an earlier one is acknowledged, which takes 40 ms.
fn prompt(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// What members of a call have sent: to whom the others' parts go, and the parts by rank.
type Calls = HashMap<(u64, u64), Vec<Option<(usize, Vec<u8>)>>>;

/// Takes the parts of calls, and sends the parts of all members to each. It ends with its process.
fn relay(listener: &TcpListener) {
    let shared: Arc<Mutex<(Vec<TcpStream>, Calls)>> = Arc::default();
    while let Ok(mut from) = accept(listener) {
        let shared = shared.clone();
        let Ok(to) = from.try_clone() else { continue };
        let number = {
            let (streams, _) = &mut *shared.lock().unwrap_or_else(PoisonError::into_inner);
            streams.push(to);
            streams.len() - 1
        };
        let hear = move || {
            while let Ok((head, bytes)) = receive(&mut from) {
                let (streams, calls) = &mut *shared.lock().unwrap_or_else(PoisonError::into_inner);
                take(streams, calls, number, head, bytes);
            }
            // The others hear that it has gone.
            let (streams, _) = &mut *shared.lock().unwrap_or_else(PoisonError::into_inner);
            streams.iter().for_each(|stream| _ = stream.shutdown(Shutdown::Both));
        };
        _ = thread::Builder::new().name("emulated nccl".to_owned()).spawn(hear);
    }
}

/// Takes a member's part in a call, and sends all parts once they are here.
fn take(streams: &mut [TcpStream], calls: &mut Calls, by: usize, head: [u64; 4], bytes: Vec<u8>) {
    let [comm, number, rank, size] = head;
    let parts = calls.entry((comm, number)).or_insert_with(|| vec![None; size as usize]);
    if let Some(part) = parts.get_mut(rank as usize) {
        *part = Some((by, bytes));
    }
    if parts.iter().any(Option::is_none) {
        return;
    }
    let (to, parts): (Vec<usize>, Vec<Vec<u8>>) = calls.remove(&(comm, number)).into_iter().flatten().flatten().unzip();
    let Ok(all) = postcard::to_allocvec(&parts) else { return };
    for (rank, to) in to.into_iter().enumerate() {
        _ = send(&mut streams[to], [comm, number, rank as u64, size], &all); // one that has gone needs none
    }
}

pub(super) fn send(to: &mut TcpStream, head: [u64; 4], bytes: &[u8]) -> io::Result<()> {
    let head: Vec<u8> = head.into_iter().chain([bytes.len() as u64]).flat_map(u64::to_le_bytes).collect();
    to.write_all(&head)?;
    to.write_all(bytes)
}

pub(super) fn receive(from: &mut TcpStream) -> io::Result<Sent> {
    let mut words = [[0; 8]; 5];
    from.read_exact(words.as_flattened_mut())?;
    let [comm, number, rank, size, bytes] = words.map(u64::from_le_bytes);
    let mut body = vec![0; bytes as usize];
    from.read_exact(&mut body)?;
    Ok(([comm, number, rank, size], body))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clippy refuses streams that are made elsewhere. The hub's end lacked it: a sample over two processes took 85 s.
    #[test]
    fn neither_end_of_a_connection_keeps_short_parts_back() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let hub = Hub { number: 0, host: this_host(), port: listener.local_addr().unwrap().port() };
        assert!([hub.connect().unwrap(), accept(&listener).unwrap()].iter().all(|end| end.nodelay().unwrap()));
    }

    #[test]
    fn a_unique_id_says_where_its_hub_is() {
        let hub = |host: &str| Hub { number: 0x0123_4567_89ab_cdef, host: host.to_owned(), port: 54_321 };
        for host in ["", "node-0", &"n".repeat(118)] {
            assert_eq!(Hub::of(&hub(host).id().unwrap()), hub(host));
        }
        assert!(hub(&"n".repeat(119)).id().is_none());
    }
}
