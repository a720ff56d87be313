//! Validation loss and next-token logits are the same on any mesh, and do not affect training.

use crate::mesh::cases::{BATCH, Case, DROPOUT, LLAMA, SEQ, SGD, UNEVEN, UNTIED};
use crate::mesh::world::{assert_same_report, on_mesh, train};
use meshwork_testkit::parity::assert_close;
use meshwork_train::config::Config;
use meshwork_train::{Data, StepReport, TrainError, Trainer, next_token_logits};

/// Relative difference of validation losses.
const TOLERANCE: f64 = 1e-6;
/// Positions whose next token is predicted.
const POSITIONS: [usize; 3] = [0, 7, SEQ - 1];

fn validation_loss(trainer: &mut Trainer, data: &Data) -> Result<f64, TrainError> {
    let rows = trainer.samples();
    Ok(trainer.evaluate((0..2).map(|index| data.validation_batch(index, BATCH, rows.clone()).unwrap()))?.loss)
}

/// Validation loss and logits after one step of training: the same on every rank. It does not use AdamW, whose first
/// step is ± lr whatever the size of a gradient, even if that is only rounding.
fn evaluated(case: &Case) -> (f64, Vec<Vec<f32>>) {
    evaluated_by(case, &case.config(SGD))
}

fn evaluated_by(case: &Case, config: &Config) -> (f64, Vec<Vec<f32>>) {
    let data = case.model.data();
    let ranks = on_mesh(config, |mut trainer| {
        train(&mut trainer, &data, config)?;
        let loss = validation_loss(&mut trainer, &data)?;
        let window = data.batch(3, BATCH, 0..1)?;
        let window = window.values::<i32>("tokens")?;
        let logits = |position| next_token_logits(&mut trainer, &window[..=position], case.model.vocab);
        Ok((loss, POSITIONS.into_iter().map(logits).collect::<Result<Vec<_>, _>>()?))
    });
    for (rank, both) in ranks.iter().enumerate() {
        assert_eq!(both, &ranks[0], "{case}: validation loss and logits of rank {rank} and rank 0");
    }
    ranks.into_iter().next().unwrap()
}

#[rustfmt::skip] // A table: one case, one line.
static CASES: [Case; 8] = [
    Case::of_1f1b(&UNEVEN,  (4, 1, 1), false, 2),
    Case::of_1f1b(&UNEVEN,  (1, 4, 1), false, 1),
    Case::of_1f1b(&UNEVEN,  (1, 4, 1), true,  1),
    Case::of_1f1b(&UNEVEN,  (1, 1, 4), false, 8),
    Case::of_1f1b(&UNEVEN,  (2, 4, 2), true,  4),
    Case::of_1f1b(&UNTIED,  (2, 2, 4), false, 4),
    Case::of_1f1b(&UNTIED,  (4, 2, 1), true,  1),
    Case::of_1f1b(&DROPOUT, (2, 2, 2), true,  2),
];

#[test]
fn any_mesh_gives_the_loss_and_logits_of_one_rank() {
    for model in [&UNEVEN, &UNTIED, &DROPOUT] {
        let (wanted, logits) = evaluated(&Case::alone(model));
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, model)) {
            let (got, got_logits) = evaluated(case);
            let off = (got - wanted).abs() / wanted;
            assert!(off <= TOLERANCE, "{case}: validation loss {got}, on one rank {wanted} ({off:.1e} off)");
            for ((position, got), wanted) in POSITIONS.iter().zip(&got_logits).zip(&logits) {
                assert_close(&format!("{case}: logits after position {position}"), got, wanted, 0.0);
            }
        }
    }
}

/// Tokens of other ranks, in another order, and places that are no tokens.
#[test]
fn a_sequence_that_cp_cuts_gives_the_loss_and_logits_of_one_rank() {
    for (model, method) in [(&UNEVEN, "all_gather"), (&UNTIED, "all_to_all"), (&LLAMA, "all_gather")] {
        let (wanted, logits) = evaluated(&Case::alone(model));
        for (case, cp) in [
            (Case::alone(model), 2),
            (Case::of_1f1b(model, (1, 1, 1), false, 4), 4),
            (Case::of_1f1b(model, (2, 2, 1), true, 1), 2),
            (Case::of_1f1b(model, (1, 1, 2), false, 2), 3),
        ] {
            if method == "all_to_all" && cp == 3 {
                continue; // four heads
            }
            let over_cp = format!("[parallelism]\ncp = {cp}\ncontext_parallel_method = '{method}'\n");
            let config = Config::from_toml(&case.text(SGD).replace("[parallelism]\n", &over_cp)).unwrap();
            let (got, got_logits) = evaluated_by(&case, &config);
            let what = format!("{case}, cp={cp} by {method}");
            assert!((got - wanted).abs() / wanted <= TOLERANCE, "{what}: validation loss {got}, on one rank {wanted}");
            for ((position, got), wanted) in POSITIONS.iter().zip(&got_logits).zip(&logits) {
                assert_close(&format!("{what}: logits after position {position}"), got, wanted, 0.0);
            }
        }
    }
}

#[test]
fn nothing_is_dropped_out_of_an_evaluation() {
    // The two models differ in dropout only, and nothing has been trained.
    let losses = [&UNEVEN, &DROPOUT].map(|model| {
        let data = model.data();
        on_mesh(&Case::alone(model).config(SGD), |mut trainer| validation_loss(&mut trainer, &data))
    });
    assert_eq!(losses[0], losses[1]);
}

#[test]
fn an_evaluation_between_two_steps_changes_nothing() {
    let case =
        Case { dp: 2, tp: 2, pp: 2, sequence_parallel: true, schedule: "1f1b", micros: 4, ..Case::alone(&DROPOUT) };
    let (config, data) = (case.config(SGD), case.model.data());
    let reports = |evaluating: bool| {
        on_mesh(&config, |mut trainer| {
            let first = train(&mut trainer, &data, &config)?;
            if evaluating {
                validation_loss(&mut trainer, &data)?;
                next_token_logits(&mut trainer, &[0; 5], case.model.vocab)?;
            }
            Ok([first, train(&mut trainer, &data, &config)?])
        })
    };
    for (rank, (with, without)) in reports(true).into_iter().zip(reports(false)).enumerate() {
        for (with, without) in with.into_iter().zip(without) {
            // If an evaluation holds more memory at once than a step, the peak may differ.
            let with = StepReport { memory: without.memory.clone(), ..with };
            assert_same_report(&format!("rank {rank}, evaluating between the steps or not"), &with, &without);
        }
    }
}
