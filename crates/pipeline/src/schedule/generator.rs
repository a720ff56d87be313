//! The schedules that a training run can select by name, and the shapes that each takes.

use super::{Action, Costs, MicroCounts, Schedule, Shape, ShapeError, simulate};
use super::{breadth_first, dualpipe_v, gpipe, interleaved_1f1b, one_f_one_b, pipedream, pipedream_2bw};
use super::{zb_h1, zb_h2, zb_v};
use std::error::Error;
use std::fmt;

/// A schedule for training, selected by its name in a configuration.
///
/// ```
/// use meshwork_pipeline::{Generator, by_name};
///
/// assert_eq!(by_name("1f1b")?, Generator::OneFOneB);
/// assert_eq!(
///     by_name("1f2b").unwrap_err().to_string(),
///     "there is no schedule \"1f2b\"; known: gpipe, 1f1b, interleaved_1f1b, breadth_first, zb_h1, zb_h2, zb_v, \
///      dualpipe_v, pipedream, pipedream_2bw"
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
    /// `interleaved_1f1b`: see [`interleaved_1f1b`].
    Interleaved,
    /// `breadth_first`: see [`breadth_first`].
    BreadthFirst,
    /// `zb_h1`: see [`zb_h1`].
    ZbH1,
    /// `zb_h2`: see [`zb_h2`].
    ZbH2,
    /// `zb_v`: see [`zb_v`].
    ZbV,
    /// `dualpipe_v`: see [`dualpipe_v`].
    DualPipeV,
    /// `pipedream`: see [`pipedream`].
    PipeDream,
    /// `pipedream_2bw`: see [`pipedream_2bw`].
    PipeDream2Bw,
}

/// Writes the schedule of a number of steps.
type Write = fn(Shape, usize) -> Schedule;

/// Each generator in the order of its declaration, its name, and what it writes.
const TABLE: [(Generator, &str, Write); 10] = [
    (Generator::Gpipe, "gpipe", |of, steps| repeated(gpipe(of.pp, of.micros), steps)),
    (Generator::OneFOneB, "1f1b", |of, steps| repeated(one_f_one_b(of.pp, of.micros), steps)),
    (Generator::Interleaved, "interleaved_1f1b", |of, steps| {
        repeated(interleaved_1f1b(of.pp, of.virtual_stages, of.micros), steps)
    }),
    (Generator::BreadthFirst, "breadth_first", |of, steps| {
        repeated(breadth_first(of.pp, of.virtual_stages, of.micros), steps)
    }),
    (Generator::ZbH1, "zb_h1", |of, steps| repeated(zb_h1(of.pp, of.micros), steps)),
    (Generator::ZbH2, "zb_h2", |of, steps| repeated(zb_h2(of.pp, of.micros), steps)),
    (Generator::ZbV, "zb_v", |of, steps| repeated(zb_v(of.pp, of.micros), steps)),
    (Generator::DualPipeV, "dualpipe_v", |of, steps| repeated(dualpipe_v(of.pp, of.micros), steps)),
    (Generator::PipeDream, "pipedream", |of, steps| pipedream(of.pp, of.micros, steps)),
    (Generator::PipeDream2Bw, "pipedream_2bw", |of, steps| pipedream_2bw(of.pp, of.micros, steps)),
];

impl Generator {
    /// All generators: synchronous before asynchronous, simplest first.
    pub const ALL: [Self; TABLE.len()] = {
        let mut all = [Self::Gpipe; TABLE.len()];
        let mut at = 0;
        while at < all.len() {
            assert!(TABLE[at].0 as usize == at, "a row for each, in the order of declaration");
            all[at] = TABLE[at].0;
            at += 1;
        }
        all
    };

    /// Its name for [`by_name`].
    pub const fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// Whether weights do not change while a step runs, so that training equals training on one rank.
    pub fn is_synchronous(self) -> bool {
        !matches!(self, Self::PipeDream | Self::PipeDream2Bw)
    }

    /// The default number of chunks per rank.
    pub fn default_virtual_stages(self) -> usize {
        if matches!(self, Self::Interleaved | Self::BreadthFirst | Self::ZbV | Self::DualPipeV) { 2 } else { 1 }
    }

    /// Whether the chunks per rank may be chosen.
    pub fn chooses_virtual_stages(self) -> bool {
        matches!(self, Self::Interleaved | Self::BreadthFirst)
    }

