//! Where tokens come from: a text file, a folder of them, a token file, or the built-in text.

use std::fs;
use std::path::{Path, PathBuf};

use super::token_file;
use super::tokenizer::Tokenizer;
use crate::config::Fault;
use crate::config::sections::Data as Settings;

/// A token stream that has been read, before it is checked against a model.
#[derive(Debug)]
pub(crate) struct Stream {
    pub(super) tokens: Vec<u32>,
    pub(super) tokenizer: Tokenizer,
    /// Whether the tokens come from the tokenizer, and not from a token file.
    pub(super) from_text: bool,
    /// What the stream was read from, for messages.
    pub(super) source: String,
    pub(super) notices: Vec<String>,
}

/// Reads the tokens of `[data]`.
pub(crate) fn read(settings: &Settings) -> Result<Stream, Vec<Fault>> {
    let source = match &settings.path {
        Some(path) => format!("{path:?}"),
        None => "(unset: the built-in Cicero text)".to_string(),
    };
    let tokenizer = Tokenizer::open(&settings.tokenizer);
    let content = match settings.path.as_deref().map(Path::new) {
        None => Ok(Content::text(lipsum::LIBER_PRIMUS.to_string())),
        Some(path) => content(path).map_err(|(problem, valid)| Fault::new("data.path", &source, problem, valid)),
    };
    let (tokenizer, content) = match (tokenizer, content) {
        (Ok(tokenizer), Ok(content)) => (tokenizer, content),
        (tokenizer, content) => return Err(tokenizer.err().into_iter().chain(content.err()).collect()),
    };
    let Content { text, tokens, notices } = content;
    let from_text = tokens.is_none();
    let tokens = match tokens {
        Some(tokens) => tokens,
        None => tokenizer.encode(&text).map_err(|error| {
            let valid = "use a tokenizer that knows every word, or has an unknown token";
            let problem = format!("cannot encode the text: {error}");
            vec![Fault::new("data.tokenizer", format!("{:?}", settings.tokenizer), problem, valid)]
        })?,
    };
    Ok(Stream { tokens, tokenizer, from_text, source, notices })
}

/// The content of a path: text to be encoded, or tokens.
struct Content {
    text: String,
    tokens: Option<Vec<u32>>,
    notices: Vec<String>,
}

impl Content {
    fn text(text: String) -> Self {
        Self { text, tokens: None, notices: Vec::new() }
    }
}

/// The content of `path`. On refusal: the problem, and what would be valid.
fn content(path: &Path) -> Result<Content, (String, String)> {
    const VALID: &str = "use a UTF-8 file, a folder of texts, or a .bin file of little-endian u16 token ids";
    let refuse = |problem: String| (problem, VALID.to_string());
    if !path.exists() {
        return Err(refuse("does not exist".to_string()));
    }
    if path.is_dir() {
        return folder(path);
    }
    let bytes = fs::read(path).map_err(|error| refuse(format!("cannot be read: {error}")))?;
    if bytes.is_empty() {
        return Err(refuse("is empty".to_string()));
    }
    if path.extension().is_some_and(|extension| extension == "bin") {
        let tokens = Some(token_file::parse(&bytes)?);
        return Ok(Content { tokens, ..Content::text(String::new()) });
    }
    String::from_utf8(bytes)
        .map(Content::text)
        .map_err(|error| refuse(format!("is not UTF-8 from byte {} on", error.utf8_error().valid_up_to())))
}

/// The extensions of the files that are read from a folder. Other files may be UTF-8 without being text to learn: SVG
/// pictures, settings, a `tokenizer.json`.
const TEXT: [&str; 8] = ["txt", "text", "md", "markdown", "rst", "tex", "org", "jsonl"];

/// The texts below `path`, one after another in the order of their paths. Each is used unchanged: a `.jsonl` file with
/// the braces of its lines.
fn folder(path: &Path) -> Result<Content, (String, String)> {
    let valid = format!("use a folder of UTF-8 files that end in .{}", TEXT.join(", ."));
    let refuse = |problem: String| (problem, valid.clone());
    let files = files(path).map_err(|error| refuse(format!("cannot be listed: {error}")))?;
    let (mut text, mut other, mut not_utf8) = (String::new(), 0, 0);
    for file in &files {
        let extension = file.extension().map(|extension| extension.to_string_lossy().to_lowercase());
        if !extension.is_some_and(|extension| TEXT.contains(&&*extension)) {
            other += 1;
            continue;
        }
        let bytes = fs::read(file).map_err(|error| refuse(format!("{} cannot be read: {error}", file.display())))?;
        match String::from_utf8(bytes) {
            Ok(part) => text.push_str(&part),
            Err(_) => not_utf8 += 1,
        }
    }
    let reasons = [(other, "no extension of text"), (not_utf8, "not UTF-8")];
    let reasons = reasons.into_iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}"));
    let reasons = reasons.collect::<Vec<_>>().join(", ");
    let skipped = format!("{} of {} files skipped ({reasons})", other + not_utf8, files.len());
    let mut content = Content::text(text);
    match (content.text.is_empty(), other + not_utf8) {
        (true, 0) => Err(refuse(format!("holds no text: {} files, all empty", files.len()))),
        (true, _) => Err(refuse(format!("holds no text: {skipped}"))),
        (false, 0) => Ok(content),
        (false, _) => {
            content.notices.push(format!("data.path = {path:?}: {skipped}"));
            Ok(content)
        }
    }
}

/// All files below `path`, sorted by path. Linked folders are not entered, so that there are no cycles.
fn files(path: &Path) -> std::io::Result<Vec<PathBuf>> {
    let (mut found, mut open) = (Vec::new(), vec![path.to_path_buf()]);
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                open.push(entry.path());
            } else if entry.path().is_file() {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}
