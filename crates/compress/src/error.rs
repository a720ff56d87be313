//! Errors of schemes, values, messages and sums.

use crate::{Method, Shape};
use meshwork_core::{BufferError, CommError};

/// The grammar of schemes, for messages.
pub(crate) const VALID: &str = "none, bf16, fp8:e4m3, fp8:e5m2, quant:BITS (1 to 8), sign, topk:FRACTION or topk:COUNT, \
     randk:FRACTION or randk:COUNT, topk or randk with + and one of the first six, powersgd:RANK";

/// Why something could not be compressed, restored or summed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CompressError {
    /// A text that names no scheme.
    #[error("{text:?} is no compression: {problem}; valid are {VALID}")]
    Scheme {
        /// The text.
        text: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A shape of more elements than an index of 32 bits reaches.
    #[error("a value of {rows} x {cols} has more than 4294967295 elements: compress it in parts")]
    TooLong {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// A rank that the matrix does not have.
    #[error("powersgd:{rank} of a {shape} matrix: the rank must be 1 to {}; use \"none\" for vectors", shape.rows().min(shape.cols()))]
    Rank {
        /// The rank of the factors.
        rank: usize,
        /// The matrix.
        shape: Shape,
    },
    /// A slice of the wrong length.
    #[error("{what} has {count} elements, it must have {wanted}")]
    Count {
        /// Which slice.
        what: &'static str,
        /// Its elements.
        count: usize,
        /// What it must have.
        wanted: usize,
    },
    /// A message that is not one of this scheme and shape.
    #[error("the message cannot be read: {0}")]
    Message(#[from] MessageError),
    /// A second use of a state in one step.
    #[error(
        "{name}: step {step} after step {last}: feedback is applied once a step, in increasing steps; a second time would add the residual twice"
    )]
    Twice {
        /// What is reduced or sent.
        name: String,
        /// The step asked for.
        step: u64,
        /// The last step that the state has seen.
        last: u64,
    },
    /// The group is not the one that a reduction was planned for.
    #[error(
        "{name} was planned for rank {rank} of {ranks}, the group has this as rank {group_rank} of {group_ranks}: reshard its states and plan it again"
    )]
    Group {
        /// What is reduced.
        name: String,
        /// Planned rank.
        rank: usize,
        /// Planned number of ranks.
        ranks: usize,
        /// Rank in the group.
        group_rank: usize,
        /// Ranks of the group.
        group_ranks: usize,
    },
    /// Feedback that a scheme cannot have.
    #[error("{feedback} with {scheme}: {problem}")]
    Feedback {
        /// The feedback.
        feedback: String,
        /// The scheme.
        scheme: String,
        /// Why not, and what would be valid.
        problem: String,
    },
    /// A sample that a buffer does not have.
    #[error("sample {sample} of a buffer of {samples}")]
    Sample {
        /// The sample.
        sample: usize,
        /// Samples of the buffer.
        samples: usize,
    },
    /// A file of activations that cannot be used.
    #[error("{path}: {problem}")]
    File {
        /// Its path.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// A collective failed.
    #[error(transparent)]
    Comm(#[from] CommError),
}

meshwork_core::debug_as_display!(CompressError);

impl From<BufferError> for CompressError {
    fn from(error: BufferError) -> Self {
        CompressError::Comm(error.into())
    }
}

/// An error in the bytes of a message.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Another number of bytes than the scheme and shape give.
    #[error("it has {bytes} bytes, {wanted} were expected")]
    Bytes {
        /// Its bytes.
        bytes: usize,
        /// The bytes of a message of this scheme and shape.
        wanted: usize,
    },
    /// A version of the format that this crate does not read.
    #[error("it is of version {0} of the format, this is version {version}", version = crate::wire::VERSION)]
    Version(u8),
    /// Another method, or no method at all.
    #[error("it was made by method number {found}, {wanted:?} (number {}) was expected", *wanted as u8)]
    Method {
        /// The number that it has.
        found: u8,
        /// The method that was expected.
        wanted: Method,
    },
    /// Another scheme of this method, or another shape.
    #[error("its scheme or shape is not {scheme} of {shape}")]
    Fingerprint {
        /// The expected scheme.
        scheme: String,
        /// The expected shape.
        shape: Shape,
    },
    /// Bits that every message has as zeros.
    #[error("bits that must be zero are set")]
    Padding,
    /// Indices that are not increasing, too few, too many or too large.
    #[error("its indices are not {count} increasing numbers below {below}")]
    Indices {
        /// How many there must be.
        count: usize,
        /// What all are below.
        below: usize,
    },
}

meshwork_core::debug_as_display!(MessageError);

/// Checks the length of a slice.
pub(crate) fn require_count(what: &'static str, count: usize, wanted: usize) -> Result<(), CompressError> {
    match count == wanted {
        true => Ok(()),
        false => Err(CompressError::Count { what, count, wanted }),
    }
}
