//! `training.dtype`: weights, activations and gradients are stored and sent in 16 bits, the optimizer has weights in
//! f32, and in f16 the loss is scaled.

use crate::mesh::cases::{ADAMW, BATCH, Case, DROPOUT, LLAMA, PLAIN, SGD, UNEVEN};
use crate::mesh::opaque::assert_opaque_as_cpu;
use crate::mesh::products::gradient_error;
use crate::mesh::split_work;
use crate::mesh::world::{Stepped, assert_same_bits_on_every_run, on_mesh, one_step, pieces, train};
use meshwork_core::DType;
use meshwork_tensor::Category;
use meshwork_testkit::Sampled;
use meshwork_train::Trainer;
use meshwork_train::config::Config;
use meshwork_train::plan::predict;

const STEPS: usize = 20;
/// Largest error of a gradient against f32, relative to its norm: activations and their gradients are rounded in every
/// operation.
const OF_GRADIENT: [(&str, f64); 2] = [("bf16", 4e-2), ("f16", 6e-3)];
/// The same between two meshes, which round other partial sums.
const BETWEEN_MESHES: [(&str, f64); 2] = [("bf16", 2.5e-2), ("f16", 4e-3)];

/// The sections `[optimizer]` and `[training]`, the second last, in `dtype`.
fn mixed(more: &str, dtype: &str) -> String {
    format!("{more}dtype = '{dtype}'\n")
}

#[test]
fn gradients_are_those_of_f32_but_for_rounding() {
    for model in [&PLAIN, &UNEVEN, &LLAMA] {
        let exact = one_step(&Case::alone(model), SGD);
        for (dtype, most) in OF_GRADIENT {
            let rounded = one_step(&Case::alone(model), &mixed(SGD, dtype));
            let error = gradient_error(&rounded, &exact);
            assert!((1e-4..=most).contains(&error), "{}, {dtype}: {error:.1e} off", model.name);
        }
    }
}

#[test]
fn it_learns_as_f32_does() {
    let losses = |more: &str| {
        let config = Case::alone(&UNEVEN).config(more);
        let batch = UNEVEN.data().batch(0, BATCH, 0..BATCH).unwrap();
        let step = |trainer: &mut Trainer| Ok(trainer.step(&batch)?.loss);
        on_mesh(&config, |mut trainer| (0..STEPS).map(|_| step(&mut trainer)).collect::<Result<Vec<_>, _>>()).concat()
    };
    let f32 = losses(ADAMW);
    for dtype in ["bf16", "f16"] {
        let rounded = losses(&mixed(ADAMW, dtype));
        assert!(rounded[STEPS - 1] < 0.8 * rounded[0], "nothing was learned in {rounded:?}");
        for (step, (rounded, f32)) in rounded.iter().zip(&f32).enumerate() {
            assert!((rounded - f32).abs() <= 1e-2 * f32, "{dtype}: loss {rounded} after {step} steps, {f32} in f32");
        }
    }
}

#[test]
fn any_mesh_gives_the_gradients_of_one_rank_as_predicted() {
    for (dtype, most) in BETWEEN_MESHES {
        for model in [&UNEVEN, &DROPOUT] {
            let sgd = mixed(SGD, dtype);
            let reference = one_step(&Case::alone(model), &sgd);
            let meshes = [((4, 1, 1), false), ((1, 4, 1), true), ((2, 2, 2), true), ((1, 1, 2), false)];
            for (mesh, sequence_parallel) in meshes.into_iter().sampled(2) {
                for reduced in ["f32", dtype] {
                    let sgd = format!("{sgd}reduce_dtype = '{reduced}'\n");
                    let case = Case::of_1f1b(model, mesh, sequence_parallel, 4);
                    let got = one_step(&case, &sgd);
                    let error = gradient_error(&got, &reference);
                    assert!(error <= most, "{case}, {dtype}, reduced in {reduced}: {error:.1e} off");
                    split_work::assert_as_predicted(&case, &sgd, &got);
                }
            }
        }
    }
}

/// A scale that is a power of two changes no bit where nothing under- or overflows.
#[test]
fn a_loss_scale_changes_no_bit_of_bf16() {
    let step = |scale: u32| {
        let sgd = format!("{}loss_scale = {scale}\n", mixed(SGD, "bf16"));
        one_step(&Case { dp: 2, pp: 2, micros: 4, ..Case::alone(&PLAIN) }, &sgd)
    };
    let (plain, scaled) = (step(1), step(1024));
    assert_eq!(plain.gradients, scaled.gradients);
    assert_eq!(plain.weights, scaled.weights);
    let norm = |of: &Stepped| of.reports[0].grad_norm.to_bits();
    assert_eq!(norm(&plain), norm(&scaled));
}

