//! A communicator that records the time that it takes on its rank.

use super::{Class, Detail, Meeting, Recorder, Span};
use crate::buffer::Buffer;
use crate::comm::{Call, CommError, Communicator, Decorator, Op, OpKind, Pending, PendingOp};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// `inner`, and every group that is split off it, recording each operation: its start, its flight, and the wait for it.
pub fn communicator(inner: Arc<dyn Communicator>, recorder: Recorder) -> Arc<dyn Communicator> {
    let group = Arc::new((inner.name().to_owned(), inner.world_ranks().to_vec()));
    Arc::new(Profiled { inner, recorder, group, seen: Mutex::default() })
}

#[derive(Debug)]
struct Profiled {
    inner: Arc<dyn Communicator>,
    recorder: Recorder,
    group: Arc<(String, Vec<usize>)>,
    /// Numbers of collectives, and of messages per sender and receiver. They are also counted while the recorder
    /// pauses, so that all members give a communication the same number.
    seen: Mutex<HashMap<Option<(usize, usize)>, u64>>,
}

impl Profiled {
    /// The communication of the next such operation of this rank.
    fn meeting(&self, op: &Op) -> Meeting {
        let me = self.inner.rank();
        let message = match *op {
            Op::Send { to, .. } => Some((me, to)),
            Op::Recv { from, .. } => Some((from, me)),
            _ => None,
        };
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let count = seen.entry(message).or_default();
        *count += 1;
        let world = |rank: usize| self.group.1.get(rank).copied().unwrap_or(rank);
        let message = message.map(|(from, to)| (world(from), world(to)));
        Meeting { group: Arc::clone(&self.group), message, seq: *count - 1 }
    }
}

impl Decorator for Profiled {
    fn inner(&self) -> &Arc<dyn Communicator> {
        &self.inner
    }

    fn pass(&self, call: Call) -> Result<Pending, CommError> {
        let kind = call.op.kind();
        let mut span = Span {
            class: Class::Post,
            name: kind.name(),
            dtype: call.input.as_ref().or(call.output.as_ref()).map(Buffer::dtype),
            bytes: traffic(kind, &call),
            detail: Detail::Meeting(self.meeting(&call.op)),
            flops: 0,
            start: self.recorder.now(),
            end: 0,
        };
        let pending = self.inner.start(call)?;
        span.end = self.recorder.now();
        self.recorder.record(span.clone());
        Ok(Pending::new(Flight { pending, span, over: Cell::new(None), recorder: self.recorder.clone() }))
    }

    fn around(&self, part: Arc<dyn Communicator>) -> Arc<dyn Communicator> {
        communicator(part, self.recorder.clone())
    }
}

/// Bytes that this rank's share of an operation reads and writes at least. A reduction is in place.
fn traffic(kind: OpKind, call: &Call) -> u64 {
    let bytes = |buffer: &Option<Buffer>| buffer.as_ref().map_or(0, Buffer::bytes) as u64;
    if matches!(kind, OpKind::AllReduce) { 2 * bytes(&call.output) } else { bytes(&call.input) + bytes(&call.output) }
}

/// An operation under way.
struct Flight {
    pending: Pending,
    /// Its start.
    span: Span,
    /// When it was first seen to be over.
    over: Cell<Option<u64>>,
    recorder: Recorder,
}

impl PendingOp for Flight {
    fn wait(self: Box<Self>) -> Result<Buffer, CommError> {
        let Flight { pending, span, over, recorder } = *self;
        let start = recorder.now();
        let buffer = pending.wait()?;
        let (took_off, landed) = (span.end, over.get().unwrap_or(start));
        recorder.record(Span { class: Class::Flight, start: took_off, end: landed, bytes: 0, ..span.clone() });
        recorder.record(Span { class: Class::Wait, start, end: recorder.now(), bytes: 0, ..span });
        Ok(buffer)
    }

    fn is_done(&self) -> bool {
        let done = self.pending.is_done();
        if done && self.over.get().is_none() {
            self.over.set(Some(self.recorder.now()));
        }
        done
    }
}
