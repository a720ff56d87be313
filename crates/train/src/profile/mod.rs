//! Where a step's time goes: `metrics.profile = true`.
//!
//! ```text
//! Profiler (a process) ── Probe (a rank) ── spans ──▶ Track ── to rank 0 ─┐
//!   │                     around device, communicator, step               ├─▶ Profile ── slices ──▶ table, trace, schedule
//!   └── Ceilings (measured before the run) ───────────────────────────────┘
//! ```
//! It profiles any model, any plan and any data; a run of a [configuration](crate::train()) uses it for
//! `metrics.profile`.
//!
//! Spans are plain data ([`meshwork_core::profile`]), recorded without communication between the ranks, and gathered
//! and evaluated when the run is over. A run without a profile is unchanged: nothing is decorated.
//!
//! [`layers`] is separate: it measures each layer by itself, for the planner of partitions.

mod ceilings;
mod layers;
mod probe;
mod schedule;
mod slices;
mod table;
mod trace;
mod track;

pub use ceilings::{Ceilings, best};
pub use layers::{layers, write_layers};
pub use probe::{Probe, Profiler};
pub use schedule::schedule_timelines;
pub use slices::{Slice, SliceKind, machine_time, slices};
pub use table::{Row, Rows};
pub use trace::write_trace;
pub use track::Track;

use crate::error::RankError;
use meshwork_core::Axis;
use meshwork_engine::Plan;
use meshwork_pipeline::svg;
use std::path::Path;

/// Says where the time of a step of `plan` went. Writes the timeline of every rank to `trace`, and a picture of the
/// pipeline, if it has several ranks, to `schedule`.
///
/// # Errors
/// When a file cannot be written.
pub fn report(profile: &Profile, plan: &Plan, trace: &Path, schedule: &Path) -> Result<String, RankError> {
    write_trace(profile, trace)?;
    let mut text = format!(
        "{}\nThe timeline of every rank is in {}; https://ui.perfetto.dev opens it.\n",
        Rows::new(profile),
        trace.display()
    );
    if plan.mesh.degree(Axis::Pp) > 1
        && let Some([predicted, measured]) = schedule_timelines(profile, plan)?
    {
        trace::write(schedule, svg(&[&predicted, &measured]).as_bytes())?;
        text += &format!(
            "The pipeline is in {}: idle for {:.0}% of a step as predicted from the times of its actions, {:.0}% as it \
             ran.\n",
            schedule.display(),
            100.0 * predicted.bubble_of_total(),
            100.0 * measured.bubble_of_total()
        );
    }
    Ok(text)
}

/// Some steps of all ranks, on one clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Tracks by world rank.
    pub tracks: Vec<Track>,
    /// Measured peaks of the machine.
    pub ceilings: Ceilings,
}
