//! The size of a pipeline, and which sizes a schedule takes.

use std::error::Error;
use std::fmt;

/// The size of the pipeline for which a schedule is generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Pipeline ranks: the degree of the mesh axis `pp`.
    pub pp: usize,
    /// Chunks per rank.
    pub virtual_stages: usize,
    /// Micro-batches of one optimizer step.
    pub micros: usize,
}

/// The numbers of micro-batches that a schedule takes: the multiples of one number, from a minimum on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroCounts {
    /// The smallest number.
    pub min: usize,
    /// The number of which each is a multiple.
    pub multiple_of: usize,
}

impl MicroCounts {
    /// Whether `micros` is one of them.
    pub fn contains(self, micros: usize) -> bool {
        micros >= self.min && micros.is_multiple_of(self.multiple_of)
    }
}

impl fmt::Display for MicroCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |count: usize| if count == 1 { "micro-batch" } else { "micro-batches" };
        match *self {
            Self { min, multiple_of: 1 } => write!(f, "at least {min} {}", plural(min)),
            Self { min, multiple_of } if min == multiple_of => write!(f, "a multiple of {min} micro-batches"),
            Self { min, multiple_of } => write!(f, "a multiple of {multiple_of} micro-batches, from {min} on"),
        }
    }
}

/// A shape that a schedule cannot have.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum ShapeError {
    /// A pipeline without ranks.
    NoRanks { schedule: &'static str },
    /// No optimizer step.
    NoSteps { schedule: &'static str },
    /// A number of chunks per rank that the schedule does not take.
    VirtualStages {
        schedule: &'static str,
        virtual_stages: usize,
        /// The only number that it takes; `None` if it takes any from 1 on.
        only: Option<usize>,
    },
    /// A number of micro-batches that the schedule does not take.
    Micros { schedule: &'static str, pp: usize, micros: usize, takes: MicroCounts },
}

debug_as_display!(ShapeError);

impl fmt::Display for ShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRanks { schedule } => {
                write!(f, "schedule {schedule} over pp=0: a pipeline has at least 1 rank")
            }
            Self::NoSteps { schedule } => write!(f, "schedule {schedule} over 0 steps: it spans at least 1"),
            Self::VirtualStages { schedule, virtual_stages, only } => {
                write!(
                    f,
                    "schedule {schedule} does not run with {virtual_stages} virtual stages (chunks per rank): it "
                )?;
                match only {
                    Some(only) => write!(f, "has {only}; interleaved_1f1b and breadth_first take any number"),
                    None => write!(f, "takes 1 or more"),
                }
            }
            Self::Micros { schedule, pp, micros, takes } => {
                write!(f, "schedule {schedule} over pp={pp} needs {takes}, got {micros}")?;
                // Only if that helps: no schedule runs without micro-batches.
                if *micros > 0 { write!(f, "; gpipe and 1f1b take any number") } else { Ok(()) }
            }
        }
    }
}

impl Error for ShapeError {}
