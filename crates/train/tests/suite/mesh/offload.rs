//! What leaves memory comes back with its bits on any mesh, and less is held meanwhile.

use crate::mesh::cases::{ADAMW, Case, DROPOUT, LLAMA, Model, PLAIN, UNEVEN, UNTIED};
use crate::mesh::opaque::assert_opaque_as_cpu;
use crate::mesh::world::{Piece, assert_same_report, on_mesh, pieces, train};
use meshwork_tensor::Category;
use meshwork_testkit::Sampled;
use meshwork_train::StepReport;
use meshwork_train::config::Config;
use std::path::Path;

/// The configuration of a case with settings of two sections, and what `offload` says goes to `dir`.
fn config(case: &Case, (parallelism, memory, training): (&str, &str, &str), offload: &str, dir: &Path) -> Config {
    let dir = dir.display();
    let memory = format!("[memory]\noffload = '{offload}'\noffload_dir = '{dir}'\n{memory}\n");
    let text = case.text(&format!("{training}\n{memory}"));
    let text = text.replace("[parallelism]\n", &format!("[parallelism]\n{parallelism}\n"));
    Config::from_toml(&text).unwrap_or_else(|error| panic!("{case}, {offload}: {error}"))
}

/// Reports of three steps, then weights, gradients and states, per rank.
fn run(config: &Config, case: &Case) -> Vec<(Vec<StepReport>, Vec<Piece>)> {
    let data = case.model.data();
    on_mesh(config, |mut trainer| {
        let mut reports = Vec::new();
        for _ in 0..3 {
            reports.push(train(&mut trainer, &data, config)?);
        }
        Ok((reports, pieces(&trainer)?))
    })
}

#[rustfmt::skip] // A table: one case, one line.
fn cases() -> Vec<(Case, &'static str, &'static str, String)> {
    let on = |model: &'static Model, (dp, tp, pp), schedule, micros| {
        Case { dp, tp, pp, schedule, micros, ..Case::alone(model) }
    };
    let rule = |name: &str| ADAMW.replace("adamw", name);
    let canonical = |name: &str| format!("{}numerics = 'canonical'\n", rule(name));
    vec![
        (on(&PLAIN,   (1, 1, 1), "gpipe",            1), "",               "",                    rule("adamw")),
        (on(&DROPOUT, (2, 2, 2), "1f1b",             4), "zero_stage = 1", "recompute = 'full'",  rule("adamw")),
        (on(&UNEVEN,  (2, 2, 2), "zb_h1",            4), "zero_stage = 3", "",                    rule("adamw")),
        (on(&UNTIED,  (2, 1, 2), "zb_h2",            4), "zero_stage = 2", "recompute = 'sqrt'",  rule("adamw")),
        (on(&LLAMA,   (4, 1, 1), "1f1b",             2), "zero_stage = 2\nzero_group = 2", "",    rule("adamw")),
        (on(&UNTIED,  (1, 2, 2), "interleaved_1f1b", 4), "",               "recompute = 1",       rule("lamb")),
        (on(&UNTIED,  (2, 2, 1), "1f1b",             2), "zero_stage = 3", "",                    rule("adafactor")),
        (on(&LLAMA,   (2, 1, 2), "zb_v",             4), "zero_stage = 1", "",                    rule("muon")),
        (on(&UNTIED,  (2, 1, 1), "gpipe",            2), "zero_stage = 2", "",                    rule("adam8bit")),
        (on(&PLAIN,   (2, 2, 2), "1f1b",             2), "zero_stage = 3", "recompute = 'full'",  canonical("adamw")),
        (on(&PLAIN,   (2, 1, 2), "gpipe",            2), "zero_stage = 1", "",                    canonical("lamb")),
        (on(&UNTIED,  (1, 1, 2), "pipedream",        4), "",               "",                    format!("{}max_norm = 0.0\n", rule("adamw"))),
    ]
}

#[test]
fn what_is_offloaded_changes_no_bit_and_is_not_held() {
    let dir = tempfile::tempdir().unwrap();
    for (case, parallelism, memory, training) in cases().into_iter().sampled(2) {
        let of = |offload: &str| config(&case, (parallelism, memory, &training), offload, dir.path());
        let held = run(&of("none"), &case);
        for offload in ["optimizer", "activations", "all"] {
            for (rank, (made, kept)) in run(&of(offload), &case).into_iter().zip(&held).enumerate() {
                let what = format!("{case}, {parallelism}, {memory}, {training}, {offload}: rank {rank}");
                for (made, kept) in made.0.iter().zip(&kept.0) {
                    let at_most =
                        |category| made.memory[rank].bytes_of(category) < kept.memory[rank].bytes_of(category);
                    assert!(offload == "activations" || at_most(Category::Optimizer), "{what}: states");
                    assert!(made.memory[rank].total() <= kept.memory[rank].total(), "{what}: {made:?} {kept:?}");
                    assert_same_report(&what, &StepReport { memory: kept.memory.clone(), ..made.clone() }, kept);
                }
                assert_eq!(made.1, kept.1, "{what}");
            }
        }
    }
}

#[test]
fn what_is_offloaded_has_the_cpus_bits_where_the_host_reads_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    for (case, parallelism, memory, training) in
        cases().into_iter().filter(|(case, ..)| case.dp * case.tp * case.pp > 2)
    {
        let config = config(&case, (parallelism, memory, &training), "all", dir.path());
        assert_opaque_as_cpu(&format!("{case}, {parallelism}"), &config, &case.model.data());
    }
}
