//! Running a schedule on paper, for given costs.

use super::ActionKind::{Backward, Forward, InputGradient, SendActivation, SendGradient, WeightGradient};
use super::needs::{Form, Graph};
use super::walk::{Terms, Walk, walk};
use super::{Action, CheckError, Interval, Schedule, Timeline, lower};

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

/// Runs a schedule without messages on paper: each action starts as soon as its rank and its inputs allow.
///
/// A message between ranks takes `costs.transfer`, from the end of the action that makes it; updates take no time.
///
/// ```
/// use meshwork_pipeline::{Costs, simulate, zb_h1};
///
/// let schedule = zb_h1(4, 8);
/// let timeline = simulate(&schedule, &Costs::per_rank(&schedule, 1.0, 1.0, 1.0))?;
/// assert_eq!(timeline.span() - timeline.ideal(), 3.0); // (p - 1)(F + I - W), where 1F1B has 9
/// assert_eq!(timeline.peak_activations(), [4.0, 4.0, 4.0, 4.0]);
///
/// let slow = Costs { transfer: 0.5, ..Costs::per_rank(&schedule, 1.0, 1.0, 1.0) };
/// assert!(simulate(&schedule, &slow)?.span() > timeline.span());
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
///
/// # Panics
///
/// If `costs` is of fewer stages than the schedule has, or holds what is no number.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline, CheckError> {
    let numbers = || [&costs.forward, &costs.input_gradient, &costs.weight_gradient].into_iter().flatten();
    assert!(numbers().chain([&costs.transfer]).all(|cost| *cost >= 0.0 && cost.is_finite()), "{costs:?}");
    let lowered = lower(schedule)?;
    let schedule = lowered.schedule();
    let graph = Graph::new(schedule, Form::Lowered);
    let delay = if costs.overlap { costs.transfer } else { 0.0 };
    let terms = Terms { busy: &|action| costs.busy(action), delay, in_flight: None };
    let Walk::Done(starts) = walk(&graph, &terms) else {
        unreachable!("a Lowered reaches its end under any timing");
    };
    let ranks = schedule.actions.iter().zip(&starts).map(|(row, starts)| {
        let computed = row.iter().zip(starts).filter(|(action, _)| !action.kind.is_message());
        computed.map(|(&action, &start)| Interval { action, start, end: start + costs.busy(action) }).collect()
    });
    Ok(Timeline {
        name: schedule.name.clone(),
        placement: schedule.placement.clone(),
        micros_per_step: schedule.micros_per_step(),
        ranks: ranks.collect(),
    })
}
