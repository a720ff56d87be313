//! What carries messages between processes: [MPI](crate::wire), or [sockets](crate::sockets).

use crate::block::Block;
use crate::ground::Claim;
use crate::lookout::Source;
use crate::native::Natives;
use crate::packet::Bytes;

/// What happened between processes.
pub(crate) enum Event<T> {
    /// A first message.
    First(Block),
    /// The bytes of a large message are here.
    Landed(T, Claim),
    /// A process cannot be reached any more, or a message of it failed.
    Lost(usize, String),
    /// The library failed in a sum of its own.
    Failed(T, String),
}

/// The connection of this process to the others. Nothing blocks: all of it goes on in polls. `T` names what a receive
/// is for.
pub(crate) trait Carrier<T>: Send {
    /// Sends a [framed](crate::wire::framed) message: at most [`ROOM`](crate::block::ROOM) bytes. Those of a process
    /// arrive in the order in which they were sent.
    fn first(&mut self, to: usize, block: Block);

    /// The tag of the next large message to a process.
    fn tag(&mut self, to: usize) -> usize;

    /// Sends the bytes of a large message, whose first message has told the receiver the tag.
    fn large(&mut self, to: usize, tag: usize, bytes: &Bytes);

    /// Receives the bytes of a large message.
    fn receive(&mut self, from: usize, tag: usize, into: Claim, what: T);

    /// What has happened since the last poll. Whether there was anything.
    fn poll(&mut self, event: &mut dyn FnMut(Event<T>)) -> bool;

    /// How a thread sleeps until there is something to poll.
    fn source(&self) -> Source;

    /// Whether messages are under way, in either direction, that this process must wait for.
    fn is_busy(&self) -> bool;

    /// The sums that the library takes, where there is one.
    fn natives(&mut self) -> Option<&mut Natives<T>>;

    /// Ends the connection, on the thread that made it. `abandoned`: some process may never come to this.
    fn close(self: Box<Self>, abandoned: bool);
}
