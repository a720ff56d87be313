//! The learning rate at each step, by hand.

use meshwork_optim::{Decay, LrSchedule};

fn rates(schedule: LrSchedule, steps: u64) -> Vec<f64> {
    (1..=steps).map(|step| schedule.lr(step)).collect()
}

const PLAIN: LrSchedule =
    LrSchedule { base: 2.0, warmup_steps: 0, decay: Decay::None, decay_steps: 4, min_lr_factor: 0.0 };

#[test]
fn without_warm_up_and_decay_the_rate_is_constant() {
    assert_eq!(rates(PLAIN, 6), [2.0; 6]);
}

#[test]
fn warm_up_climbs_from_one_nth_to_the_full_rate() {
    let schedule = LrSchedule { warmup_steps: 4, ..PLAIN };
    assert_eq!(rates(schedule, 6), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]);
}

#[test]
fn linear_decay_starts_full_and_reaches_the_floor_after_decay_steps() {
    let schedule = LrSchedule { decay: Decay::Linear, min_lr_factor: 0.5, ..PLAIN };
    assert_eq!(rates(schedule, 6), [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]);
}

#[test]
fn cosine_decay_is_half_way_in_the_middle() {
    let schedule = LrSchedule { warmup_steps: 2, decay: Decay::Cosine, decay_steps: 6, min_lr_factor: 0.1, ..PLAIN };
    let third = 0.1 + 0.9 * 0.5 * (1.0 + 0.5f64.sqrt());
    let fifth = 0.1 + 0.9 * 0.5 * (1.0 - 0.5f64.sqrt());
    let expected = [1.0, 2.0, 2.0, 2.0 * third, 1.1, 2.0 * fifth, 0.2, 0.2];
    for (rate, expected) in rates(schedule, 8).into_iter().zip(expected) {
        assert!((rate - expected).abs() < 1e-15, "{rate} is not {expected}");
    }
}

#[test]
fn a_decay_that_ends_inside_the_warm_up_goes_straight_to_the_floor() {
    let schedule = LrSchedule { warmup_steps: 3, decay: Decay::Linear, decay_steps: 2, min_lr_factor: 0.25, ..PLAIN };
    assert_eq!(rates(schedule, 5)[2..], [2.0, 0.5, 0.5]);
}

#[test]
fn extreme_steps_stay_finite() {
    for decay in [Decay::None, Decay::Linear, Decay::Cosine] {
        for warmup_steps in [0, 1, u64::MAX] {
            for decay_steps in [0, 1, u64::MAX] {
                let schedule = LrSchedule { warmup_steps, decay, decay_steps, ..PLAIN };
                for step in [0, 1, 2, u64::MAX] {
                    let lr = schedule.lr(step);
                    assert!((0.0..=2.0).contains(&lr), "{schedule:?} at {step} gives {lr}");
                }
            }
        }
    }
}
