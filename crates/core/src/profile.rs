//! The time of a rank as plain data: [`Span`]s that a [`Recorder`] keeps.
//!
//! Code that computes or communicates does not know of profiles. Two decorators record: [`communicator`] around a
//! rank's communicator, and one around its device (`meshwork_tensor::profiled`). A run without a profile has neither.

mod communicator;

pub use communicator::communicator;

use crate::dtype::DType;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The kind of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Class {
    /// A whole training step: a frame around all that follows.
    Step,
    /// One action of the pipeline's schedule: a frame inside a step.
    Action,
    /// Matrix products.
    Product,
    /// Attention.
    Attention,
    /// Norms.
    Norm,
    /// Sums, biases, activations, dropout.
    Pointwise,
    /// Lookups in tables.
    Embedding,
    /// Softmax cross entropy.
    Loss,
    /// Flat vectors of weights, gradients and optimizer states.
    Optimizer,
    /// Blocks moved within memory, buffers zeroed, uploaded, downloaded.
    Memory,
    /// Values compressed before they are sent, and restored after it.
    Compression,
    /// Reading of samples.
    Data,
    /// The start of a communication, with the work that the rank does on it before it continues.
    Post,
    /// The rank stands still until a communication is over.
    Wait,
    /// A communication under way while the rank does something else: from the end of its start until the rank sees that
    /// it is over, or waits for it. Only these spans overlap others instead of lying inside or after them.
    Flight,
}

impl Class {
    /// Whether other spans lie inside.
    pub fn is_frame(self) -> bool {
        matches!(self, Class::Step | Class::Action)
    }
}

/// Details of a span.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Detail {
    /// No details.
    None,
    /// The number of a step, from 1.
    Step(u64),
    /// A part of the schedule.
    Part {
        /// Index of the stage.
        stage: usize,
        /// Index of the micro-batch.
        micro: usize,
    },
    /// Extents of a matrix product: rows, columns, length of the sums.
    Product([usize; 3]),
    /// A communication.
    Meeting(Meeting),
}

/// A communication, the same for every member.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Meeting {
    /// The group's name and the world ranks of its members. Between processes it travels once for many spans.
    #[serde(skip)]
    pub group: Arc<(String, Vec<usize>)>,
    /// World ranks of sender and receiver; `None` for a collective.
    pub message: Option<(usize, usize)>,
    /// Its number in the group: collectives, and the messages of each sender and receiver, are counted from 0.
    pub seq: u64,
}

impl fmt::Display for Detail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Detail::None => Ok(()),
            Detail::Step(step) => write!(f, "{step}"),
            Detail::Part { stage, micro } => write!(f, "micro {micro}, stage {stage}"),
            Detail::Product([m, n, k]) => write!(f, "{m}×{n}×{k}"),
            Detail::Meeting(meeting) => f.write_str(&meeting.group.0),
        }
    }
}

/// A stretch of one rank's time. Nanoseconds count from the recorder's origin.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Its kind.
    pub class: Class,
    /// The operation: `gemm nt`, `all_reduce`, `forward`. Between processes it travels once for many spans.
    #[serde(skip)]
    pub name: &'static str,
    /// Its details.
    pub detail: Detail,
    /// Type of the elements, if there are any.
    pub dtype: Option<DType>,
    /// Start, in nanoseconds.
    pub start: u64,
    /// End, in nanoseconds.
    pub end: u64,
    /// Floating point operations of matrix work, as the device's meter counts them.
    pub flops: u64,
    /// Bytes of memory that the operation must read and write at least: each input and output once. For a
    /// communication: its buffers on this rank.
    pub bytes: u64,
}

impl Span {
    /// Its name and details.
    pub fn label(&self) -> String {
        let mut label = self.name.to_owned();
        if let Some(dtype) = self.dtype.filter(|&dtype| dtype != DType::F32 && self.meeting().is_none()) {
            label += &format!(" {dtype}");
        }
        match self.detail {
            Detail::None => label,
            ref detail => format!("{label} {detail}"),
        }
    }

    /// The communication that it is a part of.
    pub fn meeting(&self) -> Option<&Meeting> {
        if let Detail::Meeting(meeting) = &self.detail { Some(meeting) } else { None }
    }

    /// Its length in nanoseconds.
    pub fn duration(&self) -> u64 {
        self.end - self.start
    }
}

/// Keeps the spans of one rank, between [`resume`](Recorder::resume) and [`pause`](Recorder::pause). Clones write to
/// the same place. Ranks whose recorders have the same origin can be compared.
#[derive(Clone, Debug)]
pub struct Recorder {
    origin: Instant,
    // Only its own rank's thread takes the lock, so it is never contended.
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    on: bool,
    spans: Vec<Span>,
}

impl Recorder {
    /// A paused recorder, with room for some thousand spans before it allocates more memory.
    pub fn new(origin: Instant) -> Recorder {
        Recorder { origin, state: Arc::new(Mutex::new(State { on: false, spans: Vec::with_capacity(1 << 14) })) }
    }

    /// Starts recording.
    pub fn resume(&self) {
        self.state().on = true;
    }

    /// Stops recording.
    pub fn pause(&self) {
        self.state().on = false;
    }

    /// Whether it records.
    pub fn is_on(&self) -> bool {
        self.state().on
    }

    /// Nanoseconds since the origin.
    pub fn now(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    /// Records a span, unless paused.
    pub fn record(&self, span: Span) {
        let mut state = self.state();
        if state.on {
            state.spans.push(span);
        }
    }

    /// Runs `work` as a span without FLOPs and bytes.
    pub fn time<T>(&self, class: Class, name: &'static str, detail: Detail, work: impl FnOnce() -> T) -> T {
        let start = self.now();
        let result = work();
        self.record(Span { class, name, detail, dtype: None, start, end: self.now(), flops: 0, bytes: 0 });
        result
    }

    /// Takes all spans, in the order of their ends.
    pub fn drain(&self) -> Vec<Span> {
        std::mem::take(&mut self.state().spans)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic between two pushes leaves all spans complete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
