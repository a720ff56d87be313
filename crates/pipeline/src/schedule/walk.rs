//! Simulates running a schedule.

use super::needs::{Form, Graph, Table};
use super::{Action, ActionKind, Schedule};

/// The result of a walk.
pub(super) enum Walk {
    /// It reached the end: the start of each action, in the shape of [`Schedule::actions`].
    Done(Vec<Vec<f64>>),
    /// It got stuck: the step at which each rank waits (its number of actions if it finished).
    Stuck(Vec<usize>),
}

/// The assumptions of a walk.
pub(super) struct Terms<'a> {
    /// How long an action keeps its rank busy.
    pub(super) busy: &'a dyn Fn(Action) -> f64,
    /// The times from the end of a send to the arrival of its message: of an activation, and of the gradient of one.
    pub(super) delay: [f64; 2],
    /// Number of messages from one rank to another that may wait for their receives; a further send waits. `None`:
    /// no limit.
    pub(super) in_flight: Option<usize>,
}

impl Terms<'_> {
    /// Nothing takes time, which is enough to see which rank waits for which.
    pub(super) fn untimed(in_flight: Option<usize>) -> Self {
        Self { busy: &|_| 0.0, delay: [0.0; 2], in_flight }
    }
}

/// Advances every rank as far as it can go, until all have ended or none moves.
///
/// A rank starts an action when the previous action and all actions that it needs have finished. So a start time does
/// not depend on the order in which ranks are visited here, and a schedule that gets stuck here gets stuck under any
/// timing. This also holds with limited room for messages. (Start times do not include the time in which a send waits
/// for room.)
pub(super) fn walk(graph: &Graph, terms: &Terms) -> Walk {
    let schedule = graph.schedule;
    let mut finished: Table<f64> = Table::new(schedule, f64::NAN);
    let mut starts: Vec<Vec<f64>> = schedule.actions.iter().map(|row| Vec::with_capacity(row.len())).collect();
    let mut clock = vec![0.0; schedule.ranks];
    let mut channels = terms.in_flight.map(|room| Channels::new(schedule, room));
    let mut moved = true;
    while moved {
        moved = false;
        for (rank, row) in schedule.actions.iter().enumerate() {
            while let Some(&action) = row.get(starts[rank].len()) {
                // The latest finish of its needs; NaN while one of them has not finished.
                let ready = graph.needs(action).fold(0.0, |latest: f64, need| {
                    let at = finished[need];
                    if at.is_nan() || latest.is_nan() { f64::NAN } else { latest.max(at) }
                });
                if ready.is_nan() || channels.as_ref().is_some_and(|channels| channels.is_full(action)) {
                    break;
                }
                let arrives = match action.kind {
                    ActionKind::RecvActivation => terms.delay[0],
                    ActionKind::RecvGradient => terms.delay[1],
                    _ => 0.0,
                };
                let start = f64::max(ready + arrives, clock[rank]);
                clock[rank] = start + (terms.busy)(action);
                finished[action] = clock[rank];
                if let Some(channels) = &mut channels {
                    channels.moved(action);
                }
                starts[rank].push(start);
                moved = true;
            }
        }
    }
    let reached: Vec<usize> = starts.iter().map(Vec::len).collect();
    if reached.iter().zip(&schedule.actions).all(|(&reached, row)| reached == row.len()) {
        Walk::Done(starts)
    } else {
        Walk::Stuck(reached)
    }
}

/// The messages between each two ranks that wait for their receives.
struct Channels<'a> {
    schedule: &'a Schedule,
    room: usize,
    /// By sender and receiver: the number of waiting messages.
    waiting: Vec<usize>,
}

impl<'a> Channels<'a> {
    fn new(schedule: &'a Schedule, room: usize) -> Self {
        Self { schedule, room, waiting: vec![0; schedule.ranks * schedule.ranks] }
    }

    /// The channel of a message.
    fn index(&self, action: Action) -> Option<usize> {
        let rank = |stage: usize| self.schedule.rank_of(stage, action.micro);
        let (here, there) = (rank(action.stage), rank(action.counterpart()?.stage));
        let (from, to) = if action.kind.is_send() { (here, there) } else { (there, here) };
        Some(from * self.schedule.ranks + to)
    }

    /// Whether there is no room for the message of `action`.
    fn is_full(&self, action: Action) -> bool {
        action.kind.is_send() && self.index(action).is_some_and(|channel| self.waiting[channel] >= self.room)
    }

    fn moved(&mut self, action: Action) {
        if let Some(channel) = self.index(action) {
            if action.kind.is_send() { self.waiting[channel] += 1 } else { self.waiting[channel] -= 1 }
        }
    }
}

/// The smallest number of messages that must be allowed to wait between any two ranks, so that sends which wait for
/// room never make ranks wait in a circle. The schedule must end if there is room for all messages.
pub(super) fn in_flight(graph: &Graph) -> usize {
    if graph.form == Form::Plain {
        return 0;
    }
    let ends = |room| matches!(walk(graph, &Terms::untimed(Some(room))), Walk::Done(_));
    let mut enough = 1;
    while !ends(enough) {
        enough *= 2;
    }
    // `few` is too little room and `enough` is enough: more room never makes a rank wait.
    let mut few = enough / 2;
    while enough - few > 1 {
        let middle = few + (enough - few) / 2;
        if ends(middle) { enough = middle } else { few = middle }
    }
    enough
}
