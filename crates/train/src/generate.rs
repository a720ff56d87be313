//! Text from the trained model, on the mesh that trained it.

use crate::config::Config;
use crate::data::Data;
use crate::engine::TrainError;
use crate::launch::agree_to_stop;
use crate::step::Trainer;
use meshwork_tensor::random;
use std::sync::atomic::AtomicBool;

/// Tokens of the data that the model starts from.
const PROMPT: usize = 16;
/// Tokens to write: each costs a forward pass over all of them, or the last of a sequence.
const LENGTH: usize = 160;
/// Divides the logits before sampling: below 1 the likely tokens become more so.
const TEMPERATURE: f32 = 0.8;

/// Continues the first tokens of the data, until `stop`. Collective: every rank takes part and gets the same text, since the
/// randomness is a function of the seed and the place of the token.
pub fn generate(config: &Config, data: &Data, trainer: &mut Trainer, stop: &AtomicBool) -> Result<String, TrainError> {
    let key = random::key(config.training.seed, "sample");
    let mut tokens = data.prompt(PROMPT).to_vec();
    for place in 0..LENGTH as u64 {
        if agree_to_stop(trainer.rank(), stop)? {
            break;
        }
        let logits = trainer.next_token_logits(&tokens, config.model.vocab_size)?;
        tokens.push(pick(&logits, random::uniform(key, place)) as i32);
    }
    Ok(printable(&data.decode(&tokens)))
}

/// Text that does nothing to a terminal: control characters, which an untrained model writes too, but for those that lay out text.
fn printable(text: &str) -> String {
    text.replace("\r\n", "\n").replace(|char: char| char.is_control() && char != '\n' && char != '\t', "\u{fffd}")
}

/// The token at which the running sum of probabilities passes `chance`.
fn pick(logits: &[f32], chance: f32) -> usize {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights = || logits.iter().map(|&logit| f64::from((logit - max) / TEMPERATURE).exp());
    let mut left = f64::from(chance) * weights().sum::<f64>();
    weights()
        .position(|weight| {
            left -= weight;
            left < 0.0
        })
        .unwrap_or(logits.len().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_leaves_the_terminal_alone() {
        assert_eq!(printable("a\tb\r\nc\u{1b}[2Jd\re\n"), "a\tb\nc\u{fffd}[2Jd\u{fffd}e\n");
    }

    #[test]
    fn tokens_are_picked_as_often_as_their_probability() {
        let logits = [0.0, f32::ln(3.0) * TEMPERATURE, f32::NEG_INFINITY];
        assert_eq!(pick(&logits, 0.0), 0);
        assert_eq!(pick(&logits, 0.2499), 0);
        assert_eq!(pick(&logits, 0.2501), 1);
        assert_eq!(pick(&logits, 0.9999), 1);
    }
}
