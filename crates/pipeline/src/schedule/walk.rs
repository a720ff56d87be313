//! Running a schedule on paper.

use super::needs::{Form, Graph, Table};
use super::{Action, Schedule};

/// How far a walk came.
pub(super) enum Walk {
    /// To the end: when each action starts, in the shape of [`Schedule::actions`].
    Done(Vec<Vec<f64>>),
    /// Not to the end: the step at which each rank waits (its number of actions where it finished).
    Stuck(Vec<usize>),
}

/// What a walk assumes.
pub(super) struct Terms<'a> {
    /// How long an action keeps its rank busy.
    pub(super) busy: &'a dyn Fn(Action) -> f64,
    /// How much later than the end of a send its message arrives.
    pub(super) delay: f64,
    /// How many messages from one rank to another may wait for their receives; a send beyond that waits itself.
    pub(super) in_flight: usize,
}

impl Terms<'_> {
    /// Nothing takes time: enough to see who waits for whom.
    pub(super) fn untimed(in_flight: usize) -> Self {
        Self { busy: &|_| 0.0, delay: 0.0, in_flight }
    }
}

/// Advances every rank as far as it can go, until all have ended or none moves.
///
/// A rank starts an action when it has finished the one before and all that the action needs. So a start time
/// does not depend on the order in which ranks are visited here, and a schedule that gets stuck here gets stuck
/// under any timing. With a limit on messages in flight, receives must be in the order of sends.
pub(super) fn walk(graph: &Graph, terms: &Terms) -> Walk {
    let schedule = graph.schedule;
    let mut finished: Table<f64> = Table::new(schedule, f64::NAN);
    let mut starts: Vec<Vec<f64>> = schedule.actions.iter().map(|row| Vec::with_capacity(row.len())).collect();
    let mut clock = vec![0.0; schedule.ranks];
    let mut channels = Channels::new(schedule, terms.in_flight);
    let mut moved = true;
    while moved {
        moved = false;
        for (rank, row) in schedule.actions.iter().enumerate() {
            while let Some(&action) = row.get(starts[rank].len()) {
                // The latest finish of its needs; NaN while one of them is still to come.
                let ready = graph.needs(action).fold(0.0, |latest: f64, need| {
                    let at = finished[need];
                    if at.is_nan() || latest.is_nan() { f64::NAN } else { latest.max(at) }
                });
                let Some(room) = channels.room(action).filter(|_| !ready.is_nan()) else { break };
                let arrives = if action.kind.is_message() && !action.kind.is_send() { terms.delay } else { 0.0 };
                let start = f64::max(ready + arrives, room).max(clock[rank]);
                clock[rank] = start + (terms.busy)(action);
                finished[action] = clock[rank];
                channels.moved(action, clock[rank]);
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
    limit: usize,
    /// By sender and receiver: how many were sent, and when each was received.
    counts: Vec<(usize, Vec<f64>)>,
}

impl<'a> Channels<'a> {
    fn new(schedule: &'a Schedule, limit: usize) -> Self {
        let pairs = if limit == usize::MAX { 0 } else { schedule.ranks * schedule.ranks };
        Self { schedule, limit, counts: vec![(0, Vec::new()); pairs] }
    }

    fn of(&self, action: Action) -> Option<usize> {
        let rank = |stage: usize| self.schedule.rank_of(stage, action.micro);
        let (here, there) = (rank(action.stage), rank(action.counterpart()?.stage));
        let (from, to) = if action.kind.is_send() { (here, there) } else { (there, here) };
        Some(from * self.schedule.ranks + to)
    }

    /// Since when there is room for what `action` sends; none while there is no room.
    fn room(&self, action: Action) -> Option<f64> {
        if !action.kind.is_send() || self.limit == usize::MAX {
            return Some(0.0);
        }
        let (sent, received) = &self.counts[self.of(action)?];
        match sent.checked_sub(self.limit) {
            None => Some(0.0),
            Some(before) => received.get(before).copied(),
        }
    }

    fn moved(&mut self, action: Action, at: f64) {
        if self.limit == usize::MAX {
            return;
        }
        if let Some(channel) = self.of(action) {
            let (sent, received) = &mut self.counts[channel];
            if action.kind.is_send() { *sent += 1 } else { received.push(at) }
        }
    }
}

/// The smallest number of messages that must be allowed to wait between any two ranks, so that sends which wait for
/// room never make ranks wait in a circle. None where no number helps.
pub(super) fn in_flight(graph: &Graph) -> Option<usize> {
    if graph.form == Form::Plain {
        return Some(0);
    }
    let ends = |limit| matches!(walk(graph, &Terms::untimed(limit)), Walk::Done(_));
    let most = graph.schedule.actions.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let mut enough = 1;
    while !ends(enough) {
        if enough > most {
            return None;
        }
        enough *= 2;
    }
    // Too few is known up to `few`, enough from `enough` on: more room never makes anybody wait.
    let mut few = enough / 2;
    while enough - few > 1 {
        let middle = few + (enough - few) / 2;
        if ends(middle) { enough = middle } else { few = middle }
    }
    Some(enough)
}
