//! What a comparison found, in words and as a table.

use super::ulps::Spread;
use crate::plan::{count as counted, grouped};
use std::collections::BTreeMap;
use std::fmt;

/// What was compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A value of an operation.
    Op {
        /// Its number among all operations of the model, whatever the stages.
        number: usize,
        /// Its name; both, where regions are cut along the sequence on one side only.
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
        /// Which vector.
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

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Op { number, name, layer, operand: None } => {
                write!(f, "forward: output of operation #{number}, {name} ({layer})")
            }
            Place::Op { number, name, layer, operand: Some(operand) } => {
                write!(f, "backward: gradient of {operand} by operation #{number}, {name} ({layer})")
            }
            Place::Loss => write!(f, "the loss"),
            Place::GradNorm => write!(f, "the gradient norm"),
            Place::Parameter { name, vector: Vector::Gradient } => write!(f, "the reduced gradient of {name}"),
            Place::Parameter { name, vector: Vector::Weight } => write!(f, "the updated weights {name}"),
            Place::Parameter { name, vector: Vector::State(slot) } => {
                write!(f, "the optimizer's state {} of {name}", slot + 1)
            }
        }
    }
}

/// Between whom a divergence is.
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

/// A value that differs, and its first element that does.
#[derive(Clone, Debug, PartialEq)]
pub struct Divergence {
    /// The step, from 1.
    pub step: u64,
    /// What differs.
    pub place: Place,
    /// Between whom.
    pub between: Between,
    /// Global extents; dim 0 counts the samples of the step, where it counts samples.
    pub dims: Vec<usize>,
    /// Global index of the first element that differs; empty for a number.
    pub index: Vec<usize>,
    /// That element on A and B, or on the two ranks.
    pub values: [f64; 2],
    /// How many steps from number to number they are apart.
    pub ulps: u64,
    /// In which micro-batch of its dp rank each side computed it; none for what belongs to the whole step.
    pub micros: [Option<usize>; 2],
    /// The first sample it belongs to, and how many.
    pub samples: Option<(u64, usize)>,
    /// The world ranks of A and of B that hold it, or the two ranks.
    pub ranks: [Vec<usize>; 2],
    /// Elements of the value.
    pub elements: u64,
    /// How many of them differ.
    pub differing: u64,
    /// How far they are apart at most.
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
    pub place: Place,
    /// Global index of the element.
    pub index: Vec<usize>,
    /// By how much it was moved up; more than 1 where it is one rank's share of a sum.
    pub ulps: u32,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { place, index, ulps } = self;
        let share = if *ulps > 1 { " of one rank's share" } else { "" };
        write!(f, "{place}, element {index:?} by {}{share}", count(u64::from(*ulps), "ulp"))
    }
}

/// How far values of one class were apart, over all steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// `forward`, `backward` or `step`.
    pub phase: &'static str,
    /// The operation, or what it is of the step.
    pub class: String,
    /// Values compared, global ones: as many on any mesh.
    pub tensors: u64,
    /// How far their elements were apart.
    pub spread: Spread,
    /// The largest difference as a share of the largest element of the same value, over the values.
    pub error: f64,
    /// Step and layer where the class first differed.
    pub first: Option<(u64, String)>,
}

/// What a comparison found.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// What A and B are.
    pub sides: [String; 2],
    /// Whether the two promise the same bits.
    pub canonical: bool,
    /// Steps compared.
    pub steps: u64,
    /// The rows, in the order of a step.
    pub rows: Vec<Row>,
    /// The first value that differs, in the order in which values come into being.
    pub first: Option<Divergence>,
    /// The first that differs by more than rounding, as far as one can tell: weights and states are not asked, because an optimizer
    /// may turn the smallest difference of a gradient into a whole step.
    pub unexplained: Option<Divergence>,
    /// The first value that ranks of one side should share and do not: wrong in any numerics.
    pub replicas: Option<Divergence>,
    /// Values that were not compared, by the reason.
    pub skipped: BTreeMap<&'static str, u64>,
    /// What was changed on purpose.
    pub broken: Option<Broken>,
    /// Why the run ended before its last step.
    pub failed: Option<String>,
    /// Differences beyond this share of a value's largest element are no rounding.
    rounding: f64,
}

impl Report {
    pub(super) fn new(sides: [String; 2], canonical: bool, rounding: f64) -> Self {
        Self {
            sides,
            canonical,
            steps: 0,
            rows: Vec::new(),
            first: None,
            unexplained: None,
            replicas: None,
            skipped: BTreeMap::new(),
            broken: None,
            failed: None,
            rounding,
        }
    }

    /// Whether nothing differed.
    pub fn identical(&self) -> bool {
        self.first.is_none()
    }

    /// Whether both runs came to their end, and kept the promise of their numerics.
    pub fn holds(&self) -> bool {
        self.failed.is_none() && (self.identical() || !self.canonical)
    }

    /// Values that were compared.
    pub fn tensors(&self) -> u64 {
        self.rows.iter().map(|row| row.tensors).sum()
    }

    pub(super) fn skip(&mut self, why: &'static str) {
        *self.skipped.entry(why).or_default() += 1;
    }

    pub(super) fn diverged(&mut self, divergence: Divergence) {
        if divergence.between != Between::Sides {
            self.replicas.get_or_insert_with(|| divergence.clone());
        } else if !matches!(divergence.place, Place::Parameter { vector: Vector::Weight | Vector::State(_), .. })
            && (divergence.error.is_nan() || divergence.error > self.rounding)
        {
            self.unexplained.get_or_insert_with(|| divergence.clone());
        }
        self.first.get_or_insert(divergence);
    }

