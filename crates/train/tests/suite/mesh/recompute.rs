//! Recomputed activations are bitwise identical on any mesh, and their memory is free until then.

use crate::mesh::cases::{ADAMW, Case, DROPOUT, LLAMA, Model, PLAIN, SGD, UNTIED};
use crate::mesh::opaque::assert_opaque_as_cpu;
use crate::mesh::parity::assert_parity;
use crate::mesh::world::{Piece, assert_same_pieces, on_mesh, one_step, pieces, step_of};
use meshwork_train::StepReport;
use meshwork_train::config::Config;
use meshwork_train::plan::predict;

/// The configuration of a case that recomputes what `recompute` says, a value of TOML, and shares out what `zero` says.
fn config(case: &Case, recompute: &str, zero: usize, more: &str) -> Config {
    let text = case.text(&format!("{more}[memory]\nrecompute = {recompute}\n"));
    let text = text.replace("[parallelism]\n", &format!("[parallelism]\nzero_stage = {zero}\n"));
    Config::from_toml(&text).unwrap_or_else(|error| panic!("{case}, {recompute}: {error}"))
}

/// Reports of two steps and the weights after them, per rank.
fn run(case: &Case, recompute: &str, zero: usize) -> Vec<(Vec<StepReport>, Vec<Piece>)> {
    let config = config(case, recompute, zero, ADAMW);
    let data = case.model.data();
    on_mesh(&config, |mut trainer| {
        let step = |step| {
            let batch = data.batch(step, config.training.global_batch_size, trainer.samples())?;
            trainer.step(&batch)
        };
        Ok(((0..2).map(step).collect::<Result<_, _>>()?, pieces(&trainer)?))
    })
}

#[rustfmt::skip] // A table: one case, one line.
fn cases() -> Vec<(Case, &'static str, usize)> {
    let on = |model: &'static Model, (dp, tp, pp), schedule, micros| {
        Case { dp, tp, pp, schedule, micros, ..Case::alone(model) }
    };
    let cut = |case| Case { sequence_parallel: true, ..case };
    vec![
        (on(&PLAIN,   (1, 1, 1), "gpipe",            1), "'selective'", 0),
        (cut(on(&DROPOUT, (2, 2, 2), "1f1b",         4)), "'selective'", 0),
        // Its weight gradients are deferred, so some values are recomputed twice.
        (on(&PLAIN,   (1, 2, 2), "zb_h1",            4), "'selective'", 0),
        (on(&DROPOUT, (1, 1, 1), "1f1b",             4), "'full'",      0),
        (on(&PLAIN,   (2, 1, 2), "zb_h1",            4), "'full'",      0),
        (cut(on(&DROPOUT, (1, 2, 2), "1f1b",         4)), "'full'",     0),
        (cut(on(&DROPOUT, (2, 2, 2), "zb_h2",        4)), "'full'",     3),
        (on(&LLAMA,   (2, 1, 2), "gpipe",            4), "'full'",      2),
        (on(&UNTIED,  (1, 2, 2), "zb_v",             4), "1",           0),
        (on(&LLAMA,   (2, 2, 1), "1f1b",             2), "2",           3),
        (on(&DROPOUT, (2, 1, 2), "1f1b",             4), "'sqrt'",      1),
        (on(&PLAIN,   (1, 4, 1), "gpipe",            2), "'sqrt'",      0),
        (on(&UNTIED,  (2, 1, 2), "interleaved_1f1b", 4), "'stage'",     3),
    ]
}

#[test]
fn recomputation_changes_no_bit_and_takes_less_memory() {
    for (case, recompute, zero) in cases() {
        let ranks = run(&case, recompute, zero).into_iter().zip(run(&case, "'none'", zero));
        for (rank, (made, kept)) in ranks.enumerate() {
            let what = format!("{case}, recompute {recompute}, ZeRO {zero}: rank {rank}");
            for (made, kept) in made.0.iter().zip(&kept.0) {
                let less = made.peak_bytes().iter().zip(&kept.peak_bytes()).all(|(made, kept)| made < kept);
                let smallest = case.schedule == "zb_v" || case.schedule == "interleaved_1f1b"; // a layer a stage
                assert!(less || smallest, "{what}: peaks of {:?} against {:?}", made.memory, kept.memory);
                // What a layer communicates it communicates again.
                let shown = |report: &StepReport| {
                    let StepReport { step, loss, grad_norm, lr, ref metrics, .. } = *report;
                    (step, loss.to_bits(), grad_norm.to_bits(), lr.to_bits(), metrics.clone())
                };
                assert_eq!(shown(made), shown(kept), "{what}, step {}", kept.step);
                let again = made.records.len() > kept.records.len();
                let talks = recompute != "'selective'" && (case.tp > 1 || zero == 3);
                assert_eq!(again, talks, "{what}: {} calls against {}", made.records.len(), kept.records.len());
            }
            assert_same_pieces(&what, &made.1, &kept.1);
        }
    }
}

#[test]
fn recomputation_has_the_gradient_of_one_rank_and_the_predicted_cost() {
    for model in [&DROPOUT, &LLAMA] {
        let reference = one_step(&Case::alone(model), SGD);
        for (case, recompute, zero) in cases().into_iter().filter(|(case, ..)| std::ptr::eq(case.model, model)) {
            let (name, config) = (format!("{case}, {recompute}, ZeRO {zero}"), config(&case, recompute, zero, SGD));
            let stepped = step_of(&name, &config, &case.model.data());
            assert_parity(&name, &stepped, &reference);
            for (rank, usage) in stepped.usage.iter().enumerate().filter(|_| case.schedule != "zb_h2") {
                let predicted = predict(&config, rank).unwrap();
                let predicted = (predicted.flops, predicted.peak_bytes());
                assert_eq!((usage.flops, usage.peak_bytes), predicted, "{name}: rank {rank}");
            }
        }
    }
}

#[test]
fn recomputation_has_the_cpus_bits_where_the_host_reads_no_memory() {
    for (case, recompute, zero) in cases().into_iter().filter(|(_, recompute, _)| *recompute == "'full'") {
        let name = format!("{case}, {recompute}, ZeRO {zero}");
        assert_opaque_as_cpu(&name, &config(&case, recompute, zero, ADAMW), &case.model.data());
    }
}

/// In canonical numerics a mesh that recomputes has the bits of one rank that does not.
#[test]
fn recomputation_is_canonical() {
    let more = "numerics = 'canonical'\n";
    let canonical = |case: &Case, recompute: &str| {
        let config = config(case, recompute, 0, &format!("{SGD}{more}"));
        step_of(&case.to_string(), &config, &case.model.data())
    };
    let alone = canonical(&Case::alone(&PLAIN), "'none'");
    for (recompute, schedule) in [("'full'", "zb_h1"), ("'sqrt'", "1f1b"), ("1", "gpipe")] {
        for (dp, tp, pp) in [(1, 1, 1), (2, 2, 2)] {
            let schedule = if pp == 1 { "1f1b" } else { schedule };
            let case = Case { dp, tp, pp, schedule, micros: 4, ..Case::alone(&PLAIN) };
            let made = canonical(&case, recompute);
            assert_eq!(made.gradients, alone.gradients, "{case}, {recompute}");
            assert_eq!(made.weights, alone.weights, "{case}, {recompute}");
            assert_eq!(made.reports[0].loss.to_bits(), alone.reports[0].loss.to_bits(), "{case}, {recompute}");
        }
    }
}
