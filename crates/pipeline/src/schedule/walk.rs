//! Running a schedule on paper: every computation takes one unit of time, every message none.

use super::needs::{Form, Table, needs};
use super::{Action, Schedule};

/// How far a walk came.
pub(super) enum Walk {
    /// To the end: when each action starts, in the shape of [`Schedule::actions`].
    Done(Vec<Vec<usize>>),
    /// Not to the end: the step at which each rank waits (its number of actions where it finished).
    Stuck(Vec<usize>),
}

/// What an action takes in a walk.
pub(super) fn cost(action: Action) -> usize {
    usize::from(!action.kind.is_message())
}

/// Advances every rank as far as it can go, until all have ended or none moves.
///
/// A rank starts an action when it has finished the one before and all that the action needs. So a start time
/// does not depend on the order in which ranks are visited here, and a schedule that gets stuck here gets stuck
/// under any timing.
pub(super) fn walk(schedule: &Schedule, form: Form) -> Walk {
    let mut finished: Table<Option<usize>> = Table::new(schedule, None);
    let mut starts: Vec<Vec<usize>> = schedule.actions.iter().map(|row| Vec::with_capacity(row.len())).collect();
    let mut clock = vec![0; schedule.ranks];
    let mut moved = true;
    while moved {
        moved = false;
        for (rank, row) in schedule.actions.iter().enumerate() {
            while let Some(&action) = row.get(starts[rank].len()) {
                // The latest finish of its needs; none while one of them is still to come.
                let ready =
                    needs(schedule, form, action).try_fold(0, |latest, need| finished[need].map(|at| latest.max(at)));
                let Some(ready) = ready else { break };
                let start = ready.max(clock[rank]);
                clock[rank] = start + cost(action);
                finished[action] = Some(clock[rank]);
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
