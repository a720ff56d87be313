//! Documents of text: a plain file, which is one document, JSON lines, JSON arrays, and folders of such files.
//!
//! ```text
//! file ──▶ its first bytes say what it is ──▶ one document, in pieces cut where the tokenizer has a boundary ┐
//!          (format.rs)                    ├─▶ an object a line (json.rs) ───────────────────────────────────┼─▶ Piece
//!                                         └─▶ an array of objects or strings ───────────────────────────────┘
//! ```

use super::format::{self, BYTE_ORDER_MARK, EXTENSIONS, Format, HEAD, extension};
use super::json::{Bad, JsonDocuments};
use super::piece::See;
use super::prelude::*;
use super::reading::Pieces;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Cursor, Read};
use std::time::UNIX_EPOCH;

/// A file of at most this many bytes is hashed as a whole.
const WHOLE: u64 = 256 << 20;
/// Of a longer one, this many blocks of this many bytes, spread evenly.
const BLOCKS: u64 = 256;
const BLOCK: usize = 1 << 16;

/// The text files of a path.
#[derive(Debug)]
pub(super) struct Texts {
    path: PathBuf,
    files: Vec<PathBuf>,
    /// Of a folder: how many files have other extensions than those of text.
    other: Option<BTreeMap<String, usize>>,
    bytes: u64,
}

