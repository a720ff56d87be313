//! The profile as a table: a row per operation, under a row per class, that add up to the step.

use super::slices::{Slice, SliceKind, machine_time, slices};
use super::{Ceilings, Profile, Track};
use crate::terminal::{columns, fit};
use meshwork_core::profile::Class;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// An operation, or a class of them, summed over all ranks and steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// The operation: `gemm nt 2048×512×128`, `all_reduce dp`.
    pub label: String,
    /// Number of calls.
    pub calls: u64,
    /// Nanoseconds of the whole machine. At any moment the ranks that work share it equally.
    pub machine: f64,
    /// Nanoseconds of each rank.
    pub ranks: Vec<u64>,
    /// Floating point operations of matrix work.
    pub flops: u64,
    /// Bytes read and written at least.
    pub bytes: u64,
    /// Nanoseconds that the machine would need at its peaks; `None` for products if their peak is unknown.
    pub least: Option<f64>,
}

impl Row {
    fn new(label: String, ranks: usize) -> Self {
        Self { label, ranks: vec![0; ranks], least: Some(0.0), ..Self::default() }
    }

    fn add(&mut self, rank: usize, slice: &Slice<'_>, machine: f64, ceilings: &Ceilings) {
        self.machine += machine;
        self.ranks[rank] += slice.duration();
        let span = slice.span;
        match (slice.kind, span.class) {
            (SliceKind::Work, Class::Wait) => {} // counted with its start
            (SliceKind::Work, _) => {
                self.calls += 1;
                self.flops += span.flops;
                self.bytes += span.bytes;
                let least = ceilings.least_seconds(span.flops, span.bytes);
                self.least = self.least.zip(least).map(|(sum, seconds)| sum + seconds * 1e9);
            }
            (SliceKind::Hidden, _) => self.calls += 1,
            (SliceKind::Rest | SliceKind::Waiting, _) => {}
        }
    }

    fn merge(&mut self, other: &Row) {
        self.calls += other.calls;
        self.machine += other.machine;
        self.ranks.iter_mut().zip(&other.ranks).for_each(|(sum, more)| *sum += more);
        self.flops += other.flops;
        self.bytes += other.bytes;
        self.least = self.least.zip(other.least).map(|(a, b)| a + b);
    }
}

/// All rows of a profile, and the totals of which they are shares.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// Numbers of the steps.
    pub steps: BTreeSet<u64>,
    /// Classes in the order of the table, each with the sum of its operations, the longest first.
    pub classes: Vec<(Row, Vec<Row>)>,
    /// Communication beside other work, which is not part of the sum.
    pub hidden: Vec<Row>,
    ranks: usize,
    ceilings: Ceilings,
}

impl Rows {
    /// The rows of a profile.
    pub fn new(profile: &Profile) -> Self {
        let Profile { tracks, ceilings } = profile;
        let spans: Vec<_> = tracks.iter().map(|track| &track.spans[..]).collect();
        let slices = slices(&spans);
        let mut rows: BTreeMap<(&str, String), Row> = BTreeMap::new();
        for ((rank, slices), machine) in slices.iter().enumerate().zip(machine_time(&slices)) {
            for (slice, machine) in slices.iter().zip(machine) {
                let (class, label) = (class(slice), label(slice));
                let row = rows.entry((class, label.clone())).or_insert_with(|| Row::new(label, tracks.len()));
                row.add(rank, slice, machine, ceilings);
            }
        }
        let of_class = |class: &str| {
            let same = rows.iter().filter(|((other, _), _)| *other == class);
            let mut operations: Vec<Row> = same.map(|(_, row)| row.clone()).collect();
            operations.sort_by(|a, b| b.machine.total_cmp(&a.machine));
            operations
        };
        let with_sum = |class: &str| {
            let operations = of_class(class);
            let mut sum = Row::new(class.to_owned(), tracks.len());
            operations.iter().for_each(|row| sum.merge(row));
            (sum, operations)
        };
        let classes = CLASSES
            .into_iter()
            .map(|(class, _)| with_sum(class))
            .filter(|(_, operations)| !operations.is_empty())
            .collect();
        Self {
            steps: tracks.iter().flat_map(Track::steps).collect(),
            classes,
            hidden: of_class(HIDDEN),
            ranks: tracks.len(),
            ceilings: ceilings.clone(),
        }
    }

    /// Nanoseconds of the machine in all steps: the sum of all rows but the hidden ones.
    pub fn machine(&self) -> f64 {
        self.classes.iter().map(|(sum, _)| sum.machine).sum()
    }
}

/// The names of classes in the order in which they are shown, with the work of each.
const CLASSES: [(&str, &[Class]); 13] = [
    ("products", &[Class::Product]),
    ("attention", &[Class::Attention]),
    ("norm", &[Class::Norm]),
    ("pointwise", &[Class::Pointwise]),
    ("embedding", &[Class::Embedding]),
    ("loss", &[Class::Loss]),
    ("optimizer", &[Class::Optimizer]),
    ("memory", &[Class::Memory]),
    ("compression", &[Class::Compression]),
    ("data", &[Class::Data]),
    ("communication", &[Class::Post, Class::Wait, Class::Flight]),
    (WAITING, &[]),
    (REST, &[Class::Step, Class::Action]),
];
const WAITING: &str = "waiting";
const REST: &str = "the rest";
const HIDDEN: &str = "behind other work";

