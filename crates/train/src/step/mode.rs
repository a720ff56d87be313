//! When weights change: what the two kinds of steps have in common.

use super::flush::Flush;
use super::stream::Stream;
use meshwork_pipeline::Lowered;

/// When weights change.
pub(super) enum Mode {
    /// After every step.
    Flush(Flush),
    /// While the schedule runs.
    Stream(Stream),
}

impl Mode {
    /// The schedule of the step that is next.
    pub(super) fn schedule(&self) -> &Lowered {
        match self {
            Self::Flush(flush) => flush.schedule(),
            Self::Stream(stream) => stream.schedule(),
        }
    }

    /// Messages that must be able to be on their way to one pp rank.
    pub(super) fn in_flight(&self) -> usize {
        match self {
            Self::Flush(flush) => flush.schedule().report().in_flight,
            Self::Stream(stream) => stream.in_flight(),
        }
    }

    /// Updates in a step.
    pub(super) fn updates(&self) -> usize {
        match self {
            Self::Flush(_) => 1,
            Self::Stream(stream) => stream.updates(),
        }
    }

    /// The version of the weights that a micro-batch reads at a stage; nothing where all read the newest.
    pub(super) fn version(&self, stage: usize, micro: usize) -> Option<u64> {
        match self {
            Self::Flush(_) => None,
            Self::Stream(stream) => Some(stream.version(stage, micro)),
        }
    }
}
