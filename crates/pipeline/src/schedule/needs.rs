//! The dependency graph of a schedule, in one function that every pass reads.

use std::ops::{Index, IndexMut};

use super::ActionKind::{Backward, Forward, RecvActivation, RecvGradient, SendActivation, SendGradient};
use super::{Action, ActionKind, Schedule};

/// Whether what crosses ranks is written down as messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As generated: computations alone.
    Plain,
    /// With sends and receives.
    Lowered,
}

/// The actions that must have finished before `action` may start (besides those before it on its rank).
///
/// Expects stages within range and messages only where ranks are crossed, which the checker makes sure of first.
pub(super) fn needs(schedule: &Schedule, form: Form, action: Action) -> impl Iterator<Item = Action> {
    let Action { kind, stage, micro } = action;
    let on = |kind, stage| Some(Action::new(kind, stage, micro));
    let lowered = form == Form::Lowered;
    let last = stage + 1 == schedule.stages();
    let needs = match kind {
        Forward if stage == 0 => [None, None],
        Forward if lowered && schedule.crosses_before(stage) => [on(RecvActivation, stage), None],
        Forward => [on(Forward, stage - 1), None],
        Backward if last => [on(Forward, stage), None],
        Backward if lowered && schedule.crosses_after(stage) => [on(Forward, stage), on(RecvGradient, stage)],
        Backward => [on(Forward, stage), on(Backward, stage + 1)],
        SendActivation => [on(Forward, stage), None],
        SendGradient => [on(Backward, stage), None],
        RecvActivation | RecvGradient => [action.counterpart(), None],
    };
    needs.into_iter().flatten()
}

/// One value per possible action of a schedule, found without hashing: schedules reach a million actions.
pub(super) struct Table<T> {
    stages: usize,
    micros: usize,
    cells: Vec<T>,
}

impl<T: Clone> Table<T> {
    pub(super) fn new(schedule: &Schedule, value: T) -> Self {
        let (stages, micros) = (schedule.stages(), schedule.micros);
        Self { stages, micros, cells: vec![value; ActionKind::ALL.len() * stages * micros] }
    }
}

impl<T> Table<T> {
    fn at(&self, action: Action) -> usize {
        debug_assert!(action.stage < self.stages && action.micro < self.micros, "{action}");
        (action.kind as usize * self.stages + action.stage) * self.micros + action.micro
    }
}

impl<T> Index<Action> for Table<T> {
    type Output = T;

    fn index(&self, action: Action) -> &T {
        &self.cells[self.at(action)]
    }
}

impl<T> IndexMut<Action> for Table<T> {
    fn index_mut(&mut self, action: Action) -> &mut T {
        let at = self.at(action);
        &mut self.cells[at]
    }
}
