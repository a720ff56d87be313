//! Direct preference optimisation, pair by pair, in f64.
//!
//! `reward = beta (reference - loss)`, `margin = reward_chosen - reward_rejected`, and the loss of the pair is
//! `(1 - s) ln(1 + e^-margin) + s ln(1 + e^margin)`. A sample has room for some pairs, `[answers]` with the chosen
//! answer of each in front of the rejected one, and has the first `pairs` of them.

use meshwork_tensor::kernel::{PairNumber, Preference};

/// A number of the pairs of each sample, summed over them in order, from the losses of their answers and those of the
/// reference: `[samples, answers]`. Overwrites `out`.
pub fn forward(of: Preference, number: PairNumber, losses: &[f64], reference: &[f64], pairs: &[i32], out: &mut [f64]) {
    let answers = answers(losses, &[reference.len()], pairs);
    assert_eq!(pairs.len(), out.len(), "samples");
    let samples = losses.chunks(answers).zip(reference.chunks(answers)).zip(pairs);
    out.fill(0.0);
    for (((losses, reference), &pairs), out) in samples.zip(out) {
        let all = losses.chunks_exact(2).zip(reference.chunks_exact(2));
        *out = all.take(pairs.max(0) as usize).fold(0.0, |sum, (losses, reference)| {
            let [chosen, rejected] = rewards(of, losses, reference);
            let margin = chosen - rejected;
            sum + match number {
                PairNumber::Loss => {
                    let s = of.label_smoothing;
                    (1.0 - s) * softplus(-margin) + s * softplus(margin)
                }
                PairNumber::Chosen => chosen,
                PairNumber::Rejected => rejected,
                PairNumber::Margin => margin,
                PairNumber::Correct => f64::from(u8::from(margin > 0.0)),
            }
        });
    }
}

/// The gradients of the losses of answers, `[samples, answers]`, from the gradient of each sample's loss: `dl/dmargin =
/// s - 1 + σ(margin)`, and 0 behind its pairs. Overwrites `dlosses`.
pub fn backward(of: Preference, losses: &[f64], reference: &[f64], pairs: &[i32], dloss: &[f64], dlosses: &mut [f64]) {
    let answers = answers(losses, &[reference.len(), dlosses.len()], pairs);
    assert_eq!(pairs.len(), dloss.len(), "samples");
    let samples = losses.chunks(answers).zip(reference.chunks(answers)).zip(pairs.iter().zip(dloss));
    dlosses.fill(0.0);
    for (((losses, reference), (&pairs, &dloss)), dlosses) in samples.zip(dlosses.chunks_mut(answers)) {
        let all = losses.chunks_exact(2).zip(reference.chunks_exact(2)).zip(dlosses.chunks_exact_mut(2));
        for ((losses, reference), dlosses) in all.take(pairs.max(0) as usize) {
            let [chosen, rejected] = rewards(of, losses, reference);
            let sigmoid = 1.0 / (1.0 + (rejected - chosen).exp());
            let slope = (sigmoid - (1.0 - of.label_smoothing)) * of.beta * dloss;
            dlosses.copy_from_slice(&[-slope, slope]);
        }
    }
}

/// The answers that a sample has room for, at least 1.
fn answers(losses: &[f64], others: &[usize], pairs: &[i32]) -> usize {
    let answers = losses.len() / pairs.len().max(1);
    assert_eq!(losses.len(), pairs.len() * answers, "answers of {} samples", pairs.len());
    assert!(others.iter().all(|&len| len == losses.len()), "{} answers against {others:?}", losses.len());
    answers.max(1)
}

fn rewards(of: Preference, losses: &[f64], reference: &[f64]) -> [f64; 2] {
    [0, 1].map(|answer| of.beta * (reference[answer] - losses[answer]))
}

/// `ln(1 + e^x)`, without an infinity on the way.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
