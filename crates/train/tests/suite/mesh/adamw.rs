//! Twenty steps of AdamW with clipping: the loss of every step follows that of the one-rank run.

use crate::mesh::cases::{ADAMW, Case, DROPOUT, UNEVEN, UNTIED};
use crate::mesh::world::{on_mesh, train};
use meshwork_testkit::Sampled;

const STEPS: usize = 20;
/// Largest relative difference of a loss. Adam divides by the size of the gradient, so rounding grows from step to
/// step.
const TOLERANCE: f64 = 1e-5;

#[rustfmt::skip] // A table: one case, one line.
static CASES: [Case; 8] = [
    Case::of_1f1b(&UNEVEN,  (4, 1, 1), false, 2),
    Case::of_1f1b(&UNEVEN,  (1, 4, 1), true,  1),
    Case::of_1f1b(&UNEVEN,  (1, 1, 4), false, 8),
    Case::of_1f1b(&UNEVEN,  (2, 2, 2), true,  4),
    Case::of_1f1b(&UNEVEN,  (2, 4, 2), false, 4),
    Case::of_1f1b(&UNTIED,  (2, 2, 4), true,  4),
    Case::of_1f1b(&DROPOUT, (4, 2, 1), true,  2),
    Case::of_1f1b(&DROPOUT, (1, 2, 2), false, 4),
];

/// The losses of all steps, which every rank must report alike.
fn losses(case: &Case) -> Vec<f64> {
    let (config, data) = (case.config(ADAMW), case.model.data());
    let ranks = on_mesh(&config, |mut trainer| {
        (0..STEPS).map(|_| Ok(train(&mut trainer, &data, &config)?.loss)).collect::<Result<Vec<f64>, _>>()
    });
    for (rank, losses) in ranks.iter().enumerate() {
        assert_eq!(losses, &ranks[0], "{case}: losses of rank {rank} and rank 0");
    }
    ranks.into_iter().next().unwrap()
}

#[test]
fn twenty_steps_follow_the_one_rank_run() {
    for model in [&UNEVEN, &UNTIED, &DROPOUT] {
        let reference = losses(&Case::alone(model));
        assert!(reference[STEPS - 1] < reference[0], "{}: nothing was learned in {reference:?}", model.name);
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, model)).sampled(3) {
            for (step, (got, wanted)) in losses(case).iter().zip(&reference).enumerate() {
                let off = (got - wanted).abs() / wanted;
                assert!(
                    off <= TOLERANCE,
                    "{case}: loss {got} after {step} steps, on one rank {wanted} ({off:.1e} off)"
                );
            }
        }
    }
}
