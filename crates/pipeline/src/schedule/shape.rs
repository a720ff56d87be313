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

messages! {
    /// A shape that a schedule cannot have.
    #[derive(Clone, PartialEq, Eq)]
    pub enum ShapeError {
        /// A pipeline without ranks.
        NoRanks { schedule: &'static str } => "schedule {schedule} over pp=0: a pipeline has at least 1 rank";
        /// No optimizer step.
        NoSteps { schedule: &'static str } => "schedule {schedule} over 0 steps: it spans at least 1";
        /// A number of chunks per rank that the schedule does not take. It takes `only` one, or any from 1 on.
        VirtualStages { schedule: &'static str, virtual_stages: usize, only: Option<usize> }
            => "schedule {schedule} does not run with {virtual_stages} virtual stages (chunks per rank): it {}",
            match only {
                Some(only) => format!("has {only}; interleaved_1f1b and breadth_first take any number"),
                None => "takes 1 or more".to_owned(),
            };
        /// A number of micro-batches that the schedule does not take.
        Micros { schedule: &'static str, pp: usize, micros: usize, takes: MicroCounts }
            => "schedule {schedule} over pp={pp} needs {takes}, got {micros}{}",
            // Only if that helps: no schedule runs without micro-batches.
            if *micros > 0 { "; gpipe and 1f1b take any number" } else { "" };
    }
}

debug_as_display!(ShapeError);

impl Error for ShapeError {}
