//! The pipeline of a profiled step as a picture: as it should have run, by the times that its actions took, and as it ran.

use super::probe::NAMES;
use super::{Profile, Track};
use meshwork_core::profile::{Class, Detail};
use meshwork_core::{Axis, Coords, Mesh};
use meshwork_engine::{Plan, TrainError};
use meshwork_pipeline::{Action, ActionKind, Costs, Interval, Schedule, Timeline, simulate};

/// The last step that every rank saw, on the ranks with dp and tp rank 0: predicted and measured, in milliseconds. Nothing where
/// nothing was profiled.
///
/// The prediction takes what each stage's actions took on average. Where a rank waits for a core as well as for its neighbours, as
/// on a machine with fewer cores than ranks, that waiting is in the times of the actions.
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

/// What each part took on average. Of a whole backward, half is counted as the gradient of the input.
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
        transfer: 0.0,
        overlap: true,
    }
}
