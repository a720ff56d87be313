//! The dependency graph of a schedule, in one function that every pass reads.

use super::ActionKind::{
    Backward, Forward, InputGradient, RecvActivation, RecvGradient, SendActivation, SendGradient, Update,
    WeightGradient,
};
use super::{Action, ActionKind, Schedule};
use std::ops::{Index, IndexMut};

/// Whether a schedule contains the messages that cross ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As generated: only computations.
    Plain,
    /// With sends and receives.
    Lowered,
}

/// The dependencies in a schedule.
pub(super) struct Graph<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) form: Form,
    /// By (stage, micro): whether its backward is split.
    split: Vec<bool>,
}

impl<'a> Graph<'a> {
    /// Finds which backwards are split. The checker must have seen the shape before; it also refuses actions out of
    /// range.
    pub(super) fn new(schedule: &'a Schedule, form: Form) -> Self {
        let (stages, micros) = (schedule.stages(), schedule.micros);
        let mut split = vec![false; stages * micros];
        for action in schedule.actions.iter().flatten() {
            let halves = matches!(action.kind, InputGradient | WeightGradient);
            if halves && action.stage < stages && action.micro < micros {
                split[action.stage * micros + action.micro] = true;
            }
        }
        Self { schedule, form, split }
    }

    pub(super) fn is_split(&self, stage: usize, micro: usize) -> bool {
        self.split[stage * self.schedule.micros + micro]
    }

    /// The action that makes the gradient for the previous stage.
    fn input_gradient(&self, stage: usize, micro: usize) -> Action {
        let kind = if self.is_split(stage, micro) { InputGradient } else { Backward };
        Action::new(kind, stage, micro)
    }

    /// The action that adds the gradients of the weights, and frees the activation.
    pub(super) fn weight_gradient(&self, stage: usize, micro: usize) -> Action {
        let kind = if self.is_split(stage, micro) { WeightGradient } else { Backward };
        Action::new(kind, stage, micro)
    }

    /// The actions that must have finished before `action` may start (besides those before it on its rank).
    ///
    /// Stages must be within range and messages must cross ranks; the checker makes sure of both first.
    pub(super) fn needs(&self, action: Action) -> impl Iterator<Item = Action> + use<> {
        let Action { kind, stage, micro } = action;
        let schedule = self.schedule;
        let on = |kind, stage| Some(Action::new(kind, stage, micro));
        let lowered = self.form == Form::Lowered;
        let last = stage + 1 == schedule.stages();
        let needs = match kind {
            Forward if stage == 0 => [None, None],
            Forward if lowered && schedule.crosses_before(stage, micro) => [on(RecvActivation, stage), None],
            Forward => [on(Forward, stage - 1), None],
            Backward | InputGradient if last => [on(Forward, stage), None],
            Backward | InputGradient if lowered && schedule.crosses_after(stage, micro) => {
                [on(Forward, stage), on(RecvGradient, stage)]
            }
            Backward | InputGradient => [on(Forward, stage), Some(self.input_gradient(stage + 1, micro))],
            WeightGradient => [on(InputGradient, stage), None],
            // The other gradients in its batch are older; the checker makes sure of their order on this rank.
            Update => [Some(self.weight_gradient(stage, micro)), None],
            SendActivation => [on(Forward, stage), None],
            SendGradient => [Some(self.input_gradient(stage, micro)), None],
            RecvActivation | RecvGradient => [action.counterpart(), None],
        };
        needs.into_iter().flatten()
    }
}

/// One value per possible action of a schedule. Looking it up needs no hashing, because schedules reach a million
/// actions.
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