fn class(slice: &Slice<'_>) -> &'static str {
    match slice.kind {
        SliceKind::Hidden => HIDDEN,
        SliceKind::Waiting => WAITING,
        SliceKind::Rest => REST,
        SliceKind::Work => {
            let class = CLASSES.iter().find(|(_, work)| work.contains(&slice.span.class));
            class.map_or(REST, |(name, _)| name)
        }
    }
}

pub(super) fn label(slice: &Slice<'_>) -> String {
    match slice.kind {
        SliceKind::Work | SliceKind::Hidden => slice.span.label(),
        SliceKind::Waiting => format!("for {}", slice.span.label()),
        SliceKind::Rest => "tape, buffers".to_owned(),
    }
}

/// Columns of the numbers; labels have the others.
const WIDTHS: [usize; 8] = [6, 9, 7, 8, 6, 8, 9, 9];

/// Operations with less than this share of the step are shown together.
const SMALL: f64 = 0.004;

impl fmt::Display for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(first), Some(last)) = (self.steps.first(), self.steps.last()) else {
            return writeln!(f, "No step was profiled: the run ended before.");
        };
        let (steps, whole) = (self.steps.len() as f64, self.machine());
        let ranks = if self.ranks == 1 { "1 rank".to_owned() } else { format!("{} ranks", self.ranks) };
        writeln!(f, "A step takes {:.2} ms: mean of steps {first} to {last} on {ranks}.\n", whole / steps / 1e6)?;
        let head = ["calls", "ms", "share", "GFLOP/s", "GB/s", "of peak", "rank ms", "most"];
        self.columns(f, "", head.map(str::to_owned))?;
        for (sum, operations) in &self.classes {
            if let [only] = &operations[..] {
                self.line(f, &format!("{}: {}", sum.label, only.label), sum, whole)?;
                continue;
            }
            self.line(f, &sum.label, sum, whole)?;
            let (large, small): (Vec<_>, Vec<_>) = operations.iter().partition(|row| row.machine >= SMALL * whole);
            let large_are_shown = !large.is_empty();
            for row in large {
                self.line(f, &format!("  {}", row.label), row, whole)?;
            }
            if large_are_shown && let Some((first, others)) = small.split_first() {
                let mut sum = (*first).clone();
                others.iter().for_each(|row| sum.merge(row));
                let label = if others.is_empty() { first.label.clone() } else { format!("{} more", small.len()) };
                self.line(f, &format!("  {label}"), &sum, whole)?;
            }
        }
        if !self.hidden.is_empty() {
            writeln!(f, "\nbehind other work (no part of the step's sum)")?;
            for row in &self.hidden {
                self.line(f, &format!("  {}", row.label), row, whole)?;
            }
        }
        let notes = "\nms: time of the machine, which ranks that work at the same moment share equally; the classes sum to the step.\n\
                     rank ms: time of one rank, mean and most over the ranks. GB/s: every input and output counted once, from memory or from \
                     a cache, so that small operations may go beyond the peak.\n\
                     behind other work: after the last rank came and before anybody saw the end, while this rank did something else.\n";
        f.write_str(&fit(notes, columns()))?;
        let products = self
            .ceilings
            .flops
            .map_or(String::new(), |peak| format!("{:.0} GFLOP/s (best square product of this device), ", peak / 1e9));
        let Ceilings { bandwidth, threads, .. } = self.ceilings;
        let threads = match threads {
            None => "the device".to_owned(),
            Some(1) => "one thread".to_owned(),
            Some(threads) => format!("{threads} threads"),
        };
        let copies = format!("where there is no matrix work {:.1} GB/s (copy by {threads}).", bandwidth / 1e9);
        f.write_str(&fit(&format!("of peak: against {products}{copies}\n"), columns()))
    }
}

impl Rows {
    fn line(&self, f: &mut fmt::Formatter<'_>, label: &str, row: &Row, whole: f64) -> fmt::Result {
        let steps = self.steps.len() as f64;
        let ms = |ns: f64| format!("{:.2}", ns / steps / 1e6);
        let some = |shown: bool, text: String| if shown { text } else { String::new() };
        let busy = row.machine > 0.0;
        let most = row.ranks.iter().max().copied().unwrap_or(0);
        let mean = row.ranks.iter().sum::<u64>() as f64 / self.ranks as f64;
        let cells = [
            some(row.calls > 0, format!("{:.0}", row.calls as f64 / steps)),
            some(busy, ms(row.machine)),
            some(busy, format!("{:.1}%", 100.0 * row.machine / whole)),
            some(busy && row.flops > 0, format!("{:.1}", row.flops as f64 / row.machine)),
            some(busy && row.bytes > 0, format!("{:.1}", row.bytes as f64 / row.machine)),
            match row.least {
                Some(least) if busy && least > 0.0 => format!("{:.0}%", 100.0 * least / row.machine),
                _ => String::new(),
            },
            ms(mean),
            ms(most as f64),
        ];
        self.columns(f, label, cells)
    }

    /// A line of the table. A label that is wider than its column has a line of its own.
    fn columns(&self, f: &mut fmt::Formatter<'_>, label: &str, cells: [String; WIDTHS.len()]) -> fmt::Result {
        let first = columns() - WIDTHS.iter().sum::<usize>();
        let cells: String = cells.iter().zip(WIDTHS).map(|(cell, width)| format!("{cell:>width$}")).collect();
        match label.chars().count() < first {
            true => writeln!(f, "{}", format!("{label:<first$}{cells}").trim_end()),
            false => writeln!(f, "{label}\n{}", format!("{:first$}{cells}", "").trim_end()),
        }
    }
}
