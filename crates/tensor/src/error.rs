//! Errors of tensors.

use crate::memory::{Bytes, Category, MemoryUse};
use meshwork_core::agreement::Disagreement;
use meshwork_core::{BufferError, CommError, DType, SpmdError};
use meshwork_optim::OptimError;

/// The error of this crate. Variants carry the operation and the facts.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum Error {
    /// A wrongly distributed program.
    #[error(transparent)]
    Spmd(#[from] SpmdError),
    /// A failed communication.
    #[error(transparent)]
    Comm(Box<CommError>),
    /// Memory of another type, size or place than expected.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// Operands whose shapes do not fit together.
    #[error("{op}: {problem}{}", in_brackets(shapes))]
    Shape { op: &'static str, problem: String, shapes: Vec<Vec<usize>> },
    /// An element type that the operation does not take.
    #[error("{op}: dtype {dtype} on device {device} is not supported: use {valid}")]
    DType { op: &'static str, device: String, dtype: DType, valid: &'static str },
    /// The device has no kernels of this kind.
    #[error("{op}: device {device} has no {kernels} operations")]
    MissingKernel { op: &'static str, device: String, kernels: &'static str },
    /// An operation that the device has no kernel for.
    #[error("{op}: device {device} has no kernel for {dtype}")]
    MissingOperation { op: &'static str, device: String, dtype: DType },
    /// A device that failed.
    #[error("{op}: device {device}: {fault}")]
    Device { op: &'static str, device: String, fault: Box<dyn std::error::Error + Send + Sync> },
    /// A function of the host on a device that cannot run any.
    #[error(
        "{op}: device {device} runs no functions of the host: build it of operations that the device has, or give the device a kernel"
    )]
    HostFunction { op: &'static str, device: String },
    /// A dim that the mesh does not divide, or two axes that cut the same dim.
    #[error("{what}: dim {dim} of extent {extent} cannot be cut over {axis}={degree}: {problem}")]
    Placement { what: String, dim: usize, extent: usize, axis: meshwork_core::Axis, degree: usize, problem: String },
    /// An operand whose true extent the operation does not take: its shards are padded with zeros, or it was told
    /// another one.
    #[error("{op}: {operand} has {extent} elements along dim {dim} over {axis}={degree}{}, and {problem}; {valid}", padded(*extent, *stored))]
    Extent {
        op: &'static str,
        operand: &'static str,
        extent: usize,
        dim: usize,
        axis: meshwork_core::Axis,
        degree: usize,
        stored: usize,
        problem: String,
        valid: String,
    },
    /// A declaration that no mesh gives a meaning, or a name that is taken.
    #[error("parameter {name}: {problem}; {valid}")]
    Declaration { name: String, problem: String, valid: String },
    /// A parameter id that other declarations gave.
    #[error(
        "parameter #{index} was declared in other declarations than those of these weights ({problem}): use the id that these \
         declarations gave"
    )]
    OtherDeclarations { index: usize, problem: String },
    /// A buffer for which the rank's limit leaves no room.
    #[error(
        "{} of {} more would exceed the limit of {} that this rank has: it holds {held}",
        Bytes(*bytes), category.name(), Bytes(*limit)
    )]
    MemoryLimit { bytes: u64, category: Category, limit: u64, held: Box<MemoryUse> },
    /// A device whose memory is full.
    #[error("{} of {} more: device {device}: {fault}; this rank's buffers hold {held}", Bytes(*bytes), category.name())]
    OutOfMemory {
        device: String,
        bytes: u64,
        category: Category,
        fault: Box<dyn std::error::Error + Send + Sync>,
        held: Box<MemoryUse>,
    },
    /// A saved tensor that its policy cannot give back.
    #[error("a saved tensor: {0}")]
    Saved(Box<dyn std::error::Error + Send + Sync>),
    /// A value of one tape that is used on another.
    #[error(
        "{op}: {operand} lies on another tape: its gradient would be lost or added to another value; bring its tensor over with \
         Tape::input or Tape::constant"
    )]
    OtherTape { op: &'static str, operand: &'static str },
    /// A gradient that is not what backward asked an operation for.
    #[error("{op}: the gradient of {operand} {problem}; {valid}")]
    Gradient { op: &'static str, operand: &'static str, problem: String, valid: String },
    /// A gradient of a parameter that is still to be summed over ranks.
    #[error(
        "the gradient of {name} is still Partial over {axes}: sum it over these axes first, as Gradients::all_reduce does"
    )]
    StillPartial { name: String, axes: String },
    /// Two uses of one name of randomness on one tape.
    #[error(
        "two operations draw their randomness under the name {name:?}: their masks would be the same; give each a name of its own"
    )]
    RandomName { name: String },
    /// Two declarations of one parameter that do not agree.
    #[error("parameter {name} is tied to itself as {first} and as {second}: tied parameters agree in everything")]
    Tied { name: String, first: String, second: String },
    /// A parameter read as Invariant in one place and as Replicate in another.
    #[error(
        "parameter {name} is read as {first} in one place and as {second} in another: its gradient would be neither summed nor whole"
    )]
    ReadBothWays { name: String, first: String, second: String },
    /// A token id or target that the vocabulary does not have.
    #[error("{op}: id {id} at place {at} is not in a vocabulary of {vocab}")]
    Id { op: &'static str, id: i32, at: usize, vocab: usize },
    /// A layout of flat buffers that does not have a parameter exactly once.
    #[error("parameter {name} lies in {times} flat buffers of the layout: it must lie in one")]
    Layout { name: String, times: usize },
    /// A value or a message that cannot be compressed or restored.
    #[error("{op}: {source}")]
    Compress { op: &'static str, source: Box<meshwork_compress::CompressError> },
    /// An update rule that refused its vectors.
    #[error("optimizer: {0}")]
    Update(#[from] OptimError),
    /// An update rule that the device has no kernel for: a user-written one where the host cannot read the weights.
    #[error(
        "device {device} has no kernel for the update rule {rule}, and the host cannot read its memory: use {valid}, or a device \
         in host memory"
    )]
    UpdateRule { device: String, rule: String, valid: &'static str },
    /// An operation whose result depends on the mesh, used in canonical numerics.
    #[error("{op} has no canonical numerics: {problem}; use {valid}")]
    NotCanonical { op: &'static str, problem: &'static str, valid: &'static str },
    /// Notes of layers that nobody took before backward, and that would be lost.
    #[error("backward: layers left {what} on the tape, and nobody took them; {valid}")]
    Untaken { what: String, valid: &'static str },
    /// A claim about values that does not hold: see [`verify`](crate::verify). Every rank of the world has the same.
    #[error("step {step}: {claim}")]
    Claim { step: u64, claim: Box<Disagreement> },
    /// A backward pass that cannot run.
    #[error("backward: {0}")]
    Backward(String),
}

meshwork_core::debug_as_display!(Error);

impl Error {
    /// A dim that the degree of an axis does not divide, where it must: with the degrees that do.
    pub fn uneven(what: &str, dim: usize, extent: usize, axis: meshwork_core::Axis, degree: usize) -> Self {
        let problem = format!("the degree must divide it: {}", divisors(extent));
        Self::Placement { what: what.to_owned(), dim, extent, axis, degree, problem }
    }

    /// The same error with the name of the operation, if the device could not know it.
    pub(crate) fn during(self, op: &'static str) -> Self {
        match self {
            Self::MissingKernel { device, kernels, .. } => Self::MissingKernel { op, device, kernels },
            other => other,
        }
    }
}

meshwork_core::from!(Error: Comm(CommError));

/// Result with this crate's [`Error`], unless another is named: it takes the place of the standard one.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The degrees that divide an extent: the first twelve.
pub(crate) fn divisors(extent: usize) -> String {
    let divisors = (1..=extent).filter(|degree| extent.is_multiple_of(*degree)).take(12);
    divisors.map(|degree| degree.to_string()).collect::<Vec<_>>().join(", ")
}

/// How many elements are stored, if these are more than there are.
fn padded(extent: usize, stored: usize) -> String {
    if extent == stored { String::new() } else { format!(", padded with zeros to {stored}") }
}

/// The shapes of an error's operands, if it has any.
fn in_brackets(shapes: &[Vec<usize>]) -> String {
    if shapes.is_empty() { String::new() } else { format!(" (shapes {shapes:?})") }
}
