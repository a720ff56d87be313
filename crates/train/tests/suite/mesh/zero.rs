//! ZeRO beside every other kind of parallelism: one step of plain gradient descent has the gradient of one rank, and a
//! device whose memory the host cannot read gives the CPU's bits.

use crate::mesh::cases::{ADAMW, Case, DROPOUT, LLAMA, Model, SGD, UNEVEN, UNTIED};
use crate::mesh::opaque::assert_opaque_as_cpu;
use crate::mesh::parity::assert_parity;
use crate::mesh::world::{one_step, step_of};
use meshwork_train::config::Config;

/// The configuration of a case that shares out what `zero` says.
fn config(case: &Case, zero: &str, more: &str) -> Config {
    let text = case.text(more).replace("[parallelism]\n", &format!("[parallelism]\n{zero}\n"));
    Config::from_toml(&text).unwrap_or_else(|error| panic!("{case}, {zero}: {error}"))
}

#[rustfmt::skip] // A table: one case, one line.
fn cases() -> Vec<(Case, &'static str)> {
    let on = |model: &'static Model, mesh, micros| Case::of_1f1b(model, mesh, false, micros);
    vec![
        (on(&UNEVEN, (4, 1, 1), 1), "zero_stage = 3"),
        (on(&UNEVEN, (2, 2, 2), 4), "zero_stage = 1"),
        (on(&UNEVEN, (4, 1, 2), 2), "zero_stage = 3\nzero_group = 2"),
        (on(&DROPOUT, (2, 2, 2), 4), "zero_stage = 3"),
        (on(&UNTIED, (4, 2, 1), 2), "zero_stage = 2\nzero_group = 2"),
        (Case { sequence_parallel: true, ..on(&UNTIED, (2, 4, 1), 2) }, "zero_stage = 3"),
        (Case { schedule: "interleaved_1f1b", ..on(&UNTIED, (2, 1, 2), 4) }, "zero_stage = 2"),
        (Case { schedule: "zb_h1", ..on(&UNEVEN, (2, 2, 2), 4) }, "zero_stage = 3"),
        (Case { schedule: "zb_v", ..on(&UNTIED, (2, 1, 2), 4) }, "zero_stage = 2"),
        (Case { schedule: "dualpipe_v", ..on(&UNTIED, (2, 1, 2), 4) }, "zero_stage = 3"),
        (on(&DROPOUT, (4, 1, 1), 2), "zero_stage = 2"),
        (on(&LLAMA, (2, 4, 1), 2), "zero_stage = 2"),
        (Case { schedule: "zb_h2", ..on(&LLAMA, (2, 1, 4), 4) }, "zero_stage = 3"),
    ]
}

#[test]
fn what_ranks_share_out_has_the_gradient_of_one_rank() {
    for model in [&UNEVEN, &DROPOUT, &UNTIED, &LLAMA] {
        let reference = one_step(&Case::alone(model), SGD);
        for (case, zero) in cases().into_iter().filter(|(case, _)| std::ptr::eq(case.model, model)) {
            let name = format!("{case}, {zero}");
            assert_parity(&name, &step_of(&name, &config(&case, zero, SGD), &case.model.data()), &reference);
        }
    }
}

#[test]
fn what_ranks_share_out_has_the_cpus_bits_where_the_host_reads_no_memory() {
    for (case, zero) in cases().into_iter().filter(|(case, _)| std::ptr::eq(case.model, &DROPOUT)) {
        assert_opaque_as_cpu(&format!("{case}, {zero}"), &config(&case, zero, ADAMW), &case.model.data());
    }
}
