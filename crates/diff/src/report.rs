//! The result of a comparison, in words and as a table.

use super::divergence::{Between, Broken, Divergence, Location, Vector, count};
use super::ulps::Spread;
use meshwork_train::numbers::grouped;
use std::collections::BTreeMap;
use std::fmt;

/// The differences of the values of one class, over all steps.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// `forward`, `backward` or `step`.
    pub phase: &'static str,
    /// The operation, or the kind of value of the step.
    pub class: String,
    /// Number of global values compared: the same on any mesh.
    pub tensors: u64,
    /// The distances of their elements.
    pub spread: Spread,
    /// The largest difference as a share of the largest element of the same value, over the values.
    pub error: f64,
    /// Step and layer where the class first differed.
    pub first: Option<(u64, String)>,
}

/// The result of a comparison.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Descriptions of A and B.
    pub sides: [String; 2],
    /// Whether the two promise the same bits.
    pub canonical: bool,
    /// Steps compared.
    pub steps: u64,
    /// The rows, in the order of a step.
    pub rows: Vec<Row>,
    /// The first value that differs, in the order of computation.
    pub first: Option<Divergence>,
    /// The first value that seems to differ by more than rounding. Weights and states are excluded, because an
    /// optimizer may turn the smallest difference of a gradient into a whole step.
    pub unexplained: Option<Divergence>,
    /// The first value that differs between ranks of one side that should have the same: wrong in any numerics.
    pub replicas: Option<Divergence>,
    /// Values that were not compared, by the reason.
    pub skipped: BTreeMap<&'static str, u64>,
    /// The injected fault.
    pub broken: Option<Broken>,
    /// Why the run ended before its last step.
    pub failed: Option<String>,
    /// Differences beyond this share of a value's largest element do not count as rounding.
    rounding: f64,
}

impl Report {
    pub(super) fn new(sides: [String; 2], canonical: bool, rounding: f64) -> Self {
        Self { sides, canonical, rounding, ..Self::default() }
    }

    /// Whether nothing differed.
    pub fn identical(&self) -> bool {
        self.first.is_none()
    }

    /// Whether both runs finished, and had the results that their numerics guarantee.
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
        } else if !matches!(divergence.place, Location::Parameter { vector: Vector::Weight | Vector::State(_), .. })
            && (divergence.error.is_nan() || divergence.error > self.rounding)
        {
            self.unexplained.get_or_insert_with(|| divergence.clone());
        }
        self.first.get_or_insert(divergence);
    }

    pub(super) fn compared(
        &mut self,
        place: &Location,
        step: u64,
        spread: &Spread,
        error: f64,
        divergence: Option<Divergence>,
    ) {
        let (phase, class, layer) = match place {
            Location::Op { name, layer, operand: None, .. } => ("forward", &**name, &**layer),
            Location::Op { name, layer, .. } => ("backward", &**name, &**layer),
            Location::Loss => ("step", "loss", ""),
            Location::Parameter { name, vector: Vector::Gradient } => ("step", "gradients", &**name),
            Location::GradNorm => ("step", "gradient norm", ""),
            Location::Parameter { name, vector: Vector::Weight } => ("step", "weights", &**name),
            Location::Parameter { name, vector: Vector::State(_) } => ("step", "optimizer states", &**name),
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
        if let Some(failed) = failed { writeln!(f, "\nthe run ended there: {failed}") } else { Ok(()) }
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

/// Rounded down to hundredths, so that only an exact 100% is shown as 100%.
fn floor(percent: f64) -> f64 {
    (percent * 100.0).floor() / 100.0
}

/// A number of ulps in few characters.
fn short(ulps: u64) -> String {
    match ulps {
        u64::MAX => "no number".to_owned(),
        0..100_000 => ulps.to_string(),
        _ => format!("{:.1e}", ulps as f64),
    }
}
