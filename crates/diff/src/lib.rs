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
use meshwork_tensor::Precision;
use program::Program;
use world::Run;

/// Runs `steps` steps on both sides, and compares each. In canonical numerics the first step with a divergence is the
/// last.
///
/// # Errors
/// Two sides that do not have the same operations and parameters, and a run that fails. A run that fails with a loss or
/// norm that is not finite is compared up to that point, and the report says so.
pub fn compare(sides: [&Side<'_>; 2], steps: u64) -> Result<Report, Error> {
    let programs = [Program::new(sides[0])?, Program::new(sides[1])?];
    compare_pair(sides, &Pair::new(programs.each_ref())?, steps)
}

/// The same for sides whose programs are known.
fn compare_pair(sides: [&Side<'_>; 2], pair: &Pair<'_>, steps: u64) -> Result<Report, Error> {
    let canonical = sides.iter().all(|side| side.plan.blocks().is_some());
    let half = sides.iter().any(|side| side.plan.precision == Precision::Bf16 || side.plan.mixed.is_some());
    let rounding = if half { ROUNDING_HALF } else { ROUNDING };
    let mut report = Report::new([sides[0].describe()?, sides[1].describe()?], canonical, rounding);
    std::thread::scope(|scope| {
        let mut worlds = [Run::start(scope, SIDES[0], sides[0])?, Run::start(scope, SIDES[1], sides[1])?];
        let mut compared = Ok(());
        for step in 1..=steps {
            let [a, b] = &mut worlds;
            let (Some(a), Some(b)) = (a.step(), b.step()) else { break };
            let over = a.report.is_none() || b.report.is_none();
            compared = pair.step(step, [a, b], &mut report);
            report.steps = step;
            if over || compared.is_err() || canonical && !report.identical() {
                break;
            }
        }
        for ended in worlds.map(Run::end) {
            match ended {
                // The values that led to the failure have been compared.
                Err(error) if !report.identical() && compared.is_ok() => {
                    report.failed.get_or_insert(error.to_string());
                }
                ended => ended?,
            }
        }
        compared
    })?;
    Ok(report)
}

/// A difference beyond this share of a value's largest element does not count as rounding. It is a hundred times the
/// difference between meshes.
const ROUNDING: f64 = 1e-3;

/// The same with products in bf16, whose operands are rounded to 8 bits, and with values stored in 16 bits.
const ROUNDING_HALF: f64 = 5e-2;
