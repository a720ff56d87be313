//! The choice of the next token: a pure function of the logits, the seed and the place of the token.

use meshwork_tensor::random;

/// How a token is drawn from its logits. Temperature comes first, then `top_k`, then `top_p`, as in `transformers`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits. Below 1 it makes likely tokens more likely; 0 takes the most likely one.
    pub temperature: f64,
    /// The number of most likely tokens that may be drawn; 0 for all.
    pub top_k: usize,
    /// The probability that the most likely tokens must reach together; less likely ones are not drawn. 1 for all.
    pub top_p: f64,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.8, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// The token at `place`, counted from the first one that is drawn. Of equally likely tokens the first counts as
    /// more likely. `None` unless every logit is a number.
    pub fn pick(&self, logits: &[f32], place: u64) -> Option<usize> {
        let chance = random::uniform(random::key(self.seed, "sample"), place);
        self.pick_by(logits, f64::from(chance))
    }

    /// The token at which the running sum of probabilities, in the order of ids, passes `chance`.
    fn pick_by(&self, logits: &[f32], chance: f64) -> Option<usize> {
        if logits.is_empty() || !logits.iter().all(|logit| logit.is_finite()) {
            return None;
        }
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if self.temperature == 0.0 {
            return logits.iter().position(|&logit| logit == max);
        }
        let weights: Vec<f64> = logits.iter().map(|&logit| (f64::from(logit - max) / self.temperature).exp()).collect();
        let kept = self.kept(&weights);
        let mut left = chance * kept.iter().map(|&token| weights[token]).sum::<f64>();
        let passed = kept.iter().copied().find(|&token| {
            left -= weights[token];
            left < 0.0
        });
        passed.or(kept.last().copied())
    }

    /// The tokens that may be drawn, in the order of ids.
    fn kept(&self, weights: &[f64]) -> Vec<usize> {
        let mut tokens: Vec<usize> = (0..weights.len()).collect();
        if self.top_k == 0 && self.top_p >= 1.0 {
            return tokens;
        }
        // A stable sort keeps equally likely tokens in the order of ids.
        tokens.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
        if self.top_k > 0 {
            tokens.truncate(self.top_k);
        }
        let mut left = self.top_p * tokens.iter().map(|&token| weights[token]).sum::<f64>();
        let nucleus = tokens.iter().position(|&token| {
            left -= weights[token];
            left <= 0.0
        });
        tokens.truncate(nucleus.map_or(tokens.len(), |last| last + 1));
        tokens.sort_unstable();
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::f32::consts::LN_2;

    /// Logits of the probabilities 1/2, 1/4, 1/8, 1/8, out of order.
    const LOGITS: [f32; 4] = [-2.0 * LN_2, -LN_2, -3.0 * LN_2, -3.0 * LN_2];

    fn sampling() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::default() }
    }

    #[test]
    fn tokens_are_picked_as_often_as_their_probability() {
        for (chance, token) in [(0.0, 0), (0.2499, 0), (0.2501, 1), (0.7499, 1), (0.7501, 2), (0.8751, 3), (0.9999, 3)]
        {
            assert_eq!(sampling().pick_by(&LOGITS, chance), Some(token), "{chance}");
        }
        let mut counts = [0i32; 4];
        (0..8000).for_each(|place| counts[sampling().pick(&LOGITS, place).unwrap()] += 1);
        for (count, expected) in counts.into_iter().zip([2000, 4000, 1000, 1000]) {
            assert!((count - expected).abs() < 150, "{counts:?}");
        }
    }

    /// As `transformers` cuts them: top-k by rank, top-p by the smallest set that reaches the probability.
    #[test]
    fn unlikely_tokens_are_cut_off() {
        let kept = |sampling: Sampling| {
            let weights: Vec<f64> = LOGITS.iter().map(|&logit| f64::from(logit).exp()).collect();
            sampling.kept(&weights)
        };
        assert_eq!(kept(Sampling { top_k: 1, ..sampling() }), [1]);
        assert_eq!(kept(Sampling { top_k: 3, ..sampling() }), [0, 1, 2]);
        assert_eq!(kept(Sampling { top_k: 9, ..sampling() }), [0, 1, 2, 3]);
        assert_eq!(kept(Sampling { top_p: 0.4, ..sampling() }), [1]);
        assert_eq!(kept(Sampling { top_p: 0.6, ..sampling() }), [0, 1]);
        assert_eq!(kept(Sampling { top_p: 0.8, ..sampling() }), [0, 1, 2]);
        // Top-k leaves two, with 2/3 and 1/3: the first reaches 0.6 alone.
        assert_eq!(kept(Sampling { top_k: 2, top_p: 0.6, ..sampling() }), [1]);
    }

    #[test]
    fn the_most_likely_token_at_temperature_zero() {
        let greedy = Sampling { temperature: 0.0, ..sampling() };
        assert_eq!(greedy.pick(&LOGITS, 7), Some(1));
        assert_eq!(greedy.pick(&[1.0, 2.0, 2.0], 7), Some(1), "of equal ones the first");
    }

    #[test]
    fn logits_that_are_no_numbers_give_no_token() {
        for logits in [&[][..], &[0.0, f32::NAN], &[f32::INFINITY, 0.0]] {
            assert_eq!(sampling().pick(logits, 0), None);
        }
    }
}
