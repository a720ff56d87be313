//! Errors of running a schedule.

use crate::{Action, ActionKind};
use std::error::Error;
use std::fmt;

/// Why [`run`](crate::run) stopped. `S` is the error of the stages, `T` the transport's.
///
/// Its text ends with the text of the stage's or transport's error, so [`source`](Error::source) returns the cause of
/// that error.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum RunError<S, T> {
    /// The schedule has no such rank.
    NoSuchRank { rank: usize, ranks: usize },
    /// The number of given stages is not the number that the rank holds.
    StageCount { rank: usize, held: Vec<usize>, given: usize },
    /// A stage failed.
    Stage { rank: usize, action: Action, source: S },
    /// A send or receive failed.
    Transport { rank: usize, action: Action, source: T },
    /// A stage returned nothing for its neighbour, which waits for a message.
    NoResult { rank: usize, action: Action },
    /// A stage at an end of the model returned a message that has no receiver.
    LooseResult { rank: usize, action: Action },
    /// All actions ran, but the sends in flight did not complete.
    Finish { rank: usize, source: T },
}

impl<S: fmt::Display, T: fmt::Display> fmt::Display for RunError<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchRank { rank, ranks } => {
                write!(f, "pp rank {rank} is none of the schedule's {ranks}: they go from 0 to {}", ranks - 1)
            }
            Self::StageCount { rank, held, given } => write!(
                f,
                "pp rank {rank} holds {} of the stages ({held:?}), but {given} were given; give each of them once, in \
                 stage order",
                held.len()
            ),
            Self::Stage { rank, action, source } => write!(f, "{}: {source}", Doing(*rank, *action)),
            Self::Transport { rank, action, source } => write!(f, "{}: {source}", Doing(*rank, *action)),
            Self::NoResult { rank, action } => write!(
                f,
                "{}: returned nothing, but stage {} waits for its {}; only the {} stage may return nothing",
                Doing(*rank, *action),
                if action.kind == ActionKind::Forward { action.stage + 1 } else { action.stage - 1 },
                result(*action),
                end(*action)
            ),
            Self::LooseResult { rank, action } => write!(
                f,
                "{}: returned the {} of the {} stage, which nobody takes; it must return nothing",
                Doing(*rank, *action),
                result(*action),
                end(*action)
            ),
            Self::Finish { rank, source } => {
                write!(f, "pp rank {rank}, waiting for its sends after the last action: {source}")
            }
        }
    }
}

impl<S: fmt::Display, T: fmt::Display> fmt::Debug for RunError<S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<S: Error, T: Error> Error for RunError<S, T> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Stage { source, .. } => source.source(),
            Self::Transport { source, .. } | Self::Finish { source, .. } => source.source(),
            _ => None,
        }
    }
}

/// The kind of message that an action produces.
fn result(action: Action) -> &'static str {
    if action.kind == ActionKind::Forward { "activation" } else { "gradient" }
}

/// The stage at which the flow of these messages ends.
fn end(action: Action) -> &'static str {
    if action.kind == ActionKind::Forward { "last" } else { "first" }
}

/// An action in words, with the rank that runs it.
struct Doing(usize, Action);

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(rank, Action { kind, stage, micro }) = *self;
        if kind == ActionKind::Update {
            return write!(f, "stage {stage}, update after micro-batch {micro} on pp rank {rank}");
        }
        write!(f, "stage {stage}, {} of micro-batch {micro} on pp rank {rank}", kind.in_errors())
    }
}
