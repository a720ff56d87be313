//! Every generator, over every small shape: valid, with the activations and bubbles of the closed forms.

use meshwork_pipeline::{Costs, Generator, Schedule, Shape, check, forward_only, lower, simulate};
use std::time::{Duration, Instant};

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
        let fewest = shapes(generator).filter(|shape| shape.pp == 8).map(|shape| shape.micros).min();
        let any = ["gpipe", "1f1b", "breadth_first", "zb_h1", "pipedream"].contains(&generator.name());
        assert_eq!(fewest == Some(1), any, "{}: {fewest:?}", generator.name());
    }
}

/// Times of F, I and W of a rank's layers. ZB-H1's closed form is for W ≤ F; B is I and W together.
const COSTS: [[f64; 3]; 7] = [
    [1.0, 1.0, 1.0],
    [1.0, 2.0, 1.0],
    [1.0, 1.5, 0.5],
    [10.0, 11.0, 9.0],
    [2.0, 1.0, 1.5],
    [1.0, 1.0, 0.0],
    [0.5, 1.25, 0.5],
];

/// The bubble of one step in theory.
enum Bubble {
    Exactly(f64),
    AtMost(f64),
}

/// The oracles are the closed forms of the papers, which the crate itself does not use.
fn bubble(generator: Generator, shape: Shape, [f, i, w]: [f64; 3]) -> Option<Bubble> {
    let Shape { pp, virtual_stages, micros } = shape;
    let (ranks, chunks) = ((pp - 1) as f64, virtual_stages as f64);
    let equal = f == i && i == w;
    Some(match generator {
        Generator::Gpipe | Generator::OneFOneB | Generator::PipeDream2Bw => Bubble::Exactly(ranks * (f + i + w)),
        Generator::PipeDream if micros >= pp => Bubble::Exactly(ranks * (f + i + w)),
        Generator::Interleaved => Bubble::Exactly(ranks * (f + i + w) / chunks),
        Generator::BreadthFirst if micros >= pp => Bubble::Exactly(ranks * (f + i + w) / chunks),
        // Each rank but the first defers the weight gradient of one more micro-batch than the previous rank, if there
        // is one.
        Generator::ZbH1 if w <= f => Bubble::Exactly(ranks * (f + i) - (micros.min(pp) - 1) as f64 * w),
        Generator::ZbH2 if micros >= 2 * pp - 1 => Bubble::Exactly((ranks * (f + i - 2.0 * w)).max(0.0)),
        Generator::ZbV if micros >= 2 * pp && equal => Bubble::Exactly(0.0),
        // (p - 1)(F&B + B - 3W) in times of chunks; F&B is F + B where nothing overlaps.
        Generator::DualPipeV => Bubble::AtMost(ranks * (f + (i + w) + (i + w) - 3.0 * w) / 2.0),
        _ => return None,
    })
}

#[test]
fn bubbles_are_the_closed_forms() {
    for generator in Generator::ALL {
        let mut held = 0;
        for (shape, costs) in shapes(generator).flat_map(|shape| COSTS.map(|costs| (shape, costs))) {
            let Some(expected) = bubble(generator, shape, costs) else {
                continue;
            };
            let schedule = generator.build(shape).unwrap();
            let [f, i, w] = costs;
            let timeline = simulate(&schedule, &Costs::per_rank(&schedule, f, i, w)).unwrap();
            let at = format!("{} {shape:?} {costs:?}", generator.name());
            let ideal = shape.micros as f64 * (f + i + w);
            assert!((timeline.ideal() - ideal).abs() < 1e-9 * ideal, "{at}: ideal {}", timeline.ideal());
            let found = timeline.span() - ideal;
            match expected {
                Bubble::Exactly(bubble) => {
                    assert!((found - bubble).abs() < 1e-9 * ideal, "{at}: {found}, not {bubble}")
                }
                Bubble::AtMost(bubble) => assert!(found <= bubble + 1e-9 * ideal, "{at}: {found}, more than {bubble}"),
            }
            assert!((timeline.bubble_of_ideal() - found / ideal).abs() < 1e-9, "{at}");
            assert!((timeline.bubble_of_total() - found / timeline.span()).abs() < 1e-9, "{at}");
            held += 1;
        }
        assert!(held >= 10, "{}: theory had a word on only {held} shapes", generator.name());
    }
}

