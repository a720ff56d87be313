//! The data: streams of tokens, and the samples that a step takes from them.
//!
//! Which samples a step takes depends on the samples taken before and the seed only, never on the mesh: each
//! data-parallel rank asks for its rows of the global batch.
//!
//! ```text
//! text, JSON, folders ─────────▶ tokenizer ──▶ memory, or a cache: an indexed dataset ┐
//! .bin files of tokens, indexed datasets of Megatron ───────────────────────────────┼─▶ Stream: tokens and documents, by position
//! examples: messages, prompts ─▶ text and answers ─▶ tokenizer ─▶ packed into rows ──┘
//!                                                                                            ▼
//! Data::batch(step) ◀── samples of seq_len + 1 tokens, shuffled by (seed, epoch) ◀── Mixture: which stream, and which sample of it
//! ```
//!
//! More than 400 lines: one type, its construction from every kind of source, and its faults.

mod byte_level;
mod cache;
mod check;
mod documents;
mod error;
mod examples;
mod format;
mod images;
mod indexed;
mod json;
#[cfg(feature = "tokenizers")]
mod libraries;
mod library;
mod mixture;
mod packing;
mod permutation;
mod piece;
mod position;
mod reading;
mod source;
mod special_tokens;
mod text;
mod token_file;
mod tokenizer;
mod tokens;

/// Items that most kinds of data use.
mod prelude {
    pub(super) use super::error::{DataError, Problem};
    pub(super) use super::piece::DocumentPiece;
    pub(super) use super::reading::Reading;
    pub(super) use super::special_tokens::SpecialTokens;
    pub(super) use super::tokenizer::Tokenizer;
    pub(super) use super::tokens::Tokens;
    pub(super) use super::{Documents, Stream};
    pub(super) use crate::config::Fault;
    pub(super) use meshwork_core::hash;
    pub(super) use serde_json::Value;
    pub(super) use std::fs::{self, File};
    pub(super) use std::io;
    pub(super) use std::ops::Range;
    pub(super) use std::path::{Path, PathBuf};
    pub(super) use std::sync::Arc;
}

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub(crate) use byte_level::{END, byte_level};
pub use error::{DataError, Problem};
pub(crate) use examples::conversation;
pub use format::Foreign;
pub use images::Images;
pub(crate) use source::{Sources, read, split};
pub use special_tokens::{SpecialToken, SpecialTokens};
pub use tokenizer::{PromptTokens, Tokenizer};

use crate::config::{Config, ConfigError, Fault, Objective};
use documents::Documents;
use meshwork_core::hash;
use meshwork_models::language::{self, Boundary};
use meshwork_nn::{Batch, BatchSource, SAMPLE};
use mixture::Mixture;
use position::Origin;
pub(crate) use position::Position;
use tokens::{Fnv, Tokens};

/// A target with this value is masked: it adds nothing to the loss.
pub const MASKED: i32 = -1;

/// Tokens, the marks of their documents, and a hash.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    tokens: Tokens,
    documents: Documents,
    /// For each token whether it is no target; tokens behind the last are targets.
    masked: Arc<[bool]>,
    hash: u64,
}

impl Stream {
    fn new(tokens: Tokens, documents: Documents) -> Result<Self, DataError> {
        Ok(Self { hash: tokens.hash()?, tokens, documents, masked: Arc::default() })
    }

    /// The same tokens, of which some are no targets. The hash tells which.
    fn masked(self, masked: Vec<bool>) -> Self {
        let bytes: Vec<u8> = masked.iter().map(|&masked| masked.into()).collect();
        Self { hash: hash::combine(self.hash, hash::hash(&bytes)), masked: masked.into(), ..self }
    }
}

/// A stream in two parts, for training and for validation.
#[derive(Clone)]
struct SplitStream {
    stream: Stream,
    /// Tokens of the training part, at the beginning.
    training: u64,
}

impl SplitStream {
    /// The tokens that are held out, or all where none are: validation reads the training data then.
    fn validation(&self) -> Range<u64> {
        let all = self.stream.tokens.len();
        if self.training < all { self.training..all } else { 0..all }
    }

