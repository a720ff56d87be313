//! Asynchronous schedules against a serial simulation of the published update equations, bit for bit.

mod network;

use meshwork_pipeline::{Generator, Schedule, Shape, Weights, lower};
use network::{Fault, pipeline, serial_updates};

const STAGES: [usize; 4] = [1, 2, 3, 4];

fn stream(generator: Generator, pp: usize, micros: usize, steps: usize) -> Schedule {
    generator.build_steps(Shape { pp, virtual_stages: 1, micros }, steps).unwrap()
}

/// PipeDream (Narayanan et al. 2019, section 3.3), stages counted from 0:
/// w(t+1) = w(t) - lr · ∇f(w_0(t-n+1), ..., w_s(t-n+1+s), ..., w_{n-1}(t)), with w(0) before the start.
#[test]
fn pipedream_is_its_equation() {
    for pp in STAGES {
        for steps in 1..=3 {
            let micros = pp + 2;
            let schedule = stream(Generator::Pipedream, pp, micros, steps);
            let outcome = pipeline(&lower(&schedule).unwrap(), Fault::None).unwrap();
            let oracle = serial_updates(steps * micros, 1, pp, |stage, t| (t + stage + 1).saturating_sub(pp));
            assert_eq!(outcome, oracle, "pp={pp} steps={steps}");
        }
    }
}

/// With vertical sync (the same section): ∇f(w_0(t-n+1), ..., w_{n-1}(t-n+1)).
#[test]
fn vertical_sync_is_its_equation() {
    for pp in STAGES {
        let micros = 3 * pp;
        let schedule = Schedule { weights: Weights::VerticalSync, ..stream(Generator::Pipedream, pp, micros, 1) };
        let outcome = pipeline(&lower(&schedule).unwrap(), Fault::None).unwrap();
        assert_eq!(outcome, serial_updates(micros, 1, pp, |_, t| (t + 1).saturating_sub(pp)), "pp={pp}");
    }
}

/// PipeDream-2BW (Narayanan et al. 2021, section 3.1): W(t+1) = W(t) - lr · ∇f(W(t-1)), the gradient over the m micro-batches of
/// batch t; W(-1) is W(0).
#[test]
fn pipedream_2bw_is_its_equation() {
    for pp in STAGES {
        for steps in 1..=4 {
            let micros = pp + 1;
            let schedule = stream(Generator::Pipedream2bw, pp, micros, steps);
            let outcome = pipeline(&lower(&schedule).unwrap(), Fault::None).unwrap();
            let oracle = serial_updates(steps * micros, micros, pp, |_, k| (k / micros).saturating_sub(1));
            assert_eq!(outcome, oracle, "pp={pp} steps={steps}");
        }
    }
}