    /// Whether the end of a step fits together with the beginning of the next one, so that a rank can begin the next
    /// step while others end this one. To gain from that, the update must not wait for a sum over all ranks.
    pub fn overlaps_steps(self) -> bool {
        matches!(self, Self::ZbH2 | Self::ZbV | Self::DualPipeV)
    }

    /// A shape with the default number of chunks per rank.
    pub fn shape(self, pp: usize, micros: usize) -> Shape {
        Shape { pp, virtual_stages: self.default_virtual_stages(), micros }
    }

    /// The numbers of micro-batches per step that it takes over `pp` ranks.
    ///
    /// ```
    /// use meshwork_pipeline::{Generator, MicroCounts};
    ///
    /// assert_eq!(Generator::OneFOneB.micros(4), MicroCounts { min: 1, multiple_of: 1 });
    /// assert_eq!(Generator::ZbV.micros(4), MicroCounts { min: 4, multiple_of: 1 });
    /// assert_eq!(Generator::Interleaved.micros(4), MicroCounts { min: 4, multiple_of: 4 });
    /// ```
    pub fn micros(self, pp: usize) -> MicroCounts {
        let pp = pp.max(1);
        let (min, multiple_of) = match self {
            Self::Gpipe | Self::OneFOneB | Self::BreadthFirst | Self::ZbH1 | Self::PipeDream => (1, 1),
            // A batch of 2BW needs the weights of the batch before the last; with fewer micro-batches they do not exist
            // yet. ZB-H2 and ZB-V exist to have no bubble, which takes about 2 pp micro-batches; with fewer than pp
            // they are no better than ZB-H1.
            Self::ZbH2 | Self::ZbV | Self::PipeDream2Bw => (pp, 1),
            Self::DualPipeV => (pp.saturating_mul(2), 1),
            // Micro-batches go through the chunks in groups of pp (PTD-P, section 2.2).
            Self::Interleaved => (pp, pp),
        };
        MicroCounts { min, multiple_of }
    }

    /// Whether it takes this shape, and if not, what would be valid.
    ///
    /// ```
    /// use meshwork_pipeline::{Generator, Shape};
    ///
    /// let shape = Shape { pp: 4, virtual_stages: 1, micros: 2 };
    /// assert!(Generator::OneFOneB.takes(shape).is_ok());
    /// assert_eq!(
    ///     Generator::ZbH2.takes(shape).unwrap_err().to_string(),
    ///     "schedule zb_h2 over pp=4 needs at least 4 micro-batches, got 2; gpipe and 1f1b take any number"
    /// );
    /// assert_eq!(
    ///     Generator::ZbV.takes(Shape { micros: 8, ..shape }).unwrap_err().to_string(),
    ///     "schedule zb_v does not run with 1 virtual stages (chunks per rank): it has 2; interleaved_1f1b and \
    ///      breadth_first take any number"
    /// );
    /// ```
    pub fn takes(self, shape: Shape) -> Result<(), ShapeError> {
        let Shape { pp, virtual_stages, micros } = shape;
        let schedule = self.name();
        if pp == 0 {
            return Err(ShapeError::NoRanks { schedule });
        }
        let only = (!self.chooses_virtual_stages()).then_some(self.default_virtual_stages());
        if virtual_stages == 0 || only.is_some_and(|only| virtual_stages != only) {
            return Err(ShapeError::VirtualStages { schedule, virtual_stages, only });
        }
        let takes = self.micros(pp);
        if !takes.contains(micros) {
            return Err(ShapeError::Micros { schedule, pp, micros, takes });
        }
        Ok(())
    }

    /// Writes the schedule of one optimizer step.
    ///
    /// ```
    /// use meshwork_pipeline::{Generator, Shape};
    ///
    /// let shape = Shape { pp: 4, virtual_stages: 2, micros: 8 };
    /// assert_eq!(Generator::ZbV.build(shape)?.placement, [0, 1, 2, 3, 3, 2, 1, 0]);
    /// assert_eq!(Generator::Interleaved.build(shape)?.placement, [0, 1, 2, 3, 0, 1, 2, 3]);
    /// # Ok::<(), meshwork_pipeline::ShapeError>(())
    /// ```
    pub fn build(self, shape: Shape) -> Result<Schedule, ShapeError> {
        self.build_steps(shape, 1)
    }

