//! Where connections between processes are made. All of them carry short messages that somebody waits for, so none
//! keeps one back until an earlier one is acknowledged (Nagle's algorithm, which costs 40 ms each).

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Connects to a listener, within `longest`.
#[expect(clippy::disallowed_methods, reason = "this is the constructor")]
pub(crate) fn connect(to: SocketAddr, longest: Duration) -> io::Result<TcpStream> {
    prompt(TcpStream::connect_timeout(&to, longest)?)
}

/// The next connection of a listener, and whose it is.
#[expect(clippy::disallowed_methods, reason = "this is the constructor")]
pub(crate) fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    let (stream, from) = listener.accept()?;
    Ok((prompt(stream)?, from))
}

fn prompt(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    /// Clippy refuses streams that are made elsewhere.
    #[test]
    fn neither_end_of_a_connection_keeps_short_messages_back() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let one = connect(listener.local_addr().unwrap(), Duration::from_secs(60)).unwrap();
        let (other, _) = accept(&listener).unwrap();
        assert!(one.nodelay().unwrap() && other.nodelay().unwrap());
    }
}
