//! The interpreter: runs one rank of a [`Lowered`] schedule over your stages and transport.

#[cfg(feature = "channel")]
mod channel;
mod error;
mod flow;
mod moments;

use std::collections::HashMap;
use std::ops::Range;

#[cfg(feature = "channel")]
pub use channel::{ChannelError, ChannelTransport, channels};
pub use error::RunError;

use crate::{Action, ActionKind, Direction, Lowered, Tag};

/// One stage of the model, run by the interpreter. It keeps the data that its backwards need, per micro-batch.
pub trait StageRunner {
    /// A message between stages: activations one way, gradients the other.
    type Message;
    /// The error of a stage.
    type Error;

    /// Runs the forward of one micro-batch. `input` is `None` at the first stage, which reads the data itself. The last
    /// stage returns `None` (it keeps the loss), every other one returns its activation.
    fn forward(&mut self, micro: usize, input: Option<Self::Message>) -> Result<Option<Self::Message>, Self::Error>;

    /// Runs the part of backward that others wait for: the gradient of the input. `grad` is `None` at the last stage,
    /// which starts from its own loss. The first stage returns `None`, every other one returns the gradient of its
    /// input.
    ///
    /// A network that cannot split its backward runs all of it here, and nothing in
    /// [`backward_weights`](Self::backward_weights). The numbers are the same, but the bubble is not filled.
    fn backward_input(
        &mut self,
        micro: usize,
        grad: Option<Self::Message>,
    ) -> Result<Option<Self::Message>, Self::Error>;

    /// Runs the rest of the backward of one micro-batch, adding to the gradients of the weights. No rank waits for it:
    /// a zero-bubble schedule runs it where the rank would idle.
    fn backward_weights(&mut self, micro: usize) -> Result<(), Self::Error>;

    /// Runs the whole backward of one micro-batch: both parts, one after the other, unless a stage can do better.
    fn backward(&mut self, micro: usize, grad: Option<Self::Message>) -> Result<Option<Self::Message>, Self::Error> {
        let message = self.backward_input(micro, grad)?;
        self.backward_weights(micro)?;
        Ok(message)
    }

    /// Updates the weights from the gradients of the micro-batches up to and with `micro` that no update has seen yet.
    ///
    /// Only asynchronous schedules call it. The backward of a micro-batch in flight uses the weights that its forward
    /// used, whatever was updated in between. [`Lowered::version`] gives the version that a forward uses.
    fn update(&mut self, micro: usize) -> Result<(), Self::Error>;
}

/// Borrowed stages: their owner need not run them.
impl<S: StageRunner + ?Sized> StageRunner for &mut S {
    type Message = S::Message;
    type Error = S::Error;

    fn forward(&mut self, micro: usize, input: Option<S::Message>) -> Result<Option<S::Message>, S::Error> {
        (**self).forward(micro, input)
    }

    fn backward_input(&mut self, micro: usize, grad: Option<S::Message>) -> Result<Option<S::Message>, S::Error> {
        (**self).backward_input(micro, grad)
    }

    fn backward_weights(&mut self, micro: usize) -> Result<(), S::Error> {
        (**self).backward_weights(micro)
    }

    fn backward(&mut self, micro: usize, grad: Option<S::Message>) -> Result<Option<S::Message>, S::Error> {
        (**self).backward(micro, grad)
    }

    fn update(&mut self, micro: usize) -> Result<(), S::Error> {
        (**self).update(micro)
    }
}

/// Moves messages between pipeline ranks. With the feature `channel`, `channels` makes one for threads of one process.
///
/// Between two ranks, messages are received in the order in which they are sent (a [`Lowered`] guarantees it), so tags
/// only serve to check a message, or to match messages where a transport can.
pub trait Transport {
    /// A message.
    type Message;
    /// The error of the transport: a peer that failed, a timeout.
    type Error;

    /// Posts a message and returns without waiting for the receiver. Schedules rely on that: a send that waits may
    /// deadlock, unless [`Report::in_flight`](crate::Report::in_flight) messages can be in flight before it waits.
    fn send(&mut self, to_rank: usize, tag: Tag, message: Self::Message) -> Result<(), Self::Error>;

    /// Waits for a message.
    fn recv(&mut self, from_rank: usize, tag: Tag) -> Result<Self::Message, Self::Error>;

    /// Waits until the sends in flight are done. Called once, after the last action.
    fn finish(&mut self) -> Result<(), Self::Error>;
}

/// The start or end of an action, for an observer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// The action.
    pub action: Action,
    /// Whether it started or finished.
    pub phase: Phase,
}

/// The two ends of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It starts now.
    Started,
    /// It has finished. An action that fails never does.
    Finished,
}

