//! What a tokenizer of another crate gives.

use std::sync::Arc;

/// A tokenizer of another crate.
pub(super) trait Library: std::fmt::Debug + Send + Sync {
    /// See [`Tokenizer::vocab_size`](super::Tokenizer::vocab_size).
    fn vocab_size(&self) -> usize;
    /// See [`Tokenizer::end_of_text`](super::Tokenizer::end_of_text).
    fn end_of_text(&self) -> Option<u32>;
    /// See [`Tokenizer::byte_level`](super::Tokenizer::byte_level).
    fn byte_level(&self) -> Option<Vec<Vec<u8>>> {
        None
    }
    /// A hash of the tokenizer.
    fn fingerprint(&self) -> u64;
    /// See [`Tokenizer::encode`](super::Tokenizer::encode).
    fn encode(&self, text: &str) -> Result<Vec<u32>, String>;
    /// The ids of `text` with what the tokenizer adds, and, if `_spelled`, special tokens where the text spells them.
    fn encode_prompt(&self, text: &str, _spelled: bool) -> Result<Vec<u32>, String> {
        self.encode(text)
    }
    /// See [`Tokenizer::decode`](super::Tokenizer::decode).
    fn decode(&self, ids: &[u32]) -> String;
}

/// A tokenizer of another crate, or a problem and what would be valid.
pub(super) type Opened = Result<Arc<dyn Library>, (String, &'static str)>;