    pub(super) fn compared(
        &mut self,
        place: &Place,
        step: u64,
        spread: &Spread,
        error: f64,
        divergence: Option<Divergence>,
    ) {
        let (phase, class, layer) = match place {
            Place::Op { name, layer, operand: None, .. } => ("forward", &**name, &**layer),
            Place::Op { name, layer, .. } => ("backward", &**name, &**layer),
            Place::Loss => ("step", "loss", ""),
            Place::Parameter { name, vector: Vector::Gradient } => ("step", "gradients", &**name),
            Place::GradNorm => ("step", "gradient norm", ""),
            Place::Parameter { name, vector: Vector::Weight } => ("step", "weights", &**name),
            Place::Parameter { name, vector: Vector::State(_) } => ("step", "optimizer states", &**name),
        };
        let at = self.rows.iter().position(|row| row.phase == phase && row.class == class).unwrap_or_else(|| {
            let class = class.to_owned();
            self.rows.push(Row { phase, class, tensors: 0, spread: Spread::default(), error: 0.0, first: None });
            self.rows.len() - 1
        });
        let row = &mut self.rows[at];
        row.tensors += 1;
        row.spread.merge(spread);
        row.error = row.error.max(error);
        if divergence.is_some() {
            row.first.get_or_insert_with(|| (step, layer.to_owned()));
        }
        if let Some(divergence) = divergence {
            self.diverged(divergence);
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sides, steps, canonical, first, unexplained, replicas, skipped, broken, failed, .. } = self;
        writeln!(f, "A: {}\nB: {}", sides[0], sides[1])?;
        if let Some(broken) = broken {
            writeln!(f, "changed on purpose: {broken}")?;
        }
        let compared = format!("{}, {}", count(*steps, "step"), count(self.tensors(), "tensor"));
        match (first, canonical) {
            (None, _) => writeln!(f, "identical: {compared}")?,
            (Some(first), true) => writeln!(f, "\nthe first divergence: {first}")?,
            (Some(first), false) => {
                writeln!(f, "compared: {compared}\n")?;
                self.table(f)?;
                writeln!(f, "\nthe first to differ: {first}")?;
                match unexplained {
                    Some(found) if found != first => writeln!(f, "\nthe first beyond rounding: {found}")?,
                    Some(_) => writeln!(f, "  and that is more than rounding")?,
                    None => writeln!(f, "\nnothing differs by more than rounding")?,
                }
                if let Some(found) = replicas.as_ref().filter(|found| *found != first) {
                    writeln!(f, "\nthe first that ranks do not share: {found}")?;
                }
            }
        }
        for (why, values) in skipped {
            writeln!(f, "not compared: {}, {why}", count(*values, "tensor"))?;
        }
        match failed {
            Some(failed) => writeln!(f, "\nthe run ended there: {failed}"),
            None => Ok(()),
        }
    }
}

impl Report {
    fn table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |row: &Row| row.class.chars().count();
        let width = self.rows.iter().map(name).max().unwrap_or(0).max(8) + 2;
        let head = ["tensors", "elements", "identical", "median", "99%", "max", "error"];
        let [tensors, elements, identical, median, most, max, error] = head;
        writeln!(
            f,
            "{:width$}  {tensors:>7}  {elements:>12}  {identical:>9}  {median:>6}  {most:>6}  {max:>10}  {error:>7}  first at",
            ""
        )?;
        for phase in ["forward", "backward", "step"] {
            writeln!(f, "{phase}")?;
            for Row { class, tensors, spread, error, first, .. } in self.rows.iter().filter(|row| row.phase == phase) {
                let share = format!("{:.2}%", floor(100.0 * spread.identical() as f64 / spread.total().max(1) as f64));
                let first = first.as_ref().map_or(String::new(), |(step, layer)| match &**layer {
                    "" => format!("step {step}"),
                    layer => format!("step {step}, {layer}"),
                });
                let error = if *error == 0.0 { "0".to_owned() } else { format!("{error:.1e}") };
                let line = format!(
                    "  {class:pad$}  {:>7}  {:>12}  {share:>9}  {:>6}  {:>6}  {:>10}  {error:>7}  {first}",
                    grouped(*tensors),
                    grouped(spread.total()),
                    short(spread.percentile(50)),
                    short(spread.percentile(99)),
                    short(spread.max()),
                    pad = width - 2,
                );
                writeln!(f, "{}", line.trim_end())?;
            }
        }
        Ok(())
    }
}

/// Rounded down to hundredths: what is not all is not 100%.
fn floor(percent: f64) -> f64 {
    (percent * 100.0).floor() / 100.0
}

/// A number of ulps in few places.
fn short(ulps: u64) -> String {
    match ulps {
        u64::MAX => "no number".to_owned(),
        0..100_000 => ulps.to_string(),
        _ => format!("{:.1e}", ulps as f64),
    }
}

/// `1 step`, `1,200 steps`.
fn count(number: u64, noun: &str) -> String {
    counted(number as usize, noun)
}

/// A number in as few digits as tell it from others of its type.
fn exact(value: f64) -> String {
    let narrow = value as f32;
    if f64::from(narrow) == value { format!("{narrow:e}") } else { format!("{value:e}") }
}
