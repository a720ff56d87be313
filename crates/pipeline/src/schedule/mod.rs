//! Schedules: plain data, generators that write them, and passes that prove, lower and draw them.
//!
//! The words and the text form are in `README.md` beside this file.

mod action;
mod check;
mod fault;
mod forward_only;
mod generator;
mod gpipe;
mod lower;
mod needs;
mod one_f_one_b;
mod render;
mod report;
mod walk;

pub use action::{Action, ActionKind, Direction, ParseActionError, Tag, parse_actions};
pub use check::check;
pub use fault::{CheckError, Fault};
pub use forward_only::forward_only;
pub use generator::{DefaultMicros, Generator, MicrosError, UnknownSchedule, by_name, default_micros};
pub use gpipe::gpipe;
pub use lower::{Lowered, lower};
pub use one_f_one_b::one_f_one_b;
pub use render::render;
pub use report::Report;

/// Who does what, in which order: per pipeline rank, a list of actions.
///
/// The fields are open: a schedule may be written by hand, and [`check`] tells whether it is one.
///
/// ```
/// use meshwork_pipeline::{Schedule, check, parse_actions};
///
/// // Three stages on two ranks: rank 0 holds the first and the last, as a V.
/// let schedule = Schedule {
///     name: "by hand".to_string(),
///     ranks: 2,
///     placement: vec![0, 1, 0],
///     micros: 1,
///     actions: vec![parse_actions("0F0 2F0 2B0 0B0")?, parse_actions("1F0 1B0")?],
/// };
/// assert_eq!(check(&schedule)?.peaks, [2, 1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// What errors and pictures call it.
    pub name: String,
    /// Pipeline ranks: the degree of the mesh axis `pp`.
    pub ranks: usize,
    /// The rank of each stage, in stage order. A rank may hold several stages (its chunks).
    pub placement: Vec<usize>,
    /// Micro-batches in one step.
    pub micros: usize,
    /// The actions of each rank, in the order in which it runs them.
    pub actions: Vec<Vec<Action>>,
}

impl Schedule {
    /// The number of stages.
    pub fn stages(&self) -> usize {
        self.placement.len()
    }

    /// The stages that a rank holds, in stage order.
    ///
    /// ```
    /// let schedule = meshwork_pipeline::forward_only(&[0, 1, 1, 0], 8);
    /// assert_eq!(schedule.stages_of(0).collect::<Vec<_>>(), [0, 3]);
    /// ```
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> {
        let held = move |(stage, &home)| (home == rank).then_some(stage);
        self.placement.iter().enumerate().filter_map(held)
    }

    /// Whether this is an evaluation pass: it has no backward at all, so no activation is kept for one.
    ///
    /// A schedule with some backwards must have all of them; that [`check`] holds.
    pub fn is_forward_only(&self) -> bool {
        !self.actions.iter().flatten().any(|action| action.kind == ActionKind::Backward)
    }

    /// Whether what `stage` hands to the stage after it crosses ranks, and so needs a message.
    fn crosses_after(&self, stage: usize) -> bool {
        stage + 1 < self.stages() && self.placement[stage] != self.placement[stage + 1]
    }

    /// The same for the stage before it.
    fn crosses_before(&self, stage: usize) -> bool {
        stage > 0 && self.crosses_after(stage - 1)
    }
}

/// Stage s on rank s: the placement of every schedule with one stage per rank.
fn one_stage_per_rank(pp: usize) -> Vec<usize> {
    (0..pp).collect()
}
