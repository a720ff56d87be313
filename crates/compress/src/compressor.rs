//! The trait of all methods.

use crate::{MessageError, Method, Per, PowerSgd, Result, Shape, Sparse};
use meshwork_core::random::{Key, key};
use std::fmt::Debug;

/// The accuracy of a method: E|C(x) - x|² is at most `error` · |x|², in exact arithmetic, for values in the range
/// of normal numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guarantee {
    /// The bound. 0: lossless. 1: no guarantee.
    pub error: f64,
    /// Whether the mean of C(x) over all draws is x.
    pub unbiased: bool,
}

impl Guarantee {
    /// The contraction factor δ of E|C(x) - x|² ≤ (1 - δ) |x|², which must be above 0 for error feedback; `None` if
    /// that is not known.
    pub fn contraction(self) -> Option<f64> {
        (self.error < 1.0).then_some(1.0 - self.error)
    }
}

/// The random numbers of one compression: element i draws number `start + i` of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draws {
    /// The stream.
    pub key: Key,
    /// The number of the first element.
    pub start: u64,
}

impl Draws {
    /// The draws of `name` in a step.
    pub fn new(seed: u64, name: &str, step: u64) -> Draws {
        Draws { key: key(seed, &format!("compress {name}@{step}")), start: 0 }
    }

    /// The draws from element `by` on.
    pub fn skip(self, by: usize) -> Draws {
        Draws { start: self.start + by as u64, ..self }
    }
}

/// Whether restored values replace the old contents or are added to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Replaces the old contents.
    Replace,
    /// Adds to the old contents.
    Add,
}

/// How a group sums values when each rank compresses its own value: see [`sum`](crate::sum()).
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum SumMethod {
    /// Messages are gathered and added in the order of the ranks. Correct for every method.
    Gather,
    /// Each rank receives the messages of its shard from all ranks, adds them and compresses the sum again; then all
    /// ranks gather the sums (1-bit Adam). Shards are multiples of these parts, if there are several parts.
    ScatterGather(Per),
    /// The method is lossless: an all-reduce in f32.
    AllReduce,
    /// An all-reduce in bf16, summed in f32 and rounded once.
    AllReduceBf16,
    /// All ranks draw the same indices, whose values are all-reduced.
    SharedIndices(Sparse),
    /// Both factors are all-reduced.
    Factors(PowerSgd),
}

/// A method of lossy compression of f32 slices. Implement it for your own method; use it through
/// [`Message`](crate::Message) and [`sum`](crate::sum()), which check shapes and messages.
///
/// The same input and draws give the same bytes on every machine.
pub trait Compressor: Send + Sync + Debug {
    /// The scheme as text, with all parameters needed to decode a message.
    fn name(&self) -> String;

    /// Its number in the header of messages.
    fn method(&self) -> Method {
        Method::Custom
    }

    /// Whether values of this shape can be compressed; by default all can.
    ///
    /// # Errors
    /// A shape that cannot be compressed.
    fn check(&self, _shape: Shape) -> Result<()> {
        Ok(())
    }

    /// Bytes of a message, without its header.
    fn body_bytes(&self, shape: Shape) -> usize;

    /// How accurate it is.
    fn guarantee(&self, shape: Shape) -> Guarantee;

    /// Elements of state that the sender keeps between uses, initially zero.
    fn warm_len(&self, _shape: Shape) -> usize {
        0
    }

    /// How ranks sum values.
    fn sum(&self) -> SumMethod {
        SumMethod::Gather
    }

    /// Compresses `x` into `body`. The lengths match the shape, `body_bytes` and `warm_len`.
    fn write(&self, x: &[f32], shape: Shape, draws: Draws, warm: &mut [f32], body: &mut [u8]);

    /// Decodes `body` into `out`. The lengths match the shape and `body_bytes`; the bytes may be arbitrary.
    ///
    /// # Errors
    /// Bytes that encode no value.
    fn read(&self, body: &[u8], shape: Shape, fold: Fold, out: &mut [f32]) -> Result<(), MessageError>;
}
