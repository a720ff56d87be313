//! Running a schedule on paper, for given costs.

use super::ActionKind::{Backward, Forward, InputGradient, SendActivation, SendGradient, WeightGradient};
use super::needs::{Form, Graph};
use super::walk::{Terms, Walk, walk};
use super::{Action, CheckError, Schedule, lower};

/// What the parts of a schedule cost, in any one unit of time. By stage: the time for one micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// The forward of each stage.
    pub forward: Vec<f64>,
    /// The gradient of the input of each stage. A whole backward takes this and the next.
    pub input_gradient: Vec<f64>,
    /// The gradients of the weights of each stage.
    pub weight_gradient: Vec<f64>,
    /// What a message between two ranks takes.
    pub transfer: f64,
    /// Whether ranks compute while their messages move. If not, a message keeps its sender busy.
    pub overlap: bool,
}

impl Costs {
    /// Every rank takes the given times for all of its layers; its chunks share them equally. Messages take no time.
    pub fn per_rank(schedule: &Schedule, forward: f64, input_gradient: f64, weight_gradient: f64) -> Self {
        let chunks: Vec<usize> = (0..schedule.ranks).map(|rank| schedule.stages_of(rank).count()).collect();
        let share = |time: f64| schedule.placement.iter().map(|&rank| time / chunks[rank] as f64).collect();
        Self {
            forward: share(forward),
            input_gradient: share(input_gradient),
            weight_gradient: share(weight_gradient),
            transfer: 0.0,
            overlap: true,
        }
    }

    /// Forward, input gradient and weight gradient of every stage take 1 each, and messages nothing.
    pub fn unit(schedule: &Schedule) -> Self {
        let ones = vec![1.0; schedule.stages()];
        Self {
            forward: ones.clone(),
            input_gradient: ones.clone(),
            weight_gradient: ones,
            transfer: 0.0,
            overlap: true,
        }
    }

    fn busy(&self, action: Action) -> f64 {
        let stage = action.stage;
        match action.kind {
            Forward => self.forward[stage],
            InputGradient => self.input_gradient[stage],
            WeightGradient => self.weight_gradient[stage],
            Backward => self.input_gradient[stage] + self.weight_gradient[stage],
            SendActivation | SendGradient if !self.overlap => self.transfer,
            _ => 0.0,
        }
    }
}

/// An action and when it ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The action.
    pub action: Action,
    /// When it started.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// When each rank did what: predicted by [`simulate`], or measured in a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// What pictures call it.
    pub name: String,
    /// The rank of each stage.
    pub placement: Vec<usize>,
    /// The computations of each rank, in order.
    pub ranks: Vec<Vec<Span>>,
}

impl Timeline {
    /// From the first start to the last end over all ranks.
    pub fn makespan(&self) -> f64 {
        let spans = || self.ranks.iter().flatten();
        let start = spans().map(|span| span.start).fold(f64::INFINITY, f64::min);
        let end = spans().map(|span| span.end).fold(f64::NEG_INFINITY, f64::max);
        (end - start).max(0.0)
    }

    /// The longest time from the first start to the last end of one rank: what a step costs where no barrier makes
    /// ranks start together.
    pub fn span(&self) -> f64 {
        let of_rank = |row: &Vec<Span>| match (row.first(), row.last()) {
            (Some(first), Some(last)) => last.end - first.start,
            _ => 0.0,
        };
        self.ranks.iter().map(of_rank).fold(0.0, f64::max)
    }

    /// How long the busiest rank computes: the span of a pipeline without bubbles.
    pub fn ideal(&self) -> f64 {
        let of_rank = |row: &Vec<Span>| row.iter().map(|span| span.end - span.start).sum();
        self.ranks.iter().map(of_rank).fold(0.0, f64::max)
    }

    /// The idle share of the span: (span - ideal) / span.
    pub fn bubble_of_total(&self) -> f64 {
        (self.span() - self.ideal()) / self.span()
    }

    /// Idle time in units of the ideal time: (span - ideal) / ideal.
    pub fn bubble_of_ideal(&self) -> f64 {
        (self.span() - self.ideal()) / self.ideal()
    }
}

/// Runs a schedule without messages on paper: each action starts as soon as its rank and its inputs allow.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline, CheckError> {
    let lowered = lower(schedule)?;
    let schedule = lowered.schedule();
    let graph = Graph::new(schedule, Form::Lowered);
    let delay = if costs.overlap { costs.transfer } else { 0.0 };
    let terms = Terms { busy: &|action| costs.busy(action), delay, in_flight: usize::MAX };
    let Walk::Done(starts) = walk(&graph, &terms) else {
        unreachable!("a Lowered reaches its end under any timing");
    };
    let rows = schedule.actions.iter().zip(&starts).map(|(row, starts)| {
        let spans = row.iter().zip(starts).filter(|(action, _)| !action.kind.is_message());
        spans.map(|(&action, &start)| Span { action, start, end: start + costs.busy(action) }).collect()
    });
    Ok(Timeline { name: schedule.name.clone(), placement: schedule.placement.clone(), ranks: rows.collect() })
}
