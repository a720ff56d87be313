//! Text from a trained model: a sample from the trainer that has it, on its mesh, and [continuations](continue_text) of
//! a prompt by a model in a folder.

mod compression;
mod continuation;
mod sampling;
mod trained;

pub(crate) use compression::Compressed;
pub use continuation::{Continued, TextStream, continue_text, continue_text_in};
pub use sampling::Sampling;
pub use trained::{BY_DEFAULT, Trained};

pub use crate::data::PromptTokens;

use crate::checkpoint::export::end_of_text;
use crate::config::Config;
use crate::data::Data;
use crate::stop;
use meshwork_core::Axis;
use meshwork_engine::{TrainError, Trainer};
use meshwork_models::language;
use std::sync::atomic::AtomicBool;

/// Number of tokens of the data that the model starts from.
const PROMPT: usize = 16;

/// Continues the first tokens of the data by `metrics.sample_tokens` tokens, or to the end of a document, or until
/// `asked` to stop; empty if that is 0. Each token costs a forward pass over all of them, or over the last of a
/// sequence. Collective: every rank takes part and gets the same text, since the randomness is a function of the seed
/// and the place of the token.
pub fn generate(config: &Config, data: &Data, trainer: &mut Trainer, asked: &AtomicBool) -> Result<String, TrainError> {
    let length = config.metrics.sample_tokens;
    if length == 0 {
        return Ok(String::new());
    }
    let sampling = Sampling { seed: config.training.seed, ..Sampling::default() };
    let (mut tokens, end) = (data.prompt(PROMPT).to_vec(), end_of_text(config, data));
    for place in 0..length {
        if stop::agreed(trainer.rank().world(), asked)? {
            break;
        }
        let logits = next_token_logits(trainer, &tokens, config.model.vocab_size)?;
        let token = sampling.pick(&logits, place).unwrap_or(0);
        if end == Some(token as u32) {
            break;
        }
        tokens.push(token as i32);
    }
    Ok(printable(&data.decode(&tokens)))
}

/// Tokens of a sample are added to a sequence whose length grows in blocks of at least this many tokens.
const SAMPLE_BLOCK: usize = 32;

/// The logits of the token that follows `tokens`, for the real part of the vocabulary, from a trainer of a language
/// model. If the text is longer than a sequence, only its last tokens count. Collective: every rank gets the same.
///
/// # Errors
/// While steps are under way.
pub fn next_token_logits(trainer: &mut Trainer, tokens: &[i32], vocab: usize) -> Result<Vec<f32>, TrainError> {
    let fields = trainer.plan().model().fields();
    let tokens_of = fields.iter().find(|field| field.name == language::TOKENS);
    let seq_len = tokens_of.and_then(|field| field.dims.last().copied()).unwrap_or(1);
    let mut window = tokens[tokens.len().saturating_sub(seq_len)..].to_vec();
    let position = window.len().saturating_sub(1);
    // The values after the last token do not matter, because attention is causal. Sequence parallelism cuts the
    // sequence evenly, and using few different lengths lets the device reuse its memory.
    let tp = trainer.rank().mesh().degree(Axis::Tp);
    let even = window.len().next_multiple_of(tp * SAMPLE_BLOCK.div_ceil(tp));
    window.resize(even.min(seq_len), 0);
    let (targets, seq_len) = (vec![-1; window.len()], window.len());
    let batch = language::batch(window, targets, seq_len)?;
    // A text is one document.
    let batch = match fields.iter().any(|field| field.name == language::POSITIONS) {
        true => batch.with(language::POSITIONS, [seq_len], (0..seq_len as i32).collect::<Vec<_>>())?,
        false => batch,
    };
    trainer.predict(&batch, position, vocab)
}

/// Replaces control characters, which an untrained model also writes, by the replacement character, so that the text is
/// harmless to a terminal. Newlines and tabs stay.
fn printable(text: &str) -> String {
    text.replace("\r\n", "\n").replace(|char: char| char.is_control() && char != '\n' && char != '\t', "\u{fffd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_leaves_the_terminal_alone() {
        assert_eq!(printable("a\tb\r\nc\u{1b}[2Jd\re\n"), "a\tb\nc\u{fffd}[2Jd\u{fffd}e\n");
    }
}
