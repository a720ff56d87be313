//! Schedules: plain data, generators that write them, and passes that prove, lower and draw them.
//!
//! The words and the text form are in `README.md` beside this file.

use std::ops::Range;

mod action;
mod breadth_first;
mod check;
mod dualpipe_v;
mod fault;
mod forward_only;
mod generator;
mod gpipe;
mod grid;
mod interleaved;
mod lower;
mod needs;
mod one_f_one_b;
mod pipedream;
mod pipedream_2bw;
mod placement;
mod render;
mod replicated;
mod report;
mod shape;
mod simulate;
mod svg;
mod text;
mod timeline;
mod trace;
mod versions;
mod walk;
mod weights;
mod zb_h;
mod zb_v;

pub use action::{Action, ActionKind, Direction, ParseActionError, Tag, parse_actions};
pub use breadth_first::breadth_first;
pub use check::check;
pub use dualpipe_v::dualpipe_v;
pub use fault::{CheckError, Fault};
pub use forward_only::{forward_only, forward_only_replicated};
pub use generator::{DefaultMicros, Generator, UnknownSchedule, by_name, default_micros};
pub use gpipe::gpipe;
pub use interleaved::interleaved_1f1b;
pub use lower::{Lowered, lower};
pub use one_f_one_b::one_f_one_b;
pub use pipedream::pipedream;
pub use pipedream_2bw::pipedream_2bw;
pub use render::{render, text_grid};
pub use replicated::one_f_one_b_replicated;
pub use report::Report;
pub use shape::{MicroCounts, Shape, ShapeError};
pub use simulate::{Costs, simulate};
pub use svg::svg;
pub use text::{ParseScheduleError, TextFault};
pub use timeline::{Interval, Timeline};
pub use trace::chrome_trace;
pub use weights::Weights;
pub use zb_h::{zb_h1, zb_h2};
pub use zb_v::zb_v;

/// A schedule: per pipeline rank, a list of actions in order.
///
/// The fields are public, so a schedule may be written by hand; [`check`] tells whether it is valid.
///
/// ```
/// use meshwork_pipeline::{Schedule, Weights, check, parse_actions};
///
/// // Three stages on two ranks: rank 0 holds the first and the last, as a V.
/// let schedule = Schedule {
///     name: "by hand".to_string(),
///     ranks: 2,
///     placement: vec![0, 1, 0],
///     replicas: vec![1, 1, 1],
///     micros: 1,
///     steps: 1,
///     weights: Weights::Flush,
///     actions: vec![parse_actions("0F0 2F0 2B0 0B0")?, parse_actions("1F0 1B0")?],
/// };
/// assert_eq!(check(&schedule)?.peaks, [2, 1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Its name in errors and pictures.
    pub name: String,
    /// Pipeline ranks: the degree of the mesh axis `pp`.
    pub ranks: usize,
    /// The rank of each stage, in stage order. A rank may hold several stages (its chunks).
    pub placement: Vec<usize>,
    /// Number of ranks that hold each stage: consecutive ranks, beginning with the rank of its placement; 1 in most
    /// schedules. They take its micro-batches in turn (PipeDream's 1F1B-RR: Narayanan et al. 2019, section 3.2).
    pub replicas: Vec<usize>,
    /// Micro-batches, of all steps.
    pub micros: usize,
    /// Number of optimizer steps: equal runs of consecutive micro-batches.
    pub steps: usize,
    /// How weights change from step to step.
    pub weights: Weights,
    /// The actions of each rank, in the order in which it runs them.
    pub actions: Vec<Vec<Action>>,
}

impl Schedule {
    /// The number of stages.
    pub fn stages(&self) -> usize {
        self.placement.len()
    }

    /// The micro-batches of one optimizer step.
    ///
    /// # Panics
    ///
    /// If there are no steps; [`check`] refuses such a schedule.
    pub fn micros_per_step(&self) -> usize {
        self.micros / self.steps
    }

    /// The optimizer step that a micro-batch belongs to.
    fn step_of(&self, micro: usize) -> usize {
        micro / self.micros_per_step()
    }

    /// The rank that runs a micro-batch through a stage.
    ///
    /// ```
    /// use meshwork_pipeline::one_f_one_b_replicated;
    ///
    /// // Stage 0 on ranks 0 to 2, stage 1 on rank 3.
    /// let schedule = one_f_one_b_replicated(&[3, 1], 6);
    /// assert_eq!((schedule.rank_of(0, 4), schedule.rank_of(1, 4)), (1, 3));
    /// ```
    pub fn rank_of(&self, stage: usize, micro: usize) -> usize {
        self.placement[stage] + micro % self.replicas[stage]
    }

    /// The ranks that hold a stage.
    pub fn ranks_of(&self, stage: usize) -> Range<usize> {
        self.placement[stage]..self.placement[stage] + self.replicas[stage]
    }

    /// The stages that a rank holds, in stage order.
    ///
    /// ```
    /// let schedule = meshwork_pipeline::forward_only(&[0, 1, 1, 0], 8);
    /// assert_eq!(schedule.stages_of(0).collect::<Vec<_>>(), [0, 3]);
    /// ```
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.stages()).filter(move |&stage| self.ranks_of(stage).contains(&rank))
    }

    /// The micro-batches of one step that a rank takes at a stage.
    pub fn micros_at(&self, stage: usize, rank: usize) -> usize {
        (0..self.micros_per_step()).filter(|&micro| self.rank_of(stage, micro) == rank).count()
    }

    /// Whether this is an evaluation pass: it has no backward at all, so no activation is kept for one.
    ///
    /// A schedule with some backwards must have all of them; [`check`] makes sure of that.
    pub fn is_forward_only(&self) -> bool {
        !self.actions.iter().flatten().any(|action| is_gradient(action.kind))
    }

    /// Whether the result of `stage` for the next stage crosses ranks, and so needs a message.
    fn crosses_after(&self, stage: usize, micro: usize) -> bool {
        stage + 1 < self.stages() && self.rank_of(stage, micro) != self.rank_of(stage + 1, micro)
    }

    /// The same for the previous stage.
    fn crosses_before(&self, stage: usize, micro: usize) -> bool {
        stage > 0 && self.crosses_after(stage - 1, micro)
    }
}

/// Whether it is a backward or a part of one.
fn is_gradient(kind: ActionKind) -> bool {
    kind.makes_input_gradient() || kind.makes_weight_gradient()
}