    fn len(&self, validation: bool) -> u64 {
        let held = self.validation();
        if validation { held.end - held.start } else { self.training }
    }
}

/// Token streams cut into samples. Sample i of a stream is the tokens `[i·seq_len, (i+1)·seq_len]` of its part: inputs
/// and targets overlap by one. Of several streams, each sample is from one of them, in the proportion of their weights.
///
/// ```
/// use meshwork_train::Data;
///
/// let data = Data::from_tokens((0..=12).collect(), 3);
/// let batch = data.batch(1, 2, 0..2)?; // the second batch of two samples: samples 2 and 3
/// assert_eq!(batch.values::<i32>("tokens")?, [6, 7, 8, 9, 10, 11]);
/// assert_eq!(batch.values::<i32>("targets")?, [7, 8, 9, 10, 11, 12]);
/// # Ok::<(), meshwork_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct Data {
    parts: Vec<SplitStream>,
    mixture: Mixture,
    /// Whether the first token of a document is no target.
    bounded: bool,
    /// Whether batches say where in its document each token is.
    placed: bool,
    /// Whether batches say which sample each is.
    numbered: bool,
    seq_len: usize,
    /// Whether batches say of which answer each target is.
    paired: bool,
    shuffle: Option<u64>,
    /// Where a run went on; `None` at the beginning.
    origin: Option<Origin>,
    tokenizer: Tokenizer,
    /// Whether some of the tokens are the tokenizer's.
    from_text: bool,
    prompt: Vec<i32>,
    notices: Vec<String>,
}

/// The most tokens that [`Data::prompt`] has.
const PROMPT: u64 = 1024;

/// Shows the number of tokens, not the tokens.
impl fmt::Debug for Data {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Data");
        let tokens: Vec<[u64; 2]> = self.parts.iter().map(|part| [part.stream.tokens.len(), part.training]).collect();
        shown
            .field("tokens and training", &tokens)
            .field("shares", &self.mixture.shares())
            .field("seq_len", &self.seq_len);
        shown.finish_non_exhaustive()
    }
}

impl Data {
    /// Reads the data that `config` asks for.
    ///
    /// # Errors
    /// Every fault of the data: missing, empty, too short, in another format than it says, ids beyond the vocabulary.
    pub fn open(config: &Config) -> Result<Self, ConfigError> {
        read(config).and_then(|sources| Self::new(sources, config)).map_err(|faults| ConfigError { faults })
    }

    /// Checks streams against the model and cuts them into samples.
    pub(crate) fn new(sources: Sources, config: &Config) -> Result<Self, Vec<Fault>> {
        let Sources { sources, mixture, tokenizer, notices } = sources;
        let mut notices = notices;
        notices.extend(check::beyond(&sources, &tokenizer, config));
        let mut faults = check::vocabulary(&sources, &tokenizer, config);
        faults.extend(check::documents(&sources, config));
        faults.extend(check::examples(config));
        let names: Vec<_> = sources.iter().map(|source| (source.key, source.shown.clone())).collect();
        let from_text = sources.iter().any(|source| source.from_text);
        let streams = sources.into_iter().map(|source| source.stream).collect();
        let mut data =
            Self { tokenizer, from_text, notices, ..Self::from_streams(streams, mixture, config.model.seq_len) };
        data = match config.training.objective {
            Objective::Pretrain => data.hold_out(config.validation.held_out()),
            Objective::Sft | Objective::Dpo => data.packed(config).map_err(|error| {
                vec![Fault::new(names[0].0, &names[0].1, error.problem.to_string(), error.problem.valid())]
            })?,
        };
        if config.validation.every > 0 && config.validation.fraction == 0.0 {
            data.notices.push(
                "validation.fraction is 0: nothing is held out, and the validation loss is one of the training data"
                    .to_owned(),
            );
        }
        if config.data.shuffle {
            data = data.shuffled(config.training.seed);
        }
        data.bounded = config.data.documents != "stream";
        data.placed = config.boundary() > Boundary::Ignored;
        data.numbered = config.compress.aqsgd;
        // What is planned without data of its own needs none.
        if config.training.steps > 0 || config.data.path.is_some() || !config.data.sources.is_empty() {
            faults.extend(check::lengths(&data, &names, config));
        }
        let first = &data.parts[0].stream.tokens;
        match first.read(0..first.len().min(PROMPT)) {
            Ok(prompt) => data.prompt = prompt,
            Err(error) => {
                faults.push(Fault::new(names[0].0, &names[0].1, error.problem.to_string(), error.problem.valid()))
            }
        }
        if faults.is_empty() { Ok(data) } else { Err(faults) }
    }