/// A scale that is too large overflows f16: steps are skipped, and change nothing, until it is small enough; also where
/// the next step had begun.
#[test]
fn steps_that_overflow_are_skipped_on_all_ranks() {
    for schedule in ["1f1b", "zb_h2"] {
        let case = Case { dp: 2, pp: 2, schedule, micros: 4, ..Case::alone(&PLAIN) };
        let config = |initial: u64| {
            let dynamic = format!("loss_scale_initial = {initial}\nloss_scale_growth_interval = 2\n");
            case.config(&format!("{}{dynamic}", mixed(ADAMW, "f16")))
        };
        let too_large = config(1 << 32);
        let data = case.model.data();
        let run = |config: &Config, steps: usize| {
            on_mesh(config, |mut trainer| {
                let reports = (0..steps).map(|_| train(&mut trainer, &data, config)).collect::<Result<Vec<_>, _>>()?;
                Ok((reports, pieces(&trainer)?))
            })
        };
        let ranks = run(&too_large, 24);
        let (reports, _) = &ranks[0];
        let skipped = reports.iter().take_while(|report| report.skipped).count();
        assert!((8..20).contains(&skipped), "{case}: {skipped} steps were skipped");
        for (at, report) in reports[..=skipped].iter().enumerate() {
            assert_eq!(report.loss_scale, (1u64 << 32) as f64 / 2f64.powi(at as i32), "{case}, step {at}");
        }
        assert!(reports[skipped].grad_norm.is_finite());
        assert!(
            reports[skipped + 1..].iter().any(|report| report.loss_scale > reports[skipped].loss_scale),
            "{case}: grows"
        );
        for (rank, (others, _)) in ranks.iter().enumerate() {
            let scales = |reports: &[meshwork_train::StepReport]| -> Vec<(f64, bool)> {
                reports.iter().map(|report| (report.loss_scale, report.skipped)).collect()
            };
            assert_eq!(scales(others), scales(reports), "{case}: rank {rank}");
        }
        // Skipped steps leave weights and states as they are.
        let (before, skipped) = (run(&too_large, 0), run(&too_large, skipped));
        for (rank, (before, skipped)) in before.iter().zip(&skipped).enumerate() {
            assert_same_weights(&format!("{case}: rank {rank}"), &skipped.1, &before.1);
        }
    }
}

fn assert_same_weights(what: &str, got: &[crate::mesh::world::Piece], wanted: &[crate::mesh::world::Piece]) {
    for (got, wanted) in got.iter().zip(wanted) {
        assert_eq!((&got.weights, &got.states), (&wanted.weights, &wanted.states), "{what}: {}", wanted.name);
    }
}

#[test]
fn the_same_bits_on_every_run() {
    let case = Case::of_1f1b(&DROPOUT, (2, 2, 2), true, 4);
    assert_same_bits_on_every_run(case, &case.config(&mixed(ADAMW, "f16")));
}

/// 2 + 2 + 12 bytes a parameter with gradients in 16 bits (Rajbhandari et al. 2020, section 3.1), and half of the bytes
/// between ranks.
#[test]
fn memory_and_traffic_are_halved() {
    let case = Case { dp: 2, pp: 2, micros: 4, ..Case::alone(&PLAIN) };
    let of = |more: &str| predict(&case.config(&format!("{ADAMW}{more}")), 0).unwrap();
    let (f32, bf16) = (of(""), of("dtype = 'bf16'\nreduce_dtype = 'bf16'\n"));
    let parameters = f32.parameters as u64;
    assert_eq!(bf16.model_bytes, 16 * parameters);
    let bytes = |category| (f32.memory.bytes_of(category), bf16.memory.bytes_of(category));
    assert_eq!(bytes(Category::Parameters), (4 * parameters, 2 * parameters));
    assert_eq!(bytes(Category::Optimizer), (8 * parameters, 12 * parameters));
    let (f32_activations, activations) = bytes(Category::Activations);
    assert!(activations * 100 < f32_activations * 65, "{activations} bytes of activations, {f32_activations} in f32");
    for (full, half) in f32.records.iter().zip(&bf16.records).filter(|(full, _)| full.dtype == DType::F32) {
        assert_eq!((half.dtype, 2.0 * half.bytes()), (DType::Bf16, full.bytes()), "{half:?}");
    }
}

#[test]
fn the_cpus_bits_where_the_host_reads_no_memory() {
    for (model, dtype) in [(&DROPOUT, "bf16"), (&LLAMA, "f16")] {
        let case = Case { dp: 2, tp: 2, pp: 2, schedule: "1f1b", micros: 4, ..Case::alone(model) };
        let config = case.config(&mixed(ADAMW, dtype));
        assert_opaque_as_cpu(&format!("{case}, {dtype}"), &config, &case.model.data());
    }
}
