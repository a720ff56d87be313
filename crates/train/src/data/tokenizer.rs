//! Text to token ids and back.

use super::byte_level;
#[cfg(feature = "tokenizers")]
use super::libraries::{gpt2, json};
use super::library::Library;
#[cfg(not(feature = "tokenizers"))]
use super::library::Opened;
use super::piece::{DocumentPiece, PieceTokens};
use super::special_tokens::{NONE, SpecialTokens};
use crate::config::Fault;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Which special tokens a prompt has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PromptTokens {
    /// None: it is text and nothing else.
    None,
    /// Those that the tokenizer itself puts around a text, as a beginning token.
    #[default]
    Add,
    /// Also those that the text spells, as `<|user|>`.
    Parse,
}

/// How text becomes tokens: `data.tokenizer`.
#[derive(Debug, Clone)]
pub struct Tokenizer(TokenizerKind);

#[derive(Debug, Clone)]
enum TokenizerKind {
    Bytes,
    Library(Arc<dyn Library>),
    /// A tokenizer that this build cannot open, of a run that reads no text: tokens are shown as bytes, and end as its
    /// files say.
    Unopened(Arc<SpecialTokens>),
}

/// A token for each byte.
#[derive(Debug)]
struct Bytes;

impl Library for Bytes {
    fn vocab_size(&self) -> usize {
        256
    }

    fn special(&self) -> &SpecialTokens {
        &NONE
    }

