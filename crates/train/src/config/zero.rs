//! Checks of ZeRO: its stage, and the ranks that share out.

use super::Config;
use super::fault::Fault;
use super::settings::Settings;
use meshwork_core::Axis;

/// The highest stage.
const STAGES: usize = 3;

/// Adds the faults of ZeRO to `settings`.
pub(crate) fn check(config: &Config, settings: &mut Settings) {
    let mesh = &config.parallelism;
    let (key, dp, cp, ep, group) =
        ("parallelism.zero_stage", "parallelism.dp", "parallelism.cp", "parallelism.ep", "parallelism.zero_group");
    let (stage, ranks) = (mesh.zero_stage, mesh.zero_group);
    // Of the ranks that share out experts, those of dp.
    let of_dp = config.mesh().map_or(1, |mesh| mesh.degree(Axis::Ep));
    let mut faults = Vec::new();
    let mut fail = |key: &str, value: usize, problem: String, valid: String| {
        faults.push(Fault::new(key, value, problem, valid));
    };
    if settings.sound(&[key]) && stage > STAGES {
        fail(key, stage, "there is no such stage".to_owned(), format!("use one of 0 to {STAGES}"));
    } else if settings.sound(&[key, dp, cp]) && stage > 0 && mesh.dp == 1 && mesh.cp == 1 {
        fail(
            key,
            stage,
            format!("no ranks to share out with: {dp} = 1"),
            format!("use {dp} or {cp} of at least 2, or 0"),
        );
    }
    if settings.sound(&[key, group]) && ranks > 0 && stage == 0 {
        fail(group, ranks, format!("shares out nothing with {key} = 0"), format!("use {key} of 1 to {STAGES}, or 0"));
    } else if settings.sound(&[group, dp]) && ranks > 0 && !mesh.dp.is_multiple_of(ranks) {
        let valid = "use a divisor, or 0 for all of dp".to_owned();
        fail(group, ranks, format!("does not divide {dp} = {}", mesh.dp), valid);
    } else if settings.sound(&[group, dp, ep])
        && ranks > 0
        && !ranks.is_multiple_of(of_dp)
        && !of_dp.is_multiple_of(ranks)
    {
        let problem = format!("would hold other numbers of each expert with {ep} = {}", mesh.ep);
        fail(group, ranks, problem, format!("use a multiple or a divisor of {ep}"));
    }
    settings.faults.append(&mut faults);
}
