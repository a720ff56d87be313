//! Simulates a schedule with given costs.

use super::ActionKind::{Backward, Forward, InputGradient, SendActivation, SendGradient, WeightGradient};
use super::lower::with_messages;
use super::needs::{Form, Graph};
use super::walk::{Terms, Walk, walk};
use super::{Action, CheckError, Fault, Interval, Schedule, Timeline};

/// The costs of the parts of a schedule, in any unit of time; per stage, the time for one micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// The forward of each stage.
    pub forward: Vec<f64>,
    /// The gradient of the input of each stage. A whole backward takes this plus `weight_gradient`.
    pub input_gradient: Vec<f64>,
    /// The gradients of the weights of each stage.
    pub weight_gradient: Vec<f64>,
    /// The times of a message between two ranks: of an activation, and of the gradient of one.
    pub transfer: [f64; 2],
    /// Whether ranks compute while their messages are sent. If not, a message keeps its sender busy.
    pub overlap: bool,
}

impl Costs {
    /// Every rank takes the given times for all of its layers; its chunks share them equally. Messages take no time.
    pub fn per_rank(schedule: &Schedule, forward: f64, input_gradient: f64, weight_gradient: f64) -> Self {
        let chunks: Vec<usize> = schedule.placement.iter().map(|&rank| schedule.stages_of(rank).count()).collect();
        let share = |time: f64| chunks.iter().map(|&chunks| time / chunks as f64).collect();
        Self {
            forward: share(forward),
            input_gradient: share(input_gradient),
            weight_gradient: share(weight_gradient),
            transfer: [0.0; 2],
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
            transfer: [0.0; 2],
            overlap: true,
        }
    }

    /// Refuses costs that are not valid times, or missing for a stage.
    fn check(&self, stages: usize) -> Result<(), Fault> {
        let refuse = |what, stage, value: Option<&f64>| match value {
            Some(&value) if value >= 0.0 && value.is_finite() => Ok(()),
            value => Err(Fault::Cost { what, stage, value: value.map_or("(not given)".to_owned(), f64::to_string) }),
        };
        let actions = [
            ("forward", &self.forward),
            ("input gradient", &self.input_gradient),
            ("weight gradient", &self.weight_gradient),
        ];
        for (what, costs) in actions {
            (0..stages).try_for_each(|stage| refuse(what, Some(stage), costs.get(stage)))?;
        }
        self.transfer.iter().try_for_each(|time| refuse("message between two ranks", None, Some(time)))
    }

    fn busy(&self, action: Action) -> f64 {
        let stage = action.stage;
        match action.kind {
            Forward => self.forward[stage],
            InputGradient => self.input_gradient[stage],
            WeightGradient => self.weight_gradient[stage],
            Backward => self.input_gradient[stage] + self.weight_gradient[stage],
            SendActivation if !self.overlap => self.transfer[0],
            SendGradient if !self.overlap => self.transfer[1],
            _ => 0.0,
        }
    }
}

/// Simulates a schedule without messages: each action starts as soon as its rank and its inputs allow.
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
/// let slow = Costs { transfer: [0.5; 2], ..Costs::per_rank(&schedule, 1.0, 1.0, 1.0) };
/// assert!(simulate(&schedule, &slow)?.span() > timeline.span());
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
///
/// # Errors
///
/// A schedule that [`check`](crate::check) refuses; costs that are missing, negative or not finite; and costs that add
/// up to more than 1e300 units of time.
///
/// ```
/// use meshwork_pipeline::{Costs, gpipe, simulate};
///
/// let schedule = gpipe(2, 4);
/// let error = |forward| simulate(&schedule, &Costs::per_rank(&schedule, forward, 1.0, 1.0)).unwrap_err().to_string();
/// assert_eq!(error(1e308), "schedule gpipe: its costs add up to more than 1e300 units of time; use a larger unit");
/// assert_eq!(
///     error(-1.0),
///     "schedule gpipe: the forward of stage 0 costs -1; a cost is a finite time of at least 0, one for each stage"
/// );
/// ```
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline, CheckError> {
    let refuse = |fault| CheckError { schedule: schedule.name.clone(), fault };
    let schedule = &with_messages(schedule)?;
    costs.check(schedule.stages()).map_err(refuse)?;
    let graph = Graph::new(schedule, Form::Lowered);
    let delay = if costs.overlap { costs.transfer } else { [0.0; 2] };
    let terms = Terms { busy: &|action| costs.busy(action), delay, in_flight: None };
    let Walk::Done(starts) = walk(&graph, &terms) else {
        unreachable!("a schedule that is proved reaches its end under any timing");
    };
    let ranks = schedule.actions.iter().zip(&starts).map(|(row, starts)| {
        let computed = row.iter().zip(starts).filter(|(action, _)| !action.kind.is_message());
        computed.map(|(&action, &start)| Interval { action, start, end: start + costs.busy(action) }).collect()
    });
    let timeline = Timeline {
        name: schedule.name.clone(),
        placement: schedule.placement.clone(),
        micros_per_step: schedule.micros_per_step(),
        ranks: ranks.collect(),
    };
    let longest = 10_f64.powi(MOST_TIME as i32);
    if timeline.makespan() <= longest { Ok(timeline) } else { Err(refuse(Fault::TimeOverflow { most: MOST_TIME })) }
}

/// Times of up to 10 to this power leave room for sums over ranks and for smaller units of time.
const MOST_TIME: u32 = 300;
