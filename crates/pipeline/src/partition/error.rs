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

impl fmt::Display for ProfileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.fault)
    }
}

impl Error for ProfileError {}

messages! {
    /// A mistake in a line of a profile.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub enum ProfileFault {
        /// There is no layer in the whole profile.
        Empty => "no layer; a profile has a line for each, and one for each edge, such as {EXAMPLE}";
        /// The line is neither a layer nor an edge.
        NotALine { text: String } => "{text:?} is neither a layer nor an edge, such as {EXAMPLE}";
        /// A missing field, or another one in its place.
        Field { expected: &'static str, found: String } => "{}; a layer is {LAYER}", match &found[..] {
            "" => format!("no {expected}"),
            found => format!("{found:?} where {expected} should be"),
        };
        /// An invalid time or size.
        Number { field: &'static str, value: String } => "{field} = {value:?} is no number of {}", match *field {
            "stage_id" => "a stage; use a whole number of at least 0",
            "activation_size" => "bytes; use a finite number of at least 0, or some in brackets, as [8; 16]",
            time if time.ends_with("time") => "milliseconds; use a finite number of at least 0",
            _ => "bytes; use a finite number of at least 0",
        };
        /// An earlier line has a layer of the same id.
        Twice { id: String, first: usize } => "line {first} has a layer {id:?} already; give each an id of its own";
        /// An id or a name that the format cannot represent.
        Text { text: String }
            => "{text:?} cannot stand for a layer; use a text without line breaks and without \" -- \"";
        /// An edge from or to an unknown layer.
        Unknown { id: String } => "no layer {id:?}; an edge joins two layers of the profile";
        /// An earlier line has the same edge.
        EdgeTwice { first: usize } => "line {first} has the same edge; give each once";
        /// The last edge of a cycle. `ids` are its layers, in the order of its edges.
        Cycle { ids: Vec<String> }
            => "closes a cycle, {} -- {}; a layer may read only from layers before it", ids.join(" -- "), ids[0];
    }
}

const LAYER: &str = "\"ID -- NAME -- forward_compute_time=MS, backward_compute_time=MS, activation_size=BYTES, \
                     parameter_size=BYTES\"";
const EXAMPLE: &str = "\"a -- Linear -- forward_compute_time=1.5, backward_compute_time=3, activation_size=64, \
                       parameter_size=128\" and, after a tab, \"a -- b\"";

messages! {
    /// Why the planner cannot make a plan.
    #[derive(Clone, PartialEq)]
    pub enum PlanError {
        /// The profile has no layers besides inputs.
        NoLayers => "the profile has nothing but inputs; it needs a layer that computes";
        /// The model has parts that are not connected.
        Unconnected { from: String, to: String }
            => "{to:?} is not connected to {from:?}; a pipeline needs one connected graph of layers";
        /// The model has too many places for a cut, because of its parallel branches.
        TooManyStates { most: usize } => "more than {most} places for a cut, because so many branches run side by \
            side; write each branch as one layer";
        /// A search that would take too long, or too much memory.
        TooLarge { states: usize, comparisons: u128, most_comparisons: u128, bytes: u128, most_bytes: u128 }
            => "{states} places for a cut and these machines take {:.1e} comparisons and {:.1} GiB; some minutes and a \
                common machine have room for {:.1e} and {:.1} GiB: use fewer machines, one level instead of several, or \
                write branches that run side by side as one layer",
            *comparisons as f64, gib(*bytes), *most_comparisons as f64, gib(*most_bytes);
        /// A topology without levels.
        NoLevels => "no machines; give each level of the topology some, innermost first";
        /// A level without machines, or with too many.
        Machines { level: usize, machines: usize, most: usize }
            => "{machines} machines on level {level}; use 1 to {most}";
        /// An invalid bandwidth.
        Bandwidth { level: usize, bytes_per_second: f64 }
            => "a bandwidth of {bytes_per_second} bytes per second on level {level}; use a finite number above 0";
        /// An invalid compression ratio.
        Ratio { ratio: f64 } => "an activation compression ratio of {ratio}; use a finite number above 0, 1 for none";
        /// A straight pipeline with more stages than the model can be cut into.
        TooManyMachines { machines: usize, stages: usize }
            => "a straight pipeline over {machines} machines needs as many stages, and there can be only {stages}; use \
                at most {stages} machines, or allow replication";
    }
}

debug_as_display!(PlanError);

impl Error for PlanError {}

fn gib(bytes: u128) -> f64 {
    bytes as f64 / (1_u64 << 30) as f64
}
