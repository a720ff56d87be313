//! What became of a case and of its mutants.

use crate::case::Case;
use crate::mutate::{Change, Kind, Mutant};
use crate::program::{Op, Program};
use crate::run::{self, Ended, Numbers};
use crate::user;
use meshwork_core::Axis;
use meshwork_engine::Plan;
use meshwork_tensor::Var;
use meshwork_testkit::check::{OpInput, check_op};
use std::collections::BTreeMap;
use std::fmt;

/// What became of a right program.
#[derive(Clone, Debug)]
pub enum Fate {
    /// The mesh has the numbers of one rank, which are these.
    Right(Box<Numbers>),
    /// The mesh has other numbers, or a right program is refused.
    Wrong(String),
}

/// What became of a mutant.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// An error in every run.
    Refused,
    /// The numbers are those of one rank; whether verify mode complained.
    Harmless { claimed: bool },
    /// The numbers are others, and on one rank they are the same others: not a mistake, but another program.
    Another,
    /// Verify mode found it, and without it the numbers are wrong.
    Found,
    /// The check of the user's operation found it: `testkit::check::check_op`.
    Checked,
    /// The numbers are wrong and nobody said so.
    Survived(String),
}

/// Runs a case on one rank and on its mesh.
pub fn fate(case: &Case) -> Fate {
    let said = |who: &str, ended: &Ended| match ended {
        Ended::Numbers(_) => None,
        Ended::Claim(text) | Ended::NotFinite(text) | Ended::Refused(text) | Ended::Panicked(text) => {
            Some(format!("a right program is refused {who}: {text}"))
        }
    };
    let alone = run::alone(case);
    let mesh = run::on_mesh(case);
    match (alone, mesh) {
        (Ended::Numbers(alone), Ended::Numbers(mesh)) => match mesh.differ_from(&alone, &case.plan) {
            None => Fate::Right(alone),
            Some(difference) => Fate::Wrong(difference.to_string()),
        },
        (alone, mesh) => {
            let text = said("on one rank", &alone).or(said("on the mesh", &mesh));
            Fate::Wrong(text.expect("one of them gave no numbers"))
        }
    }
}

/// Runs a mutant. A panic is told, whatever became of it.
pub fn verdict(case: &Case, mutant: &Mutant, alone: &Numbers) -> Result<Verdict, String> {
    let verified = run::mutated(case, mutant, true);
    let (claimed, ended) = match verified {
        Ended::Claim(_) => (true, run::mutated(case, mutant, false)),
        other => (false, other),
    };
    match ended {
        Ended::Panicked(text) => Err(text),
        Ended::Numbers(numbers) => Ok(match numbers.differ_from(alone, &case.plan) {
            None => Verdict::Harmless { claimed },
            Some(_) if claimed => Verdict::Found,
            Some(_) if checks_find(mutant) => Verdict::Checked,
            Some(difference) => match run::mutated_alone(case, mutant) {
                Ended::Numbers(other) if mutant.on.is_none() && numbers.differ_from(&other, &case.plan).is_none() => {
                    Verdict::Another
                }
                _ => Verdict::Survived(difference.to_string()),
            },
        }),
        // Without verify mode an error ends the run, so nobody trains on wrong numbers.
        _ => Ok(Verdict::Refused),
    }
}

/// Whether the check that a user runs on an operation of their own refuses this one.
fn checks_find(mutant: &Mutant) -> bool {
    match &mutant.change {
        Change::Instr { op: op @ (Op::User(_) | Op::Unsent(_)), .. } => check_of_user(op).is_err(),
        _ => false,
    }
}

/// The check of an operation of the user's own.
pub fn check_of_user(op: &Op) -> Result<(), String> {
    let apply = |values: &[Var]| match op {
        Op::User(lie) => user::sine(values[0].tape(), &values[0], *lie),
        Op::Unsent(collective) => user::unsent(values[0].tape(), &values[0], &collective.over(Axis::Tp)),
        other => unreachable!("{other:?} is not the user's"),
    };
    check_op("user", &[OpInput::value("x", &[3, 2, 2])], apply).map(drop).map_err(|error| error.to_string())
}

