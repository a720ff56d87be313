//! The data: a stream of tokens, and the samples that a step takes from it.
//!
//! Which samples a step takes depends on the step, the seed and the global batch only, never on the mesh: each
//! data-parallel rank asks for its rows of the global batch.

mod images;
#[cfg(feature = "tokenizers")]
mod libraries;
mod library;
mod permutation;
mod source;
mod token_file;
mod tokenizer;

use std::fmt;
use std::ops::Range;

pub use images::Images;
pub(crate) use source::{Stream, read};
pub use tokenizer::Tokenizer;

use crate::config::{Config, ConfigError, Fault};
use meshwork_models::language;
use meshwork_nn::{Batch, BatchSource};
use permutation::Permutation;

/// A target with this value is masked: it adds nothing to the loss.
pub const MASKED: i32 = -1;

/// A token stream cut into samples. Sample i is the tokens `[i·seq_len, (i+1)·seq_len]` of its part: inputs and
/// targets overlap by one.
///
/// ```
/// use meshwork_train::Data;
///
/// let data = Data::from_tokens((0..=12).collect(), 3);
/// let batch = data.batch(1, 2, 0..2); // the second batch of two samples: samples 2 and 3
/// assert_eq!(batch.values::<i32>("tokens")?, [6, 7, 8, 9, 10, 11]);
/// assert_eq!(batch.values::<i32>("targets")?, [7, 8, 9, 10, 11, 12]);
/// # Ok::<(), meshwork_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct Data {
    tokens: Vec<i32>,
    masked: Vec<bool>,
    training: usize,
    seq_len: usize,
    shuffle: Option<u64>,
    tokenizer: Tokenizer,
    notices: Vec<String>,
}

/// Shows the number of tokens, not the tokens.
impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Data");
        shown.field("tokens", &self.tokens.len()).field("training", &self.training).field("seq_len", &self.seq_len);
        shown.finish_non_exhaustive()
    }
}

impl Data {
    /// Reads the data that `config` asks for.
    ///
    /// # Errors
    /// Every fault of the data: missing, empty, too short, not UTF-8, ids beyond the vocabulary.
    pub fn open(config: &Config) -> Result<Self, ConfigError> {
        read(&config.data).and_then(|stream| Self::new(stream, config)).map_err(|faults| ConfigError { faults })
    }

    /// Checks a stream against the model and cuts it into samples.
    pub(crate) fn new(stream: Stream, config: &Config) -> Result<Self, Vec<Fault>> {
        let mut faults = Vec::new();
        let (vocab_size, seq_len) = (config.model.vocab_size, config.model.seq_len);
        let Stream { tokens, tokenizer, from_text, source, notices } = stream;

        if from_text && tokenizer.vocab_size() > vocab_size {
            let ids = tokenizer.vocab_size();
            faults.push(Fault::new(
                "data.tokenizer",
                format!("{:?}", config.data.tokenizer),
                format!("has {ids} ids, more than model.vocab_size = {vocab_size}"),
                format!("use model.vocab_size = {ids} or more, or another tokenizer"),
            ));
        } else if let Some(at) = tokens.iter().position(|&id| id as usize >= vocab_size) {
            let (id, valid) = (tokens[at], format!("use model.vocab_size = {} or more", max_id(&tokens) + 1));
            let problem = format!("token {at} is {id}, beyond model.vocab_size = {vocab_size}");
            faults.push(Fault::new("data.path", &source, problem, valid));
        }

        let mut data = Self::from_tokens(tokens.into_iter().map(|id| id as i32).collect(), seq_len);
        if config.validation.every > 0 {
            data = data.hold_out(config.validation.fraction);
        }
        if config.data.shuffle {
            data = data.shuffled(config.training.seed);
        }
        let need = format!("fewer than one sample of model.seq_len + 1 = {} tokens", seq_len as u128 + 1);
        let (all, held_out) = (data.tokens.len(), data.tokens.len() - data.training);
        if data.samples(false) == 0 {
            let rest =
                if held_out > 0 { format!(" after {held_out} are held out for validation") } else { String::new() };
            let problem = format!("leaves {} of {all} tokens for training{rest}, {need}", data.training);
            faults.push(Fault::new("data.path", &source, problem, "use more data or a smaller model.seq_len"));
        }
        if config.validation.every > 0 && data.samples(true) == 0 {
            let problem = format!("holds out {held_out} of {all} tokens of data.path = {source}, {need}");
            let valid = "use a larger fraction, more data or a smaller model.seq_len";
            faults.push(Fault::new("validation.fraction", config.validation.fraction, problem, valid));
        }
        if faults.is_empty() { Ok(Self { tokenizer, notices, ..data }) } else { Err(faults) }
    }

    /// Samples from your own tokens, in order, with nothing held out or masked.
    ///
    /// There must be more tokens than `seq_len`, which is at least 1.
    #[must_use]
    pub fn from_tokens(tokens: Vec<i32>, seq_len: usize) -> Self {
        let training = tokens.len();
        Self {
            tokens,
            masked: Vec::new(),
            training,
            seq_len,
            shuffle: None,
            tokenizer: Tokenizer::BYTES,
            notices: Vec::new(),
        }
    }

    /// Masks the targets that `mask` picks by their place in the stream, so that samples differ in their number of
    /// unmasked tokens.
    #[must_use]
    pub fn masked(mut self, mask: impl Fn(usize) -> bool) -> Self {
        self.masked = (0..self.tokens.len()).map(mask).collect();
        self
    }

