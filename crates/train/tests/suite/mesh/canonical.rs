//! Canonical numerics: every mesh, schedule and number of micro-batches gives the bits of one rank.

use crate::mesh::cases::{ADAMW, CASES, Case, DROPOUT, LLAMA, PLAIN, UNEVEN, UNTIED};
use crate::mesh::split_work;
use crate::mesh::world::{assemble, on_mesh, one_step, pieces, train};
use meshwork_pipeline::Generator;
use meshwork_testkit::Sampled;
use meshwork_train::Data;
use meshwork_train::config::Config;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

const STEPS: u64 = 5;

/// The results of a run of some steps, as bits, so that a comparison of floats hides nothing.
#[derive(Debug, PartialEq)]
pub struct Bits {
    /// (loss, gradient norm) of every step.
    reports: Vec<(u64, u64)>,
    /// Per parameter: gradients of the last step, weights, optimizer states.
    values: BTreeMap<String, Vec<u32>>,
}

fn run(case: &Case, more: &str) -> Bits {
    run_config(&case.to_string(), &case.config(more), &case.model.data())
}

pub fn run_config(name: &str, config: &Config, data: &Data) -> Bits {
    let ranks = on_mesh(config, |mut trainer| {
        let mut reports = Vec::new();
        for _ in 0..STEPS {
            let report = train(&mut trainer, data, config)?;
            reports.push((report.loss.to_bits(), report.grad_norm.to_bits()));
        }
        Ok((reports, pieces(&trainer)?))
    });
    let (reports, mut held): (Vec<_>, Vec<Vec<_>>) = ranks.into_iter().unzip();
    held.iter_mut().for_each(|pieces| pieces.retain(|piece| !piece.frozen));
    assert!(reports.iter().all(|report| *report == reports[0]), "{name}: every rank reports the same");
    let mut values = BTreeMap::new();
    let mut take = |kind: &str, whole: BTreeMap<String, Vec<f32>>| {
        for (name, whole) in whole {
            values.insert(format!("{kind} {name}"), whole.iter().map(|value| value.to_bits()).collect());
        }
    };
    take("gradient", assemble(name, &held, |piece| &piece.gradient));
    take("weights", assemble(name, &held, |piece| &piece.weights));
    // The first rank may have frozen parameters alone.
    for state in 0..held.iter().flatten().next().map_or(0, |piece| piece.states.len()) {
        take(&format!("state {state}"), assemble(name, &held, |piece| &piece.states[state]));
    }
    Bits { reports: reports.into_iter().next().unwrap_or_default(), values }
}

/// Panics at the first difference.
pub fn assert_same(case: impl fmt::Display, got: &Bits, wanted: &Bits) {
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

pub const CANONICAL: &str = "numerics = 'canonical'\n";

#[test]
fn every_mesh_has_the_bits_of_one_rank() {
    let more = format!("{ADAMW}{CANONICAL}");
    for model in [&PLAIN, &UNEVEN, &UNTIED, &DROPOUT, &LLAMA] {
        let alone = run(&Case::alone(model), &more);
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, model)).sampled(5) {
            assert_same(case, &run(case, &more), &alone);
        }
    }
}

/// Two micro-batches of three samples, and three of two, are not whole subtrees of six: partial sums of both kinds
/// wait.
#[test]
fn micro_batches_need_not_be_subtrees() {
    let more = "[optimizer]\nname = 'sgd'\nlr = 1.0\n[training]\nmax_norm = 0.0\nglobal_batch_size = 12\nnumerics = 'canonical'\n\
                [numerics]\nleaves = 4\n";
    let alone = run(&Case { micros: 1, ..Case::alone(&UNEVEN) }, more);
    for micros in [2, 3, 4, 6, 12] {
        let case = Case { micros, ..Case::alone(&UNEVEN) };
        assert_same(case, &run(&case, more), &alone);
    }
    // Three dp ranks of four samples each hold subtrees of twelve; so do three tp ranks with four of twelve blocks
    // each, ...
    for (dp, tp, pp, sequence_parallel, micros) in
        [(3, 1, 1, false, 2), (3, 2, 1, true, 4), (6, 1, 2, false, 2), (3, 4, 1, true, 1)]
    {
        let case = Case { dp, tp, pp, sequence_parallel, micros, schedule: "1f1b", ..Case::alone(&UNEVEN) };
        assert_same(case, &run(&case, more), &alone);
    }
}

/// `meta` and `record` predict reduction blocks, partial trees and copies too.
#[test]
fn memory_and_communication_are_predicted() {
    let more = format!("{ADAMW}{CANONICAL}");
    for case in CASES.iter().sampled(9) {
        split_work::assert_as_predicted(case, &more, &one_step(case, &more));
    }
}

