//! One mesh gives the same bits on every run, whatever the timing.

use crate::mesh::cases::{ADAMW, Case, DROPOUT, UNTIED};
use crate::mesh::world::{Piece, assert_same_pieces, assert_same_report, on_mesh, pieces};
use meshwork_testkit::Rng;
use meshwork_train::StepReport;
use std::time::Duration;

const STEPS: u64 = 3;

/// Reports of all steps and the weights at the end, per rank. With a seed, about every other rank sleeps up to 2 ms
/// before and after some of its actions.
fn run(case: &Case, sleeps: Option<u64>) -> Vec<(Vec<StepReport>, Vec<Piece>)> {
    let (config, data) = (case.config(ADAMW), case.model.data());
    on_mesh(&config, |mut trainer| {
        let mut rng = Rng::new(sleeps.unwrap_or(0) ^ (trainer.rank().world_rank() as u64) << 32);
        let sleepy = sleeps.is_some() && rng.below(2) == 0;
        let step = |step| {
            let batch = data.batch(step, config.training.global_batch_size, trainer.samples())?;
            trainer.observed_step(&batch, |_| {
                if sleepy && rng.below(4) == 0 {
                    std::thread::sleep(Duration::from_micros(rng.below(2000) as u64));
                }
            })
        };
        let reports = (0..STEPS).map(step).collect::<Result<_, _>>()?;
        Ok((reports, pieces(&trainer)?))
    })
}

#[test]
fn the_same_bits_on_every_run_and_with_other_timing() {
    let cases = [
        Case { dp: 2, tp: 2, pp: 2, sequence_parallel: true, micros: 4, schedule: "1f1b", ..Case::alone(&DROPOUT) },
        Case { dp: 4, tp: 4, micros: 2, ..Case::alone(&UNTIED) },
    ];
    for case in cases {
        let first = run(&case, None);
        for sleeps in [None, Some(1), Some(2), Some(3)] {
            for (rank, (got, wanted)) in run(&case, sleeps).iter().zip(&first).enumerate() {
                let what = format!("{case}: rank {rank}, sleeping by {sleeps:?}");
                for (got, wanted) in got.0.iter().zip(&wanted.0) {
                    assert_same_report(&format!("{what}, step {}", wanted.step), got, wanted);
                }
                assert_same_pieces(&what, &got.1, &wanted.1);
            }
        }
    }
}