    /// Holds out the last `fraction` of the stream for validation.
    #[must_use]
    pub fn hold_out(mut self, fraction: f64) -> Self {
        let held_out = (self.tokens.len() as f64 * fraction) as usize;
        self.training = self.tokens.len().saturating_sub(held_out);
        self
    }

    /// Permutes the training samples anew in each epoch, by `seed` and epoch.
    #[must_use]
    pub fn shuffled(mut self, seed: u64) -> Self {
        self.shuffle = Some(seed);
        self
    }

    /// Rows `rows` of the global batch of training step `step`, which is counted from 0. Batches go through the
    /// samples in order, or in the order of the epoch, and start again at the end.
    ///
    /// # Panics
    /// When the data holds no whole sample.
    #[must_use]
    pub fn batch(&self, step: u64, global_batch_size: usize, rows: Range<usize>) -> Batch {
        let samples = self.samples(false) as u64;
        assert!(samples > 0, "{} training tokens hold no sample of {} + 1", self.training, self.seq_len);
        self.collect(step, global_batch_size, rows, |index| {
            let (epoch, place) = ((index / u128::from(samples)) as u64, (index % u128::from(samples)) as u64);
            let sample = match self.shuffle {
                Some(seed) => Permutation::new(samples, seed, epoch).at(place),
                None => place,
            };
            sample as usize * self.seq_len
        })
    }

    /// Rows `rows` of validation batch `index`, in the order of the stream, whatever training does.
    ///
    /// # Panics
    /// When no whole sample is held out.
    #[must_use]
    pub fn validation_batch(&self, index: u64, global_batch_size: usize, rows: Range<usize>) -> Batch {
        let samples = self.samples(true);
        let held_out = self.tokens.len() - self.training;
        assert!(samples > 0, "{held_out} held-out tokens hold no sample of {} + 1", self.seq_len);
        self.collect(index, global_batch_size, rows, |index| {
            self.training + (index % samples as u128) as usize * self.seq_len
        })
    }

    /// Number of batches of a validation with `validation.steps` = `steps`. If `steps` is 0, it is the number that
    /// fits, and at least one; else it is `steps`, starting again at the end of the data.
    #[must_use]
    pub fn validation_batches(&self, steps: u64, global_batch_size: usize) -> u64 {
        match steps {
            0 => (self.samples(true) / global_batch_size.max(1)).max(1) as u64,
            steps => steps,
        }
    }

    /// Gathers rows of a batch; `start` gives the place in the stream where the n-th taken sample begins.
    fn collect(&self, batch: u64, size: usize, rows: Range<usize>, start: impl Fn(u128) -> usize) -> Batch {
        let count = rows.len();
        let mut inputs = Vec::with_capacity(count * self.seq_len);
        let mut targets = Vec::with_capacity(count * self.seq_len);
        for row in rows {
            let start = start(u128::from(batch) * size as u128 + row as u128);
            let end = start + self.seq_len;
            inputs.extend_from_slice(&self.tokens[start..end]);
            let masked = |at: &usize| self.masked.get(*at) == Some(&true);
            targets.extend((start + 1..=end).map(|at| if masked(&at) { MASKED } else { self.tokens[at] }));
        }
        language::batch(inputs, targets, self.seq_len).expect("whole samples")
    }

    /// Number of whole samples, of the training part or of the held-out part.
    fn samples(&self, validation: bool) -> usize {
        let tokens = if validation { self.tokens.len() - self.training } else { self.training };
        tokens.saturating_sub(1) / self.seq_len
    }

    /// Number of whole training samples: those of one epoch.
    #[must_use]
    pub fn training_samples(&self) -> usize {
        self.samples(false)
    }

    /// Number of whole held-out samples.
    #[must_use]
    pub fn validation_samples(&self) -> usize {
        self.samples(true)
    }

    /// Fingerprint of the whole token stream: FNV-1a of 64 bits over the ids as little-endian i32, in hexadecimal.
    #[must_use]
    pub fn hash(&self) -> String {
        let bytes = self.tokens.iter().flat_map(|token| token.to_le_bytes());
        let hash = bytes
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
        format!("{hash:016x}")
    }

    /// The first tokens of the stream, at most `count`, as a prompt for a model.
    #[must_use]
    pub fn prompt(&self, count: usize) -> &[i32] {
        &self.tokens[..count.min(self.tokens.len())]
    }

    /// The text of some tokens, for showing; masked ones are left out.
    #[must_use]
    pub fn decode(&self, tokens: &[i32]) -> String {
        let ids: Vec<u32> = tokens.iter().filter_map(|&token| u32::try_from(token).ok()).collect();
        self.tokenizer.decode(&ids)
    }

    /// Notices for the user about how the data was read.
    #[must_use]
    pub fn notices(&self) -> &[String] {
        &self.notices
    }
}

impl BatchSource for Data {
    fn batch(
        &self,
        step: u64,
        global_batch_size: usize,
        samples: Range<usize>,
    ) -> Result<Batch, meshwork_tensor::Error> {
        Ok(Data::batch(self, step, global_batch_size, samples))
    }
}

fn max_id(tokens: &[u32]) -> u64 {
    tokens.iter().max().map_or(0, |&id| u64::from(id))
}
