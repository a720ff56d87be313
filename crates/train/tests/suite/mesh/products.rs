//! `training.matmul_dtype`, "bf16" and "tf32": products round their operands and add up in f32. In bf16, values that
//! only products read are stored rounded; everything else that is kept or sent is f32.

use crate::mesh::cases::{ADAMW, BATCH, Case, DROPOUT, PLAIN, SGD, UNEVEN};
use crate::mesh::split_work;
use crate::mesh::world::{Stepped, assert_same_bits_on_every_run, on_mesh, one_step};
use meshwork_core::{DType, OpKind};
use meshwork_testkit::parity::{FLOOR, norm, norm_of_all};
use meshwork_train::Trainer;
use meshwork_train::plan::{Prediction, predict};

const STEPS: usize = 20;

/// A type of operands, and what it is allowed. TF32 has three bits more than bf16: an operand is rounded by an eighth
/// as much. Where the last bit of f32 decides how an operand is rounded, that happens eight times as often, each by an
/// eighth, which leaves a factor of √8.
#[derive(Clone, Copy)]
struct Low {
    name: &'static str,
    /// Largest relative difference of a loss from that of f32, over all steps: AdamW carries rounding from step to
    /// step.
    of_loss: f64,
    /// Least and largest error of a gradient against f32, relative to its norm. An operand of bf16 is rounded by up to
    /// 2⁻⁹ of itself.
    of_gradient: [f64; 2],
    /// The same between two meshes, which differ where the last bit of an f32 sum makes an operand round the other way.
    between_meshes: f64,
}

const BF16: Low = Low { name: "bf16", of_loss: 1e-2, of_gradient: [1e-4, 2e-2], between_meshes: 2e-3 };
const TF32: Low = Low { name: "tf32", of_loss: 3.5e-3, of_gradient: [1e-4 / 8.0, 2e-2 / 8.0], between_meshes: 7e-4 };

impl Low {
    /// The sections `[optimizer]` and `[training]`, the second last, with products of this type.
    fn with(&self, more: &str) -> String {
        format!("{more}matmul_dtype = '{}'\n", self.name)
    }
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
    let f32 = losses(ADAMW);
    for low in [BF16, TF32] {
        let (rounded, name) = (losses(&low.with(ADAMW)), low.name);
        // Random tokens, the same in every step, so the model can only memorise them.
        assert!(rounded[STEPS - 1] < 0.8 * rounded[0], "nothing was learned in {rounded:?}");
        for (step, (rounded, f32)) in rounded.iter().zip(&f32).enumerate() {
            let off = (rounded - f32).abs() / f32;
            assert!(off <= low.of_loss, "loss {rounded} after {step} steps in {name}, {f32} in f32 ({off:.1e} off)");
            assert!(off > 0.0, "step {step} in {name} has the loss of f32: nothing was rounded");
        }
    }
}

#[test]
fn gradients_are_those_of_f32_but_for_rounding() {
    for model in [&PLAIN, &UNEVEN] {
        let f32 = one_step(&Case::alone(model), SGD);
        for low in [BF16, TF32] {
            let error = gradient_error(&one_step(&Case::alone(model), &low.with(SGD)), &f32);
            let [least, most] = low.of_gradient;
            assert!((least..=most).contains(&error), "{} in {}: {error:.1e} off", model.name, low.name);
        }
    }
}

#[test]
fn any_mesh_gives_the_gradients_of_one_rank() {
    for (low, model) in [(BF16, &UNEVEN), (BF16, &DROPOUT), (TF32, &UNEVEN), (TF32, &DROPOUT)] {
        let sgd = low.with(SGD);
        let reference = one_step(&Case::alone(model), &sgd);
        for (mesh, sequence_parallel) in [((4, 1, 1), false), ((1, 4, 1), true), ((1, 1, 2), false), ((2, 2, 2), true)]
        {
            let case = Case::of_1f1b(model, mesh, sequence_parallel, 4);
            let got = one_step(&case, &sgd);
            let error = gradient_error(&got, &reference);
            assert!(error <= low.between_meshes, "{case} in {}: {error:.1e} off", low.name);
            split_work::assert_as_predicted(&case, &sgd, &got);
        }
    }
}

#[test]
fn the_same_bits_on_every_run() {
    let mesh = Case::of_1f1b(&DROPOUT, (2, 2, 2), true, 4);
    for (low, case) in [(BF16, Case::alone(&DROPOUT)), (BF16, mesh), (TF32, Case::alone(&DROPOUT)), (TF32, mesh)] {
        assert_same_bits_on_every_run(case, &case.config(&low.with(ADAMW)));
    }
}

/// The normed activations that sequence parallelism gathers are matmul operands, and take half the bytes; nothing else
/// changes.
#[test]
fn the_plan_is_that_of_f32_but_for_factors() {
    let case = Case::of_1f1b(&UNEVEN, (2, 2, 2), true, 4);
    let [f32, tf32, bf16] = [SGD, &TF32.with(SGD), &BF16.with(SGD)].map(|more| predict(&case.config(more), 0).unwrap());
    assert!(tf32.records == f32.records && tf32.peak_bytes() == f32.peak_bytes(), "operands of TF32 are kept in full");
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
