//! Simulated time, against closed forms: messages that take time, and different stages.

use meshwork_pipeline::{
    Costs, Fault, Generator, Schedule, chrome_trace, gpipe, one_f_one_b, simulate, svg, text_grid,
};
use proptest::prelude::*;

fn makespan(schedule: &Schedule, costs: &Costs) -> f64 {
    simulate(schedule, costs).unwrap().makespan()
}

#[track_caller]
fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-9 * expected, "{found}, not {expected}");
}

const F: f64 = 1.0;
const I: f64 = 1.25;
const W: f64 = 0.75;
const B: f64 = I + W;

/// A message that overlaps adds one way there and back at each border. One that does not overlap delays all later
/// actions of its sender.
#[test]
fn messages_take_time() {
    for (pp, micros) in [(1, 3), (2, 2), (4, 8), (8, 5)] {
        let (p, m) = (pp as f64, micros as f64);
        let schedule = gpipe(pp, micros);
        let costs = Costs { transfer: [0.5; 2], ..Costs::per_rank(&schedule, F, I, W) };
        close(makespan(&schedule, &costs), m * (F + B) + (p - 1.0) * (F + B + 2.0 * 0.5));
        let blocking = Costs { overlap: false, ..costs };
        let each = if pp > 1 { F + B + 2.0 * 0.5 } else { F + B };
        close(makespan(&schedule, &blocking), (m + p - 2.0) * each + F + B);
    }
    // In the steady state, a rank waits for each micro-batch's way there and back, which nothing hides.
    for micros in [4, 8, 16] {
        let schedule = one_f_one_b(2, micros);
        let costs = Costs { transfer: [0.5; 2], ..Costs::per_rank(&schedule, F, I, W) };
        assert!(makespan(&schedule, &costs) > makespan(&gpipe(2, micros), &costs), "m={micros}");
    }
}

/// A flow shop of forwards, then one of backwards: the slowest stage sets the pace of each.
#[test]
fn the_slowest_stage_sets_the_pace() {
    let (forward, input, weight) = (vec![1.0, 3.0, 2.0], vec![2.0, 1.0, 4.0], vec![1.0, 1.5, 0.5]);
    let schedule = gpipe(3, 6);
    let costs = Costs {
        forward: forward.clone(),
        input_gradient: input.clone(),
        weight_gradient: weight.clone(),
        transfer: [0.0; 2],
        overlap: true,
    };
    let backward: Vec<f64> = input.iter().zip(&weight).map(|(i, w)| i + w).collect();
    let flow = |times: &[f64]| times.iter().sum::<f64>() + 5.0 * times.iter().copied().fold(0.0, f64::max);
    let timeline = simulate(&schedule, &costs).unwrap();
    close(timeline.makespan(), flow(&forward) + flow(&backward));
    close(timeline.ideal(), 6.0 * (2.0 + 4.5));
    // The work of all ranks over the time that they take: the busiest alone would say too little of it.
    let work: f64 = 6.0 * forward.iter().chain(&backward).sum::<f64>();
    close(timeline.speedup(), work / timeline.makespan());
}

/// Three times a third of a time is not exactly that time; columns must not shift by the rounding error.
#[test]
fn grids_do_not_slip_with_costs_that_round() {
    for generator in Generator::ALL {
        let schedule = generator.build(generator.shape(4, 8)).unwrap();
        let drawn = |cost: f64| text_grid(&simulate(&schedule, &Costs::per_rank(&schedule, cost, cost, cost)).unwrap());
        for cost in [0.1, 1.0 / 3.0, 0.7, 1e-6, 12345.678] {
            assert!(drawn(cost) == drawn(1.0), "{} at {cost}:\n{}", generator.name(), drawn(cost));
        }
    }
}

#[test]
fn a_trace_starts_at_nought_whenever_the_run_did() {
    let mut timeline = simulate(&gpipe(2, 2), &Costs::unit(&gpipe(2, 2))).unwrap();
    let before = chrome_trace(&[&timeline], 1000.0);
    for interval in timeline.ranks.iter_mut().flatten() {
        interval.start += 64.0;
        interval.end += 64.0;
    }
    assert_eq!(chrome_trace(&[&timeline], 1000.0), before);
}

/// Costs of any size, alike or not: those that add up to more than can be measured are refused, all others drawn within
/// bounds.
fn costs_of_any_size() -> impl Strategy<Value = f64> {
    prop_oneof![
        2 => 0.0..4.0_f64,
        2 => any::<f64>().prop_map(f64::abs).prop_filter("a time", |cost| cost.is_finite()),
        1 => prop::sample::select(vec![0.0, 5e-324, 1e-300, 1e9, 1e299, 1e300, 1e308, f64::MAX]),
    ]
}

#[test]
fn costs_whose_inverse_overflows_are_drawn_within_bounds() {
    let schedule = gpipe(3, 6);
    let timeline = simulate(&schedule, &Costs::per_rank(&schedule, 5e-324, 5e-324, 5e-324)).unwrap();
    let picture = svg(&[&timeline]);
    assert!(!picture.contains("inf") && !picture.contains("NaN"), "{picture}");
}

proptest! {
    #[test]
    fn any_costs_are_drawn_within_bounds_or_refused(
        which in 0..Generator::ALL.len(),
        costs in prop::array::uniform4(costs_of_any_size()),
        overlap: bool,
    ) {
        let generator = Generator::ALL[which];
        let schedule = generator.build(generator.shape(3, 6)).unwrap();
        let [forward, input, weight, transfer] = costs;
        let costs = Costs { transfer: [transfer; 2], overlap, ..Costs::per_rank(&schedule, forward, input, weight) };
        match simulate(&schedule, &costs) {
            Ok(timeline) => {
                // 500 columns, one more for each of up to 36 actions and updates, of 4 characters each; and the line
                // below.
                prop_assert!(text_grid(&timeline).lines().all(|line| line.len() < 2500));
                let numbers = [timeline.makespan(), timeline.span(), timeline.ideal(), timeline.speedup()];
                prop_assert!(numbers.into_iter().all(f64::is_finite), "{numbers:?}");
                prop_assert!((0.0..=1.0).contains(&timeline.bubble_of_total()));
                for picture in [svg(&[&timeline]), chrome_trace(&[&timeline], 1000.0)] {
                    prop_assert!(!picture.contains("inf") && !picture.contains("NaN"), "{picture}");
                }
            }
            Err(error) => {
                prop_assert!(matches!(error.fault, Fault::TimeOverflow { .. }), "{error}");
                prop_assert!([forward, input, weight, transfer].into_iter().any(|cost| cost > 1e297), "{error}");
            }
        }
    }
}

#[test]
fn costs_that_are_no_times_are_refused() {
    let schedule = gpipe(2, 1);
    let refused = |costs: Costs| simulate(&schedule, &costs).unwrap_err().to_string();
    let sound = || Costs::unit(&schedule);
    let rule = "a cost is a finite time of at least 0, one for each stage";
    assert_eq!(
        refused(Costs { weight_gradient: vec![1.0, f64::NAN], ..sound() }),
        format!("schedule gpipe: the weight gradient of stage 1 costs NaN; {rule}")
    );
    assert_eq!(
        refused(Costs { input_gradient: vec![1.0], ..sound() }),
        format!("schedule gpipe: the input gradient of stage 1 costs (not given); {rule}")
    );
    assert_eq!(
        refused(Costs { transfer: [0.0, -0.5], ..sound() }),
        format!("schedule gpipe: the message between two ranks costs -0.5; {rule}")
    );
}
