//! The common interface of the two kinds of schedules, which differ in when weights change.

use super::asynchronous::Asynchronous;
use super::synchronous::Synchronous;
use meshwork_pipeline::Lowered;

/// When weights change.
pub(super) enum Driver {
    /// After every step.
    Synchronous(Synchronous),
    /// While the schedule runs.
    Asynchronous(Asynchronous),
}

impl Driver {
    /// The schedule of the next step.
    pub(super) fn schedule(&self) -> &Lowered {
        match self {
            Self::Synchronous(driver) => driver.schedule(),
            Self::Asynchronous(driver) => driver.schedule(),
        }
    }

    /// Number of messages that must fit in flight to one pp rank.
    pub(super) fn in_flight(&self) -> usize {
        match self {
            Self::Synchronous(driver) => driver.schedule().report().in_flight,
            Self::Asynchronous(driver) => driver.in_flight(),
        }
    }

    /// Updates in a step.
    pub(super) fn updates(&self) -> usize {
        match self {
            Self::Synchronous(_) => 1,
            Self::Asynchronous(driver) => driver.updates(),
        }
    }

    /// The version of the weights that a micro-batch reads at a stage; `None` where all read the newest.
    pub(super) fn version(&self, stage: usize, micro: usize) -> Option<u64> {
        match self {
            Self::Synchronous(_) => None,
            Self::Asynchronous(driver) => Some(driver.version(stage, micro)),
        }
    }

    /// Number of steps begun before the first of them is certain: 0 if each step is certain before the next begins.
    pub(super) fn steps_ahead(&self) -> usize {
        match self {
            Self::Synchronous(driver) => usize::from(driver.overlaps()),
            Self::Asynchronous(driver) => driver.lag(),
        }
    }
}