    fn from_streams(streams: Vec<Stream>, mixture: Mixture, seq_len: usize) -> Self {
        let parts = streams.into_iter().map(|stream| SplitStream { training: stream.tokens.len(), stream }).collect();
        Self {
            parts,
            mixture,
            bounded: false,
            placed: false,
            numbered: false,
            seq_len,
            paired: false,
            shuffle: None,
            origin: None,
            tokenizer: Tokenizer::BYTES,
            from_text: false,
            prompt: Vec::new(),
            notices: Vec::new(),
        }
    }

    /// Samples from your own tokens, in order, with nothing held out or masked.
    ///
    /// There must be more tokens than `seq_len`, which is at least 1.
    pub fn from_tokens(tokens: Vec<i32>, seq_len: usize) -> Self {
        let mut fnv = Fnv::default();
        tokens.iter().for_each(|id| fnv.add(&id.to_le_bytes()));
        let prompt = tokens[..tokens.len().min(PROMPT as usize)].to_vec();
        let (tokens, documents, masked) = (Tokens::Memory(tokens.into()), Documents::Unmarked, Arc::default());
        let stream = Stream { tokens, documents, masked, hash: fnv.0 };
        Self { prompt, ..Self::from_streams(vec![stream], Mixture::alone(), seq_len) }
    }

    /// Samples of the text that is trained on where none is given, the bytes of Cicero's first book On the Ends of Good
    /// and Evil, in order, with nothing held out or masked. For examples and tests.
    ///
    /// The text has 49,068 bytes, and `seq_len` is at least 1 and less.
    pub fn sample_text(seq_len: usize) -> Self {
        Self::from_tokens(lipsum::LIBER_PRIMUS.bytes().map(i32::from).collect(), seq_len)
    }

    /// Masks the targets that `mask` picks by their place in the stream, so that samples differ in their number of
    /// unmasked tokens. Of several streams, each is masked in the same places.
    #[must_use]
    pub fn masked(mut self, mask: impl Fn(usize) -> bool) -> Self {
        for part in &mut self.parts {
            part.stream.masked = (0..part.stream.tokens.len() as usize).map(&mask).collect();
        }
        self
    }

    /// Holds out the last `fraction` of each stream for validation.
    #[must_use]
    pub fn hold_out(mut self, fraction: f64) -> Self {
        for part in &mut self.parts {
            let tokens = part.stream.tokens.len();
            part.training = tokens.saturating_sub((tokens as f64 * fraction) as u64);
        }
        self
    }

    /// Packs the examples of each stream into rows, some of them for validation.
    fn packed(mut self, config: &Config) -> Result<Self, DataError> {
        let (documents, held_out) = (config.training.objective.documents(), config.validation.held_out());
        self.paired = documents == 2;
        for part in &mut self.parts {
            let packed = packing::pack(&part.stream, documents, self.seq_len, held_out, config.data.overlong)?;
            if packed.training <= 1 {
                return Err(Problem::NoAnswers(packed.told).in_file(Path::new("")));
            }
            self.notices.push(packed.told);
            *part = SplitStream { stream: packed.stream, training: packed.training };
        }
        Ok(self)
    }

    /// Batches with the numbers of their samples ([`SAMPLE`]), by which a sample is known when it comes again.
    #[must_use]
    pub fn numbered(mut self) -> Self {
        self.numbered = true;
        self
    }

    /// Permutes the training samples of a stream anew each time it is read, by `seed` and the number of times before.
    #[must_use]
    pub fn shuffled(mut self, seed: u64) -> Self {
        self.shuffle = Some(seed);
        self
    }

