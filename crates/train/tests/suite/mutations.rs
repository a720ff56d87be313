//! A comparison finds faults: in canonical numerics a mesh has the bits of one rank, so a fault in its program shows at
//! the first value that it touches. Each fault here is a typical one. It must be found at its operation, layer and
//! step, and nothing before it may differ.

use crate::small::{self, HIDDEN, SEQ, data};
use meshwork_core::Axis;
use meshwork_diff::{Between, Location, Side, Site, Vector, compare};
use meshwork_models::language::{self, TARGETS, TOKENS};
use meshwork_tensor::tape::Seen;
use meshwork_tensor::{Error, Tensor};
use meshwork_train::config::Config;
use meshwork_train::{Data, TrainError};
use std::collections::BTreeMap;
use std::sync::Mutex;

fn config(mesh: &str) -> Config {
    small::config(&format!("{mesh} --set training.numerics=canonical"))
}

/// Runs three steps of one rank, and of a mesh with a fault. Returns where the fault was found.
#[track_caller]
fn found(mesh: &str, with_fault: impl FnOnce(Side<'static>) -> Side<'static>) -> (u64, Location) {
    // The data lives as long as the test process, because a side borrows it, and its hooks own theirs.
    let data: &'static Data = Box::leak(Box::new(data()));
    let [one, other]: [&'static Config; 2] = ["dp=1", mesh].map(|mesh| &*Box::leak(Box::new(config(mesh))));
    let (one, other) = (Side::new(one, data).unwrap(), Side::new(other, data).unwrap());
    let sound = compare([&one, &other], 3).unwrap();
    assert!(sound.identical() && sound.skipped.is_empty(), "{mesh} without a fault: {sound}");
    let report = compare([&one, &with_fault(other)], 3).unwrap();
    let first = report.first.as_ref().unwrap_or_else(|| panic!("not found: {report}"));
    // Between the sides, or already between ranks that should hold the same.
    assert!(first.between != Between::Ranks { side: 'A' }, "{report}");
    assert!(!report.holds(), "a divergence in canonical numerics is a failure: {report}");
    (first.step, first.place.clone())
}

/// The same for a fault in one value: (step, operation, layer, operand).
#[track_caller]
fn found_at(
    mesh: &str,
    fault: impl Fn(Site, &Seen<'_>) -> Result<Option<Tensor>, Error> + Send + Sync + 'static,
) -> (u64, String, String, Option<&'static str>) {
    match found(mesh, |side| side.with_hook(fault)) {
        (step, Location::Op { name, layer, operand, .. }) => (step, name, layer, operand),
        (step, other) => panic!("step {step}: {other}"),
    }
}

fn at(step: u64, op: &str, layer: &str, operand: Option<&'static str>) -> (u64, String, String, Option<&'static str>) {
    (step, op.to_owned(), layer.to_owned(), operand)
}

/// Whether this is the output of that operation on parameters of that layer.
fn is_output(seen: &Seen<'_>, op: &str, layer: &str) -> bool {
    seen.op == op && seen.operand.is_none() && seen.params.iter().any(|name| name.starts_with(layer))
}

/// A value with other elements.
fn with(seen: &Seen<'_>, change: impl FnOnce(&mut Vec<f32>)) -> Result<Option<Tensor>, Error> {
    let mut values = seen.tensor.to_vec::<f32>()?;
    change(&mut values);
    Tensor::from_slice(seen.tensor.device(), &values, seen.tensor.shape()).map(Some)
}

const MESH: &str = "dp=2,tp=2,pp=2 --set pipeline.num_microbatches=2";
const SEQUENCE: &str = "dp=2,tp=2 --set parallelism.sequence_parallel=true";

#[test]
fn a_sum_in_another_order() {
    let fault = |_: Site, seen: &Seen<'_>| {
        if !is_output(seen, "linear", "h.0.attn.out") {
            return Ok(None);
        }
        let [x, w] = [0, 1].map(|i| seen.inputs[i].to_vec::<f32>().unwrap());
        let k = w.len() / HIDDEN;
        with(seen, |y| {
            for (i, y) in y.iter_mut().enumerate() {
                let (x, w) = (&x[i / HIDDEN * k..][..k], &w[i % HIDDEN * k..][..k]);
                *y = x.iter().zip(w).rev().fold(0.0, |sum, (x, w)| x.mul_add(*w, sum));
            }
        })
    };
    assert_eq!(found_at(MESH, fault), at(1, "linear", "h.0.attn.out", None));
}

/// Forward is right without it; the gradient is each rank's own share.
#[test]
fn a_missing_copy() {
    let shares: Mutex<BTreeMap<(usize, usize), Tensor>> = Mutex::default();
    let fault = move |site: Site, seen: &Seen<'_>| {
        let mut shares = shares.lock().unwrap();
        match (seen.op, seen.operand) {
            ("copy", Some(_)) => Ok(shares.remove(&(site.rank, site.micro))),
            (_, Some("x")) => {
                shares.insert((site.rank, site.micro), seen.tensor.clone());
                Ok(None)
            }
            _ => Ok(None),
        }
    };
    assert_eq!(found_at(MESH, fault), at(1, "copy", "after ln_f", Some("x")));
}

/// Biases start at zero: the first step is right.
#[test]
fn a_bias_added_on_every_rank() {
    let fault = |_: Site, seen: &Seen<'_>| {
        if !is_output(seen, "bias_residual", "h.1.mlp.down") {
            return Ok(None);
        }
        let bias = seen.inputs[1].to_vec::<f32>()?;
        with(seen, |y| y.iter_mut().enumerate().for_each(|(i, y)| *y += bias[i % HIDDEN]))
    };
    assert_eq!(found_at(MESH, fault), at(2, "bias_residual", "h.1.mlp.down", None));
}

