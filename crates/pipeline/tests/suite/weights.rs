//! The version of the weights that a micro-batch uses, and the number that a rank holds, by the published rules.

use meshwork_pipeline::{Generator, Schedule, Weights, check, lower, pipedream, pipedream_2bw};

/// By stage, the version that each micro-batch uses.
fn versions(schedule: &Schedule) -> Vec<Vec<usize>> {
    let lowered = lower(schedule).unwrap();
    let of_stage = |stage| (0..schedule.micros).map(|micro| lowered.version(stage, micro)).collect();
    (0..schedule.stages()).map(of_stage).collect()
}

fn expected(schedule: &Schedule, version: impl Fn(usize, usize) -> usize) -> Vec<Vec<usize>> {
    let of_stage = |stage| (0..schedule.micros).map(|micro| version(stage, micro)).collect();
    (0..schedule.stages()).map(of_stage).collect()
}

/// w(t+1) = w(t) - lr ∇f(w_1(t-n+1), ..., w_n(t)): stage s of n is n - 1 - s updates behind (Harlap et al., section
/// 3.3).
#[test]
fn stashed_weights_are_as_old_as_the_way_to_the_end() {
    for pp in 1..=8 {
        let schedule = pipedream(pp, 4, 6);
        let old = |stage: usize, micro: usize| micro.saturating_sub(pp - 1 - stage);
        assert_eq!(versions(&schedule), expected(&schedule, old), "pp={pp}");
        let held: Vec<usize> = (0..pp).map(|rank| pp - rank).collect();
        assert_eq!(check(&schedule).unwrap().weight_versions, held);
    }
}

/// ∇f(w_1(t-n+1), ..., w_n(t-n+1)): the same version everywhere, which the last stage must keep as long as the first.
#[test]
fn vertical_sync_takes_one_version_through_all_stages() {
    for pp in 1..=8 {
        let schedule = Schedule { weights: Weights::VerticalSync, ..pipedream(pp, 4, 6) };
        assert_eq!(versions(&schedule), expected(&schedule, |_, micro| micro.saturating_sub(pp - 1)), "pp={pp}");
        assert_eq!(check(&schedule).unwrap().weight_versions, vec![pp; pp]);
    }
}

/// Micro-batch k of batches of m, counted from 0: max(⌊k/m⌋ - 1, 0) (Narayanan et al., 2021, section 3.1).
#[test]
fn double_buffered_weights_are_one_batch_old() {
    for pp in 1..=8 {
        for micros in pp..=pp + 3 {
            let schedule = pipedream_2bw(pp, micros, 5);
            let old = |_: usize, micro: usize| (micro / micros).saturating_sub(1);
            assert_eq!(versions(&schedule), expected(&schedule, old), "pp={pp}");
            let held = check(&schedule).unwrap().weight_versions;
            // With one rank nothing is in flight when a batch ends, but the next one still uses the old version.
            assert_eq!(held, vec![2; pp], "pp={pp} m={micros}");
        }
    }
    // Fewer micro-batches than ranks: a batch would need weights that do not exist yet.
    let error = check(&pipedream_2bw(4, 1, 8)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "schedule pipedream_2bw: rank 0, step 2: 0F2 needs version 1 of the weights of stage 0, which has only 0 \
         updates behind it by then"
    );
}

#[test]
fn synchronous_schedules_have_one_version_per_step() {
    for generator in Generator::ALL.into_iter().filter(|generator| generator.is_synchronous()) {
        let schedule = generator.build_steps(generator.shape(2, 4), 3).unwrap();
        assert_eq!(versions(&schedule), expected(&schedule, |_, micro| micro / 4), "{}", generator.name());
        assert_eq!(check(&schedule).unwrap().weight_versions, [1, 1]);
    }
}
