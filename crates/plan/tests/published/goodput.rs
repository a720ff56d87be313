//! Checkpoint intervals against failures that are drawn, and against what is published.

use meshwork_plan::goodput::{Failures, Times};

const TIMES: Times = Times { save: 20.0, write: 0.0, recover: 120.0 };

/// The share of time that trains over many failures that are drawn one by one.
fn drawn(times: &Times, interval: f64, between: f64) -> f64 {
    let mut state = 1_u64;
    let mut until_failure = || {
        // A generator of Knuth's MMIX; the upper bits are uniform.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        -between * (((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64).ln()
    };
    let (mut clock, mut kept, mut failure) = (0.0, 0.0, until_failure());
    while kept < 3e4 * interval {
        if failure >= interval + times.save {
            (clock, kept, failure) = (clock + interval + times.save, kept + interval, failure - interval - times.save);
            continue;
        }
        clock += failure;
        // A recovery that fails begins anew.
        failure = until_failure();
        while failure < times.recover {
            clock += failure;
            failure = until_failure();
        }
        clock += times.recover;
        failure -= times.recover;
    }
    kept / clock
}

#[test]
fn the_share_is_that_of_failures_drawn_one_by_one() {
    for (interval, between) in [(300.0, 3600.0), (60.0, 600.0), (900.0, 1200.0)] {
        let (formula, drawn) = (TIMES.share(interval, between), drawn(&TIMES, interval, between));
        assert!((formula / drawn - 1.0).abs() < 0.02, "{interval}, {between}: {formula} {drawn}");
    }
}

#[test]
fn the_best_interval_beats_others_and_is_youngs_where_failures_are_rare() {
    for between in [600.0, 3600.0, 1e6] {
        let best = TIMES.best(between);
        for other in [0.5, 0.9, 1.1, 2.0] {
            assert!(TIMES.share(other * best.interval, between) < best.share, "{between}, {other}");
        }
    }
    let rare = TIMES.best(1e8).interval;
    assert!((rare / (2.0_f64 * 20.0 * 1e8).sqrt() - 1.0).abs() < 0.01, "{rare}");
}

/// Published shares: 97% of 9,600 cards; about 80% of 100,000 with recoveries of 3 minutes, and far less with 10.
#[test]
fn published_shares_are_about_right() {
    let failures = Failures::published().unwrap();
    assert_eq!(failures.hours(16384), 1.8);
    assert!((failures.hours(512) - 15.8).abs() < 1e-9, "as often as a card of 1024");
    let hours: Vec<f64> = [8, 64, 1000, 9600, 100_000, 200_000].iter().map(|&cards| failures.hours(cards)).collect();
    assert!(hours.windows(2).all(|pair| pair[0] > pair[1]), "{hours:?}");
    let share = |cards: usize, recover: f64| {
        Times { save: 1.0, write: 10.0, recover }.best(3600.0 * failures.hours(cards)).share
    };
    assert!((share(9_600, 180.0) - 0.97).abs() < 0.03, "{}", share(9_600, 180.0));
    assert!((share(100_000, 180.0) - 0.80).abs() < 0.08, "{}", share(100_000, 180.0));
    assert!(share(100_000, 600.0) < 0.60, "{}", share(100_000, 600.0));
}
