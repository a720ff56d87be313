//! A value that differs: its name and place, and by how much.

use meshwork_train::numbers::{count as counted, grouped};
use std::fmt;

/// The value that was compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A value of an operation.
    Op {
        /// Its number among all operations of the model, whatever the stages.
        number: usize,
        /// Its name, or both names if only one side uses sequence parallelism.
        name: String,
        /// The layer whose parameters it reads, else `after` the last such layer.
        layer: String,
        /// `None` for the output; in backward the operand whose gradient this is.
        operand: Option<&'static str>,
    },
    /// The loss of the step.
    Loss,
    /// The norm of the whole gradient.
    GradNorm,
    /// A vector that goes with a parameter, after the step.
    Parameter {
        /// Its name.
        name: String,
        /// The vector.
        vector: Vector,
    },
}

/// A vector that goes with a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vector {
    /// The gradient: summed over the batch and all ranks, before clipping.
    Gradient,
    /// The weights.
    Weight,
    /// A state of the optimizer, by its slot.
    State(usize),
}

impl Vector {
    pub(super) fn at(place: usize) -> Self {
        match place {
            0 => Self::Gradient,
            1 => Self::Weight,
            state => Self::State(state - 2),
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Op { number, name, layer, operand: None } => {
                write!(f, "forward: output of operation #{number}, {name} ({layer})")
            }
            Location::Op { number, name, layer, operand: Some(operand) } => {
                write!(f, "backward: gradient of {operand} by operation #{number}, {name} ({layer})")
            }
            Location::Loss => write!(f, "the loss"),
            Location::GradNorm => write!(f, "the gradient norm"),
            Location::Parameter { name, vector: Vector::Gradient } => write!(f, "the reduced gradient of {name}"),
            Location::Parameter { name, vector: Vector::Weight } => write!(f, "the updated weights {name}"),
            Location::Parameter { name, vector: Vector::State(slot) } => {
                write!(f, "the optimizer's state {} of {name}", slot + 1)
            }
        }
    }
}

/// The two sides or ranks that diverge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Between {
    /// Side A and side B.
    Sides,
    /// Two ranks of one side that should hold the same.
    Ranks {
        /// `A` or `B`.
        side: char,
    },
}

/// A value that differs, and the first element in which it does.
#[derive(Clone, Debug, PartialEq)]
pub struct Divergence {
    /// The step, from 1.
    pub step: u64,
    /// The value.
    pub place: Location,
    /// The sides or ranks that diverge.
    pub between: Between,
    /// Global extents; dim 0 counts the samples of the step, where it counts samples.
    pub dims: Vec<usize>,
    /// Global index of the first element that differs; empty for a number.
    pub index: Vec<usize>,
    /// That element on A and B, or on the two ranks.
    pub values: [f64; 2],
    /// Distance of the two values in ulps.
    pub ulps: u64,
    /// In which micro-batch of its dp rank each side computed it; `None` for a value of the whole step.
    pub micros: [Option<usize>; 2],
    /// The first sample of the value, and the number of samples.
    pub samples: Option<(u64, usize)>,
    /// The world ranks of A and of B that hold it, or the two ranks.
    pub ranks: [Vec<usize>; 2],
    /// Elements of the value.
    pub elements: u64,
    /// Number of elements that differ.
    pub differing: u64,
    /// The largest distance in ulps.
    pub max_ulps: u64,
    /// The largest difference, as a share of the value's largest element on A.
    pub error: f64,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, place, between, dims, index, values: [a, b], ulps, micros, samples, ranks, .. } = self;
        write!(f, "step {step}, {place}")?;
        if !dims.is_empty() {
            write!(f, "\n  element {index:?} of {dims:?}")?;
        }
        match samples {
            Some((sample, 1)) => write!(f, " (sample {sample})")?,
            Some((first, samples)) => write!(f, " (samples {first} to {})", first + *samples as u64 - 1)?,
            None => {}
        }
        let names = match between {
            Between::Sides => ["A", "B"].map(str::to_owned),
            Between::Ranks { side } => [&ranks[0], &ranks[1]].map(|ranks| format!("rank {} of {side}", ranks[0])),
        };
        let apart = if *ulps == u64::MAX { "one is no number".to_owned() } else { count(*ulps, "ulp") + " apart" };
        write!(f, "\n  {} has {}, {} has {}: {apart}", names[0], exact(*a), names[1], exact(*b))?;
        if *between == Between::Sides {
            let at = |side: usize| {
                let micro = micros[side].map(|micro| format!("micro-batch {micro}, "));
                let numbers = ranks[side].iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
                let noun = if ranks[side].len() == 1 { "rank" } else { "ranks" };
                format!("{}{noun} {numbers}", micro.unwrap_or_default())
            };
            if !ranks[0].is_empty() {
                write!(f, "\n  on A in {}; on B in {}", at(0), at(1))?;
            }
        } else {
            write!(f, "\n  although they should hold the same")?;
        }
        let Self { differing, elements, max_ulps, error, .. } = self;
        if *elements > 1 {
            let (differing, elements, most) = (grouped(*differing), grouped(*elements), count(*max_ulps, "ulp"));
            write!(f, "\n  {differing} of {elements} elements differ, by up to {most}, {error:.1e} of the largest")?;
        }
        Ok(())
    }
}

/// A fault that was injected: one element of a value, in the first micro-batch of the first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// The value.
    pub place: Location,
    /// Global index of the element.
    pub index: Vec<usize>,
    /// Number of ulps by which it was increased: more than 1 if it is a share of a sum, which changes on every rank
    /// that has one.
    pub ulps: u32,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, index, ulps } = self;
        let share = if *ulps > 1 { " of each rank's share" } else { "" };
        write!(f, "{place}, element {index:?} by {}{share}", count(u64::from(*ulps), "ulp"))
    }
}

/// A number in the fewest digits that distinguish it from others of its type.
fn exact(value: f64) -> String {
    let narrow = value as f32;
    if f64::from(narrow) == value { format!("{narrow:e}") } else { format!("{value:e}") }
}

pub(super) fn count(number: u64, noun: &str) -> String {
    counted(number as usize, noun)
}
