//! A comparison as the ranks of one world run it. Of two meshes the smaller has the first ranks of the world.
//!
//! ```text
//! each rank:  a step of A ─▶ what it saw, to rank 0 ─▶ a step of B ─▶ what it saw, to rank 0 ─▶ rank 0 compares
//! ```
//! Ranks of the process that has rank 0 put what they saw into its memory; those of other processes send it.

use super::compare::{Pair, SIDES};
use super::fault::Break;
use super::report::Report;
use super::run::{Run, Saw, Stepped};
use super::side::{Error, Side};
use meshwork_core::comm::thread::Options;
use meshwork_core::{Cause, Group, World};
use meshwork_engine::TrainError;
use std::sync::{Mutex, PoisonError};

/// A comparison under way: what its ranks have in common.
pub(super) struct Comparing<'a> {
    pub(super) sides: [&'a Side<'a>; 2],
    pub(super) pair: &'a Pair<'a>,
    pub(super) steps: u64,
    /// The fault of side B, whose hook injects it.
    pub(super) fault: Option<&'a Break>,
    /// What the ranks of several processes compare before the first step.
    pub(super) before: &'a Before<'a>,
}

/// What ranks do before the first step. Collective over the world.
pub(super) type Before<'a> = dyn Fn(&Group) -> Result<(), Cause> + Sync + 'a;

/// What the ranks of this process saw of each side, where rank 0 is one of them.
type Here = [Mutex<Vec<Saw>>; 2];

/// The error of a rank in a step of a side.
#[derive(Debug, thiserror::Error)]
#[error("side {side}: {error}")]
struct OfSide {
    side: char,
    error: TrainError,
}

impl<'a> Comparing<'a> {
    /// Ranks of the larger of the two meshes.
    pub(super) fn ranks(sides: [&Side<'_>; 2]) -> usize {
        sides.map(|side| side.plan.mesh.world_size()).into_iter().max().unwrap_or_default()
    }

    /// Runs both sides. The report begins as `report`; only the process that has rank 0 gets it.
    ///
    /// # Errors
    /// A rank that failed; a world of another size than the larger mesh; values that have no counterpart.
    pub(super) fn run(&self, world: &World, report: &Report) -> Result<Option<Report>, Error> {
        let ranks = Self::ranks(self.sides);
        if let World::Joined(joined) = world
            && let Some(size) = joined.first().map(|rank| rank.size()).filter(|&size| size != ranks)
        {
            let problem = format!("the larger mesh has {ranks} ranks, and the world has {size}");
            return Err(Error::Structure(problem));
        }
        let timeout = self.sides.map(|side| side.timeout).into_iter().max().unwrap_or_default();
        let here = world.leads().then(Here::default);
        let ended = world.run_with(Options { timeout }, |world| self.on_rank(&world, here.as_ref(), report.clone()))?;
        ended.into_iter().flatten().next().transpose()
    }

    /// Runs both sides on one rank. The result is that of rank 0, and none of the others.
    fn on_rank(
        &self,
        world: &Group,
        here: Option<&Here>,
        mut report: Report,
    ) -> Result<Option<Result<Report, Error>>, Cause> {
        (self.before)(world)?;
        let of_side = |side: usize| move |error| OfSide { side: SIDES[side], error };
        let mut runs = [
            Run::start(SIDES[0], self.sides[0], world).map_err(of_side(0))?,
            Run::start(SIDES[1], self.sides[1], world).map_err(of_side(1))?,
        ];
        for step in 1..=self.steps {
            let mut stepped = <[Stepped; 2]>::default();
            for (side, run) in runs.iter_mut().enumerate() {
                let saw = run.as_mut().map(Run::step).transpose().map_err(of_side(side))?;
                let change = self.fault.filter(|_| side == 1).and_then(Break::change);
                let saw = saw.map(|saw| saw.with_change(change));
                gather(world, here.map(|here| &here[side]), saw, |saw| stepped[side].add(saw))?;
            }
            let mut ended = None;
            if world.rank() == 0 {
                ended = self.compared(step, stepped, &mut report, &|| world.heartbeat());
            }
            if world.broadcast_bytes(vec![ended.is_some().into()], 0)? != [0] {
                return Ok(ended.map(|ended| ended.map(|()| report)));
            }
        }
        Ok((world.rank() == 0).then_some(Ok(report)))
    }

    /// Compares a step. Returns how the comparison ended, if it did before its last step.
    fn compared(
        &self,
        step: u64,
        mut stepped: [Stepped; 2],
        report: &mut Report,
        alive: &dyn Fn(),
    ) -> Option<Result<(), Error>> {
        if let (Some(fault), Some(change)) = (self.fault, stepped[1].change.take()) {
            report.broken.get_or_insert_with(|| fault.broken(change));
        }
        let failed = [0, 1].map(|side| Some((SIDES[side], stepped[side].failed.take()?)));
        report.steps = step;
        if let Err(error) = self.pair.step(step, stepped, report, alive) {
            return Some(Err(error));
        }
        match failed.into_iter().flatten().next() {
            Some((side, error)) if report.identical() => return Some(Err(Error::Step { side, error })),
            // The values that led to the failure have been compared.
            Some((side, error)) => report.failed = Some(format!("side {side}: {error}")),
            None if report.identical() || !report.canonical => return None,
            None => {}
        }
        Some(Ok(()))
    }
}

/// Brings what each rank saw to rank 0, where `take` gets it, in any order; `here` is there in the process that has
/// rank 0. Collective over the world.
fn gather(world: &Group, here: Option<&Mutex<Vec<Saw>>>, saw: Option<Saw>, take: impl FnMut(Saw)) -> Result<(), Cause> {
    let mut message = Vec::new();
    match (saw, here) {
        (Some(saw), Some(here)) => here.lock().unwrap_or_else(PoisonError::into_inner).push(saw),
        (Some(saw), None) => message = postcard::to_stdvec(&saw)?,
        (None, _) => {}
    }
    let messages = world.gather_bytes(message)?;
    if world.rank() == 0 {
        let mut all = here
            .map(|here| std::mem::take(&mut *here.lock().unwrap_or_else(PoisonError::into_inner)))
            .unwrap_or_default();
        for message in messages.iter().filter(|message| !message.is_empty()) {
            all.push(postcard::from_bytes(message)?);
        }
        all.into_iter().for_each(take);
    }
    Ok(())
}
