//! The fused rules against hand-computed numbers and against naive recurrences in f64.

use meshwork_optim::{AdamW, OptimError, Optimizer, Rule, Sgd, Update, clip_factor};

/// Integers of a small linear congruential generator, scaled to about ±1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn at(step: u64) -> Update {
    Update { step, lr: 0.01, grad_scale: 1.0, decay_factor: 1.0 }
}

/// AdamW as the paper writes it, one element, all in f64.
#[derive(Default)]
struct NaiveAdamW {
    m: f64,
    v: f64,
}

impl NaiveAdamW {
    fn step(&mut self, rule: &AdamW, update: Update, w: f64, grad: f64) -> f64 {
        let g = f64::from(update.grad_scale) * grad;
        self.m = rule.beta1 * self.m + (1.0 - rule.beta1) * g;
        self.v = rule.beta2 * self.v + (1.0 - rule.beta2) * g * g;
        let m_hat = self.m / (1.0 - rule.beta1.powi(update.step as i32));
        let v_hat = self.v / (1.0 - rule.beta2.powi(update.step as i32));
        let decay = rule.weight_decay * update.decay_factor;
        w - update.lr * (m_hat / (v_hat.sqrt() + rule.eps) + decay * w)
    }
}

#[test]
fn adamw_by_hand() {
    // Step 1: m̂ = g, v̂ = g², so the weight moves by lr·sign(g), after losing lr·decay of itself:
    // 2·(1 - 0.1·0.5) - 0.1 = 1.8. Step 2 with the gradient turned round: m = 0.9·0.1·4 - 0.1·4 = -0.04,
    // m̂ = -0.04 / 0.19, v̂ = 16, so w = 1.8·0.95 + 0.1·(0.04 / 0.19) / 4 = 1.7152632.
    let rule = AdamW { weight_decay: 0.5, beta2: 0.99, ..AdamW::default() };
    let (mut w, mut m, mut v) = ([2.0f32], [0.0f32], [0.0f32]);
    let update = Update { lr: 0.1, ..at(1) };
    rule.update(update, &mut w, &[4.0], &mut [&mut m, &mut v]).unwrap();
    assert!((w[0] - 1.8).abs() < 1e-6, "{w:?}");
    assert!((m[0] - 0.4).abs() < 1e-6 && (v[0] - 0.16).abs() < 1e-6, "{m:?} {v:?}");
    rule.update(Update { step: 2, ..update }, &mut w, &[-4.0], &mut [&mut m, &mut v]).unwrap();
    assert!((w[0] - 1.715_263_2).abs() < 1e-6, "{w:?}");
}

#[test]
fn adamw_follows_the_paper_over_many_steps() {
    let rule = AdamW::default();
    let mut w = noise(1, 64);
    let (mut m, mut v) = (vec![0.0; 64], vec![0.0; 64]);
    let mut exact: Vec<f64> = w.iter().map(|&w| w.into()).collect();
    let mut naive: Vec<NaiveAdamW> = (0..64).map(|_| NaiveAdamW::default()).collect();
    for step in 1..=50 {
        let grads = noise(100 + step, 64);
        let update = Update { grad_scale: 0.37, decay_factor: [0.0, 1.0, 0.3][step as usize % 3], ..at(step) };
        rule.update(update, &mut w, &grads, &mut [&mut m, &mut v]).unwrap();
        for i in 0..64 {
            exact[i] = naive[i].step(&rule, update, exact[i], grads[i].into());
            // 50 steps, each adding a few roundings of values of about 1.
            assert!((f64::from(w[i]) - exact[i]).abs() < 50.0 * 2e-7, "step {step}, element {i}");
        }
    }
}

#[test]
fn sgd_by_hand() {
    // As PyTorch: g = 0.5·2 + 0.5·4 = 3; b = 3; w = 4 - 0.1·3 = 3.7.
    // Then g = 0.5·2 + 0.5·3.7 = 2.85; b = 0.9·3 + 2.85 = 5.55; w = 3.7 - 0.555 = 3.145.
    let rule = Sgd { momentum: 0.9, weight_decay: 0.5 };
    let (mut w, mut b) = ([4.0f32], [0.0f32]);
    let update = Update { lr: 0.1, grad_scale: 0.5, ..at(1) };
    rule.update(update, &mut w, &[2.0], &mut [&mut b]).unwrap();
    assert!((w[0] - 3.7).abs() < 1e-6, "{w:?}");
    rule.update(Update { step: 2, ..update }, &mut w, &[2.0], &mut [&mut b]).unwrap();
    assert!((w[0] - 3.145).abs() < 1e-6, "{w:?}");
}

#[test]
fn plain_sgd_has_no_state_and_is_exact_on_integers() {
    let rule = Sgd::default();
    assert!(rule.state_names().is_empty());
    let mut w = [5.0f32, -3.0];
    rule.update(Update { lr: 1.0, ..at(1) }, &mut w, &[2.0, -7.0], &mut []).unwrap();
    assert_eq!(w, [3.0, 4.0]);
}

#[test]
fn decay_spares_biases_and_norms() {
    let rule = AdamW { weight_decay: 0.5, ..AdamW::default() };
    for (decay_factor, expected) in [(1.0, 0.995), (0.0, 1.0), (0.5, 0.9975)] {
        let (mut w, mut m, mut v) = ([1.0f32], [0.0f32], [0.0f32]);
        rule.update(Update { decay_factor, ..at(1) }, &mut w, &[0.0], &mut [&mut m, &mut v]).unwrap();
        assert_eq!(w, [expected]);
        let sgd = Sgd { momentum: 0.0, weight_decay: 0.5 };
        let mut w = [1.0f32];
        sgd.update(Update { decay_factor, ..at(1) }, &mut w, &[0.0], &mut []).unwrap();
        assert_eq!(w, [expected]);
    }
}

