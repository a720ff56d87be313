//! The handle of an operation in flight.

use super::{CommError, CommLog, Site};
use crate::buffer::Buffer;
use std::fmt;
use std::time::Instant;

/// The backend's part of a [`Pending`]. Dropping it detaches from the operation, whose memory must stay
/// owned until it is over.
pub trait PendingOp: Send {
    /// Blocks until the operation is over and gives its buffer back.
    fn wait(self: Box<Self>) -> Result<Buffer, CommError>;

    /// Whether [`PendingOp::wait`] would return at once.
    fn is_done(&self) -> bool;

    /// The place of the operation, of a backend whose ranks [attend](super::Membership::attend) to work outside of it.
    fn site(&self) -> Option<&Site> {
        None
    }
}

/// An operation in flight, which owns its memory. Dropping it detaches: the operation still takes place.
#[must_use = "the operation's memory comes back from `wait`"]
pub struct Pending {
    state: State,
    /// The log that adds up the time of the wait.
    log: Option<CommLog>,
}

enum State {
    Done(Buffer),
    Running(Box<dyn PendingOp>),
}

impl Pending {
    /// A handle for a backend's operation.
    pub fn new(op: impl PendingOp + 'static) -> Pending {
        Pending { state: State::Running(Box::new(op)), log: None }
    }

    /// An operation that is already over.
    pub fn done(buffer: Buffer) -> Pending {
        Pending { state: State::Done(buffer), log: None }
    }

    /// The same operation, whose wait counts in `log`.
    pub(super) fn timed(self, log: &CommLog) -> Pending {
        Pending { log: Some(log.clone()), ..self }
    }

    /// Blocks until the operation is over. Returns the output, the input of a send, or an empty buffer for a barrier.
    pub fn wait(self) -> Result<Buffer, CommError> {
        let op = match self.state {
            State::Done(buffer) => return Ok(buffer),
            State::Running(op) => op,
        };
        let begun = Instant::now();
        let over = op.wait();
        self.log.iter().for_each(|log| log.wait(begun.elapsed()));
        over
    }

    /// Whether [`Pending::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Done(_) => true,
            State::Running(op) => op.is_done(),
        }
    }

    /// The place of the operation, if the backend [says it](PendingOp::site).
    pub fn site(&self) -> Option<&Site> {
        match &self.state {
            State::Done(_) => None,
            State::Running(op) => op.site(),
        }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_done() { "Pending(done)" } else { "Pending(running)" })
    }
}
