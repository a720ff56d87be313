//! The pipeline of a profiled step as a picture: as predicted from the times of its actions, and as it ran.

use super::probe::NAMES;
use super::{Profile, Track};
use meshwork_core::profile::{Class, Detail};
use meshwork_core::{Axis, Coords, Mesh};
use meshwork_engine::{Plan, TrainError};
use meshwork_pipeline::{Action, ActionKind, Costs, Interval, Schedule, Timeline, simulate};

/// The last step that every rank recorded, on the ranks with dp and tp rank 0: predicted and measured, in milliseconds.
/// `None` if nothing was profiled.
///
/// The prediction uses the average time of each stage's actions. On a machine with fewer cores than ranks, these times
/// include waiting for a core.
pub fn schedule_timelines(profile: &Profile, plan: &Plan) -> Result<Option<[Timeline; 2]>, TrainError> {
    let (mesh, schedule) = (&plan.mesh, plan.build_schedule()?);
    let Some(step) = profile.tracks.iter().map(|track| track.steps().max()).min().flatten() else { return Ok(None) };
    let ranks = (0..schedule.ranks).map(|pp_rank| of_step(&profile.tracks[place(mesh, pp_rank)], step)).collect();
    let measured = Timeline {
        name: format!("{}, measured (ms)", schedule.name),
        placement: schedule.placement.clone(),
        micros_per_step: schedule.micros_per_step(),
        ranks,
    };
    let predicted = simulate(&schedule, &costs(&schedule, &measured))?;
    Ok(Some([Timeline { name: format!("{}, predicted (ms)", schedule.name), ..predicted }, measured]))
}

fn place(mesh: &Mesh, pp_rank: usize) -> usize {
    mesh.rank_at(Coords::default().with(Axis::Pp, pp_rank))
}

/// The actions of a rank within a step.
fn of_step(track: &Track, step: u64) -> Vec<Interval> {
    let frame = |span: &&meshwork_core::profile::Span| span.class == Class::Step && span.detail == Detail::Step(step);
    let Some(frame) = track.spans.iter().find(frame) else { return Vec::new() };
    let within = track.spans.iter().filter(|span| span.start >= frame.start && span.end <= frame.end);
    let mut intervals: Vec<Interval> = within
        .filter_map(|span| {
            let (kind, _) = NAMES.iter().find(|(_, name)| *name == span.name)?;
            let Detail::Part { stage, micro } = span.detail else { return None };
            let ms = |ns: u64| ns as f64 / 1e6;
            Some(Interval { action: Action { kind: *kind, stage, micro }, start: ms(span.start), end: ms(span.end) })
        })
        .collect();
    intervals.sort_by(|a, b| a.start.total_cmp(&b.start));
    intervals
}

/// The average time of each part. Half of a whole backward counts as the gradient of the input.
fn costs(schedule: &Schedule, measured: &Timeline) -> Costs {
    let mean = |stage: usize, parts: &[(ActionKind, f64)]| {
        let (mut sum, mut count) = (0.0, 0);
        for Interval { action, start, end } in measured.ranks.iter().flatten().filter(|it| it.action.stage == stage) {
            if let Some((_, share)) = parts.iter().find(|(kind, _)| *kind == action.kind) {
                sum += share * (end - start);
                count += 1;
            }
        }
        if count == 0 { 0.0 } else { sum / f64::from(count) }
    };
    let of = |parts: &[(ActionKind, f64)]| (0..schedule.stages()).map(|stage| mean(stage, parts)).collect();
    Costs {
        forward: of(&[(ActionKind::Forward, 1.0)]),
        input_gradient: of(&[(ActionKind::InputGradient, 1.0), (ActionKind::Backward, 0.5)]),
        weight_gradient: of(&[(ActionKind::WeightGradient, 1.0), (ActionKind::Backward, 0.5)]),
        transfer: [0.0; 2],
        overlap: true,
    }
}