/// A model for at most 16 ranks, whose reduction blocks and batch fit them: 16 blocks and 16 samples, or an odd
/// multiple.
fn fitting(dp: usize, tp: usize, pp: usize, more: &str) -> Config {
    let odd = |n: usize| n >> n.trailing_zeros();
    let text = format!(
        "[model]\nvocab_size = 37\nnum_layers = {layers}\nhidden_size = {hidden}\nnum_heads = {heads}\n\
         ffn_hidden_size = {hidden}\nseq_len = {seq}\n\
         [parallelism]\ndp = {dp}\ntp = {tp}\npp = {pp}\n\
         [training]\nnumerics = 'canonical'\nglobal_batch_size = {batch}\n[numerics]\nleaves = {leaves}\n{more}",
        layers = pp.max(2),
        heads = 2 * tp,
        hidden = 8 * tp,
        seq = 16 * odd(tp),
        batch = 16 * odd(dp),
        leaves = 16 * odd(tp),
    );
    Config::from_toml(&text).unwrap_or_else(|error| panic!("{text}\n{error}"))
}

/// Every mesh of up to 16 ranks, sequence parallel or not, with every schedule and number of micro-batches that divides
/// the batch: all of them if `MESHWORK_SWEEP` is `all`, as in `.ci/nightly`, else some.
#[test]
fn a_sweep_over_all_meshes() {
    let all = meshwork_testkit::sweeps();
    let mut configs = Vec::new();
    for (dp, tp, pp) in (0..16 * 16 * 16).map(|i| (i / 256 + 1, i / 16 % 16 + 1, i % 16 + 1)) {
        if dp * tp * pp > 16 {
            continue;
        }
        let samples = fitting(dp, tp, pp, "").training.global_batch_size / dp;
        for micros in (1..=samples).filter(|micros| samples.is_multiple_of(*micros)) {
            for schedule in Generator::ALL.into_iter().filter(|schedule| schedule.is_synchronous()) {
                for sequence_parallel in [false, true] {
                    if schedule.takes(schedule.shape(pp, micros)).is_ok() && (tp > 1 || !sequence_parallel) {
                        configs.push((dp, tp, pp, schedule, sequence_parallel, micros));
                    }
                }
            }
        }
    }
    let mut alone: HashMap<(usize, usize, usize), Bits> = HashMap::new();
    let step = if all { 1 } else { 1103 };
    let chosen = configs.iter().step_by(step).collect::<Vec<_>>();
    for (done, &&(dp, tp, pp, schedule, sequence_parallel, micros)) in chosen.iter().enumerate() {
        let schedule_name = schedule.name();
        let name =
            format!("dp={dp},tp={tp},pp={pp} {schedule_name} x{micros}, sequence_parallel = {sequence_parallel}");
        // The number of layers is that of the ranks: with two stages on each, every other one is empty.
        let (layers, stages) = (pp.max(2), pp * schedule.default_virtual_stages());
        let of_stage = |stage: usize| (stage + 1) * layers / stages - stage * layers / stages;
        let partition: Vec<usize> = (0..stages).map(of_stage).collect();
        let more = format!(
            "[pipeline]\nschedule = '{schedule_name}'\nnum_microbatches = {micros}\npartition = {partition:?}\n"
        );
        let mut config = fitting(dp, tp, pp, &more);
        config.parallelism.sequence_parallel = sequence_parallel;
        let mut rng = meshwork_testkit::Rng::new(7);
        let seq = config.model.seq_len;
        let tokens = (0..2 * config.training.global_batch_size * seq + 1).map(|_| rng.below(37) as i32).collect();
        let data = Data::from_tokens(tokens, seq).masked(|at| at % 7 == 3);
        let batch = config.training.global_batch_size;
        let reference = alone.entry((batch, tp, config.model.num_layers)).or_insert_with(|| {
            let mut one = config.clone();
            (one.parallelism.dp, one.parallelism.tp, one.parallelism.pp) = (1, 1, 1);
            one.parallelism.sequence_parallel = false;
            (one.pipeline.num_microbatches, one.training.micro_batch_size) = (1, batch);
            (one.pipeline.schedule, one.pipeline.virtual_stages) = ("gpipe".to_owned(), 1);
            one.pipeline.partition = vec![one.model.num_layers];
            run_config("one rank", &one, &data)
        });
        assert_same(&name, &run_config(&name, &config, &data), reference);
        if all && done % 100 == 0 {
            println!("{done} of {} meshes, schedules and micro-batch counts are identical", chosen.len());
        }
    }
}