impl Texts {
    /// The files of a path, which exists. Files below a folder are sorted by path.
    pub fn find(path: &Path) -> Result<Self, DataError> {
        let mut texts = Self { path: path.to_path_buf(), files: vec![path.to_path_buf()], other: None, bytes: 0 };
        if path.is_dir() {
            let all = files(path).map_err(|error| Problem::Unreadable(error).in_file(path))?;
            let is_text = |file: &PathBuf| extension(file).is_some_and(|of| EXTENSIONS.iter().any(|text| *text == of));
            let (text, other): (Vec<_>, Vec<_>) = all.into_iter().partition(is_text);
            let mut counts = BTreeMap::new();
            for file in &other {
                let extension = extension(file).map_or_else(|| "none".to_owned(), |extension| format!(".{extension}"));
                *counts.entry(extension).or_default() += 1;
            }
            (texts.files, texts.other) = (text, Some(counts));
        }
        for file in &texts.files {
            texts.bytes += fs::metadata(file).map_err(|error| Problem::Unreadable(error).in_file(file))?.len();
        }
        Ok(texts)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A hash by which the files are recognised: of their names below the path, their lengths and their contents; of a
    /// file of more than [`WHOLE`] bytes, of the time of its last change and evenly spread blocks.
    pub fn fingerprint(&self) -> Result<u64, DataError> {
        self.files.iter().try_fold(self.files.len() as u64, |sum, file| {
            let name = file.strip_prefix(&self.path).unwrap_or(file).to_string_lossy();
            let content = content_hash(file).map_err(|error| Problem::Unreadable(error).in_file(file))?;
            Ok(hash::combine(hash::combine(sum, hash::hash(name.as_bytes())), content))
        })
    }

    /// Gives all documents piece by piece. Returns notices about documents and files that are left out.
    pub fn read(
        &self,
        reading: &Reading<'_>,
        tokenizer: &Tokenizer,
        mut see: impl FnMut(DocumentPiece) -> Result<(), DataError>,
    ) -> Result<Vec<String>, DataError> {
        let (mut skipped, mut pieces, mut bad) = (BTreeMap::<String, usize>::new(), 0u64, Bad::default());
        let mut see = |piece: DocumentPiece| {
            pieces += u64::from(!piece.text.is_empty());
            see(piece)
        };
        for file in &self.files {
            let (head, from) = open(file)?;
            let format = reading.format_of(file, &head);
            // Of a folder, only what is text is read; a file that is named must be. A pointer stands for text that was
            // not fetched.
            let of_folder = self.other.is_some();
            let json = JsonDocuments { path: file, reading, bad: &mut bad, see: &mut see };
            match format {
                Format::JsonLines => json.read_lines(from)?,
                Format::JsonArray => json.read_array(from)?,
                Format::Foreign(foreign) if of_folder && foreign != format::LFS => {
                    *skipped.entry(foreign.name.to_owned()).or_default() += 1;
                }
                Format::Foreign(foreign) => return Err(Problem::Foreign(foreign).in_file(file)),
                Format::Text if reading.examples.is_some() && of_folder => {
                    *skipped.entry("text, and no examples".to_owned()).or_default() += 1;
                }
                Format::Text if reading.examples.is_some() => return Err(Problem::NoExamples("text").in_file(file)),
                Format::Text if of_folder => {
                    match plain(file, open(file)?.1, reading, &Tokenizer::BYTES, &mut |_| Ok(())) {
                        Err(DataError { problem: Problem::NotUtf8 { .. } | Problem::Nul { .. }, .. }) => {
                            *skipped.entry("not UTF-8".to_owned()).or_default() += 1;
                        }
                        read => read.and_then(|()| plain(file, from, reading, tokenizer, &mut see))?,
                    }
                }
                Format::Text => plain(file, from, reading, tokenizer, &mut see)?,
            }
        }
        let mut notices: Vec<String> = bad.told(&self.path).into_iter().collect();
        let Some(other) = &self.other else {
            return match (pieces, bad.first) {
                (0, Some(first)) => Err(first),
                (0, None) => Err(Problem::Empty.in_file(&self.path)),
                _ => Ok(notices),
            };
        };
        let others = other.values().sum::<usize>();
        let listed =
            other.iter().map(|(extension, count)| format!("{extension} {count}")).collect::<Vec<_>>().join(", ");
        let reasons = (others > 0).then(|| format!("{others} no extension of text: {listed}"));
        let reasons = reasons.into_iter().chain(skipped.iter().map(|(why, count)| format!("{count} {why}")));
        let (left_out, all) = (others + skipped.values().sum::<usize>(), self.files.len() + others);
        let told = format!("{left_out} of {all} files skipped ({})", reasons.collect::<Vec<_>>().join("; "));
        match (pieces, left_out) {
            (0, 0) => return Err(Problem::NoText(format!("{all} files, all empty")).in_file(&self.path)),
            (0, _) => return Err(Problem::NoText(told).in_file(&self.path)),
            (_, 0) => {}
            _ => notices.push(format!("{}: {told}", self.path.display())),
        }
        Ok(notices)
    }
}

/// The first bytes of a file, and all of it from the beginning. A pipe gives its bytes once, so it is opened once.
fn open(path: &Path) -> Result<(Vec<u8>, impl BufRead), DataError> {
    let mut file = File::open(path).map_err(|error| Problem::Unreadable(error).in_file(path))?;
    let mut head = Vec::new();
    let read = file.by_ref().take(HEAD as u64).read_to_end(&mut head);
    read.map_err(|error| Problem::Read { at: 0, error }.in_file(path))?;
    Ok((head.clone(), BufReader::new(Cursor::new(head).chain(file))))
}

/// A plain file as one document, in pieces.
fn plain(
    path: &Path,
    mut from: impl Read,
    reading: &Reading<'_>,
    tokenizer: &Tokenizer,
    see: &mut See<'_>,
) -> Result<(), DataError> {
    let Pieces { bytes: size, margin } = reading.pieces;
    // Bytes that are read and not yet given, from `start` of the file on. It begins with `left` bytes of the piece
    // before, which are as many tokens.
    let (mut bytes, mut start, mut left, mut left_tokens, mut wanted) = (Vec::new(), 0u64, 0, 0, size);
    loop {
        let more = (wanted - bytes.len()) as u64;
        let read = from.by_ref().take(more).read_to_end(&mut bytes);
        let ends = read.map_err(|error| Problem::Read { at: start, error }.in_file(path))? < more as usize;
        if start == 0 && left == 0 && bytes.starts_with(BYTE_ORDER_MARK) {
            bytes.drain(..BYTE_ORDER_MARK.len());
            start = BYTE_ORDER_MARK.len() as u64;
        }
        let text = match std::str::from_utf8(&bytes) {
            Ok(text) => text,
            // The last character may be cut.
            Err(error) if error.error_len().is_none() && !ends => {
                std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default()
            }
            Err(error) => return Err(Problem::NotUtf8 { at: start + error.valid_up_to() as u64 }.in_file(path)),
        };
        if let Some(at) = text.bytes().position(|byte| byte == 0) {
            return Err(Problem::Nul { at: start + at as u64 }.in_file(path));
        }
        if ends {
            let text = text.to_owned();
            return if text.is_empty() {
                Ok(())
            } else {
                see(DocumentPiece { margins: [left_tokens, 0], ..DocumentPiece::whole(text) })
            };
        }
        let Some(cut) = last_cut(text, left, margin, tokenizer) else {
            wanted *= 2;
            continue;
        };
        let Cut { window, at, tokens: [before, behind] } = cut;
        let piece = DocumentPiece::whole(text[..window.end].to_owned());
        see(DocumentPiece { margins: [left_tokens, behind], last: false, ..piece })?;
        (left, left_tokens) = (at - window.start, before);
        start += window.start as u64;
        bytes.drain(..window.start);
        wanted = size.max(2 * bytes.len());
    }
}

/// A cut of a text, and the window around it that both pieces have.
struct Cut {
    window: Range<usize>,
    at: usize,
    /// Tokens of the window before and behind the cut.
    tokens: [usize; 2],
}

/// So many places from the end are asked. Where none of these is a boundary, none will be soon.
const TRIES: usize = 64;

/// The last place behind the first `left` bytes where a cut changes no token. Only places beside white space are tried,
/// with a window on either side; bytes can be cut anywhere.
fn last_cut(text: &str, left: usize, margin: usize, tokenizer: &Tokenizer) -> Option<Cut> {
    let floor = |at: usize| (0..=at).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    if tokenizer.is_bytes() {
        let at = floor(text.len());
        return (at > left).then_some(Cut { window: at..at, at, tokens: [0, 0] });
    }
    let last = floor(text.len().checked_sub(margin)?);
    let is_space = |byte: u8| byte.is_ascii_whitespace();
    let bytes = text.as_bytes();
    let places = (left + margin + 1..=last)
        .rev()
        .filter(|&at| text.is_char_boundary(at) && at < bytes.len() && is_space(bytes[at - 1]) != is_space(bytes[at]));
    places.take(TRIES).find_map(|at| {
        let window = floor(at - margin)..floor(at + margin);
        let tokens = tokenizer.cut(&text[window.clone()], at - window.start)?;
        Some(Cut { window, at, tokens })
    })
}

/// All files below `path`, sorted by path. Linked folders are not entered, so that there are no cycles.
fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
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

fn content_hash(path: &Path) -> io::Result<u64> {
    let mut file = File::open(path)?;
    let (about, mut block) = (file.metadata()?, vec![0; BLOCK]);
    let mut sum = about.len();
    if about.len() > WHOLE {
        let changed = about.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        sum = hash::combine(sum, changed.as_nanos() as u64);
        for at in 0..BLOCKS {
            let place = u128::from(about.len() - BLOCK as u64) * u128::from(at) / u128::from(BLOCKS - 1);
            io::Seek::seek(&mut file, io::SeekFrom::Start(place as u64))?;
            file.read_exact(&mut block)?;
            sum = hash::combine(sum, hash::hash(&block));
        }
        return Ok(sum);
    }
    loop {
        block.clear();
        if file.by_ref().take(BLOCK as u64).read_to_end(&mut block)? == 0 {
            return Ok(sum);
        }
        sum = hash::combine(sum, hash::hash(&block));
    }
}

#[cfg(test)]
mod tests;
