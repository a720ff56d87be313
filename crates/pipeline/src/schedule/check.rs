//! Proves that a schedule is valid.

use super::ActionKind::{Backward, Forward, InputGradient, SendActivation, SendGradient, Update, WeightGradient};
use super::grid::stuck_grid;
use super::needs::{Form, Graph, Table};
use super::versions::Versions;
use super::walk::{Terms, Walk, in_flight, walk};
use super::{Action, CheckError, Fault, Report, Schedule, Weights};
use std::collections::{BTreeMap, HashSet};

/// Proves a schedule without messages: every part of every (stage, micro) runs exactly once, on the rank of its
/// stage, after its inputs, and no timing makes ranks wait in a circle.
///
/// Schedules with messages are proved when a [`Lowered`](crate::Lowered) is built from them.
///
/// ```
/// use meshwork_pipeline::{check, gpipe, one_f_one_b};
///
/// assert_eq!(check(&gpipe(4, 8))?.peaks, [8, 8, 8, 8]);
/// assert_eq!(check(&one_f_one_b(4, 8))?.peaks, [4, 3, 2, 1]);
///
/// let mut broken = gpipe(2, 2);
/// broken.actions[1].pop();
/// assert_eq!(
///     check(&broken).unwrap_err().to_string(),
///     "schedule gpipe: rank 1 runs no backward of micro-batch 1 through stage 1 (1B1)"
/// );
/// # Ok::<(), meshwork_pipeline::CheckError>(())
/// ```
pub fn check(schedule: &Schedule) -> Result<Report, CheckError> {
    prove(schedule, Form::Plain).map(|(report, _)| report)
}

/// [`check`] for either form; also by (stage, micro) the version of the weights that it uses.
pub(super) fn prove(schedule: &Schedule, form: Form) -> Result<(Report, Vec<usize>), CheckError> {
    let proof = || {
        check_shape(schedule)?;
        let steps = locate(schedule, form)?;
        let graph = Graph::new(schedule, form);
        check_complete(&graph, &steps)?;
        check_local_order(&graph, &steps)?;
        check_message_order(schedule)?;
        check_updates(&graph, &steps)?;
        let versions = Versions::new(schedule, &steps)?;
        if let Walk::Stuck(reached) = walk(&graph, &Terms::untimed(None)) {
            return Err(Fault::Deadlock { grid: stuck_grid(&graph, &reached) });
        }
        Ok((Report::new(schedule, versions.peaks, in_flight(&graph)), versions.used))
    };
    proof().map_err(|fault| CheckError { schedule: schedule.name.clone(), fault })
}

/// The step of each action on its rank; `None` if it does not occur.
type Steps = Table<Option<usize>>;

fn check_shape(schedule: &Schedule) -> Result<(), Fault> {
    let (ranks, stages, micros) = (schedule.ranks, schedule.stages(), schedule.micros);
    if ranks == 0 || stages == 0 || micros == 0 {
        return Err(Fault::Empty { ranks, stages, micros });
    }
    if schedule.steps == 0 || !micros.is_multiple_of(schedule.steps) {
        return Err(Fault::Steps { micros, steps: schedule.steps });
    }
    if schedule.actions.len() != ranks {
        return Err(Fault::RowCount { ranks, rows: schedule.actions.len() });
    }
    let mut holds = vec![false; ranks];
    if schedule.replicas.len() != stages || schedule.replicas.contains(&0) {
        return Err(Fault::Replicas { stages, replicas: schedule.replicas.clone() });
    }
    if let (Some(stage), false) =
        (schedule.replicas.iter().position(|&replicas| replicas > 1), schedule.weights.is_synchronous())
    {
        return Err(Fault::ReplicatedVersions { stage, weights: schedule.weights });
    }
    for (stage, (&first, &replicas)) in schedule.placement.iter().zip(&schedule.replicas).enumerate() {
        // In a schedule written by hand, both may be any number.
        let last = first.saturating_add(replicas - 1);
        let held = holds.get_mut(first..=last).ok_or(Fault::Placement { stage, rank: last, ranks })?;
        held.fill(true);
    }
    if let Some(rank) = holds.iter().position(|holds| !holds) {
        return Err(Fault::IdleRank { rank, ranks, stages });
    }
    // If there are fewer actions than forwards, find a missing one here, before anything of the size of `micros` is
    // allocated. A schedule written by hand may set `micros` to any number.
    let actions = schedule.actions.iter().flatten();
    if actions.clone().count() < stages.saturating_mul(micros) {
        let present: HashSet<Action> = actions.copied().collect();
        let missing = each(schedule)
            .map(|(stage, micro)| Action::new(Forward, stage, micro))
            .find(|action| !present.contains(action));
        if let Some(action) = missing {
            let rank = schedule.rank_of(action.stage, action.micro);
            return Err(Fault::Missing { rank, action });
        }
    }
    Ok(())
}

