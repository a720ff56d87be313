//! Pieces of documents, and their tokens.

use super::prelude::*;

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

impl Answers {
    /// Whether there is nothing in them.
    pub fn are_empty(&self) -> bool {
        self.spans.iter().all(Range::is_empty)
    }
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
