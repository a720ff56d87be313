//! One step on every mesh of the table against the run of one rank. Plain gradient descent with rate 1, so that the
//! step is the gradient; different data on every row; with masks, token counts that differ between ranks and
//! micro-batches.

use crate::mesh::cases::{
    CASES, CLIPPED_SGD, Case, DROPOUT, LLAMA, Model, PADDED, PADDED_LLAMA, PLAIN, SGD, UNEVEN, UNTIED,
};
use crate::mesh::split_work;
use crate::mesh::world::{Stepped, one_step};
use meshwork_testkit::Sampled;
use meshwork_testkit::parity::{assert_close, norm, norm_of_all};

/// Loss and gradient norm are sums of many terms: they agree better than single gradients.
const SCALARS: f64 = 1e-6;

/// Every case of a model.
fn check(model: &'static Model) {
    let reference = one_step(&Case::alone(model), SGD);
    for case in CASES.iter().filter(|case| std::ptr::eq(case.model, model)).sampled(2) {
        let got = one_step(case, SGD);
        assert_parity(&case.to_string(), &got, &reference);
        split_work::assert_as_predicted(case, SGD, &got);
        // The closed forms are those of GPT-2.
        if model.more.is_empty() {
            split_work::assert_closed_forms(case, &got, &reference);
        }
    }
}

#[track_caller]
pub fn assert_parity(case: &str, got: &Stepped, reference: &Stepped) {
    let wanted = &reference.reports[0];
    for (rank, report) in got.reports.iter().enumerate() {
        let scalars = [("loss", report.loss, wanted.loss), ("gradient norm", report.grad_norm, wanted.grad_norm)];
        for (what, got, wanted) in scalars {
            let ratio = (got - wanted).abs() / wanted.abs();
            assert!(ratio <= SCALARS, "{case}: {what} on rank {rank} is {got}, on one rank {wanted} ({ratio:.1e} off)");
        }
    }
    // The reported norm is that of the gradients after the step.
    let of_all = norm_of_all(reference.gradients.values().map(Vec::as_slice));
    assert_close(&format!("{case}: gradient norm"), &[got.reports[0].grad_norm], &[of_all], 0.0);
    for (what, got, wanted) in [
        ("gradient", &got.gradients, &reference.gradients),
        ("weights after the step", &got.weights, &reference.weights),
    ] {
        assert!(
            got.keys().eq(wanted.keys()),
            "{case}: parameters are {:?}, on one rank {:?}",
            got.keys(),
            wanted.keys()
        );
        let all = norm_of_all(wanted.values().map(Vec::as_slice));
        for (name, wanted) in wanted {
            assert_close(&format!("{case}: {what} of {name}"), &got[name], wanted, all);
        }
    }
}

#[test]
fn plain_model() {
    check(&PLAIN);
}

#[test]
fn uneven_layers_vocabulary_and_masks() {
    check(&UNEVEN);
}

#[test]
fn untied_embeddings() {
    check(&UNTIED);
}

#[test]
fn llama() {
    check(&LLAMA);
}

/// In fast numerics the last ranks hold zeros beyond them.
#[test]
fn inner_features_that_tp_does_not_divide() {
    for (model, like) in [(&PADDED, &UNTIED), (&PADDED_LLAMA, &LLAMA)] {
        let reference = one_step(&Case::alone(model), SGD);
        for case in CASES.iter().filter(|case| std::ptr::eq(case.model, like) && case.tp > 1).sampled(3) {
            let case = Case { model, ..*case };
            let got = one_step(&case, SGD);
            assert_parity(&case.to_string(), &got, &reference);
            split_work::assert_as_predicted(&case, SGD, &got);
        }
    }
}

#[test]
fn dropout_is_the_same_on_any_mesh() {
    check(&DROPOUT);
    let [with, without] = [&DROPOUT, &UNEVEN].map(|model| one_step(&Case::alone(model), SGD).reports[0].loss);
    assert!((with - without).abs() > 1e-4 * without, "dropout changes nothing: {with} with, {without} without");
}

#[test]
fn clipped_steps() {
    let reference = one_step(&Case::alone(&UNEVEN), CLIPPED_SGD);
    let unclipped = one_step(&Case::alone(&UNEVEN), SGD);
    let moved = |stepped: &Stepped| {
        let difference = |name: &String| -> Vec<f32> {
            let start = &unclipped.weights[name].iter().zip(&unclipped.gradients[name]).map(|(w, g)| w + g);
            start.clone().zip(&stepped.weights[name]).map(|(start, end)| start - end).collect()
        };
        norm(&unclipped.weights.keys().flat_map(difference).collect::<Vec<f32>>())
    };
    let (length, whole) = (moved(&reference), moved(&unclipped));
    assert!((length - 0.125).abs() < 1e-4 && whole > 0.5, "the step has length {length} clipped, {whole} unclipped");
    for case in CASES.iter().filter(|case| std::ptr::eq(case.model, &UNEVEN) && case.dp * case.tp * case.pp >= 8) {
        assert_parity(&format!("{case}, clipped"), &one_step(case, CLIPPED_SGD), &reference);
    }
}
