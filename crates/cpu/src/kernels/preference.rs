//! Direct preference optimisation, pair by pair, in f64.
//!
//! `reward = beta (reference - loss)`, `margin = reward_chosen - reward_rejected`, and the loss of the pair is
//! `(1 - s) ln(1 + e^-margin) + s ln(1 + e^margin)`.

use meshwork_tensor::kernel::{PairNumber, Preference};

/// A number of each pair, from the losses of its answers and those of the reference: `[pairs, 2]`. Overwrites `out`.
pub fn forward(of: Preference, number: PairNumber, losses: &[f64], reference: &[f64], out: &mut [f64]) {
    assert_eq!([losses.len(), reference.len()], [2 * out.len(); 2], "answers against {} pairs", out.len());
    for ((losses, reference), out) in losses.chunks_exact(2).zip(reference.chunks_exact(2)).zip(out) {
        let [chosen, rejected] = rewards(of, losses, reference);
        let margin = chosen - rejected;
        *out = match number {
            PairNumber::Loss => {
                let s = of.label_smoothing;
                (1.0 - s) * softplus(-margin) + s * softplus(margin)
            }
            PairNumber::Chosen => chosen,
            PairNumber::Rejected => rejected,
            PairNumber::Margin => margin,
            PairNumber::Correct => f64::from(u8::from(margin > 0.0)),
        };
    }
}

/// The gradients of the losses of answers, `[pairs, 2]`, from the gradient of each pair's loss: `dl/dmargin = s - 1 +
/// σ(margin)`. Overwrites `dlosses`.
pub fn backward(of: Preference, losses: &[f64], reference: &[f64], dloss: &[f64], dlosses: &mut [f64]) {
    assert_eq!([losses.len(), reference.len(), dlosses.len()], [2 * dloss.len(); 3], "answers and pairs");
    let answers = losses.chunks_exact(2).zip(reference.chunks_exact(2));
    for ((losses, reference), (dlosses, &dloss)) in answers.zip(dlosses.chunks_exact_mut(2).zip(dloss)) {
        let [chosen, rejected] = rewards(of, losses, reference);
        let sigmoid = 1.0 / (1.0 + (rejected - chosen).exp());
        let slope = (sigmoid - (1.0 - of.label_smoothing)) * of.beta * dloss;
        dlosses.copy_from_slice(&[-slope, slope]);
    }
}

fn rewards(of: Preference, losses: &[f64], reference: &[f64]) -> [f64; 2] {
    [0, 1].map(|answer| of.beta * (reference[answer] - losses[answer]))
}

/// `ln(1 + e^x)`, without an infinity on the way.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