    /// Writes the schedule of several optimizer steps in a row, with no barrier between them.
    ///
    /// In a synchronous schedule each rank begins the next step when it has ended the previous one; the update between
    /// them is not part of the schedule. An asynchronous schedule is a single stream, filled and drained once.
    ///
    /// ```
    /// use meshwork_pipeline::Generator;
    ///
    /// let schedule = Generator::ZbH2.build_steps(Generator::ZbH2.shape(2, 3), 2)?;
    /// assert_eq!((schedule.steps, schedule.micros), (2, 6));
    /// # Ok::<(), meshwork_pipeline::ShapeError>(())
    /// ```
    pub fn build_steps(self, shape: Shape, steps: usize) -> Result<Schedule, ShapeError> {
        self.takes(shape)?;
        if steps == 0 {
            return Err(ShapeError::NoSteps { schedule: self.name() });
        }
        Ok((TABLE[self as usize].2)(shape, steps))
    }

    /// The idle share of one step, filled and drained, if forward, input gradient and weight gradient take 1 each.
    ///
    /// ```
    /// use meshwork_pipeline::Generator;
    ///
    /// assert_eq!(Generator::Gpipe.bubble(Generator::Gpipe.shape(4, 1))?, 0.75);
    /// assert_eq!(Generator::OneFOneB.bubble(Generator::OneFOneB.shape(4, 9))?, 0.25);
    /// # Ok::<(), meshwork_pipeline::ShapeError>(())
    /// ```
    pub fn bubble(self, shape: Shape) -> Result<f64, ShapeError> {
        let schedule = self.build(shape)?;
        let timeline = simulate(&schedule, &Costs::unit(&schedule));
        Ok(timeline.expect("a generator writes valid schedules for all that `takes` lets through").bubble_of_total())
    }
}

/// The same step several times, each with its own micro-batches.
fn repeated(step: Schedule, steps: usize) -> Schedule {
    let of_step = |row: &[Action], n: usize| {
        let moved = |&action: &Action| Action { micro: action.micro + n * step.micros, ..action };
        row.iter().map(moved).collect::<Vec<_>>()
    };
    let actions = step.actions.iter().map(|row| (0..steps).flat_map(|n| of_step(row, n)).collect());
    Schedule { actions: actions.collect(), micros: steps * step.micros, steps, ..step }
}

/// The generator with this name.
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

    /// Whether the bubble is as small as it should be for a default. If not, the user should be told.
    pub fn under_quarter(&self) -> bool {
        self.bubble < Self::MAX_BUBBLE
    }
}

/// The smallest number of micro-batches, up to `max_micros` and among those that `divides` allows, that the
/// schedule takes with a bubble under a quarter; else the largest that it takes; `None` if it takes none of them.
///
/// ```
/// use meshwork_pipeline::{Generator, default_micros};
///
/// // 16 samples per data-parallel rank, to be cut into equal micro-batches over 4 pipeline ranks.
/// let choice = default_micros(Generator::OneFOneB, 4, 1, 16, |micros| 16 % micros == 0).unwrap();
/// assert_eq!((choice.micros, choice.under_quarter()), (16, true)); // 8 would idle for 3/11 of the time
///
/// let choice = default_micros(Generator::OneFOneB, 4, 1, 8, |micros| 8 % micros == 0).unwrap();
/// assert_eq!((choice.micros, choice.under_quarter()), (8, false));
///
/// assert_eq!(default_micros(Generator::ZbH2, 4, 1, 2, |micros| 2 % micros == 0), None); // it takes 4 or more
/// ```
pub fn default_micros(
    generator: Generator,
    pp: usize,
    virtual_stages: usize,
    max_micros: usize,
    divides: impl Fn(usize) -> bool,
) -> Option<DefaultMicros> {
    let mut largest = None;
    let takes = generator.micros(pp);
    for micros in (takes.min..=max_micros).filter(|&micros| takes.contains(micros) && divides(micros)) {
        let Ok(bubble) = generator.bubble(Shape { pp, virtual_stages, micros }) else {
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

/// An unknown name of a schedule.
#[derive(Clone, PartialEq, Eq)]
pub struct UnknownSchedule {
    /// The name.
    pub name: String,
    /// The known names.
    pub known: Vec<&'static str>,
}

debug_as_display!(UnknownSchedule);

impl fmt::Display for UnknownSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "there is no schedule {:?}; known: {}", self.name, self.known.join(", "))
    }
}

impl Error for UnknownSchedule {}