/// Runs all actions of one rank.
///
/// `stages` are those that the rank holds, in stage order. Results between two of them are passed directly; all others
/// go through `transport`. The `observer` is called before and after each action. That is enough to draw a timeline, to
/// show progress, and, with [`Lowered::last_backward`], to know when gradients are final.
///
/// This returns at the first error. Peers that wait for this rank continue to wait until the transport tells them, when
/// it is dropped or by a timeout. After an error, stages still hold the data that they kept.
///
/// ```
/// use std::convert::Infallible;
/// use meshwork_pipeline::{Event, Phase, StageRunner, Tag, Transport, gpipe, lower, run};
///
/// /// loss = (weight · micro)² / 2, all in one stage.
/// struct Square { weight: f32, grad: f32 }
///
/// impl StageRunner for Square {
///     type Message = f32;
///     type Error = Infallible;
///     fn forward(&mut self, _micro: usize, _input: Option<f32>) -> Result<Option<f32>, Infallible> {
///         Ok(None)
///     }
///     fn backward_input(&mut self, _micro: usize, _grad: Option<f32>) -> Result<Option<f32>, Infallible> {
///         Ok(None)
///     }
///     fn backward_weights(&mut self, micro: usize) -> Result<(), Infallible> {
///         self.grad += self.weight * (micro * micro) as f32;
///         Ok(())
///     }
///     fn update(&mut self, _micro: usize) -> Result<(), Infallible> {
///         unreachable!("gpipe leaves the update to its caller")
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
    S: StageRunner,
    T: Transport<Message = S::Message>,
{
    let mut interpreter = Interpreter::default();
    interpreter.advance(lowered, rank, 0..usize::MAX, stages, transport, observer)?;
    transport.finish().map_err(|source| RunError::Finish { rank, source })
}

/// Like [`run`], for callers that stop between two actions and continue later: to update weights while other ranks
/// still compute, or because the schedule is one step of a stream that never drains.
#[derive(Debug)]
pub struct Interpreter<M> {
    /// Results between the action that makes them and the one that takes them, by tag. Results for another local stage,
    /// results that are not sent yet, and received results are all kept here.
    waiting: HashMap<Tag, M>,
}

impl<M> Default for Interpreter<M> {
    fn default() -> Self {
        Self { waiting: HashMap::new() }
    }
}

impl<M> Interpreter<M> {
    /// Runs the actions of a rank with the indices `actions`, as far as they exist. A call continues where the previous
    /// one ended. Messages may still be in flight afterwards; the caller must call [`Transport::finish`].
    pub fn advance<S, T>(
        &mut self,
        lowered: &Lowered,
        rank: usize,
        actions: Range<usize>,
        stages: &mut [S],
        transport: &mut T,
        observer: &mut impl FnMut(Event),
    ) -> Result<(), RunError<S::Error, T::Error>>
    where
        S: StageRunner<Message = M>,
        T: Transport<Message = M>,
    {
        let schedule = lowered.schedule();
        if rank >= schedule.ranks {
            return Err(RunError::NoSuchRank { rank, ranks: schedule.ranks });
        }
        let held: Vec<usize> = schedule.stages_of(rank).collect();
        if held.len() != stages.len() {
            return Err(RunError::StageCount { rank, held, given: stages.len() });
        }
        let all = lowered.actions(rank);
        for &action in &all[actions.start.min(all.len())..actions.end.min(all.len())] {
            observer(Event { action, phase: Phase::Started });
            let Action { kind, stage, micro } = action;
            let peer = action.counterpart().map(|other| schedule.rank_of(other.stage, other.micro));
            let not_moved = |source| RunError::Transport { rank, action, source };
            match (peer, action.tag()) {
                (Some(to), Some(tag)) if kind.is_send() => {
                    let message = self.waiting.remove(&tag).expect("a Lowered sends after what makes the message");
                    transport.send(to, tag, message).map_err(not_moved)?;
                }
                (Some(from), Some(tag)) => {
                    let message = transport.recv(from, tag).map_err(not_moved)?;
                    self.waiting.insert(tag, message);
                }
                _ => {
                    let (takes, makes) = hand_overs(action, schedule.stages());
                    let input = takes.and_then(|tag| self.waiting.remove(&tag));
                    let chunk = &mut stages[held.partition_point(|&other| other < stage)];
                    let result = match kind {
                        ActionKind::Forward => chunk.forward(micro, input),
                        ActionKind::InputGradient => chunk.backward_input(micro, input),
                        ActionKind::WeightGradient => chunk.backward_weights(micro).map(|()| None),
                        ActionKind::Update => chunk.update(micro).map(|()| None),
                        _ => chunk.backward(micro, input),
                    };
                    let result = result.map_err(|source| RunError::Stage { rank, action, source })?;
                    match (makes, result) {
                        (Some(tag), Some(message)) => drop(self.waiting.insert(tag, message)),
                        (None, None) => {}
                        (Some(_), None) => return Err(RunError::NoResult { rank, action }),
                        (None, Some(_)) => return Err(RunError::LooseResult { rank, action }),
                    }
                }
            }
            observer(Event { action, phase: Phase::Finished });
        }
        Ok(())
    }

    /// Drops the results of actions, after a failure or to run them again.
    pub fn clear(&mut self) {
        self.waiting.clear();
    }
}

/// The messages that a computation takes from a neighbour stage and makes for one; `None` at the ends of the model.
fn hand_overs(action: Action, stages: usize) -> (Option<Tag>, Option<Tag>) {
    let Action { kind, stage, micro } = action;
    let before = stage.checked_sub(1);
    let after = Some(stage + 1).filter(|&after| after < stages);
    let (direction, from, to) = match kind {
        ActionKind::Forward => (Direction::Activation, before, after),
        ActionKind::Backward | ActionKind::InputGradient => (Direction::Gradient, after, before),
        _ => return (None, None),
    };
    let tag = |stage| Tag { direction, stage, micro };
    (from.map(tag), to.map(|_| tag(stage)))
}
