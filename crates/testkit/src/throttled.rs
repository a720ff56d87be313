//! A communicator that takes the time of a slow link: what ranks of one process send each other is charged as if it
//! went over a wire.

use meshwork_core::comm::{Call, Decorator, Op, OpKind, PendingOp};
use meshwork_core::{Buffer, CommError, Communicator, DType, Pending, Record};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// `inner`, over a link by which a rank sends `bytes_per_second`. A collective or a send is over when its logical bytes
/// have been sent ([`Record::bytes`]): the bytes of a rank's operations follow each other on its link, in all of its
/// groups. A message is there after its time on the link of the receiver. Values are `inner`'s.
///
/// # Panics
/// If the link sends nothing.
pub fn communicator(inner: Arc<dyn Communicator>, bytes_per_second: f64) -> Arc<dyn Communicator> {
    assert!(bytes_per_second > 0.0, "a link of {bytes_per_second} bytes a second");
    Arc::new(Throttled { inner, link: Arc::new(Link { bytes_per_second, free: Mutex::new(Instant::now()) }) })
}

#[derive(Debug)]
struct Link {
    bytes_per_second: f64,
    /// When it has sent all that it was given.
    free: Mutex<Instant>,
}

impl Link {
    /// When these bytes are sent, behind those before them.
    fn send(&self, bytes: f64) -> Instant {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let begins = (*free).max(Instant::now());
        *free = begins + Duration::from_secs_f64(bytes / self.bytes_per_second);
        *free
    }
}

#[derive(Debug)]
struct Throttled {
    inner: Arc<dyn Communicator>,
    link: Arc<Link>,
}

impl Decorator for Throttled {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn pass(&self, call: Call) -> Result<Pending, CommError> {
        let op = call.op.kind();
        let (at, then) = match op {
            OpKind::Recv => {
                let bytes = call.output.as_ref().map_or(0, |room| room.as_bytes().map_or(0, <[u8]>::len));
                (Instant::now(), Duration::from_secs_f64(bytes as f64 / self.link.bytes_per_second))
            }
            _ => (self.link.send(self.bytes(&call, op)), Duration::ZERO),
        };
        Ok(Pending::new(Sent { inner: self.inner.start(call)?, at, then }))
    }

    fn around(&self, part: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        Arc::new(Throttled { inner: part, link: self.link.clone() })
    }
}

impl Throttled {
    /// Logical bytes of a call.
    fn bytes(&self, call: &Call, op: OpKind) -> f64 {
        let kept = if let Op::AllToAll { send_counts, .. } = &call.op { send_counts[self.inner.rank()] } else { 0 };
        let dtype = call.input.as_ref().or(call.output.as_ref()).map_or(DType::U8, Buffer::dtype);
        let (elements, ranks) = (call.elements() - kept, self.inner.size());
        Record { group: self.inner.name().to_owned(), op, dtype, elements, ranks }.bytes()
    }
}

/// An operation that is over when its bytes are sent.
struct Sent {
    inner: Pending,
    at: Instant,
    /// The arrival time of a message, once it is on its way.
    then: Duration,
}

impl PendingOp for Sent {
    fn wait(self: Box<Self>) -> Result<Buffer, CommError> {
        let buffer = self.inner.wait()?;
        thread::sleep(self.at.saturating_duration_since(Instant::now()) + self.then);
        Ok(buffer)
    }

    fn is_done(&self) -> bool {
        self.inner.is_done() && Instant::now() >= self.at && self.then.is_zero()
    }
}
