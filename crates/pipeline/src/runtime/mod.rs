//! The one interpreter: runs one rank of a [`Lowered`] schedule over stages and a transport of yours.

mod error;

use std::collections::HashMap;

pub use error::RunError;

use crate::{Action, ActionKind, Direction, Lowered, Tag};

/// One stage of the model, as the interpreter sees it. It keeps what its backwards need, per micro-batch.
pub trait Stage {
    /// What stages hand to each other: activations one way, gradients the other.
    type Message;
    /// What can go wrong.
    type Error;

    /// Runs the forward of one micro-batch. `input` is none at the first stage, which reads the data itself. The
    /// last stage returns none (it keeps the loss), every other one returns its activation.
    fn forward(&mut self, micro: usize, input: Option<Self::Message>) -> Result<Option<Self::Message>, Self::Error>;

    /// Runs the whole backward of one micro-batch, adding to the gradients of the weights. `grad` is none at the
    /// last stage, which starts from its own loss. The first stage returns none, every other one returns the
    /// gradient of its input.
    fn backward(&mut self, micro: usize, grad: Option<Self::Message>) -> Result<Option<Self::Message>, Self::Error>;
}

/// Moves messages between pipeline ranks.
///
/// Between two ranks, messages are received in the order in which they are sent (a [`Lowered`] guarantees it), so
/// tags are there to check, or to match by where a transport can.
pub trait Transport {
    /// What is moved.
    type Message;
    /// What can go wrong: a peer that failed, a timeout.
    type Error;

    /// Posts a message and returns without waiting for the receiver. Schedules rely on that: a send that waits
    /// may deadlock.
    fn send(&mut self, to_rank: usize, tag: Tag, message: Self::Message) -> Result<(), Self::Error>;

    /// Waits for a message.
    fn recv(&mut self, from_rank: usize, tag: Tag) -> Result<Self::Message, Self::Error>;

    /// Waits until the sends in flight are done. Called once, after the last action.
    fn finish(&mut self) -> Result<(), Self::Error>;
}

/// That an action starts or has finished, as told to an observer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The action.
    pub action: Action,
    /// Which of its two ends.
    pub phase: Phase,
}

/// The two ends of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It starts now.
    Started,
    /// It has finished. An action that fails does not.
    Finished,
}

/// Runs all actions of one rank.
///
/// `stages` are those that the rank holds, in stage order. Between two of them results are handed over directly;
/// all others go through `transport`. The `observer` hears of each action before and after it: enough to draw a
/// timeline, to show that the rank lives, and, with [`Lowered::last_backward`], to know when gradients are final.
///
/// At the first error this returns, and peers that wait for this rank will wait on: it is the transport's part to
/// tell them, when it is dropped or by a timeout. An error leaves stages with whatever they kept.
///
/// ```
/// use std::convert::Infallible;
/// use meshwork_pipeline::{Event, Phase, Stage, Tag, Transport, gpipe, lower, run};
///
/// /// loss = (weight · micro)² / 2, all in one stage.
/// struct Square { weight: f32, grad: f32 }
///
/// impl Stage for Square {
///     type Message = f32;
///     type Error = Infallible;
///     fn forward(&mut self, _micro: usize, _input: Option<f32>) -> Result<Option<f32>, Infallible> {
///         Ok(None)
///     }
///     fn backward(&mut self, micro: usize, _grad: Option<f32>) -> Result<Option<f32>, Infallible> {
///         self.grad += self.weight * (micro * micro) as f32;
///         Ok(None)
///     }
/// }
///
/// /// A pipeline of one rank sends nothing.
/// struct Alone;
///
/// impl Transport for Alone {
///     type Message = f32;
///     type Error = &'static str;
///     fn send(&mut self, _: usize, _: Tag, _: f32) -> Result<(), Self::Error> { Err("alone") }
///     fn recv(&mut self, _: usize, _: Tag) -> Result<f32, Self::Error> { Err("alone") }
///     fn finish(&mut self) -> Result<(), Self::Error> { Ok(()) }
/// }
///
/// let schedule = lower(&gpipe(1, 3))?;
/// let mut stages = [Square { weight: 2.0, grad: 0.0 }];
/// let mut log = Vec::new();
/// run(&schedule, 0, &mut stages, &mut Alone, &mut |event: Event| {
///     if event.phase == Phase::Finished {
///         log.push(event.action.to_string());
///     }
/// }).map_err(|error| error.to_string())?;
/// assert_eq!(log.join(" "), "0F0 0F1 0F2 0B0 0B1 0B2");
/// assert_eq!(stages[0].grad, 2.0 * (1.0 + 4.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn run<S, T>(
    lowered: &Lowered,
    rank: usize,
    stages: &mut [S],
    transport: &mut T,
    observer: &mut impl FnMut(Event),
) -> Result<(), RunError<S::Error, T::Error>>
where
    S: Stage,
    T: Transport<Message = S::Message>,
{
    let schedule = lowered.schedule();
    if rank >= schedule.ranks {
        return Err(RunError::NoSuchRank { rank, ranks: schedule.ranks });
    }
    let held: Vec<usize> = schedule.stages_of(rank).collect();
    if held.len() != stages.len() {
        return Err(RunError::StageCount { rank, held, given: stages.len() });
    }
    // Results on their way from the action that makes them to the one that takes them. A local hand-over, a result
    // yet to be sent and a received one are the same here: something under its tag.
    let mut waiting: HashMap<Tag, S::Message> = HashMap::new();

    for &action in lowered.actions(rank) {
        observer(Event { action, phase: Phase::Started });
        let Action { kind, stage, micro } = action;
        let peer = action.counterpart().map(|other| schedule.placement[other.stage]);
        let not_moved = |source| RunError::Transport { rank, action, source };
        match (peer, action.tag()) {
            (Some(to), Some(tag)) if kind.is_send() => {
                let message = waiting.remove(&tag).expect("a Lowered sends after what makes the message");
                transport.send(to, tag, message).map_err(not_moved)?;
            }
            (Some(from), Some(tag)) => {
                let message = transport.recv(from, tag).map_err(not_moved)?;
                waiting.insert(tag, message);
            }
            _ => {
                let (takes, makes) = hand_overs(action, schedule.stages());
                let input = takes.and_then(|tag| waiting.remove(&tag));
                let chunk = &mut stages[held.partition_point(|&other| other < stage)];
                let result = match kind {
                    ActionKind::Forward => chunk.forward(micro, input),
                    _ => chunk.backward(micro, input),
                };
                let result = result.map_err(|source| RunError::Stage { rank, action, source })?;
                match (makes, result) {
                    (Some(tag), Some(message)) => drop(waiting.insert(tag, message)),
                    (None, None) => {}
                    (Some(_), None) => return Err(RunError::NoResult { rank, action }),
                    (None, Some(_)) => return Err(RunError::LooseResult { rank, action }),
                }
            }
        }
        observer(Event { action, phase: Phase::Finished });
    }
    transport.finish().map_err(|source| RunError::Finish { rank, source })
}

/// What a computation takes from a neighbour stage and what it makes for one; none at the ends of the model.
fn hand_overs(action: Action, stages: usize) -> (Option<Tag>, Option<Tag>) {
    let Action { kind, stage, micro } = action;
    let before = stage.checked_sub(1);
    let after = Some(stage + 1).filter(|&after| after < stages);
    let (direction, from, to) = match kind {
        ActionKind::Forward => (Direction::Activation, before, after),
        _ => (Direction::Gradient, after, before),
    };
    let tag = |stage| Tag { direction, stage, micro };
    (from.map(tag), to.map(|_| tag(stage)))
}
