//! Errors of profiles and of the planner's input.

use std::error::Error;
use std::fmt;

/// A profile that cannot be read.
#[derive(Clone, PartialEq, Eq)]
pub struct ProfileError {
    /// The line, from 1. If the profile was not read from text, the line that it would have.
    pub line: usize,
    /// The mistake.
    pub fault: ProfileFault,
}

debug_as_display!(ProfileError);

/// A mistake in a line of a profile.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum ProfileFault {
    /// There is no layer in the whole profile.
    Empty,
    /// The line is neither a layer nor an edge.
    NotALine { text: String },
    /// A missing field, or another one in its place.
    Field { expected: &'static str, found: String },
    /// An invalid time or size.
    Number { field: &'static str, value: String },
    /// An earlier line has a layer of the same id.
    Twice { id: String, first: usize },
    /// An id or a name that the format cannot represent.
    Text { text: String },
    /// An edge from or to an unknown layer.
    Unknown { id: String },
    /// An earlier line has the same edge.
    EdgeTwice { first: usize },
    /// The last edge of a cycle.
    Cycle {
        /// The layers of the cycle, in the order of its edges.
        ids: Vec<String>,
    },
}

impl fmt::Display for ProfileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.fault)
    }
}

impl fmt::Display for ProfileFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => {
                write!(f, "no layer; a profile has a line for each, and one for each edge, such as {EXAMPLE}")
            }
            Self::NotALine { text } => write!(f, "{text:?} is neither a layer nor an edge, such as {EXAMPLE}"),
            Self::Field { expected, found } if found.is_empty() => write!(f, "no {expected}; a layer is {LAYER}"),
            Self::Field { expected, found } => write!(f, "{found:?} where {expected} should be; a layer is {LAYER}"),
            Self::Number { field: field @ "stage_id", value } => {
                write!(f, "{field} = {value:?} is no number of a stage; use a whole number of at least 0")
            }
            Self::Number { field, value } => {
                let unit = if field.ends_with("time") { "milliseconds" } else { "bytes" };
                write!(f, "{field} = {value:?} is no number of {unit}; use a finite number of at least 0")?;
                if *field == "activation_size" { f.write_str(", or some in brackets, as [8; 16]") } else { Ok(()) }
            }
            Self::Twice { id, first } => {
                write!(f, "line {first} has a layer {id:?} already; give each an id of its own")
            }
            Self::Text { text } => {
                write!(f, "{text:?} cannot stand for a layer; use a text without line breaks and without \" -- \"")
            }
            Self::Unknown { id } => write!(f, "no layer {id:?}; an edge joins two layers of the profile"),
            Self::EdgeTwice { first } => write!(f, "line {first} has the same edge; give each once"),
            Self::Cycle { ids } => {
                write!(
                    f,
                    "closes a cycle, {} -- {}; a layer may read only from layers before it",
                    ids.join(" -- "),
                    ids[0]
                )
            }
        }
    }
}

const LAYER: &str = "\"ID -- NAME -- forward_compute_time=MS, backward_compute_time=MS, activation_size=BYTES, \
                     parameter_size=BYTES\"";
const EXAMPLE: &str = "\"a -- Linear -- forward_compute_time=1.5, backward_compute_time=3, activation_size=64, \
                       parameter_size=128\" and, after a tab, \"a -- b\"";

impl Error for ProfileError {}

/// Why the planner cannot make a plan.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
#[expect(missing_docs, reason = "fields are named as in the message")]
pub enum PlanError {
    /// The profile has no layers besides inputs.
    NoLayers,
    /// The model has parts that are not connected.
    Unconnected { from: String, to: String },
    /// The model has too many places for a cut, because of its parallel branches.
    TooManyStates { most: usize },
    /// A search that would take too long, or too much memory.
    TooLarge { states: usize, comparisons: u128, most_comparisons: u128, bytes: u128, most_bytes: u128 },
    /// A topology without levels.
    NoLevels,
    /// A level without machines, or with too many.
    Machines { level: usize, machines: usize, most: usize },
    /// An invalid bandwidth.
    Bandwidth { level: usize, bytes_per_second: f64 },
    /// An invalid compression ratio.
    Ratio { ratio: f64 },
    /// A straight pipeline with more stages than the model can be cut into.
    TooManyMachines { machines: usize, stages: usize },
}

debug_as_display!(PlanError);

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLayers => f.write_str("the profile has nothing but inputs; it needs a layer that computes"),
            Self::Unconnected { from, to } => {
                write!(f, "{to:?} is not connected to {from:?}; a pipeline needs one connected graph of layers")
            }
            Self::TooManyStates { most } => write!(
                f,
                "more than {most} places for a cut, because so many branches run side by side; write each branch as one layer"
            ),
            Self::TooLarge { states, comparisons, most_comparisons, bytes, most_bytes } => {
                let gib = |bytes: &u128| *bytes as f64 / (1_u64 << 30) as f64;
                let (comparisons, most_comparisons) = (*comparisons as f64, *most_comparisons as f64);
                write!(
                    f,
                    "{states} places for a cut and these machines take {comparisons:.1e} comparisons and {:.1} GiB; some \
                     minutes and a common machine have room for {most_comparisons:.1e} and {:.1} GiB: use fewer machines, \
                     one level instead of several, or write branches that run side by side as one layer",
                    gib(bytes),
                    gib(most_bytes)
                )
            }
            Self::NoLevels => f.write_str("no machines; give each level of the topology some, innermost first"),
            Self::Machines { level, machines, most } => {
                write!(f, "{machines} machines on level {level}; use 1 to {most}")
            }
            Self::Bandwidth { level, bytes_per_second } => write!(
                f,
                "a bandwidth of {bytes_per_second} bytes per second on level {level}; use a finite number above 0"
            ),
            Self::Ratio { ratio } => {
                write!(f, "an activation compression ratio of {ratio}; use a finite number above 0, 1 for none")
            }
            Self::TooManyMachines { machines, stages } => write!(
                f,
                "a straight pipeline over {machines} machines needs as many stages, and there can be only {stages}; use at \
                 most {stages} machines, or allow replication"
            ),
        }
    }
}

impl Error for PlanError {}