#[test]
fn bits_do_not_depend_on_the_cut() {
    let rules = [
        Rule::from(AdamW::default()),
        Rule::from(Sgd { momentum: 0.9, weight_decay: 0.1 }),
        Rule::from(Sgd { momentum: 0.0, weight_decay: 0.1 }),
    ];
    const LEN: usize = 103;
    for rule in &rules {
        let run = |piece: usize| {
            let mut w = noise(7, LEN);
            let mut state = vec![vec![0.0f32; LEN]; rule.state_names().len()];
            for step in 1..=5 {
                let grads = noise(step, LEN);
                let update = Update { grad_scale: 0.3, ..at(step) };
                for start in (0..LEN).step_by(piece) {
                    let end = LEN.min(start + piece);
                    let mut cut: Vec<&mut [f32]> = state.iter_mut().map(|s| &mut s[start..end]).collect();
                    rule.update(update, &mut w[start..end], &grads[start..end], &mut cut).unwrap();
                }
            }
            let bits: Vec<u32> = w.iter().chain(state.iter().flatten()).map(|value| value.to_bits()).collect();
            bits
        };
        let whole = run(LEN);
        for piece in [1, 2, 3, 5, 8, 31, 64] {
            assert_eq!(run(piece), whole, "in pieces of {piece}");
        }
    }
}

/// Signs of a running mean (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): a rule of a user's
/// own.
#[derive(Debug)]
struct Lion;

impl Optimizer for Lion {
    fn name(&self) -> &str {
        "lion"
    }

    fn state_names(&self) -> &[&'static str] {
        &["mean"]
    }

    fn update(
        &self,
        update: Update,
        weights: &mut [f32],
        grads: &[f32],
        states: &mut [&mut [f32]],
    ) -> Result<(), OptimError> {
        let [mean] = update.check(self.name(), weights, grads, states)?;
        for ((w, &g), m) in weights.iter_mut().zip(grads).zip(mean.iter_mut()) {
            *w -= update.lr as f32 * (*m + g).signum();
            *m += 0.5 * (g - *m);
        }
        Ok(())
    }
}

#[test]
fn a_rule_is_data_and_says_what_it_keeps() {
    for (rule, name, states) in [
        (Rule::from(AdamW::default()), "adamw", &["exp_avg", "exp_avg_sq"][..]),
        (Rule::from(Sgd { momentum: 0.9, weight_decay: 0.0 }), "sgd", &["momentum_buffer"]),
        (Rule::from(Sgd::default()), "sgd", &[]),
        (Rule::custom(Lion), "lion", &["mean"]),
    ] {
        assert_eq!((rule.name(), rule.state_names()), (name, states));
    }
    let (mut w, mut mean) = ([1.0f32, 1.0], [0.0f32, 8.0]);
    let update = Update { lr: 0.25, ..at(1) };
    Rule::custom(Lion).update(update, &mut w, &[4.0, -4.0], &mut [&mut mean]).unwrap();
    assert_eq!((w, mean), ([0.75, 0.75], [2.0, 2.0]));
    let refused = Rule::custom(Lion).update(update, &mut w, &[4.0, -4.0], &mut []).unwrap_err();
    assert_eq!(refused.to_string(), "0 state vectors given: lion takes 1");
}

#[test]
fn clipping_brings_the_norm_down_and_never_up() {
    assert_eq!(clip_factor(0.0, 1.0), 1.0);
    assert_eq!(clip_factor(0.999, 1.0), 1.0);
    assert_eq!(clip_factor(8.0, 2.0), (2.0f64 / 8.000001) as f32);
    assert_eq!(clip_factor(1e30, 0.0), 1.0);
    assert_eq!(clip_factor(f64::INFINITY, 1.0), 0.0);
    assert!(clip_factor(f64::NAN, 1.0).is_nan(), "a NaN must not pass for an unclipped gradient");
}

#[test]
fn calls_that_do_not_fit_are_refused_before_anything_is_written() {
    let rule = AdamW::default();
    let (mut w, mut m, mut v) = ([1.0f32; 3], [0.0f32; 3], [0.0f32; 2]);
    let mut refusal = |step, grads: &[f32], state: &mut [&mut [f32]]| {
        let error = rule.update(at(step), &mut w, grads, state).unwrap_err();
        assert_eq!(w, [1.0; 3]);
        error
    };
    let step_zero = refusal(0, &[0.0; 3], &mut []);
    assert_eq!(step_zero, OptimError::StepZero);
    assert_eq!(step_zero.to_string(), "step 0: steps are counted from 1");
    assert_eq!(refusal(1, &[0.0; 2], &mut []).to_string(), "2 gradients for 3 weights: the lengths must be equal");
    assert_eq!(refusal(1, &[0.0; 3], &mut [&mut m]).to_string(), "1 state vectors given: adamw takes 2");
    assert_eq!(
        refusal(1, &[0.0; 3], &mut [&mut m, &mut v]).to_string(),
        "state vector 1 has 2 values for 3 weights: the lengths must be equal"
    );
    assert_eq!(
        Sgd::default().update(at(1), &mut [0.0], &[0.0], &mut [&mut [0.0]]).unwrap_err().to_string(),
        "1 state vectors given: sgd without momentum takes 0"
    );
}
