//! Canonical numerics: every mesh, schedule and number of micro-batches gives the bits of one rank.

use crate::cases::{ADAMW, CASES, Case, DROPOUT, PLAIN, UNEVEN, UNTIED};
use crate::world::{assemble, on_mesh, pieces, train};
use std::collections::BTreeMap;

const STEPS: u64 = 5;

/// What a run of some steps leaves behind: bits, so that nothing hides behind a comparison of floats.
#[derive(Debug, PartialEq)]
struct Bits {
    /// (loss, gradient norm) of every step.
    reports: Vec<(u64, u64)>,
    /// Per parameter: gradients of the last step, weights, optimizer states.
    values: BTreeMap<String, Vec<u32>>,
}

fn run(case: &Case, more: &str) -> Bits {
    let (config, data) = (case.config(more), case.model.data());
    let ranks = on_mesh(&config, |mut trainer| {
        let mut reports = Vec::new();
        for _ in 0..STEPS {
            let report = train(&mut trainer, &data, &config)?;
            reports.push((report.loss.to_bits(), report.grad_norm.to_bits()));
        }
        Ok((reports, pieces(&trainer)?))
    });
    let name = case.to_string();
    let (reports, held): (Vec<_>, Vec<_>) = ranks.into_iter().unzip();
    assert!(reports.iter().all(|report| *report == reports[0]), "{name}: every rank reports the same");
    let mut values = BTreeMap::new();
    let mut take = |kind: &str, whole: BTreeMap<String, Vec<f32>>| {
        for (name, whole) in whole {
            values.insert(format!("{kind} {name}"), whole.iter().map(|value| value.to_bits()).collect());
        }
    };
    take("gradient", assemble(&name, &held, |piece| &piece.gradient));
    take("weights", assemble(&name, &held, |piece| &piece.weights));
    for state in 0..held[0][0].states.len() {
        take(&format!("state {state}"), assemble(&name, &held, |piece| &piece.states[state]));
    }
    Bits { reports: reports.into_iter().next().unwrap_or_default(), values }
}

/// Panics at the first difference.
fn assert_same(case: &Case, got: &Bits, wanted: &Bits) {
    for (step, (got, wanted)) in got.reports.iter().zip(&wanted.reports).enumerate() {
        let value = |bits: u64| f64::from_bits(bits);
        assert_eq!(got, wanted, "{case}, step {step}: loss {} and {}", value(got.0), value(wanted.0));
    }
    assert_eq!(got.values.keys().collect::<Vec<_>>(), wanted.values.keys().collect::<Vec<_>>(), "{case}: parameters");
    for (name, wanted) in &wanted.values {
        let got = &got.values[name];
        let differs = got.iter().zip(wanted).position(|(got, wanted)| got != wanted);
        let show = |bits: &[u32], at: usize| f32::from_bits(bits[at]);
        if let Some(at) = differs {
            panic!("{case}: element {at} of {name} is {:e}, on one rank {:e}", show(got, at), show(wanted, at));
        }
    }
}

const CANONICAL: &str = "numerics = 'canonical'\n";

#[test]
fn every_mesh_has_the_bits_of_one_rank() {
    let more = format!("{ADAMW}{CANONICAL}");
    for model in [&PLAIN, &UNEVEN, &UNTIED, &DROPOUT] {
        let alone = run(&Case::alone(model), &more);
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, model)) {
            assert_same(case, &run(case, &more), &alone);
        }
    }
}

/// Two micro-batches of three samples, and three of two, are no whole subtrees of six: partial sums of both kinds wait.
#[test]
fn micro_batches_need_not_be_subtrees() {
    let more = "[optimizer]\nname = 'sgd'\nlr = 1.0\n[training]\nmax_norm = 0.0\nglobal_batch_size = 12\nnumerics = 'canonical'\n\
                [numerics]\nleaves = 4\n";
    let alone = run(&Case { micros: 1, ..Case::alone(&UNEVEN) }, more);
    for micros in [2, 3, 4, 6, 12] {
        let case = Case { micros, ..Case::alone(&UNEVEN) };
        assert_same(&case, &run(&case, more), &alone);
    }
    // Three dp ranks of four samples each hold subtrees of twelve; so do three tp ranks of twelve leaves of four, ...
    for (dp, tp, pp, sequence_parallel, micros) in
        [(3, 1, 1, false, 2), (3, 2, 1, true, 4), (6, 1, 2, false, 2), (3, 4, 1, true, 1)]
    {
        let case = Case { dp, tp, pp, sequence_parallel, micros, schedule: "1f1b", ..Case::alone(&UNEVEN) };
        assert_same(&case, &run(&case, more), &alone);
    }
}
