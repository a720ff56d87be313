//! Processes of the same host, whose memory this one reads: bytes of a large message are copied once, from the sender's
//! memory into the receiver's, instead of into packets and out of them. MPI libraries do the same (cross-memory
//! attach).
//!
//! Whether two processes are such neighbours is tried when they have met: containers, users and the system's security
//! settings (`kernel.yama.ptrace_scope`) decide it. Where it fails, their bytes go over the connection.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;

/// A process whose memory this one reads, and that reads this one's.
#[derive(Debug)]
pub(crate) struct Neighbour {
    process: u64,
}

/// What a process tells another one, to be tried: its process id, where it has some bytes, and these bytes. All zeros
/// where there is no such call.
type Offer = [u64; 4];

impl Neighbour {
    /// Those of the processes at the other ends of these connections that are neighbours. All processes call it at the
    /// same time.
    pub(crate) fn find(streams: &mut [Option<TcpStream>]) -> io::Result<Vec<Option<Neighbour>>> {
        let bytes: Box<[u64; 2]> = Box::new([random(), random()]);
        let own: Offer = match cfg!(target_os = "linux") {
            true => [u64::from(std::process::id()), bytes.as_ptr() as u64, bytes[0], bytes[1]],
            false => [0; 4],
        };
        // A few bytes, which a connection takes at once, so that nobody waits in a circle.
        for stream in streams.iter_mut().flatten() {
            stream.write_all(own.map(u64::to_le_bytes).as_flattened())?;
        }
        let mut found = Vec::new();
        for stream in &mut *streams {
            let Some(stream) = stream else {
                found.push(None);
                continue;
            };
            let offer = hear(stream)?;
            let (process, at, bytes) = (offer[0], offer[1], [offer[2], offer[3]]);
            let (neighbour, mut read) = (Neighbour { process }, [0; 16]);
            let is_read = process != 0 && neighbour.read(at, &mut read).is_ok();
            found.push((is_read && read == *bytes.map(u64::to_le_bytes).as_flattened()).then_some(neighbour));
        }
        for (stream, found) in streams.iter_mut().zip(&found) {
            stream.as_mut().map_or(Ok(()), |stream| stream.write_all(&[u8::from(found.is_some())]))?;
        }
        for (stream, found) in streams.iter_mut().zip(&mut found) {
            let mut reads = [0];
            stream.as_mut().map_or(Ok(()), |stream| stream.read_exact(&mut reads))?;
            found.take_if(|_| reads == [0]);
        }
        drop(bytes); // all have read them
        Ok(found)
    }

    /// Reads bytes of its memory that it keeps as they are. They cannot be read if it has ended.
    #[cfg(target_os = "linux")]
    pub(crate) fn read(&self, mut at: u64, mut into: &mut [u8]) -> io::Result<()> {
        use nix::sys::uio::{RemoteIoVec, process_vm_readv};
        let process = nix::unistd::Pid::from_raw(self.process as i32);
        while !into.is_empty() {
            let there = RemoteIoVec { base: at as usize, len: into.len() };
            let read = process_vm_readv(process, &mut [io::IoSliceMut::new(into)], &[there]);
            match read.map_err(|_| ErrorKind::UnexpectedEof)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                read => {
                    at += read as u64;
                    into = &mut into[read..];
                }
            }
        }
        Ok(())
    }

    /// Nothing offers memory here.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn read(&self, _at: u64, _into: &mut [u8]) -> io::Result<()> {
        Err(ErrorKind::Unsupported.into())
    }
}

fn hear(stream: &mut TcpStream) -> io::Result<Offer> {
    let mut words = [[0; 8]; 4];
    stream.read_exact(words.as_flattened_mut())?;
    Ok(words.map(u64::from_le_bytes))
}

/// A random number, which another process does not have by chance.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}