    /// Rows `rows` of the global batch of training step `step`, which is counted from 0, where every step takes
    /// `global_batch_size` samples. Batches go through the samples of a stream in order, or in the order of the epoch,
    /// and start again at the end.
    ///
    /// # Errors
    /// Tokens that cannot be read, or are no ids.
    ///
    /// # Panics
    /// When a stream holds no whole sample.
    pub fn batch(&self, step: u64, global_batch_size: usize, rows: Range<usize>) -> Result<Batch, DataError> {
        self.collect(u128::from(step) * global_batch_size as u128, rows, |index| self.place(index))
    }

    /// The batch of the step that comes after `samples` samples of this run, whatever the batches before were.
    ///
    /// # Errors
    /// As [`batch`](Self::batch).
    ///
    /// # Panics
    /// As [`batch`](Self::batch).
    pub fn batch_at(&self, samples: u64, rows: Range<usize>) -> Result<Batch, DataError> {
        self.collect(u128::from(samples), rows, |index| self.place(index))
    }

    /// Rows `rows` of validation batch `index`, in the order of the streams, whatever training does. Where nothing is
    /// held out they are of the training data.
    ///
    /// # Errors
    /// Tokens that cannot be read, or are no ids.
    ///
    /// # Panics
    /// When a stream has no whole sample for validation.
    pub fn validation_batch(
        &self,
        index: u64,
        global_batch_size: usize,
        rows: Range<usize>,
    ) -> Result<Batch, DataError> {
        self.collect(u128::from(index) * global_batch_size as u128, rows, |index| {
            let (source, nth) = self.mixture.at(index);
            let (samples, part) = (self.samples_of(source, true), &self.parts[source]);
            assert!(samples > 0, "{} held-out tokens hold no sample of {} + 1", part.len(true), self.seq_len);
            (source, part.validation().start + (nth % u128::from(samples)) as u64 * self.seq_len as u64)
        })
    }

    /// Number of batches of a validation with `validation.steps` = `steps`. If `steps` is 0, it is the number in which
    /// no held-out sample comes twice, and at least one; else it is `steps`, starting again at the end of the data.
    pub fn validation_batches(&self, steps: u64, global_batch_size: usize) -> u64 {
        match steps {
            0 => (self.validation_samples() / global_batch_size.max(1)).max(1) as u64,
            steps => steps,
        }
    }

    /// Gathers rows of the batch after `taken` samples; `place` gives the stream of the n-th sample, and where in it
    /// the sample begins.
    fn collect(
        &self,
        taken: u128,
        rows: Range<usize>,
        place: impl Fn(u128) -> (usize, u64),
    ) -> Result<Batch, DataError> {
        let (count, width) = (rows.len(), self.seq_len);
        let mut inputs = Vec::with_capacity(count * width);
        let mut targets = Vec::with_capacity(count * width);
        let (mut positions, mut answers, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            let (source, start) = place(taken + row as u128);
            let stream = &self.parts[source].stream;
            let window = start..start + width as u64 + 1;
            let before: u64 = (0..source).map(|source| self.samples_of(source, false)).sum();
            numbers.push((before + start / width as u64) as i32);
            let tokens = stream.tokens.read(window.clone())?;
            let before = targets.len();
            inputs.extend_from_slice(&tokens[..width]);
            targets.extend_from_slice(&tokens[1..]);
            let masked = (start + 1..window.end).map(|at| stream.masked.get(at as usize) == Some(&true));
            targets[before..].iter_mut().zip(masked).filter(|(_, masked)| *masked).for_each(|(to, _)| *to = MASKED);
            if !self.bounded {
                continue;
            }
            let firsts = stream.documents.starts(window, &tokens)?;
            let firsts: Vec<usize> = firsts.into_iter().map(|first| (first - start) as usize).collect();
            firsts.iter().for_each(|first| targets[before + first - 1] = MASKED);
            if self.paired {
                // Of the document that it lies in: of packed pairs, each is an answer, but for padding.
                let document = |at: usize| firsts.partition_point(|&first| first <= at) as i32;
                let of = |(at, &target): (usize, &i32)| if target == MASKED { MASKED } else { document(at) };
                answers.extend(targets[before..].iter().enumerate().map(of));
            }
            if self.placed {
                // A document that began before the sample begins anew with it: the model never sees its first tokens.
                let edges: Vec<usize> = [0].into_iter().chain(firsts).map(|first| first.min(width)).collect();
                let ends = edges.iter().skip(1).chain([&width]);
                positions.extend(edges.iter().zip(ends).flat_map(|(first, end)| 0..(end - first) as i32));
            }
        }
        let batch = language::batch(inputs, targets, width).expect("whole samples");
        let placed = if self.placed { batch.with(language::POSITIONS, [width], positions) } else { Ok(batch) };
        let batch = placed.expect("a position for each token");
        let paired = if self.paired { batch.with(language::ANSWERS, [width], answers) } else { Ok(batch) };
        let batch = paired.expect("an answer for each token");
        let numbered = if self.numbered { batch.with(SAMPLE, [], numbers) } else { Ok(batch) };
        Ok(numbered.expect("a number for each sample"))
    }

