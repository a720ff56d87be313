//! A loss whose logits exist for a few tokens at a time (`memory.loss_chunk`): the loss of all logits, its gradient,
//! and less memory.

use crate::mesh::cases::{Case, LARGE_HEAD, LLAMA, Model, PLAIN, SEQ, SGD, UNEVEN, UNTIED};
use crate::mesh::opaque::assert_opaque_as_cpu;
use crate::mesh::parity::assert_parity;
use crate::mesh::world::{Stepped, one_step, step_of};
use meshwork_train::config::Config;
use meshwork_train::plan::predict;

/// The configuration of a case with this chunk, and more lines of its section `[memory]`.
fn config(case: &Case, chunk: usize, zero: usize, more: &str, memory: &str) -> Config {
    let text = case.text(&format!("{more}[memory]\nloss_chunk = {chunk}\n{memory}"));
    let text = text.replace("[parallelism]\n", &format!("[parallelism]\nzero_stage = {zero}\n"));
    Config::from_toml(&text).unwrap_or_else(|error| panic!("{case}, chunks of {chunk}: {error}"))
}

#[rustfmt::skip] // A table: one case, one line. Chunks that divide a sample of 16 tokens, that do not, of one token, and larger than a sample.
fn cases() -> Vec<(Case, usize, usize, &'static str)> {
    let on = |model: &'static Model, (dp, tp, pp), schedule, micros| {
        Case { dp, tp, pp, schedule, micros, ..Case::alone(model) }
    };
    let cut = |case| Case { sequence_parallel: true, ..case };
    vec![
        (on(&PLAIN,      (1, 1, 1), "gpipe",            1), 4,   0, ""),
        (on(&PLAIN,      (2, 1, 1), "gpipe",            2), 5,   0, ""),
        (on(&UNEVEN,     (1, 4, 1), "gpipe",            1), 16,  0, ""),
        (cut(on(&UNTIED, (2, 2, 1), "1f1b",             2)), 7,  3, ""),
        // Its weight gradients are deferred, so logits are computed a third time.
        (on(&PLAIN,      (1, 2, 2), "zb_h1",            4), 3,   0, ""),
        (on(&LLAMA,      (2, 1, 2), "1f1b",             4), 1,   1, "recompute = 'full'\n"),
        (cut(on(&LLAMA,  (2, 2, 2), "interleaved_1f1b", 4)), 4,  2, "recompute = 'stage'\n"),
        (on(&UNTIED,     (2, 2, 2), "zb_v",             4), 100, 0, "recompute = 'selective'\n"),
    ]
}

#[test]
fn a_loss_in_chunks_is_that_of_one_rank_and_takes_what_is_predicted() {
    for (case, chunk, zero, memory) in cases() {
        let name = format!("{case}, chunks of {chunk}, ZeRO {zero}, {memory}");
        let config = config(&case, chunk, zero, SGD, memory);
        let stepped = step_of(&name, &config, &case.model.data());
        assert_parity(&name, &stepped, &one_step(&Case::alone(case.model), SGD));
        // The first step of zb_v holds less than those behind it, with all logits too.
        for (rank, usage) in stepped.usage.iter().enumerate().filter(|_| case.schedule != "zb_v") {
            let predicted = predict(&config, rank).unwrap();
            let predicted = (predicted.flops, predicted.peak_bytes());
            assert_eq!((usage.flops, usage.peak_bytes), predicted, "{name}: rank {rank}");
        }
    }
}

/// Every row of logits has the bits that it has among all, and so has the loss.
#[test]
fn a_loss_in_chunks_has_the_bits_of_the_whole() {
    for (case, chunk, zero, memory) in cases() {
        let loss = |chunk| {
            let config = config(&case, chunk, zero, SGD, memory);
            step_of("", &config, &case.model.data()).reports[0].loss.to_bits()
        };
        assert_eq!(loss(chunk), loss(0), "{case}, chunks of {chunk}");
    }
}

#[test]
fn a_loss_in_chunks_has_the_cpus_bits_where_the_host_reads_no_memory() {
    for (case, chunk, zero, memory) in cases().into_iter().take(4) {
        assert_opaque_as_cpu(
            &format!("{case}, chunks of {chunk}"),
            &config(&case, chunk, zero, SGD, memory),
            &case.model.data(),
        );
    }
}

/// In canonical numerics every mesh has the bits of one rank with the same chunks.
#[test]
fn a_loss_in_chunks_is_canonical() {
    let more = format!("{SGD}numerics = 'canonical'\n");
    for (model, chunk) in [(&PLAIN, 5), (&UNEVEN, 16)] {
        let stepped = |case: &Case, zero, memory| {
            step_of(&case.to_string(), &config(case, chunk, zero, &more, memory), &model.data())
        };
        let alone = stepped(&Case::alone(model), 0, "");
        for ((dp, tp, pp), schedule, zero, memory) in [
            ((2, 1, 1), "gpipe", 1, ""),
            ((1, 2, 1), "gpipe", 0, "recompute = 'full'\n"),
            ((2, 2, 2), "zb_h1", 0, ""),
            ((4, 1, 2), "1f1b", 3, ""),
        ] {
            let case = Case { dp, tp, pp, schedule, micros: 2, ..Case::alone(model) };
            let made = stepped(&case, zero, memory);
            let loss = |stepped: &Stepped| stepped.reports[0].loss.to_bits();
            assert_eq!(loss(&made), loss(&alone), "{case}, chunks of {chunk}");
            assert_eq!(made.gradients, alone.gradients, "{case}, chunks of {chunk}");
            assert_eq!(made.weights, alone.weights, "{case}, chunks of {chunk}");
        }
    }
}

/// The peak, which was in backward of the head, is lower by nearly all logits but those of a chunk.
#[test]
fn a_loss_in_chunks_frees_the_logits() {
    let case = Case { micros: 1, ..Case::alone(&LARGE_HEAD) };
    let peak = |chunk| predict(&config(&case, chunk, 0, SGD, ""), 0).unwrap().peak_bytes();
    let (whole, chunk) = (peak(0), peak(4));
    let (logits, left) = ((16 * SEQ * LARGE_HEAD.vocab * 4) as u64, (4 * LARGE_HEAD.vocab * 4) as u64);
    let freed = whole.checked_sub(chunk).expect("less memory");
    assert!(freed * 5 >= (logits - left) * 4, "{freed} bytes of {logits}");
}
