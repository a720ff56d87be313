//! Lowering: adds the messages that cross ranks to a schedule of computations.

use super::ActionKind::{Forward, SendActivation, SendGradient};
use super::check::prove;
use super::needs::{Form, Table};
use super::{Action, CheckError, Report, Schedule, check};
use std::collections::VecDeque;

/// A proved schedule with its messages. A wrong schedule cannot be put into this type.
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
    versions: Vec<usize>,
}

impl Lowered {
    /// Takes a schedule that already has its messages, and proves everything that [`check`](crate::check) proves, and
    /// that every crossing between ranks has one send and one receive, received in the order of sending.
    ///
    /// ```
    /// use meshwork_pipeline::{Lowered, Schedule, Weights, parse_actions};
    ///
    /// let by_hand = Schedule {
    ///     name: "by hand".to_string(),
    ///     ranks: 2,
    ///     placement: vec![0, 1],
    ///     replicas: vec![1, 1],
    ///     micros: 1,
    ///     steps: 1,
    ///     weights: Weights::Flush,
    ///     actions: vec![parse_actions("0F0")?, parse_actions("1RF0 1F0")?],
    /// };
    /// assert_eq!(
    ///     Lowered::new(by_hand).unwrap_err().to_string(),
    ///     "schedule by hand: rank 1 receives 1RF0, but rank 0 never sends it (0SF0 is missing)"
    /// );
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn new(schedule: Schedule) -> Result<Self, CheckError> {
        let (report, versions) = prove(&schedule, Form::Lowered)?;
        let mut last_backward = vec![None; schedule.stages()];
        for action in schedule.actions.iter().flatten().filter(|action| action.kind.makes_weight_gradient()) {
            last_backward[action.stage] = Some(action.micro);
        }
        Ok(Self { schedule, report, last_backward, versions })
    }

    /// The schedule, with its messages.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The actions of a rank, in order.
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

    /// The measurements of the proof.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The micro-batch whose weight gradient (`B`, or `W` where split) is the last of `stage`: when it has finished,
    /// the gradients of the stage are final and may be reduced. Of several steps, the last one counts.
    /// `None` in a forward-only schedule, and for a stage that does not exist.
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
    /// The version of the weights that the forward of `micro` at `stage` uses, and its backward too, counted in
    /// updates: 0 is the version at the start of the schedule. See [`Weights`](crate::Weights).
    ///
    /// ```
    /// use meshwork_pipeline::{lower, pipedream};
    ///
    /// let lowered = lower(&pipedream(2, 4, 1))?;
    /// let versions = |stage| (0..4).map(|micro| lowered.version(stage, micro)).collect::<Vec<_>>();
    /// assert_eq!(versions(0), [0, 0, 1, 2]); // stage 0 starts a second micro-batch before the first comes back
    /// assert_eq!(versions(1), [0, 1, 2, 3]);
    /// # Ok::<(), meshwork_pipeline::CheckError>(())
    /// ```
    ///
    /// # Panics
    ///
    /// If there is no such stage or micro-batch.
    pub fn version(&self, stage: usize, micro: usize) -> usize {
        assert!(micro < self.schedule.micros, "micro-batch {micro} of {}", self.schedule.micros);
        self.versions[stage * self.schedule.micros + micro]
    }

    /// Whether the weight gradients of each stage are made in the order of micro-batches, so that their sums have the
    /// same bits as in any other such schedule. This holds for every schedule of a [`Generator`](crate::Generator).
    pub fn weight_gradients_in_order(&self) -> bool {
        let mut next = vec![0; self.schedule.stages()];
        self.schedule.actions.iter().flatten().filter(|action| action.kind.makes_weight_gradient()).all(|action| {
            let expected = next[action.stage];
            next[action.stage] += 1;
            action.micro == expected
        })
    }
}

/// Adds a send right after each action whose result another rank needs. Right before each action that needs a result of
/// another rank, it adds the receive of that result, after the receives of all messages that the same rank has sent
/// before it. So messages are received in the order in which they are sent. This costs no time, because earlier
/// messages arrive earlier. Between stages of one rank there is no message: the interpreter passes the result.
///
/// The schedule is proved before and after.
pub fn lower(schedule: &Schedule) -> Result<Lowered, CheckError> {
    Lowered::new(with_messages(schedule)?)
}

/// The same without the second proof.
pub(super) fn with_messages(schedule: &Schedule) -> Result<Schedule, CheckError> {
    check(schedule)?;
    // By sender and receiver: the receives of all sent messages, in the order of sending.
    let mut sent = vec![VecDeque::new(); schedule.ranks * schedule.ranks];
    let channel = |from: usize, to: usize| from * schedule.ranks + to;
    for (rank, row) in schedule.actions.iter().enumerate() {
        for receive in row.iter().filter_map(|&action| send_after(schedule, action)?.counterpart()) {
            sent[channel(rank, schedule.rank_of(receive.stage, receive.micro))].push_back(receive);
        }
    }
    let mut received = Table::new(schedule, false);
    let mut actions = Vec::with_capacity(schedule.ranks);
    for (rank, row) in schedule.actions.iter().enumerate() {
        let mut lowered = Vec::with_capacity(3 * row.len());
        for &action in row {
            if let Some(awaited) = receive_before(schedule, action)
                && let Some(send) = awaited.counterpart()
            {
                let queue = &mut sent[channel(schedule.rank_of(send.stage, send.micro), rank)];
                while !received[awaited] {
                    let Some(receive) = queue.pop_front() else { break };
                    received[receive] = true;
                    lowered.push(receive);
                }
            }
            lowered.push(action);
            lowered.extend(send_after(schedule, action));
        }
        actions.push(lowered);
    }
    Ok(Schedule { actions, ..schedule.clone() })
}

/// The send of the result that an action makes for another rank.
fn send_after(schedule: &Schedule, Action { kind, stage, micro }: Action) -> Option<Action> {
    match kind {
        Forward => schedule.crosses_after(stage, micro).then(|| Action::new(SendActivation, stage, micro)),
        kind if kind.makes_input_gradient() => {
            schedule.crosses_before(stage, micro).then(|| Action::new(SendGradient, stage, micro))
        }
        _ => None,
    }
}

/// The receive of the result that an action needs from another rank.
fn receive_before(schedule: &Schedule, Action { kind, stage, micro }: Action) -> Option<Action> {
    let send = match kind {
        Forward if schedule.crosses_before(stage, micro) => Action::new(SendActivation, stage - 1, micro),
        kind if kind.makes_input_gradient() && schedule.crosses_after(stage, micro) => {
            Action::new(SendGradient, stage + 1, micro)
        }
        _ => return None,
    };
    send.counterpart()
}