/// A smaller case that fails alike: instructions are taken out one by one while it does.
pub fn shrink(case: &Case, fails: impl Fn(&Case) -> bool) -> Case {
    let mut smallest = case.clone();
    loop {
        let before = smallest.clone();
        for (block, place) in before.program.sites().collect::<Vec<_>>().into_iter().rev() {
            let instr = &smallest.program.blocks[block].code[place];
            if instr.op == Op::Same || instr.args.is_empty() {
                continue;
            }
            let mut without: Program = smallest.program.clone();
            without.blocks[block].code[place].op = Op::Same;
            let smaller = Case { program: without, ..smallest.clone() };
            if fails(&smaller) {
                smallest = smaller;
            }
        }
        if smallest.program == before.program {
            return smallest;
        }
    }
}

/// How a case is told: its program, its plan, and how to run it again.
pub fn told(case: &Case) -> String {
    let Plan { mesh, schedule, partition, global_batch_size, num_microbatches, numerics, precision, .. } = &case.plan;
    let Plan { recompute, max_norm, scatter_gather, .. } = &case.plan;
    format!(
        "{:?}, MESHWORK_FIRST={} MESHWORK_PROGRAMS=1 runs this case again\n{mesh}, {schedule:?}, partition {partition:?}, {global_batch_size} samples in \
         {num_microbatches:?} micro-batches, {numerics:?}, {precision:?}, recompute {recompute:?}, clipped to {max_norm}, \
         scatter_gather {scatter_gather}\n{}",
        case.way, case.seed, case.program
    )
}

/// Counts of verdicts.
#[derive(Clone, Debug, Default)]
pub struct Score {
    pub programs: usize,
    /// In canonical numerics.
    pub canonical: usize,
    pub by_kind: BTreeMap<Kind, Counts>,
    /// (seed, mutant, difference)
    pub survivors: Vec<(u64, String, String)>,
}

/// Counts of one kind of mutants.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub refused: usize,
    pub found: usize,
    pub checked: usize,
    pub another: usize,
    pub harmless: usize,
    /// Of the harmless ones, those of which verify mode complained.
    pub claimed: usize,
    pub survived: usize,
}

impl Counts {
    pub fn add(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Refused => self.refused += 1,
            Verdict::Found => self.found += 1,
            Verdict::Checked => self.checked += 1,
            Verdict::Another => self.another += 1,
            Verdict::Harmless { claimed } => {
                self.harmless += 1;
                self.claimed += usize::from(*claimed);
            }
            Verdict::Survived(_) => self.survived += 1,
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            refused: self.refused + other.refused,
            found: self.found + other.found,
            checked: self.checked + other.checked,
            another: self.another + other.another,
            harmless: self.harmless + other.harmless,
            claimed: self.claimed + other.claimed,
            survived: self.survived + other.survived,
        }
    }

    /// Of the mutants by which a mesh differs from one rank, the share that is refused or found.
    pub fn share(self) -> f64 {
        let caught = self.refused + self.found + self.checked;
        if self.survived == 0 { 1.0 } else { caught as f64 / (caught + self.survived) as f64 }
    }

    /// Mutants.
    pub fn all(self) -> usize {
        self.refused + self.found + self.checked + self.another + self.harmless + self.survived
    }
}

impl Score {
    pub fn join(mut self, other: Self) -> Self {
        self.programs += other.programs;
        self.canonical += other.canonical;
        for (kind, counts) in other.by_kind {
            let sum = self.by_kind.entry(kind).or_default();
            *sum = sum.plus(counts);
        }
        self.survivors.extend(other.survivors);
        self
    }

    /// Of all kinds.
    pub fn total(&self) -> Counts {
        self.by_kind.values().fold(Counts::default(), |sum, counts| sum.plus(*counts))
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, counts: Counts| {
            let Counts { refused, found, checked, another, harmless, survived, .. } = counts;
            let (all, share) = (counts.all(), 100.0 * counts.share());
            writeln!(
                f,
                "| {name} | {all} | {refused} | {found} | {checked} | {harmless} | {another} | {survived} | {share:.1}% |"
            )
        };
        writeln!(f, "{} programs, {} of them in canonical numerics", self.programs, self.canonical)?;
        writeln!(
            f,
            "| mutation | mutants | refused | verify mode | `check_op` | harmless | another program | survived | score |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|")?;
        for kind in Kind::ALL {
            if let Some(counts) = self.by_kind.get(kind) {
                row(f, kind.name(), *counts)?;
            }
        }
        row(f, "all", self.total())?;
        for (seed, mutant, difference) in &self.survivors {
            writeln!(f, "survived: program {seed}, {mutant}: {difference}")?;
        }
        Ok(())
    }
}