/// In units of one rank's activations of one micro-batch.
#[test]
fn peaks_of_activations_are_the_closed_forms() {
    for generator in Generator::ALL {
        for shape in shapes(generator) {
            let (pp, micros, chunks) = (shape.pp as f64, shape.micros as f64, shape.virtual_stages as f64);
            let schedule = generator.build(shape).unwrap();
            let peaks = simulate(&schedule, &Costs::unit(&schedule)).unwrap().peak_activations();
            let at = format!("{} {shape:?}: {peaks:?}", generator.name());
            let peak = peaks.iter().copied().fold(0.0, f64::max);
            match generator {
                Generator::Gpipe | Generator::BreadthFirst => assert!(peaks.iter().all(|&peak| peak == micros), "{at}"),
                Generator::OneFOneB | Generator::PipeDream | Generator::PipeDream2Bw => {
                    let expected = (0..shape.pp).map(|rank| (pp - rank as f64).min(micros));
                    assert_eq!(peaks, expected.collect::<Vec<_>>(), "{at}");
                }
                Generator::Interleaved => {
                    let expected = (pp * (1.0 + (pp - 1.0) / (pp * chunks))).min(micros);
                    assert!((peak - expected).abs() < 1e-9, "{at}");
                }
                Generator::ZbH1 => assert!(peaks.iter().all(|&peak| peak == pp.min(micros)), "{at}"),
                Generator::ZbH2 => assert_eq!(peak, (2.0 * pp - 1.0).min(micros), "{at}"),
                Generator::ZbV if micros >= 2.0 * pp => assert!(peaks.iter().all(|&peak| peak == pp), "{at}"),
                Generator::ZbV => assert!(peak <= pp, "{at}"),
                Generator::DualPipeV => assert!(peak <= pp + 0.5, "{at}"),
                other => panic!("no closed form for {}", other.name()),
            }
            // The proof counts the same, in chunks.
            let counted = check(&schedule).unwrap().peaks;
            assert_eq!(counted, peaks.iter().map(|peak| (peak * chunks) as usize).collect::<Vec<_>>(), "{at}");
        }
    }
}

/// GPipe's speed-up over one rank, K·M/(M + K - 1), rounded as it is tabulated: rows of M, columns of K = 2, 4, 8.
#[test]
fn the_ideal_speedup_of_gpipe_is_as_tabulated() {
    for (micros, row) in [(1, [1.0, 1.0, 1.0]), (4, [1.6, 2.29, 2.91]), (32, [1.94, 3.66, 6.56])] {
        for (pp, expected) in [2, 4, 8].into_iter().zip(row) {
            let schedule = Generator::Gpipe.build(Generator::Gpipe.shape(pp, micros)).unwrap();
            let speedup = simulate(&schedule, &Costs::per_rank(&schedule, 1.0, 1.0, 1.0)).unwrap().speedup();
            assert_eq!((100.0 * speedup).round() / 100.0, expected, "K={pp} M={micros}: {speedup}");
        }
    }
}

/// With no barrier between steps, a rank that would idle at the end of one step works on the next. Zero-bubble
/// schedules lose nothing in any number of steps, and schedules that wait inside a step lose the same in each.
#[test]
fn steps_without_a_barrier_lose_what_is_inside_of_each() {
    for generator in Generator::ALL.into_iter().filter(|generator| generator.is_synchronous()) {
        let shape = generator.shape(4, 8);
        let bubble = |steps| {
            let schedule = generator.build_steps(shape, steps).unwrap();
            let timeline = simulate(&schedule, &Costs::per_rank(&schedule, 1.0, 1.0, 1.0)).unwrap();
            timeline.span() - timeline.ideal()
        };
        assert!((bubble(5) - 5.0 * bubble(1)).abs() < 1e-9, "{}: {} and {}", generator.name(), bubble(1), bubble(5));
    }
    // An asynchronous one is filled and drained once.
    for generator in [Generator::PipeDream, Generator::PipeDream2Bw] {
        let schedule = generator.build_steps(generator.shape(4, 8), 5).unwrap();
        let timeline = simulate(&schedule, &Costs::per_rank(&schedule, 1.0, 1.0, 1.0)).unwrap();
        assert!((timeline.span() - timeline.ideal() - 9.0).abs() < 1e-9, "{}", generator.name());
    }
}

/// Forward-only works for any placement: here for every way to put up to 5 stages on up to 3 ranks.
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

/// Large schedules, with up to two million actions each. The bound is loose (a slow machine under load), the growth is
/// what matters: anything quadratic takes minutes.
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

/// Schedules whose steps overlap need this: a rank may rerun its warm-up although no other rank sends it more messages.
#[test]
fn warm_ups_can_be_run_again_where_steps_overlap() {
    for generator in Generator::ALL.into_iter().filter(|generator| generator.overlaps_steps()) {
        for pp in 1..=8 {
            for micros in 1..=20 {
                let Ok(schedule) = generator.build(generator.shape(pp, micros)) else { continue };
                let lowered = lower(&schedule).unwrap();
                for rank in 0..pp {
                    let at = format!("{} pp={pp} m={micros}, rank {rank}", generator.name());
                    let left = lowered.unreceived(rank).unwrap_or_else(|| panic!("{at}"));
                    assert!(lowered.warm_up(rank) > 0 && left[rank] == 0, "{at}: {left:?}");
                }
            }
        }
    }
}
