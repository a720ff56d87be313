//! Every generator, over every small shape: valid, as deep and as idle as theory says.

use std::time::{Duration, Instant};

use meshwork_pipeline::{Costs, Generator, Schedule, Shape, check, forward_only, lower, simulate};

/// Every shape of a small sweep that the generator takes: p ≤ 8, v ≤ 4, m ≤ 16.
fn shapes(generator: Generator) -> impl Iterator<Item = Shape> {
    let micros = |pp, virtual_stages| (1..=16).map(move |micros| Shape { pp, virtual_stages, micros });
    let all = (1..=8).flat_map(move |pp| (1..=4).flat_map(move |virtual_stages| micros(pp, virtual_stages)));
    all.filter(move |&shape| generator.takes(shape).is_ok())
}

/// The messages that a micro-batch needs, both ends of each counted: two ways over each border between ranks.
fn messages(schedule: &Schedule) -> usize {
    4 * schedule.micros * schedule.placement.windows(2).filter(|pair| pair[0] != pair[1]).count()
}

#[test]
fn every_small_schedule_is_valid_and_lowers() {
    for generator in Generator::ALL {
        let mut count = 0;
        for shape in shapes(generator) {
            count += 1;
            for steps in [1, 3] {
                let at = format!("{} {shape:?} over {steps} steps", generator.name());
                let schedule = generator.build_steps(shape, steps).unwrap();
                assert_eq!((schedule.ranks, schedule.micros), (shape.pp, shape.micros * steps), "{at}");
                assert_eq!(schedule.weights.is_synchronous(), generator.is_synchronous(), "{at}");
                let lowered = lower(&schedule).unwrap_or_else(|error| panic!("{at}: {error}"));
                assert_eq!(lowered.peaks(), check(&schedule).unwrap().peaks, "{at}");
                let found = lowered.schedule().actions.iter().flatten().filter(|a| a.kind.is_message());
                assert_eq!(found.count(), messages(&schedule), "{at}");
                assert!(lowered.weight_gradients_in_order(), "{at}");
                assert!((0..schedule.stages()).all(|s| lowered.last_backward(s) == Some(schedule.micros - 1)), "{at}");
            }
        }
        assert!(count >= 30, "{} takes only {count} shapes", generator.name());
    }
}

/// The oracles are the closed forms of the papers, which the crate itself does not use. Times of a rank's layers: F, I
/// and W of 1 each, so that B is 2.
#[test]
fn bubbles_are_the_closed_forms() {
    for generator in Generator::ALL {
        for shape in shapes(generator) {
            let (p, v, m) = (shape.pp as f64, shape.virtual_stages as f64, shape.micros as f64);
            let bubble = match generator {
                Generator::Gpipe | Generator::OneFOneB | Generator::PipeDream | Generator::PipeDream2Bw => {
                    if generator == Generator::PipeDream && shape.micros < shape.pp {
                        continue;
                    }
                    3.0 * (p - 1.0)
                }
                Generator::Interleaved => 3.0 * (p - 1.0) / v,
                Generator::BreadthFirst if shape.micros >= shape.pp => 3.0 * (p - 1.0) / v,
                Generator::ZbH1 => p - 1.0,
                Generator::ZbH2 if shape.micros >= 2 * shape.pp - 1 => 0.0,
                Generator::ZbV if shape.micros >= 2 * shape.pp => 0.0,
                Generator::DualPipeV => (p - 1.0) / 2.0,
                _ => continue,
            };
            let schedule = generator.build(shape).unwrap();
            let timeline = simulate(&schedule, &Costs::per_rank(&schedule, 1.0, 1.0, 1.0)).unwrap();
            let at = format!("{} {shape:?}", generator.name());
            let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
            assert!(close(timeline.ideal(), 3.0 * m), "{at}: ideal {}", timeline.ideal());
            assert!(close(timeline.span() - timeline.ideal(), bubble), "{at}: {} not {bubble}", timeline.span());
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

/// A rack and more: up to two million actions each. The bound is loose (a slow machine under load), the growth is what
/// matters: anything quadratic takes minutes.
#[test]
fn large_schedules_are_proved_in_a_moment() {
    let start = Instant::now();
    for generator in Generator::ALL {
        let schedule = generator.build(generator.shape(64, 2048)).unwrap();
        let lowered = lower(&schedule).unwrap();
        let found = lowered.schedule().actions.iter().flatten().filter(|a| a.kind.is_message());
        assert_eq!(found.count(), messages(&schedule));
    }
    let placement: Vec<usize> = (0..64).collect();
    lower(&forward_only(&placement, 2048)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(60), "took {:?}", start.elapsed());
}
