//! Proves that a schedule is one.

use std::collections::{BTreeMap, HashSet};

use super::ActionKind::{Backward, Forward, SendActivation, SendGradient};
use super::needs::{Form, Table, needs};
use super::render::stuck_grid;
use super::walk::{Walk, walk};
use super::{Action, CheckError, Fault, Report, Schedule};

/// Proves a schedule without messages: every part of every (stage, micro) runs exactly once, on the rank of its
/// stage, after its inputs, and no timing makes ranks wait in a circle.
///
/// Schedules with messages are proved when a [`Lowered`](crate::Lowered) is made of them.
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
    prove(schedule, Form::Plain)
}

/// [`check`] for either form.
pub(super) fn prove(schedule: &Schedule, form: Form) -> Result<Report, CheckError> {
    let proof = || {
        check_shape(schedule)?;
        let steps = locate(schedule, form)?;
        check_complete(schedule, form, &steps)?;
        check_local_order(schedule, form, &steps)?;
        check_message_order(schedule)?;
        match walk(schedule, form) {
            Walk::Done(starts) => Ok(Report::new(schedule, starts)),
            Walk::Stuck(reached) => Err(Fault::Deadlock { grid: stuck_grid(schedule, form, &reached) }),
        }
    };
    proof().map_err(|fault| CheckError { schedule: schedule.name.clone(), fault })
}

/// The step of each action on its rank; none where it does not occur.
type Steps = Table<Option<usize>>;

fn check_shape(schedule: &Schedule) -> Result<(), Fault> {
    let (ranks, stages, micros) = (schedule.ranks, schedule.stages(), schedule.micros);
    if ranks == 0 || stages == 0 || micros == 0 {
        return Err(Fault::Empty { ranks, stages, micros });
    }
    if schedule.actions.len() != ranks {
        return Err(Fault::RowCount { ranks, rows: schedule.actions.len() });
    }
    let mut holds = vec![false; ranks];
    for (stage, &rank) in schedule.placement.iter().enumerate() {
        *holds.get_mut(rank).ok_or(Fault::Placement { stage, rank, ranks })? = true;
    }
    if let Some(rank) = holds.iter().position(|holds| !holds) {
        return Err(Fault::IdleRank { rank, ranks, stages });
    }
    // Fewer actions than forwards that must be: find one that is missing here, before anything of the size of
    // `micros` is allocated, which a schedule written by hand may set to any number.
    let actions = schedule.actions.iter().flatten();
    if actions.clone().count() < stages.saturating_mul(micros) {
        let present: HashSet<Action> = actions.copied().collect();
        let missing = each(schedule)
            .map(|(stage, micro)| Action::new(Forward, stage, micro))
            .find(|action| !present.contains(action));
        if let Some(action) = missing {
            let rank = schedule.placement[action.stage];
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

/// Finds every action, and refuses those that should not be where they are.
fn locate(schedule: &Schedule, form: Form) -> Result<Steps, Fault> {
    let (stages, micros) = (schedule.stages(), schedule.micros);
    let mut steps = Steps::new(schedule, None);
    for (rank, row) in schedule.actions.iter().enumerate() {
        for (step, &action) in row.iter().enumerate() {
            if action.stage >= stages || action.micro >= micros {
                return Err(Fault::OutOfRange { rank, step, action, stages, micros });
            }
            let home = schedule.placement[action.stage];
            if home != rank {
                return Err(Fault::WrongRank { rank, step, action, home });
            }
            if action.kind.is_message() {
                if form == Form::Plain {
                    return Err(Fault::MessageInPlain { rank, step, action });
                }
                let peer = action.peer_stage().and_then(|peer| schedule.placement.get(peer));
                if peer.is_none_or(|&peer| peer == rank) {
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

/// Every part of every (stage, micro) is there, and every message that crosses ranks with both of its ends.
fn check_complete(schedule: &Schedule, form: Form, steps: &Steps) -> Result<(), Fault> {
    let trains = !schedule.is_forward_only();
    let parts: &[_] = if trains { &[Forward, Backward] } else { &[Forward] };
    for (stage, micro) in each(schedule) {
        for &kind in parts {
            let action = Action::new(kind, stage, micro);
            if steps[action].is_none() {
                let rank = schedule.placement[stage];
                return Err(Fault::Missing { rank, action });
            }
        }
    }
    for (stage, micro) in each(schedule) {
        if form == Form::Lowered && schedule.crosses_after(stage) {
            let activation = Action::new(SendActivation, stage, micro);
            let gradient = Action::new(SendGradient, stage + 1, micro);
            check_message(schedule, steps, activation, true)?;
            // Sent all the same where nothing trains, it is a `Missing` backward when its order is checked.
            check_message(schedule, steps, gradient, trains)?;
        }
    }
    Ok(())
}

fn check_message(schedule: &Schedule, steps: &Steps, send: Action, required: bool) -> Result<(), Fault> {
    let Some(receive) = send.counterpart() else {
        return Ok(());
    };
    let from = schedule.placement[send.stage];
    let to = schedule.placement[receive.stage];
    match (steps[send].is_some(), steps[receive].is_some()) {
        (true, false) => Err(Fault::SendWithoutReceive { send, from, receive, to }),
        (false, true) => Err(Fault::ReceiveWithoutSend { receive, to, send, from }),
        (false, false) if required => Err(Fault::MissingMessage { send, from, receive, to }),
        _ => Ok(()),
    }
}

/// What an action needs from its own rank must stand before it: plain to say, where the walk would only get stuck.
fn check_local_order(schedule: &Schedule, form: Form, steps: &Steps) -> Result<(), Fault> {
    for (rank, row) in schedule.actions.iter().enumerate() {
        for (step, &action) in row.iter().enumerate() {
            for input in needs(schedule, form, action) {
                match steps[input] {
                    None => {
                        return Err(Fault::Missing { rank: schedule.placement[input.stage], action: input });
                    }
                    Some(input_step) if schedule.placement[input.stage] == rank && input_step > step => {
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
            let peer = schedule.placement[other.stage];
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
