//! The interface to tokenizers of other crates.

use super::prelude::*;

/// A tokenizer of another crate.
pub(super) trait Library: std::fmt::Debug + Send + Sync {
    /// See [`Tokenizer::vocab_size`](super::Tokenizer::vocab_size).
    fn vocab_size(&self) -> usize;
    /// One more than the largest id that a text can become.
    fn vocab_size_of_text(&self) -> usize {
        self.vocab_size()
    }
    /// The tokens that end and begin a document.
    fn special(&self) -> &SpecialTokens;
    /// See [`Tokenizer::byte_level`](super::Tokenizer::byte_level).
    fn byte_level(&self) -> Option<Vec<Vec<u8>>> {
        None
    }
    /// See [`Tokenizer::beginning_of_text`](super::Tokenizer::beginning_of_text).
    fn beginning_of_text(&self) -> Option<u32> {
        None
    }
    fn fingerprint(&self) -> u64;
    /// See [`Tokenizer::encode`](super::Tokenizer::encode).
    fn encode(&self, text: &str) -> Result<Vec<u32>, String>;
    /// The ids of `text` with the tokens that the tokenizer adds, and, if `_spelled`, special tokens where the text
    /// spells them.
    fn encode_prompt(&self, text: &str, _spelled: bool) -> Result<Vec<u32>, String> {
        self.encode(text)
    }
    /// The ids of `text`, each with the bytes that it stands for: special tokens where the text spells them, and none
    /// that the tokenizer adds.
    fn encode_spelled(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, String>;
    /// See [`Tokenizer::decode`](super::Tokenizer::decode).
    fn decode(&self, ids: &[u32]) -> String;
    /// See [`Tokenizer::cut`](super::Tokenizer::cut).
    fn cut(&self, window: &str, at: usize) -> Option<[usize; 2]>;
}

/// A tokenizer of another crate, or a problem and what would be valid.
pub(super) type Opened = Result<Arc<dyn Library>, (String, &'static str)>;