#[test]
fn a_weight_of_the_step_before() {
    let name = "h.0.mlp.up.weight";
    let old: Mutex<BTreeMap<usize, Vec<f32>>> = Mutex::default();
    let place = found("dp=2", |side| {
        side.with_before_step(move |trainer, _| {
            let now = {
                let params = trainer.params();
                let id = params.declarations().find(name).unwrap();
                params.value(id)?.to_vec::<f32>()?
            };
            let before = old.lock().unwrap().insert(trainer.rank().world_rank(), now);
            match (trainer.steps_done(), before) {
                (2, Some(before)) => trainer.load_parameter(name, &before),
                _ => Ok(()),
            }
        })
    });
    let (step, Location::Op { name, layer, operand, .. }) = place else { panic!("{place:?}") };
    assert_eq!((step, name, layer, operand), at(3, "linear_bias_gelu", "h.0.mlp.up", None));
}

#[test]
fn micro_batches_in_another_order() {
    let place = found(MESH, |side| {
        side.with_before_step(|trainer, batch| {
            if trainer.rank().coords().get(Axis::Dp) == 1 && trainer.steps_done() == 1 {
                let rotated = [TOKENS, TARGETS].map(|field| {
                    let mut values = batch.values::<i32>(field).unwrap().to_vec();
                    let half = values.len() / 2;
                    values.rotate_left(half);
                    values
                });
                let ([tokens, targets], seq_len) = (rotated, batch.dims(TOKENS)?[0]);
                *batch = language::batch(tokens, targets, seq_len)?;
            }
            Ok::<(), TrainError>(())
        })
    });
    let (step, Location::Op { name, layer, operand, .. }) = place else { panic!("{place:?}") };
    assert_eq!((step, name, layer, operand), at(2, "vocab_parallel_embedding", "wte", None));
}

/// The loss of a mean over each micro-batch, if they have different numbers of unmasked tokens.
#[test]
fn a_loss_averaged_over_its_micro_batch() {
    let fault = |_: Site, seen: &Seen<'_>| match (seen.op, seen.operand) {
        ("vocab_parallel_cross_entropy", Some("logits")) => with(seen, |grad| {
            let rows = grad.len() / seen.tensor.shape()[2];
            let masked = grad.chunks(grad.len() / rows).filter(|row| row.iter().all(|g| *g == 0.0)).count();
            grad.iter_mut().for_each(|g| *g *= rows as f32 / (rows - masked) as f32);
        }),
        _ => Ok(None),
    };
    assert_eq!(found_at(MESH, fault), at(1, "vocab_parallel_cross_entropy", "after wte", Some("logits")));
}

#[test]
fn a_lookup_outside_the_shard() {
    let fault = |site: Site, seen: &Seen<'_>| {
        if !is_output(seen, "vocab_parallel_embedding", "wte") || site.coords.get(Axis::Tp) == 0 {
            return Ok(None);
        }
        let table = seen.inputs[1].to_vec::<f32>()?;
        with(seen, |y| {
            // Rows of words of other ranks should be zero; here they are the first row instead.
            for row in y.chunks_mut(HIDDEN).filter(|row| row.iter().all(|y| *y == 0.0)) {
                row.copy_from_slice(&table[..HIDDEN]);
            }
        })
    };
    assert_eq!(found_at(MESH, fault), at(1, "vocab_parallel_embedding", "wte", None));
}

