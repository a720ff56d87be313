//! The fewest micro-batches in which ranks hold what they hold in a long step.

use meshwork_pipeline::{Costs, Generator, Shape, simulate};

/// The most activations of each rank, without recomputation and with it.
fn peaks(generator: Generator, shape: Shape) -> [Vec<f64>; 2] {
    let schedule = generator.build(shape).unwrap();
    let timeline = simulate(&schedule, &Costs::unit(&schedule)).unwrap();
    [1.0, 8.0].map(|deferred| timeline.peak_held(1.0, deferred))
}

/// They do not grow with the step, and ranks hold as much. Schedules that keep all micro-batches need all of them.
#[test]
fn a_few_micro_batches_hold_as_much_as_many() {
    for generator in Generator::ALL.into_iter().filter(|generator| generator.is_synchronous()) {
        for (pp, virtual_stages) in [(1, 1), (2, 1), (3, 1), (8, 1), (1, 2), (2, 2), (3, 2), (4, 2), (2, 3), (4, 8)] {
            for micros in [pp, 3 * pp + 1, 12 * pp, 12 * pp + 1, 13 * pp] {
                let shape = Shape { pp, virtual_stages, micros };
                if generator.takes(shape).is_err() {
                    continue;
                }
                let few = generator.few_micros(shape);
                let what = format!("{} {shape:?}: {few}", generator.name());
                let grows = matches!(generator, Generator::Gpipe | Generator::BreadthFirst);
                if grows || micros < 3 * pp {
                    assert_eq!(few, micros, "{what}");
                } else if micros >= 12 * pp {
                    assert!(few < micros / 2 && few % pp == micros % pp, "{what}");
                }
                assert_eq!(peaks(generator, Shape { micros: few, ..shape }), peaks(generator, shape), "{what}");
            }
        }
    }
}
