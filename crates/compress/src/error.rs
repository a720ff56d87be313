//! Errors of schemes, values, messages and sums.

use crate::{Method, Shape};
use meshwork_core::{BufferError, CommError};

/// The grammar of schemes, for error messages.
pub(crate) const VALID: &str = "none, bf16, fp8:e4m3, fp8:e5m2, quant:BITS (1 to 8), sign, int8, nf4, topk:FRACTION or topk:COUNT, \
     randk:FRACTION or randk:COUNT, topk or randk with + and one of the first eight, powersgd:RANK";

/// A result of compression; of another error where one is named.
pub type Result<T, E = CompressError> = std::result::Result<T, E>;

/// Failure to compress, restore or sum.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum CompressError {
    /// A text that names no scheme.
    #[error("{text:?} is no compression: {problem}; valid are {VALID}")]
    Scheme { text: String, problem: String },
    /// A shape with more elements than a 32-bit index can address.
    #[error("a value of {rows} x {cols} has more than 4294967295 elements: compress it in parts")]
    TooLong { rows: usize, cols: usize },
    /// A rank that is not valid for the matrix.
    #[error("powersgd:{rank} of a {shape} matrix: the rank must be 1 to {}; use \"none\" for vectors", shape.rows().min(shape.cols()))]
    Rank { rank: usize, shape: Shape },
    /// A slice of the wrong length.
    #[error("{what} has {count} elements, it must have {wanted}")]
    Count { what: &'static str, count: usize, wanted: usize },
    /// A message that does not match the scheme and shape.
    #[error("the message cannot be read: {0}")]
    Message(#[from] MessageError),
    /// A second use of a state in one step.
    #[error(
        "{name}: step {step} after step {last}: feedback is applied once a step, in increasing steps; a second time would add the residual twice"
    )]
    Twice { name: String, step: u64, last: u64 },
    /// The group differs from the planned group of a reduction.
    #[error(
        "{name} was planned for rank {rank} of {ranks}, the group has this as rank {group_rank} of {group_ranks}: reshard its states and plan it again"
    )]
    Group { name: String, rank: usize, ranks: usize, group_rank: usize, group_ranks: usize },
    /// Feedback that a scheme does not support.
    #[error("{feedback} with {scheme}: {problem}")]
    Feedback { feedback: String, scheme: String, problem: String },
    /// A sample outside the buffer.
    #[error("sample {sample} of a buffer of {samples}")]
    Sample { sample: usize, samples: usize },
    /// A file of activations that cannot be used.
    #[error("{path}: {problem}")]
    File { path: String, problem: String },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

meshwork_core::debug_as_display!(CompressError);
meshwork_core::from!(CompressError: Comm(BufferError));

/// An error in the bytes of a message.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum MessageError {
    /// A number of bytes that does not match the scheme and shape.
    #[error("it has {bytes} bytes, {wanted} were expected")]
    Bytes { bytes: usize, wanted: usize },
    /// A format version that this crate cannot read.
    #[error("it is of version {0} of the format, this is version {version}", version = crate::wire::VERSION)]
    Version(u8),
    /// Another method, or no method at all.
    #[error("it was made by method number {found}, {wanted:?} (number {}) was expected", *wanted as u8)]
    Method { found: u8, wanted: Method },
    /// Another scheme of this method, or another shape.
    #[error("its scheme or shape is not {scheme} of {shape}")]
    Fingerprint { scheme: String, shape: Shape },
    /// Padding bits that are not zero.
    #[error("bits that must be zero are set")]
    Padding,
    /// Indices that are not increasing, too large, or of the wrong number.
    #[error("its indices are not {count} increasing numbers below {below}")]
    Indices { count: usize, below: usize },
}

meshwork_core::debug_as_display!(MessageError);

/// Checks the length of a slice.
pub(crate) fn require_count(what: &'static str, count: usize, wanted: usize) -> Result<(), CompressError> {
    if count == wanted { Ok(()) } else { Err(CompressError::Count { what, count, wanted }) }
}