#[test]
fn a_norm_with_another_epsilon() {
    let fault = |_: Site, seen: &Seen<'_>| {
        if !is_output(seen, "layer_norm", "h.1.ln_2") {
            return Ok(None);
        }
        let [x, gamma, beta] = [0, 1, 2].map(|i| seen.inputs[i].buffer());
        let (y, ..) = seen.tensor.device().norm()?.layer_norm(x, [gamma, beta], 1e-6, seen.tensor.dtype())?;
        Tensor::from_buffer(seen.tensor.device(), y, seen.tensor.shape()).map(Some)
    };
    assert_eq!(found_at(MESH, fault), at(1, "layer_norm", "h.1.ln_2", None));
}

/// The sigmoid form of GELU instead of the tanh form.
#[test]
fn another_activation() {
    let fault = |_: Site, seen: &Seen<'_>| {
        if !is_output(seen, "linear_bias_gelu", "h.0.mlp.up") {
            return Ok(None);
        }
        let [x, w, b] = [0, 1, 2].map(|i| seen.inputs[i].to_vec::<f32>().unwrap());
        with(seen, |y| {
            for (i, y) in y.iter_mut().enumerate() {
                let (x, w) = (&x[i / b.len() * HIDDEN..][..HIDDEN], &w[i % b.len() * HIDDEN..][..HIDDEN]);
                let inner = x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>() + b[i % b.len()];
                *y = inner / (1.0 + (-1.702 * inner).exp());
            }
        })
    };
    assert_eq!(found_at(MESH, fault), at(1, "linear_bias_gelu", "h.0.mlp.up", None));
}

#[test]
fn slices_gathered_in_the_wrong_order() {
    let fault = |_: Site, seen: &Seen<'_>| match (seen.op, seen.operand, seen.position.step) {
        // The first of the model: after ln_1 of layer 0, [b, s, hidden] from two halves of s.
        ("all_gather", None, 1) => with(seen, |y| {
            y.chunks_mut(SEQ * HIDDEN).for_each(|sample| sample.rotate_left(SEQ / 2 * HIDDEN));
        }),
        _ => Ok(None),
    };
    assert_eq!(found_at(SEQUENCE, fault), at(2, "copy | all_gather", "after h.0.ln_1", None));
}

/// Each rank keeps its slice of its own share.
#[test]
fn a_slice_that_was_not_summed() {
    let fault = |site: Site, seen: &Seen<'_>| match (seen.op, seen.operand, seen.number > 1) {
        ("reduce_scatter", None, true) => {
            let whole = seen.inputs[0].to_vec::<f32>()?;
            let half = SEQ / 2 * HIDDEN;
            let of = |sample: usize| sample * SEQ * HIDDEN + site.coords.get(Axis::Tp) * half;
            with(seen, |y| {
                y.chunks_mut(half).enumerate().for_each(|(sample, y)| y.copy_from_slice(&whole[of(sample)..][..half]));
            })
        }
        _ => Ok(None),
    };
    assert_eq!(found_at(SEQUENCE, fault), at(1, "all_reduce | reduce_scatter", "after h.0.attn.out", None));
}

/// Every token sees the one after it as well.
#[test]
fn a_mask_that_is_off_by_one() {
    let fault = |_: Site, seen: &Seen<'_>| {
        if (seen.op, seen.operand) != ("causal_attention", None) {
            return Ok(None);
        }
        let row = seen.tensor.shape()[2..].iter().product::<usize>();
        with(seen, |y| {
            for sample in y.chunks_mut(SEQ * row) {
                sample.copy_within(row.., 0);
            }
        })
    };
    assert_eq!(found_at(MESH, fault), at(1, "causal_attention", "after h.0.attn.qkv", None));
}

/// The gradient was the same, so the update is wrong.
#[test]
fn an_optimizer_that_forgets_slower() {
    let data = data();
    let (one, other) = (config("dp=1"), config(&format!("{MESH} --set optimizer.beta2=0.96")));
    let report = compare([&Side::new(&one, &data).unwrap(), &Side::new(&other, &data).unwrap()], 3).unwrap();
    let first = report.first.as_ref().unwrap();
    let Location::Parameter { name, vector } = &first.place else { panic!("{report}") };
    assert_eq!((first.step, &**name, *vector), (1, "wte.weight", Vector::Weight), "{report}");
}
