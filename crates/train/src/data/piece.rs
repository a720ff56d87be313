//! Pieces of documents, and the keys of `[data]` by which texts become pieces.

use super::examples::Examples;
use super::format::{self, Format};
use super::prelude::*;
use crate::config::TextFormat;

/// How texts are read: the keys of `[data]` that say so.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading<'a> {
    pub format: TextFormat,
    /// The key of the text in a JSON object.
    pub text_key: &'a str,
    /// Whether documents of JSON without a text are left out.
    pub skip_bad_lines: bool,
    /// How objects of JSON are examples, where they are no texts.
    pub examples: Option<&'a Examples>,
    pub pieces: Pieces,
}

/// How a plain text is cut into pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    /// Bytes after which it is cut.
    pub bytes: usize,
    /// Bytes of the text on either side of a cut that are encoded with a piece, so that the tokens at its ends are
    /// those of the whole.
    pub margin: usize,
}

impl Default for Pieces {
    fn default() -> Self {
        Self { bytes: 4 << 20, margin: 1 << 10 }
    }
}

impl Reading<'_> {
    /// A hash of the keys that decide which texts a file becomes.
    pub fn fingerprint(&self) -> u64 {
        let said = format!("{} {} {}", self.format.name(), self.skip_bad_lines, self.text_key);
        hash::hash(said.as_bytes())
    }

    /// The format of a file that begins with `head`.
    pub fn format_of(&self, path: &Path, head: &[u8]) -> Format {
        match (self.format, format::recognise(path, head, self.text_key)) {
            (TextFormat::Auto, format) => format,
            (TextFormat::Text, _) => Format::Text,
            (TextFormat::JsonLines, _) => Format::JsonLines,
        }
    }
}

/// A part of a document.
#[derive(Debug, PartialEq)]
pub(super) struct DocumentPiece {
    pub text: String,
    /// How many tokens at the beginning and at the end of the text belong to the pieces before and behind.
    pub margins: [usize; 2],
    /// Whether the document ends with it.
    pub last: bool,
    /// Of an example, what is learnt of it; of a text all is.
    pub answers: Option<Answers>,
}

/// The answers of an example.
#[derive(Debug, PartialEq)]
pub(super) struct Answers {
    /// The bytes of the text that they are.
    pub spans: Vec<Range<usize>>,
    /// Whether a chat template wrote the text, and with it the tokens that begin and end it.
    pub templated: bool,
}

impl DocumentPiece {
    pub fn whole(text: String) -> Self {
        Self { text, margins: [0, 0], last: true, answers: None }
    }

    pub fn example(text: String, answers: Answers) -> Self {
        Self { answers: Some(answers), ..Self::whole(text) }
    }
}

/// The tokens of a piece.
#[derive(Debug, Default, PartialEq)]
pub(super) struct PieceTokens {
    pub ids: Vec<u32>,
    /// Of an example, for each token whether it is no target; of a text empty.
    pub masked: Vec<bool>,
}

impl PieceTokens {
    /// The tokens of an example, each with the bytes of the text that it stands for. Every token that has a byte of an
    /// answer is learnt.
    pub fn of_example(tokens: Vec<(u32, Range<usize>)>, answers: &Answers) -> Self {
        let mut masked = vec![true; tokens.len()];
        for answer in answers.spans.iter().filter(|answer| !answer.is_empty()) {
            let first = tokens.iter().position(|(_, bytes)| bytes.end > answer.start);
            let last = tokens.iter().rposition(|(_, bytes)| bytes.start < answer.end);
            if let (Some(first), Some(last)) = (first, last) {
                masked[first..=last].fill(false);
            }
        }
        Self { ids: tokens.into_iter().map(|(id, _)| id).collect(), masked }
    }

    /// The same between a token that begins the text and one that ends it. The end of an example is learnt, as part of
    /// its last answer.
    pub fn between(self, beginning: Option<u32>, end: Option<u32>) -> Self {
        let ids = [beginning.as_slice(), &self.ids, end.as_slice()].concat();
        let masked = match self.masked.is_empty() {
            true => Vec::new(),
            false => {
                [&vec![true; beginning.iter().count()][..], &self.masked, &vec![false; end.iter().count()]].concat()
            }
        };
        Self { ids, masked }
    }
}

/// The receiver of the pieces.
pub(super) type See<'a> = dyn FnMut(DocumentPiece) -> Result<(), DataError> + 'a;
