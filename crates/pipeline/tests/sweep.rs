//! Every generator, over every small size: valid, and as deep and as idle as theory says.

use std::time::{Duration, Instant};

use meshwork_pipeline::{Generator, check, forward_only, lower};

#[test]
fn every_small_schedule_is_valid_and_lowers() {
    for generator in Generator::ALL {
        for pp in 1..=8 {
            for micros in 1..=16 {
                let at = format!("{} pp={pp} m={micros}", generator.name());
                let Ok(schedule) = generator.build(pp, micros) else {
                    assert!(micros < generator.min_micros(pp), "{at}");
                    continue;
                };
                assert!(micros >= generator.min_micros(pp), "{at}");
                let report = check(&schedule).unwrap();
                // The oracles: closed forms, which the crate itself does not use.
                let peaks: Vec<usize> = match generator {
                    Generator::OneFOneB => (0..pp).map(|rank| pp - rank).collect(),
                    _ => vec![micros; pp],
                };
                assert_eq!(report.peaks, peaks, "{at}");
                assert_eq!((report.span, report.ideal), (2 * (micros + pp - 1), 2 * micros), "{at}");
                assert_eq!(report.bubble(), (pp - 1) as f64 / (micros + pp - 1) as f64, "{at}");

                let lowered = lower(&schedule).unwrap();
                let messages = lowered.schedule().actions.iter().flatten().filter(|a| a.kind.is_message());
                assert_eq!(messages.count(), 4 * (pp - 1) * micros, "{at}");
                assert_eq!(lowered.report().span, report.span, "{at}: messages take no time");
                assert_eq!(lowered.peaks(), peaks, "{at}");
                assert!((0..pp).all(|stage| lowered.last_backward(stage) == Some(micros - 1)), "{at}");
            }
        }
    }
}

/// Forward-only holds for any placement at all: here every way to put up to 5 stages on up to 3 ranks.
#[test]
fn forward_only_is_valid_for_any_placement() {
    for stages in 1..=5_u32 {
        for code in 0..3_usize.pow(stages) {
            let placement: Vec<usize> = (0..stages).map(|stage| code / 3_usize.pow(stage) % 3).collect();
            let ranks = 1 + placement.iter().max().unwrap();
            if (0..ranks).any(|rank| !placement.contains(&rank)) {
                continue;
            }
            let schedule = forward_only(&placement, 3);
            let lowered = lower(&schedule).unwrap_or_else(|error| panic!("{placement:?}: {error}"));
            assert_eq!(lowered.peaks(), vec![0; ranks], "nothing is kept for a backward");
            assert!(schedule.is_forward_only());
        }
    }
}

/// A rack and more: half a million actions each. The bound is loose (a slow machine under load), the growth is what
/// matters: anything quadratic takes minutes.
#[test]
fn large_schedules_are_proved_in_a_moment() {
    let start = Instant::now();
    for generator in Generator::ALL {
        let lowered = lower(&generator.build(64, 2048).unwrap()).unwrap();
        let actions = lowered.schedule().actions.iter().map(Vec::len).sum::<usize>();
        assert_eq!(actions, 2048 * (2 * 64 + 4 * 63));
    }
    let placement: Vec<usize> = (0..64).collect();
    lower(&forward_only(&placement, 2048)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(10), "took {:?}", start.elapsed());
}