    /// Number of whole samples of a stream, of the training part or of the held-out part.
    fn samples_of(&self, source: usize, validation: bool) -> u64 {
        self.parts[source].len(validation).saturating_sub(1) / self.seq_len as u64
    }

    /// Number of samples before one comes twice.
    fn samples(&self, validation: bool) -> usize {
        let held: Vec<u64> = (0..self.parts.len()).map(|source| self.samples_of(source, validation)).collect();
        self.mixture.samples(&held) as usize
    }

    /// Number of whole training samples: those of one epoch. Of several streams, the samples before the first of them
    /// starts again.
    pub fn training_samples(&self) -> usize {
        self.samples(false)
    }

    /// Number of different training samples of all streams.
    pub fn distinct_samples(&self) -> usize {
        (0..self.parts.len()).map(|source| self.samples_of(source, false) as usize).sum()
    }

    /// Number of whole held-out samples, counted likewise.
    pub fn validation_samples(&self) -> usize {
        self.samples(true)
    }

    /// Fingerprint of the data, in hexadecimal: FNV-1a of 64 bits over the ids of the whole stream as little-endian
    /// i32. Of a stream of more than 2²⁴ tokens, over their number and 1024 evenly spread blocks of 4096 ids. Of
    /// several streams, over the fingerprint and the share of each. Where only an id marks documents, and boundaries
    /// count, that id is part of it.
    pub fn hash(&self) -> String {
        let combined = |parts: &[SplitStream]| {
            let mut hash = Fnv::default();
            for (part, share) in parts.iter().zip(self.mixture.shares()) {
                hash.add(&part.stream.hash.to_le_bytes());
                hash.add(&share.to_le_bytes());
            }
            hash.0
        };
        let mut hash = Fnv(if let [alone] = &self.parts[..] { alone.stream.hash } else { combined(&self.parts) });
        for part in self.parts.iter().filter(|_| self.bounded) {
            if let Documents::EndOfText(id) = part.stream.documents {
                hash.add(&id.to_le_bytes());
            }
        }
        format!("{:016x}", hash.0)
    }

    /// The first tokens of the first stream, at most `count` and 1024, as a prompt for a model.
    pub fn prompt(&self, count: usize) -> &[i32] {
        &self.prompt[..count.min(self.prompt.len())]
    }

    /// The text of some tokens, for showing; masked ones are left out.
    pub fn decode(&self, tokens: &[i32]) -> String {
        let ids: Vec<u32> = tokens.iter().filter_map(|&token| u32::try_from(token).ok()).collect();
        self.tokenizer.decode(&ids)
    }

    /// How text becomes tokens.
    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether some of the tokens were made of text, by [`tokenizer`](Self::tokenizer).
    pub(crate) fn is_from_text(&self) -> bool {
        self.from_text
    }

    /// Notices for the user about how the data was read.
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
        Ok(Data::batch(self, step, global_batch_size, samples)?)
    }
}

/// The seed of a stream: the run's for the first, another for each other, so that streams of one length differ in
/// order.
fn seed_of(seed: u64, source: usize) -> u64 {
    if source == 0 { seed } else { hash::combine(seed, source as u64) }
}
