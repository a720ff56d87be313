#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod align;
mod compare;
mod comparison;
mod divergence;
mod fault;
mod global;
mod program;
mod report;
mod run;
mod side;
mod ulps;
mod world;

pub use divergence::{Between, Broken, Divergence, Location, Vector};
pub use report::{Report, Row};
pub use side::{BeforeStep, Error, Hook, Side, Site, Wrap};
pub use ulps::Spread;

use compare::Pair;
pub use compare::SIDES;
pub use comparison::Comparison;
use fault::Break;
use meshwork_core::World;
use program::Program;
use world::{Before, Comparing};

/// Runs `steps` steps on both sides, in threads of this process, and compares each. In canonical numerics the first
/// step with a divergence is the last.
///
/// # Errors
/// Two sides that do not have the same operations and parameters, and a run that fails. A run that fails with a loss or
/// norm that is not finite is compared up to that point, and the report says so.
pub fn compare(sides: [&Side<'_>; 2], steps: u64) -> Result<Report, Error> {
    Ok(of_rank_0(compare_in(&World::Threads(Comparing::ranks(sides)), sides, steps)?))
}

/// The report of a world of threads.
fn of_rank_0(report: Option<Report>) -> Report {
    report.unwrap_or_else(|| unreachable!("rank 0 is a thread of this process"))
}

/// [`compare`] in any world of as many ranks as the larger mesh has: the smaller one has the first of them. In each
/// process of a [joined](World::Joined) world it is called with the same sides; the process that has rank 0 gets the
/// report.
///
/// # Errors
/// As [`compare`], and a world of another size.
pub fn compare_in(world: &World, sides: [&Side<'_>; 2], steps: u64) -> Result<Option<Report>, Error> {
    let programs = [Program::new(sides[0])?, Program::new(sides[1])?];
    compare_pair(world, sides, &Pair::new(programs.each_ref())?, steps, (None, &|_| Ok(())))
}

/// The same for sides whose programs are known, with the fault of side B, and what ranks do before the first step.
fn compare_pair(
    world: &World,
    sides: [&Side<'_>; 2],
    pair: &Pair<'_>,
    steps: u64,
    (fault, before): (Option<&Break>, &Before<'_>),
) -> Result<Option<Report>, Error> {
    let canonical = sides.iter().all(|side| side.plan.blocks().is_some());
    // A difference beyond this share of a value's largest element does not count as rounding.
    let rounding = sides.iter().map(|side| side.plan.rounding()).fold(0.0, f64::max);
    let report = Report::new([sides[0].describe()?, sides[1].describe()?], canonical, rounding);
    Comparing { sides, pair, steps, fault, before }.run(world, &report)
}