/// Each (stage, micro) of a schedule.
fn each(schedule: &Schedule) -> impl Iterator<Item = (usize, usize)> {
    let micros = schedule.micros;
    (0..schedule.stages()).flat_map(move |stage| (0..micros).map(move |micro| (stage, micro)))
}

/// Finds every action, and refuses misplaced ones.
fn locate(schedule: &Schedule, form: Form) -> Result<Steps, Fault> {
    let (stages, micros) = (schedule.stages(), schedule.micros);
    let mut steps = Steps::new(schedule, None);
    for (rank, row) in schedule.actions.iter().enumerate() {
        for (step, &action) in row.iter().enumerate() {
            if action.stage >= stages || action.micro >= micros {
                return Err(Fault::OutOfRange { rank, step, action, stages, micros });
            }
            let home = schedule.rank_of(action.stage, action.micro);
            if home != rank {
                return Err(Fault::WrongRank { rank, step, action, home });
            }
            if action.kind.is_message() {
                if form == Form::Plain {
                    return Err(Fault::MessageInPlain { rank, step, action });
                }
                let peer = action.peer_stage().filter(|&peer| peer < stages);
                if peer.is_none_or(|peer| schedule.rank_of(peer, action.micro) == rank) {
                    return Err(Fault::NeedlessMessage { rank, step, action });
                }
            }
            if let Some(first) = steps[action].replace(step) {
                return Err(Fault::Duplicate { rank, action, first, second: step });
            }
        }
    }
    Ok(steps)
}

/// Checks that every part of every (stage, micro) exists, and both ends of every message that crosses ranks.
fn check_complete(graph: &Graph, steps: &Steps) -> Result<(), Fault> {
    let schedule = graph.schedule;
    let trains = !schedule.is_forward_only();
    for (stage, micro) in each(schedule) {
        let rank = schedule.rank_of(stage, micro);
        let parts: &[_] = match trains {
            false => &[Forward],
            true if graph.is_split(stage, micro) => &[Forward, InputGradient, WeightGradient],
            true => &[Forward, Backward],
        };
        for &kind in parts {
            let action = Action::new(kind, stage, micro);
            if steps[action].is_none() {
                return Err(Fault::Missing { rank, action });
            }
        }
        let whole = Action::new(Backward, stage, micro);
        if let Some(step) = steps[whole].filter(|_| graph.is_split(stage, micro)) {
            return Err(Fault::WholeAndSplit { rank, step, action: whole });
        }
    }
    for (stage, micro) in each(schedule) {
        if graph.form == Form::Lowered && schedule.crosses_after(stage, micro) {
            let activation = Action::new(SendActivation, stage, micro);
            let gradient = Action::new(SendGradient, stage + 1, micro);
            check_message(schedule, steps, activation, true)?;
            // If it is sent although nothing trains, the check of the order reports a `Missing` backward.
            check_message(schedule, steps, gradient, trains)?;
        }
    }
    Ok(())
}

fn check_message(schedule: &Schedule, steps: &Steps, send: Action, required: bool) -> Result<(), Fault> {
    let Some(receive) = send.counterpart() else {
        return Ok(());
    };
    let from = schedule.rank_of(send.stage, send.micro);
    let to = schedule.rank_of(receive.stage, receive.micro);
    match (steps[send].is_some(), steps[receive].is_some()) {
        (true, false) => Err(Fault::SendWithoutReceive { send, from, receive, to }),
        (false, true) => Err(Fault::ReceiveWithoutSend { receive, to, send, from }),
        (false, false) if required => Err(Fault::MissingMessage { send, from, receive, to }),
        _ => Ok(()),
    }
}

/// An action must come after the actions of its own rank that it needs. This gives a clear message, where the walk
/// would only report that it is stuck.
fn check_local_order(graph: &Graph, steps: &Steps) -> Result<(), Fault> {
    let schedule = graph.schedule;
    for (rank, row) in schedule.actions.iter().enumerate() {
        for (step, &action) in row.iter().enumerate() {
            for input in graph.needs(action) {
                match steps[input] {
                    None => {
                        return Err(Fault::Missing { rank: schedule.rank_of(input.stage, input.micro), action: input });
                    }
                    Some(input_step) if schedule.rank_of(input.stage, input.micro) == rank && input_step > step => {
                        return Err(Fault::BeforeItsInput { rank, step, action, input, input_step });
                    }
                    Some(_) => {}
                }
            }
        }
    }
    Ok(())
}

