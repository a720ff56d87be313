//! Recomputed activations are bitwise identical on any mesh, and their memory is free until then.

use crate::cases::{ADAMW, Case, DROPOUT, PLAIN};
use crate::world::{Piece, assert_same_pieces, assert_same_report, on_mesh, pieces};
use meshwork_train::StepReport;

/// Reports of two steps and the weights after them, per rank.
fn run(case: &Case, recompute: &str) -> Vec<(Vec<StepReport>, Vec<Piece>)> {
    let config = case.config(&format!("{ADAMW}[memory]\nrecompute = '{recompute}'\n"));
    let data = case.model.data();
    on_mesh(&config, |mut trainer| {
        let step = |step| {
            let batch = data.batch(step, config.training.global_batch_size, trainer.samples())?;
            trainer.step(&batch)
        };
        Ok(((0..2).map(step).collect::<Result<_, _>>()?, pieces(&trainer)?))
    })
}

#[test]
fn selective_recomputation_changes_no_bit_and_takes_less_memory() {
    let cases = [
        Case { micros: 1, ..Case::alone(&PLAIN) },
        Case { dp: 2, tp: 2, pp: 2, sequence_parallel: true, micros: 4, schedule: "1f1b", ..Case::alone(&DROPOUT) },
        // Its weight gradients are deferred, so some values are recomputed twice.
        Case { tp: 2, pp: 2, micros: 4, schedule: "zb_h1", ..Case::alone(&PLAIN) },
    ];
    for case in cases {
        for (rank, (made, kept)) in run(&case, "selective").into_iter().zip(run(&case, "none")).enumerate() {
            let what = format!("{case}: rank {rank}");
            for (made, kept) in made.0.iter().zip(&kept.0) {
                let less = made.peak_bytes().iter().zip(&kept.peak_bytes()).all(|(made, kept)| made < kept);
                assert!(less, "{what}: peaks of {:?} against {:?}", made.memory, kept.memory);
                let made = StepReport { memory: kept.memory.clone(), ..made.clone() };
                assert_same_report(&format!("{what}, step {}", kept.step), &made, kept);
            }
            assert_same_pieces(&what, &made.1, &kept.1);
        }
    }
}