    fn byte_level(&self) -> Option<Vec<Vec<u8>>> {
        Some(byte_level::bytes())
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn encode_spelled(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>, String> {
        Ok(text.bytes().enumerate().map(|(at, byte)| (byte.into(), at..at + 1)).collect())
    }

    /// Ids that are not bytes become a byte that never occurs in UTF-8 text.
    fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().map(|&id| u8::try_from(id).unwrap_or(0xff)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn cut(&self, text: &str, at: usize) -> Option<[usize; 2]> {
        text.is_char_boundary(at).then(|| [at, text.len() - at])
    }
}

impl Tokenizer {
    /// One token per byte, ids 0 to 255.
    pub const BYTES: Self = Self(TokenizerKind::Bytes);

    /// The tokenizer called `name`: `bytes`, `gpt2`, or the path of a `tokenizer.json` or of a folder that has one. The
    /// last two need the feature `tokenizers`.
    ///
    /// # Errors
    /// A path from which no tokenizer can be read, or a build without the feature that the tokenizer needs.
    pub fn open(name: &str) -> Result<Self, Fault> {
        let path = Path::new(name);
        let inside = path.join("tokenizer.json");
        let path = if inside.is_file() { &inside } else { path };
        let library = match name {
            "bytes" => return Ok(Self::BYTES),
            "gpt2" => gpt2(),
            _ if !path.is_file() => Err((
                "is neither a known tokenizer nor a file".to_owned(),
                "use bytes, gpt2 or the path of a tokenizer.json",
            )),
            _ if byte_level::is_of_bytes(path) => return Ok(Self::BYTES),
            _ => json(path),
        };
        let fault = |(problem, valid)| Fault::new("data.tokenizer", format!("{name:?}"), problem, valid);
        library.map(|library| Self(TokenizerKind::Library(library))).map_err(fault)
    }

    /// A stand-in for a tokenizer that cannot be opened, where no text is read: only its special tokens are known.
    pub(super) fn unopened(special: SpecialTokens) -> Self {
        Self(TokenizerKind::Unopened(special.into()))
    }

    fn library(&self) -> &dyn Library {
        match &self.0 {
            TokenizerKind::Library(library) => &**library,
            TokenizerKind::Bytes | TokenizerKind::Unopened(_) => &Bytes,
        }
    }

    /// The tokens that end and begin a document, as the files of the tokenizer say; `bytes` have neither.
    pub fn special(&self) -> &SpecialTokens {
        if let TokenizerKind::Unopened(special) = &self.0 { special } else { self.library().special() }
    }

    /// The id that ends a document, if the tokenizer has one: of `gpt2` 50256; of a `tokenizer.json` what
    /// [`SpecialTokens`] says.
    pub fn end_of_text(&self) -> Option<u32> {
        self.special().end.as_ref().map(|end| end.id)
    }

    /// The id that the tokenizer itself puts before a text, if it does.
    pub fn beginning_of_text(&self) -> Option<u32> {
        self.library().beginning_of_text()
    }

    /// Whether a cut of `text` at byte `at` changes no token, also where `text` is part of a longer text. If so, how
    /// many tokens of `text` lie before the cut, and how many behind it.
    pub(super) fn cut(&self, text: &str, at: usize) -> Option<[usize; 2]> {
        self.library().cut(text, at)
    }

    /// The tokens by id, if they are byte strings: of `bytes` and `gpt2`.
    pub(crate) fn byte_level(&self) -> Option<Vec<Vec<u8>>> {
        if matches!(&self.0, TokenizerKind::Unopened(_)) { None } else { self.library().byte_level() }
    }

    /// Whether a token is a byte.
    pub(super) fn is_bytes(&self) -> bool {
        matches!(self.0, TokenizerKind::Bytes)
    }

    /// A hash of everything that decides which tokens a text becomes.
    pub(super) fn fingerprint(&self) -> u64 {
        self.library().fingerprint()
    }

    /// The same in hexadecimal; none of a tokenizer that could not be opened.
    pub(crate) fn hash(&self) -> Option<String> {
        (!matches!(self.0, TokenizerKind::Unopened(_))).then(|| format!("{:016x}", self.fingerprint()))
    }

    /// A tokenizer that a test brings.
    #[cfg(test)]
    pub(super) fn with_library(library: impl Library + 'static) -> Self {
        Self(TokenizerKind::Library(Arc::new(library)))
    }

    /// One more than the largest id of the tokenizer.
    pub fn vocab_size(&self) -> usize {
        self.library().vocab_size()
    }

    /// One more than the largest id that a text becomes: without special tokens, which text never becomes.
    pub fn vocab_size_of_text(&self) -> usize {
        self.library().vocab_size_of_text()
    }

    /// The ids of `text`. No special tokens are added or recognised.
    ///
    /// # Errors
    /// The error message of the library, if a `tokenizer.json` cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        self.library().encode(text)
    }

    /// The ids of a text that a model is to continue.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_prompt(&self, text: &str, special: PromptTokens) -> Result<Vec<u32>, String> {
        match special {
            PromptTokens::None => self.encode(text),
            PromptTokens::Add => self.library().encode_prompt(text, false),
            PromptTokens::Parse => self.library().encode_prompt(text, true),
        }
    }

    /// The tokens of a text that a chat template wrote: special tokens where it spells them, and no others.
    pub(crate) fn encode_conversation(&self, text: &str) -> Result<Vec<u32>, String> {
        Ok(self.library().encode_spelled(text)?.into_iter().map(|(id, _)| id).collect())
    }

    /// The tokens of a piece of a text: the part of the whole text's that does not belong to its neighbours. An example
    /// becomes special tokens where its text spells them, as in `transformers`.
    pub(super) fn encode_piece(&self, piece: &DocumentPiece) -> Result<PieceTokens, String> {
        if let Some(answers) = &piece.answers {
            return Ok(PieceTokens::of_example(self.library().encode_spelled(&piece.text)?, answers));
        }
        let (mut ids, [before, behind]) = (self.encode(&piece.text)?, piece.margins);
        let end = ids.len().checked_sub(behind).filter(|end| *end >= before);
        let end = end.ok_or_else(|| "a piece of the text has fewer tokens than its ends".to_owned())?;
        ids.truncate(end);
        ids.drain(..before);
        Ok(PieceTokens { ids, masked: Vec::new() })
    }

    /// The text of `ids`, for display: invalid text and unknown ids become the replacement character.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.library().decode(ids)
    }
}

#[cfg(not(feature = "tokenizers"))]
fn gpt2() -> Opened {
    let problem = "needs the feature tokenizers, which this build lacks".to_owned();
    Err((problem, "build it with --features tokenizers, or use bytes"))
}

#[cfg(not(feature = "tokenizers"))]
fn json(_: &Path) -> Opened {
    gpt2()
}
