//! `memory.saved_dtype`: what forward keeps for backward is rounded to 16 bits. Forward stays exact, and the numbers
//! depend neither on the mesh nor on what is recomputed.

use crate::mesh::cases::{ADAMW, BATCH, Case, DROPOUT, LLAMA, PLAIN, SGD, UNEVEN};
use crate::mesh::opaque::assert_opaque_as_cpu;
use crate::mesh::products::gradient_error;
use crate::mesh::world::{Stepped, on_mesh, one_step, step_of};
use meshwork_tensor::Category;
use meshwork_train::Trainer;
use meshwork_train::config::Config;
use meshwork_train::plan::predict;

const STEPS: usize = 20;

/// The configuration of a case that keeps what backward needs as `dtype`; `more` are keys of the section `[memory]`.
fn config(case: &Case, dtype: &str, more: &str, training: &str) -> Config {
    let text = case.text(&format!("{training}[memory]\nsaved_dtype = '{dtype}'\n{more}"));
    Config::from_toml(&text).unwrap_or_else(|error| panic!("{case}, {dtype}: {error}"))
}

fn step(case: &Case, dtype: &str, more: &str, training: &str) -> Stepped {
    step_of(&format!("{case}, {dtype}, {more}"), &config(case, dtype, more, training), &case.model.data())
}

#[test]
fn the_loss_is_exact_and_gradients_are_rounded() {
    for model in [&PLAIN, &DROPOUT, &LLAMA] {
        let exact = one_step(&Case::alone(model), SGD);
        for (dtype, most) in [("bf16", 2e-2), ("f16", 3e-3)] {
            let rounded = step(&Case::alone(model), dtype, "", SGD);
            assert_eq!(rounded.reports[0].loss.to_bits(), exact.reports[0].loss.to_bits(), "{}, {dtype}", model.name);
            let error = gradient_error(&rounded, &exact);
            assert!((1e-5..=most).contains(&error), "{}, {dtype}: {error:.1e} off", model.name);
        }
    }
}

#[test]
fn it_learns_as_f32_does() {
    let losses = |dtype: &str| {
        let config = config(&Case::alone(&UNEVEN), dtype, "", ADAMW);
        let batch = UNEVEN.data().batch(0, BATCH, 0..BATCH).unwrap();
        let step = |trainer: &mut Trainer| Ok(trainer.step(&batch)?.loss);
        on_mesh(&config, |mut trainer| (0..STEPS).map(|_| step(&mut trainer)).collect::<Result<Vec<_>, _>>()).concat()
    };
    let f32 = losses("f32");
    for dtype in ["bf16", "f16"] {
        let rounded = losses(dtype);
        assert!(rounded[STEPS - 1] < 0.8 * rounded[0], "nothing was learned in {rounded:?}");
        for (step, (rounded, f32)) in rounded.iter().zip(&f32).enumerate() {
            assert!((rounded - f32).abs() <= 1e-2 * f32, "{dtype}: loss {rounded} after {step} steps, {f32} in f32");
        }
    }
}

#[test]
fn canonical_numerics_have_the_bits_of_one_rank_and_of_none_recomputed() {
    let canonical = format!("{SGD}numerics = 'canonical'\n");
    let alone = step(&Case::alone(&PLAIN), "bf16", "", &canonical);
    for (recompute, schedule) in
        [("'none'", "1f1b"), ("'selective'", "zb_h1"), ("'full'", "zb_h1"), ("'stage'", "gpipe")]
    {
        let case = Case { dp: 2, tp: 2, pp: 2, schedule, micros: 4, ..Case::alone(&PLAIN) };
        let mesh = step(&case, "bf16", &format!("recompute = {recompute}\n"), &canonical);
        assert_eq!(mesh.gradients, alone.gradients, "{case}, {recompute}");
        assert_eq!(mesh.weights, alone.weights, "{case}, {recompute}");
        assert_eq!(mesh.reports[0].loss.to_bits(), alone.reports[0].loss.to_bits(), "{case}, {recompute}");
    }
}

/// A layer of GPT-2 keeps 16 times the size of its input besides what is exact: about half of that in 16 bits.
#[test]
fn memory_is_less_and_as_predicted() {
    let sequence_parallel = true;
    for case in [
        Case::alone(&PLAIN),
        Case { dp: 2, tp: 2, pp: 2, schedule: "zb_h1", micros: 4, sequence_parallel, ..Case::alone(&DROPOUT) },
        Case { tp: 4, schedule: "gpipe", micros: 2, ..Case::alone(&LLAMA) },
    ] {
        let activations = |dtype: &str| -> u64 {
            let config = config(&case, dtype, "", SGD);
            let stepped = step_of(&format!("{case}, {dtype}"), &config, &case.model.data());
            let predicted = |rank: usize| predict(&config, rank).unwrap();
            for (rank, usage) in stepped.usage.iter().enumerate() {
                let predicted = predicted(rank);
                assert_eq!(
                    (usage.flops, usage.peak_bytes),
                    (predicted.flops, predicted.peak_bytes()),
                    "{case}: rank {rank}"
                );
            }
            predicted(0).memory.bytes_of(Category::Activations)
        };
        let (f32, bf16) = (activations("f32"), activations("bf16"));
        assert!(bf16 * 10 < f32 * 8, "{case}: {bf16} bytes in bf16, {f32} in f32");
    }
}

/// A GPT-2 has the zeros of its dropout alone. A run takes at most what is predicted, which counts no zeros.
#[test]
fn zeros_are_left_out_without_a_trace() {
    let sequence_parallel = true;
    for case in [
        Case::alone(&DROPOUT),
        Case { dp: 2, tp: 2, pp: 2, schedule: "zb_h1", micros: 4, sequence_parallel, ..Case::alone(&DROPOUT) },
        Case { dp: 4, pp: 2, schedule: "1f1b", micros: 2, ..Case::alone(&LLAMA) },
    ] {
        let of = |more: &str| {
            let config = config(&case, "f32", more, ADAMW);
            (step_of(&format!("{case}, {more}"), &config, &case.model.data()), config)
        };
        let ((dense, _), (sparse, config)) = (of(""), of("saved_encoding = 'sparse'\n"));
        assert_eq!((&sparse.gradients, &sparse.weights), (&dense.gradients, &dense.weights), "{case}");
        for (rank, usage) in sparse.usage.iter().enumerate() {
            let predicted = predict(&config, rank).unwrap().peak_bytes();
            assert!(
                usage.peak_bytes <= predicted,
                "{case}: rank {rank} took {}, predicted {predicted}",
                usage.peak_bytes
            );
        }
        assert_opaque_as_cpu(&format!("{case}, sparse"), &config, &case.model.data());
    }
}

#[test]
fn the_cpus_bits_where_the_host_reads_no_memory() {
    for (model, dtype) in [(&DROPOUT, "bf16"), (&LLAMA, "f16")] {
        let case = Case { dp: 2, tp: 2, pp: 2, schedule: "1f1b", micros: 4, ..Case::alone(model) };
        let config = config(&case, dtype, "recompute = 'full'\n", ADAMW);
        assert_opaque_as_cpu(&format!("{case}, {dtype}"), &config, &case.model.data());
    }
}
