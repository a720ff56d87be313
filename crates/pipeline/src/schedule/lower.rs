//! From computations to what a rank really does: adds the messages that cross ranks.

use super::ActionKind::{Backward, Forward, RecvActivation, RecvGradient, SendActivation, SendGradient};
use super::check::prove;
use super::needs::Form;
use super::{Action, CheckError, Report, Schedule, check};

/// A schedule with its messages, proved. There is no way to hold one that is wrong.
///
/// ```
/// use meshwork_pipeline::{gpipe, lower};
///
/// let lowered = lower(&gpipe(2, 1))?;
/// let text = |rank| lowered.actions(rank).iter().map(|a| a.to_string()).collect::<Vec<_>>().join(" ");
/// assert_eq!(text(0), "0F0 0SF0 0RB0 0B0");
/// assert_eq!(text(1), "1RF0 1F0 1B0 1SB0");
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lowered {
    schedule: Schedule,
    report: Report,
    last_backward: Vec<Option<usize>>,
}

impl Lowered {
    /// Takes a schedule that holds its messages already, and proves it: what [`check`](crate::check) proves, and
    /// that every crossing between ranks has one send and one receive, received in the order of sending.
    ///
    /// ```
    /// use meshwork_pipeline::{Lowered, Schedule, parse_actions};
    ///
    /// let by_hand = Schedule {
    ///     name: "by hand".to_string(),
    ///     ranks: 2,
    ///     placement: vec![0, 1],
    ///     micros: 1,
    ///     actions: vec![parse_actions("0F0")?, parse_actions("1RF0 1F0")?],
    /// };
    /// assert_eq!(
    ///     Lowered::new(by_hand).unwrap_err().to_string(),
    ///     "schedule by hand: rank 1 receives 1RF0, but rank 0 never sends it (0SF0 is missing)"
    /// );
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(schedule: Schedule) -> Result<Self, CheckError> {
        let report = prove(&schedule, Form::Lowered)?;
        let mut last_backward = vec![None; schedule.stages()];
        for action in schedule.actions.iter().flatten().filter(|action| action.kind == Backward) {
            last_backward[action.stage] = Some(action.micro);
        }
        Ok(Self { schedule, report, last_backward })
    }

    /// The schedule, with its messages.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// What a rank does, in order.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn actions(&self, rank: usize) -> &[Action] {
        &self.schedule.actions[rank]
    }

    /// The most activations that live on each rank at once; see [`Report::peaks`].
    pub fn peaks(&self) -> &[usize] {
        &self.report.peaks
    }

    /// What the proof measured.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The micro-batch whose backward is the last through `stage`: when it has finished, the gradients of the
    /// stage are final and may be reduced. None in a forward-only schedule, and for a stage that does not exist.
    ///
    /// ```
    /// use meshwork_pipeline::{forward_only, lower, one_f_one_b};
    ///
    /// assert_eq!(lower(&one_f_one_b(2, 6))?.last_backward(1), Some(5));
    /// assert_eq!(lower(&forward_only(&[0, 1], 6))?.last_backward(1), None);
    /// # Ok::<(), meshwork_pipeline::CheckError>(())
    /// ```
    pub fn last_backward(&self, stage: usize) -> Option<usize> {
        self.last_backward.get(stage).copied().flatten()
    }
}

/// Adds a send right after each action whose result another rank needs, and a receive right before each action
/// that needs a result of another rank. Between stages of one rank there is no message: the interpreter hands over.
///
/// The schedule is proved before and after. After it, because a schedule whose ranks agree on all dependencies may
/// still consume messages in another order than its neighbour makes them, which transports need not support.
pub fn lower(schedule: &Schedule) -> Result<Lowered, CheckError> {
    check(schedule)?;
    let actions = schedule.actions.iter().map(|row| row.iter().flat_map(|&a| with_messages(schedule, a)).collect());
    Lowered::new(Schedule { actions: actions.collect(), ..schedule.clone() })
}

/// The receive before a computation, itself, and the send after it.
fn with_messages(schedule: &Schedule, action: Action) -> impl Iterator<Item = Action> {
    let Action { kind, stage, micro } = action;
    let (before, after) = (schedule.crosses_before(stage), schedule.crosses_after(stage));
    let (receive, send) = match kind {
        Forward => (before.then_some(RecvActivation), after.then_some(SendActivation)),
        Backward => (after.then_some(RecvGradient), before.then_some(SendGradient)),
        SendActivation | RecvActivation | SendGradient | RecvGradient => (None, None),
    };
    let at_stage = move |kind| Action::new(kind, stage, micro);
    [receive.map(at_stage), Some(action), send.map(at_stage)].into_iter().flatten()
}
