//! The keys of `[data]` by which files become documents.

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
