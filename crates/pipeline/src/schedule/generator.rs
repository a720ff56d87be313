//! The schedules that a training run may ask for by name, and how many micro-batches each takes.

use std::error::Error;
use std::fmt;

use super::{Schedule, check, gpipe, one_f_one_b};

/// A schedule to train with: what a name in a configuration stands for.
///
/// ```
/// use meshwork_pipeline::{Generator, by_name};
///
/// assert_eq!(by_name("1f1b")?, Generator::OneFOneB);
/// assert_eq!(
///     by_name("1f2b").unwrap_err().to_string(),
///     "there is no schedule \"1f2b\"; known: gpipe, 1f1b"
/// );
/// # Ok::<(), meshwork_pipeline::UnknownSchedule>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Generator {
    /// `gpipe`: see [`gpipe`].
    Gpipe,
    /// `1f1b`: see [`one_f_one_b`].
    OneFOneB,
}

impl Generator {
    /// All of them, simplest first.
    pub const ALL: [Self; 2] = [Self::Gpipe, Self::OneFOneB];

    /// The name that [`by_name`] knows it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpipe => "gpipe",
            Self::OneFOneB => "1f1b",
        }
    }

    /// The fewest micro-batches that it takes over `pp` ranks.
    ///
    /// ```
    /// use meshwork_pipeline::Generator;
    ///
    /// assert_eq!(Generator::Gpipe.min_micros(4), 1);
    /// assert_eq!(Generator::OneFOneB.min_micros(4), 4);
    /// ```
    pub fn min_micros(self, pp: usize) -> usize {
        match self {
            Self::Gpipe => 1,
            Self::OneFOneB => pp.max(1),
        }
    }

    /// Whether it takes this many micro-batches over `pp` ranks, and if not, what would be valid.
    ///
    /// ```
    /// use meshwork_pipeline::Generator;
    ///
    /// assert!(Generator::OneFOneB.takes(4, 4).is_ok());
    /// assert_eq!(
    ///     Generator::OneFOneB.takes(4, 2).unwrap_err().to_string(),
    ///     "schedule 1f1b over pp=4 needs at least 4 micro-batches, got 2; gpipe takes any number"
    /// );
    /// ```
    pub fn takes(self, pp: usize, micros: usize) -> Result<(), MicrosError> {
        let min = self.min_micros(pp);
        if pp == 0 || micros < min {
            return Err(MicrosError { schedule: self.name(), pp, min, micros });
        }
        Ok(())
    }

    /// Writes the schedule of `micros` micro-batches over `pp` ranks.
    pub fn build(self, pp: usize, micros: usize) -> Result<Schedule, MicrosError> {
        self.takes(pp, micros)?;
        Ok(match self {
            Self::Gpipe => gpipe(pp, micros),
            Self::OneFOneB => one_f_one_b(pp, micros),
        })
    }

    /// The idle share of its timeline, by running it with every forward and every backward taking one unit.
    ///
    /// ```
    /// use meshwork_pipeline::Generator;
    ///
    /// assert_eq!(Generator::Gpipe.bubble(4, 1)?, 0.75);
    /// assert_eq!(Generator::OneFOneB.bubble(4, 9)?, 0.25);
    /// # Ok::<(), meshwork_pipeline::MicrosError>(())
    /// ```
    pub fn bubble(self, pp: usize, micros: usize) -> Result<f64, MicrosError> {
        let schedule = self.build(pp, micros)?;
        let report = check(&schedule).expect("a generator writes valid schedules for all that `takes` lets through");
        Ok(report.bubble())
    }
}

/// The generator of that name.
pub fn by_name(name: &str) -> Result<Generator, UnknownSchedule> {
    let found = Generator::ALL.into_iter().find(|generator| generator.name() == name);
    found.ok_or_else(|| UnknownSchedule { name: name.to_string(), known: Generator::ALL.map(Generator::name).to_vec() })
}

/// A number of micro-batches chosen by [`default_micros`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DefaultMicros {
    /// The number.
    pub micros: usize,
    /// The bubble that it leaves.
    pub bubble: f64,
}

impl DefaultMicros {
    /// The bubble that a default should stay below.
    pub const MAX_BUBBLE: f64 = 0.25;

    /// Whether the bubble is as small as a default should have it. Where not, tell the user.
    pub fn under_quarter(&self) -> bool {
        self.bubble < Self::MAX_BUBBLE
    }
}

/// The smallest number of micro-batches, up to `max_micros` and among those that `divides` allows, that the
/// schedule takes with a bubble under a quarter; else the largest that it takes; none if it takes none of them.
///
/// ```
/// use meshwork_pipeline::{Generator, default_micros};
///
/// // 16 samples per data-parallel rank, to be cut into equal micro-batches over 4 pipeline ranks.
/// let choice = default_micros(Generator::OneFOneB, 4, 16, |micros| 16 % micros == 0).unwrap();
/// assert_eq!((choice.micros, choice.under_quarter()), (16, true)); // 8 would idle for 3/11 of the time
///
/// let choice = default_micros(Generator::OneFOneB, 4, 8, |micros| 8 % micros == 0).unwrap();
/// assert_eq!((choice.micros, choice.under_quarter()), (8, false));
///
/// assert_eq!(default_micros(Generator::OneFOneB, 4, 2, |micros| 2 % micros == 0), None);
/// ```
pub fn default_micros(
    generator: Generator,
    pp: usize,
    max_micros: usize,
    divides: impl Fn(usize) -> bool,
) -> Option<DefaultMicros> {
    let mut largest = None;
    for micros in (generator.min_micros(pp)..=max_micros).filter(|&micros| divides(micros)) {
        let Ok(bubble) = generator.bubble(pp, micros) else {
            continue;
        };
        let choice = DefaultMicros { micros, bubble };
        if choice.under_quarter() {
            return Some(choice);
        }
        largest = Some(choice);
    }
    largest
}

/// A name that no schedule has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownSchedule {
    /// The name.
    pub name: String,
    /// The names that there are.
    pub known: Vec<&'static str>,
}

impl fmt::Display for UnknownSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no schedule {:?}; known: {}", self.name, self.known.join(", "))
    }
}

impl Error for UnknownSchedule {}

/// Fewer micro-batches than a schedule needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MicrosError {
    /// The schedule.
    pub schedule: &'static str,
    /// The pipeline degree.
    pub pp: usize,
    /// The fewest micro-batches that it takes.
    pub min: usize,
    /// What was asked for.
    pub micros: usize,
}

impl fmt::Display for MicrosError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { schedule, pp, min, micros } = self;
        if *pp == 0 {
            return write!(f, "schedule {schedule} over pp=0: a pipeline has at least 1 rank");
        }
        let plural = if *min == 1 { "" } else { "es" };
        write!(f, "schedule {schedule} over pp={pp} needs at least {min} micro-batch{plural}, got {micros}")?;
        // Only where that is a way out: nothing runs without any micro-batch.
        if *micros > 0 { write!(f, "; gpipe takes any number") } else { Ok(()) }
    }
}

impl Error for MicrosError {}
