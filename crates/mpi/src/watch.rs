//! Sleeping until a connection has something to read, or can be written again.

use std::net::TcpStream;
use std::sync::atomic::AtomicBool;

pub(crate) use sleeper::Watch;

/// A connection to a process.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) stream: TcpStream,
    /// Whether something waits until the system takes more.
    pub(crate) is_full: AtomicBool,
}

#[cfg(unix)]
mod sleeper {
    use std::io::{self, ErrorKind, Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Weak};
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::Connection;

    /// All connections of a process, for the one thread that sleeps at them.
    #[derive(Debug)]
    pub(crate) struct Watch {
        /// One that is lost is gone.
        connections: Vec<Weak<Connection>>,
        /// Bytes that are written to the second one wake the thread that sleeps, or the next one that would.
        call: [UnixStream; 2],
        is_called: AtomicBool,
    }

    impl Watch {
        pub(crate) fn new<'a>(connections: impl Iterator<Item = &'a Arc<Connection>>) -> io::Result<Watch> {
            let (here, there) = UnixStream::pair()?;
            [&here, &there].into_iter().try_for_each(|end| end.set_nonblocking(true))?;
            let connections = connections.map(Arc::downgrade).collect();
            Ok(Watch { connections, call: [here, there], is_called: AtomicBool::new(false) })
        }

        /// Sleeps until a connection has something or somebody calls, but no longer than this.
        pub(crate) fn sleep(&self, longest: Duration) {
            let open: Vec<Arc<Connection>> = self.connections.iter().filter_map(Weak::upgrade).collect();
            let flags = |connection: &Connection| match connection.is_full.load(Ordering::SeqCst) {
                true => PollFlags::IN | PollFlags::OUT,
                false => PollFlags::IN,
            };
            let mut all: Vec<PollFd<'_>> = vec![PollFd::new(&self.call[0], PollFlags::IN)];
            all.extend(open.iter().map(|connection| PollFd::new(&connection.stream, flags(connection))));
            // After a signal, too, the caller looks again.
            _ = poll(&mut all, Timespec::try_from(longest).ok().as_ref());
            if !all[0].revents().is_empty() {
                let mut calls = [0; 16];
                while matches!((&self.call[0]).read(&mut calls), Ok(1..)) {}
                // Who calls from now on writes again; what others called for before, the caller sees.
                self.is_called.store(false, Ordering::SeqCst);
            }
        }

        /// Wakes the thread that sleeps, or the next one that would.
        pub(crate) fn call(&self) {
            if !self.is_called.swap(true, Ordering::SeqCst) {
                while matches!((&self.call[1]).write(&[0]), Err(error) if error.kind() == ErrorKind::Interrupted) {}
            }
        }
    }
}

/// Where a thread cannot sleep at several connections, it looks at them from time to time.
#[cfg(not(unix))]
mod sleeper {
    use std::sync::Arc;
    use std::time::Duration;
    use std::{io, thread};

    use super::Connection;

    const LONGEST: Duration = Duration::from_micros(200);

    #[derive(Debug)]
    pub(crate) struct Watch;

    impl Watch {
        pub(crate) fn new<'a>(_connections: impl Iterator<Item = &'a Arc<Connection>>) -> io::Result<Watch> {
            Ok(Watch)
        }

        pub(crate) fn sleep(&self, longest: Duration) {
            thread::sleep(longest.min(LONGEST));
        }

        pub(crate) fn call(&self) {}
    }
}