/// Between each two ranks the n-th receive must take the n-th send. Expects every message to have both ends.
fn check_message_order(schedule: &Schedule) -> Result<(), Fault> {
    // (from, to) → the sends and the receives, each in the order of its rank.
    let mut channels: BTreeMap<(usize, usize), [Vec<Action>; 2]> = BTreeMap::new();
    for (rank, row) in schedule.actions.iter().enumerate() {
        for &action in row {
            let Some(other) = action.counterpart() else {
                continue;
            };
            let peer = schedule.rank_of(other.stage, other.micro);
            if action.kind.is_send() {
                channels.entry((rank, peer)).or_default()[0].push(action);
            } else {
                channels.entry((peer, rank)).or_default()[1].push(action);
            }
        }
    }
    for ((from, to), [sends, receives]) in channels {
        for (index, (sent, received)) in sends.into_iter().zip(receives).enumerate() {
            if sent.counterpart() != Some(received) {
                return Err(Fault::OutOfOrder { from, to, index, sent, received });
            }
        }
    }
    Ok(())
}

/// Checks that weights change where their [`Weights`] say, and only after the gradients that they need.
fn check_updates(graph: &Graph, steps: &Steps) -> Result<(), Fault> {
    if graph.schedule.is_forward_only() {
        return Ok(());
    }
    if graph.schedule.weights.is_synchronous() { check_flush(graph.schedule) } else { check_applied(graph, steps) }
}

/// Checks that there is no update, and that no stage starts a step before it has ended the previous one.
fn check_flush(schedule: &Schedule) -> Result<(), Fault> {
    let mut latest: Vec<Option<Action>> = vec![None; schedule.stages()];
    for (rank, row) in schedule.actions.iter().enumerate() {
        for (step, &action) in row.iter().enumerate() {
            if action.kind == Update {
                return Err(Fault::UpdateInFlush { rank, step, action });
            }
            if action.kind.is_message() {
                continue;
            }
            let before = latest[action.stage].replace(action);
            if let Some(before) =
                before.filter(|before| schedule.step_of(before.micro) > schedule.step_of(action.micro))
            {
                return Err(Fault::StepsOverlap { rank, step, action, before });
            }
        }
    }
    Ok(())
}

/// Checks that every gradient is applied, in order; with double-buffered weights a batch at a time.
fn check_applied(graph: &Graph, steps: &Steps) -> Result<(), Fault> {
    let schedule = graph.schedule;
    let last_of_batch = |micro: usize| (micro + 1).is_multiple_of(schedule.micros_per_step());
    // By stage: the first micro-batch whose gradient has not been applied.
    let mut next = vec![0; schedule.stages()];
    for (rank, row) in schedule.actions.iter().enumerate() {
        for (step, &action) in row.iter().enumerate().filter(|(_, action)| action.kind == Update) {
            let Action { stage, micro, .. } = action;
            if micro < next[stage] {
                return Err(Fault::UpdateOutOfOrder { rank, step, action, applied: next[stage] - 1 });
            }
            if schedule.weights == Weights::DoubleBuffered && !last_of_batch(micro) {
                return Err(Fault::UpdateInsideBatch { rank, step, action, per_batch: schedule.micros_per_step() });
            }
            for input in (next[stage]..=micro).map(|micro| graph.weight_gradient(stage, micro)) {
                match steps[input] {
                    Some(input_step) if input_step < step => {}
                    Some(input_step) => return Err(Fault::BeforeItsInput { rank, step, action, input, input_step }),
                    None => return Err(Fault::Missing { rank, action: input }),
                }
            }
            next[stage] = micro + 1;
        }
    }
    let left = next.iter().position(|&next| next != schedule.micros);
    if let Some(stage) = left {
        let action = Action::new(Update, stage, schedule.micros - 1);
        return Err(Fault::Missing { rank: schedule.rank_of(action.stage, action.micro), action });
    }
    if schedule.weights == Weights::DoubleBuffered {
        let ends = |(_, micro): &(usize, usize)| last_of_batch(*micro);
        for action in each(schedule).filter(ends).map(|(stage, micro)| Action::new(Update, stage, micro)) {
            if steps[action].is_none() {
                return Err(Fault::Missing { rank: schedule.rank_of(action.stage, action.micro), action });
            }
        }
    }
    Ok(())
}
