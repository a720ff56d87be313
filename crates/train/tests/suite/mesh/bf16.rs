//! `training.matmul_dtype = "bf16"`: products round their operands and add up in f32. Values that only products read
//! are stored rounded; everything else that is kept or sent is f32.

use crate::mesh::cases::{ADAMW, BATCH, Case, DROPOUT, PLAIN, SGD, UNEVEN};
use crate::mesh::split_work;
use crate::mesh::world::{Stepped, assert_same_pieces, assert_same_report, on_mesh, one_step, pieces, train};
use meshwork_core::{DType, OpKind};
use meshwork_testkit::parity::{FLOOR, norm, norm_of_all};
use meshwork_train::Trainer;
use meshwork_train::plan::{Prediction, predict};

const STEPS: usize = 20;
/// Largest relative difference of a loss from that of f32, over all steps: AdamW carries rounding from step to step.
const OF_LOSS: f64 = 1e-2;
/// Largest error of a gradient against f32, relative to its norm. An operand is rounded by up to 2⁻⁹ of itself.
const OF_GRADIENT: f64 = 2e-2;
/// The same between two meshes, which differ where the last bit of an f32 sum makes an operand round the other way.
const BETWEEN_MESHES: f64 = 2e-3;

/// The sections `[optimizer]` and `[training]`, the second last, with products in bf16.
fn bf16(more: &str) -> String {
    format!("{more}matmul_dtype = 'bf16'\n")
}

/// Over all parameters, the largest error of a gradient relative to its norm, or to a part of the whole gradient's norm
/// where it is near zero.
pub fn gradient_error(got: &Stepped, wanted: &Stepped) -> f64 {
    let all = norm_of_all(wanted.gradients.values().map(Vec::as_slice));
    let error = |(name, wanted): (&String, &Vec<f32>)| {
        let difference: Vec<f32> = got.gradients[name].iter().zip(wanted).map(|(got, wanted)| got - wanted).collect();
        norm(&difference) / norm(wanted).max(FLOOR * all)
    };
    wanted.gradients.iter().map(error).fold(0.0, f64::max)
}

#[test]
fn it_learns_as_f32_does_and_is_another_run() {
    let losses = |more: &str| {
        let config = Case::alone(&UNEVEN).config(more);
        let batch = UNEVEN.data().batch(0, BATCH, 0..BATCH).unwrap();
        let step = |trainer: &mut Trainer| Ok(trainer.step(&batch)?.loss);
        on_mesh(&config, |mut trainer| (0..STEPS).map(|_| step(&mut trainer)).collect::<Result<Vec<_>, _>>()).concat()
    };
    let (f32, bf16) = (losses(ADAMW), losses(&bf16(ADAMW)));
    // Random tokens, the same in every step, so the model can only memorise them.
    assert!(bf16[STEPS - 1] < 0.8 * bf16[0], "nothing was learned in {bf16:?}");
    for (step, (bf16, f32)) in bf16.iter().zip(&f32).enumerate() {
        let off = (bf16 - f32).abs() / f32;
        assert!(off <= OF_LOSS, "loss {bf16} after {step} steps, {f32} in f32 ({off:.1e} off)");
        assert!(off > 0.0, "step {step} has the loss of f32: nothing was rounded");
    }
}

#[test]
fn gradients_are_those_of_f32_but_for_rounding() {
    for model in [&PLAIN, &UNEVEN] {
        let [f32, bf16] = [SGD, &bf16(SGD)].map(|more| one_step(&Case::alone(model), more));
        let error = gradient_error(&bf16, &f32);
        assert!((1e-4..=OF_GRADIENT).contains(&error), "{}: {error:.1e} off", model.name);
    }
}

#[test]
fn any_mesh_gives_the_gradients_of_one_rank() {
    let sgd = bf16(SGD);
    for model in [&UNEVEN, &DROPOUT] {
        let reference = one_step(&Case::alone(model), &sgd);
        for (mesh, sequence_parallel) in [((4, 1, 1), false), ((1, 4, 1), true), ((1, 1, 2), false), ((2, 2, 2), true)]
        {
            let case = Case::of_1f1b(model, mesh, sequence_parallel, 4);
            let got = one_step(&case, &sgd);
            let error = gradient_error(&got, &reference);
            assert!(error <= BETWEEN_MESHES, "{case}: {error:.1e} off");
            split_work::assert_as_predicted(&case, &sgd, &got);
        }
    }
}

#[test]
fn the_same_bits_on_every_run() {
    for case in [Case::alone(&DROPOUT), Case::of_1f1b(&DROPOUT, (2, 2, 2), true, 4)] {
        let config = case.config(&bf16(ADAMW));
        let data = case.model.data();
        let run = || {
            on_mesh(&config, |mut trainer| {
                let reports = (0..3).map(|_| train(&mut trainer, &data, &config)).collect::<Result<Vec<_>, _>>()?;
                Ok((reports, pieces(&trainer)?))
            })
        };
        for (rank, (got, wanted)) in run().iter().zip(run()).enumerate() {
            let what = format!("{case}: rank {rank}");
            got.0.iter().zip(&wanted.0).for_each(|(got, wanted)| assert_same_report(&what, got, wanted));
            assert_same_pieces(&what, &got.1, &wanted.1);
        }
    }
}

/// The normed activations that sequence parallelism gathers are matmul operands, and take half the bytes; nothing else
/// changes.
#[test]
fn the_plan_is_that_of_f32_but_for_factors() {
    let case = Case::of_1f1b(&UNEVEN, (2, 2, 2), true, 4);
    let [f32, bf16] = [SGD, &bf16(SGD)].map(|more| predict(&case.config(more), 0).unwrap());
    let rest = |plan: &Prediction| (plan.parameters, plan.model_bytes, plan.flops, plan.records.len());
    assert_eq!(rest(&f32), rest(&bf16));
    assert!(bf16.peak_bytes() < f32.peak_bytes(), "{} bytes, {} in f32", bf16.peak_bytes(), f32.peak_bytes());
    let mut factors = 0;
    for (f32, bf16) in f32.records.iter().zip(&bf16.records) {
        if f32 != bf16 {
            assert_eq!(
                (&*f32.group, f32.op, f32.dtype, f32.bytes()),
                ("tp", OpKind::AllGather, DType::F32, 2.0 * bf16.bytes())
            );
            factors += 1;
        }
    }
    // For every layer of the first stage and every micro-batch: the inputs of attention and of the feed-forward block.
    let layers = UNEVEN.layers.div_ceil(2);
    assert_eq!(factors, 2 * layers * 4);
}
