//! Documents of text: a plain file, which is one document, JSON lines, and folders of such files.

use super::error::{DataError, Problem};
use meshwork_core::hash;
use serde::Deserialize;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// The extensions of the files that are read from a folder. Other files may be UTF-8 without being text to learn: SVG pictures,
/// settings, a `tokenizer.json`.
pub(super) const EXTENSIONS: [&str; 8] = ["txt", "text", "md", "markdown", "rst", "tex", "org", "jsonl"];
/// A plain file is encoded in pieces of at least this many bytes; each ends with a line.
const PIECE: usize = 4 << 20;
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
    /// Of a folder: files that have no extension of text.
    other: Option<usize>,
    bytes: u64,
}

/// A part of a document.
#[derive(Debug, PartialEq)]
pub(super) struct Piece {
    pub text: String,
    /// Whether the document ends with it.
    pub last: bool,
}

impl Texts {
    /// The files of a path, which exists. Files below a folder are sorted by path.
    pub fn find(path: &Path) -> Result<Self, DataError> {
        let mut texts = Self { path: path.to_path_buf(), files: vec![path.to_path_buf()], other: None, bytes: 0 };
        if path.is_dir() {
            let all = files(path).map_err(|error| Problem::Unreadable(error).of(path))?;
            let is_text = |file: &PathBuf| extension(file).is_some_and(|of| EXTENSIONS.iter().any(|text| *text == of));
            let (text, other): (Vec<_>, Vec<_>) = all.into_iter().partition(is_text);
            (texts.files, texts.other) = (text, Some(other.len()));
        }
        for file in &texts.files {
            texts.bytes += fs::metadata(file).map_err(|error| Problem::Unreadable(error).of(file))?.len();
        }
        Ok(texts)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A hash by which the files are recognised: of their names below the path, their lengths and their contents; of a file of more
    /// than [`WHOLE`] bytes, of the time of its last change and evenly spread blocks.
    pub fn fingerprint(&self) -> Result<u64, DataError> {
        self.files.iter().try_fold(self.files.len() as u64, |sum, file| {
            let name = file.strip_prefix(&self.path).unwrap_or(file).to_string_lossy();
            let content = content_hash(file).map_err(|error| Problem::Unreadable(error).of(file))?;
            Ok(hash::combine(hash::combine(sum, hash::hash(name.as_bytes())), content))
        })
    }

    /// Gives all documents piece by piece. Returns notices about what is left out.
    pub fn read(&self, mut see: impl FnMut(Piece) -> Result<(), DataError>) -> Result<Vec<String>, DataError> {
        let (mut not_utf8, mut pieces) = (0, 0u64);
        let mut see = |piece: Piece| {
            pieces += u64::from(!piece.text.is_empty());
            see(piece)
        };
        for file in &self.files {
            let open = || File::open(file).map(BufReader::new).map_err(|error| Problem::Unreadable(error).of(file));
            match extension(file).as_deref() {
                Some("jsonl") => json_lines(file, open()?, &mut see)?,
                Some("parquet") => return Err(Problem::Parquet.of(file)),
                // Of a folder, only what is text is read; a file that is named must be.
                _ if self.other.is_some() && plain(file, open()?, &mut |_| Ok(())).is_err_and(not_text) => {
                    not_utf8 += 1
                }
                _ => plain(file, open()?, &mut see)?,
            }
        }
        let Some(other) = self.other else {
            return if pieces == 0 { Err(Problem::Empty.of(&self.path)) } else { Ok(Vec::new()) };
        };
        let reasons = [(other, "no extension of text"), (not_utf8, "not UTF-8")];
        let reasons = reasons.into_iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}"));
        let (skipped, all) = (other + not_utf8, self.files.len() + other);
        let told = format!("{skipped} of {all} files skipped ({})", reasons.collect::<Vec<_>>().join(", "));
        match (pieces, skipped) {
            (0, 0) => Err(Problem::NoText(format!("{all} files, all empty")).of(&self.path)),
            (0, _) => Err(Problem::NoText(told).of(&self.path)),
            (_, 0) => Ok(Vec::new()),
            _ => Ok(vec![format!("{}: {told}", self.path.display())]),
        }
    }
}

fn not_text(error: DataError) -> bool {
    matches!(error.problem, Problem::NotUtf8 { .. })
}

fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase())
}

/// The documents of JSON lines: the value of `text` of each. Blank lines and empty texts are no documents.
fn json_lines(
    path: &Path,
    mut from: impl BufRead,
    see: &mut impl FnMut(Piece) -> Result<(), DataError>,
) -> Result<(), DataError> {
    #[derive(Deserialize)]
    struct Line {
        text: Option<String>,
    }
    let (mut bytes, mut at) = (Vec::new(), 0);
    for line in 1.. {
        bytes.clear();
        let read = from.read_until(b'\n', &mut bytes).map_err(|error| Problem::Read { at, error }.of(path))?;
        if read == 0 {
            break;
        }
        let text = std::str::from_utf8(&bytes);
        let text = text.map_err(|error| Problem::NotUtf8 { at: at + error.valid_up_to() as u64 }.of(path))?.trim();
        at += read as u64;
        if text.is_empty() {
            continue;
        }
        let object = match serde_json::from_str(text) {
            // A struct is also read from an array.
            Ok(_) if !text.starts_with('{') => Err("it is an array".to_owned()),
            Err(error) if error.is_data() && text.starts_with('{') => {
                return Err(Problem::NoTextField { line, error: Some(error.to_string()) }.of(path));
            }
            object => object.map_err(|error: serde_json::Error| error.to_string()),
        };
        match object.map_err(|error| Problem::NotJson { line, error }.of(path))? {
            Line { text: None } => return Err(Problem::NoTextField { line, error: None }.of(path)),
            Line { text: Some(text) } if text.is_empty() => {}
            Line { text: Some(text) } => see(Piece { text, last: true })?,
        }
    }
    Ok(())
}

/// A plain file as one document, in pieces.
fn plain(
    path: &Path,
    mut from: impl Read,
    see: &mut impl FnMut(Piece) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let (mut bytes, mut start, mut wanted) = (Vec::new(), 0u64, PIECE);
    loop {
        let more = (wanted - bytes.len()) as u64;
        let read = from.by_ref().take(more).read_to_end(&mut bytes);
        let ends = read.map_err(|error| Problem::Read { at: start, error }.of(path))? < more as usize;
        let cut = if ends { Some(bytes.len()) } else { last_cut(&bytes) };
        let Some(cut) = cut else {
            wanted *= 2;
            continue;
        };
        let rest = bytes.split_off(cut);
        let text = String::from_utf8(std::mem::replace(&mut bytes, rest)).map_err(|error| {
            let at = start + error.utf8_error().valid_up_to() as u64;
            Problem::NotUtf8 { at }.of(path)
        })?;
        start += cut as u64;
        wanted = PIECE.max(2 * bytes.len());
        if !text.is_empty() || start > 0 {
            see(Piece { text, last: ends })?;
        }
        if ends {
            return Ok(());
        }
    }
}

/// The last place behind a line break that stands alone between words: tokenizers encode the parts as they encode the whole.
fn last_cut(bytes: &[u8]) -> Option<usize> {
    let word = |at: usize| bytes.get(at).is_some_and(|byte| !byte.is_ascii_whitespace());
    (2..bytes.len()).rev().find(|&at| bytes[at - 1] == b'\n' && word(at - 2) && word(at))
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
mod tests {
    use super::*;

    fn documents(
        read: impl FnOnce(&mut dyn FnMut(Piece) -> Result<(), DataError>) -> Result<(), DataError>,
    ) -> Result<Vec<Piece>, String> {
        let mut pieces = Vec::new();
        let read = read(&mut |piece| {
            pieces.push(piece);
            Ok(())
        });
        read.map(|()| pieces).map_err(|error| error.to_string())
    }

    fn lines(bytes: &[u8]) -> Result<Vec<String>, String> {
        let pieces = documents(|mut see| json_lines(Path::new("a.jsonl"), bytes, &mut see))?;
        assert!(pieces.iter().all(|piece| piece.last));
        Ok(pieces.into_iter().map(|piece| piece.text).collect())
    }

    #[test]
    fn json_lines_give_their_texts() {
        let two = b"{\"id\": 1, \"text\": \"a\\n\\u00fc\"}\r\n\n{\"text\":\"\"}\n {\"text\": \"b\"}";
        assert_eq!(lines(two).unwrap(), ["a\nü", "b"]);
        assert_eq!(lines(b"").unwrap(), [""; 0]);
    }

    #[test]
    fn wrong_lines_are_named() {
        let valid = "use one JSON object a line, such as {\"text\": \"Arma virumque cano\"}";
        for (bytes, problem) in [
            (&b"{\"text\": \"a\"}\n{\"txt\": \"b\"}"[..], "line 2 has no string \"text\""),
            (b"\n{\"text\": null}", "line 2 has no string \"text\""),
            (
                b"{\"text\": 5}",
                "line 1 has no string \"text\" (invalid type: integer `5`, expected a string at line 1 column 10)",
            ),
            (b"[\"a\"]", "line 1 is no JSON object: it is an array"),
            (b"{\"text\": \"a\"", "line 1 is no JSON object: EOF while parsing an object at line 1 column 12"),
            (b"plain text", "line 1 is no JSON object: expected value at line 1 column 1"),
        ] {
            assert_eq!(lines(bytes).unwrap_err(), format!("a.jsonl: {problem}; {valid}"));
        }
        let error = lines(b"{\"text\": \"a\"}\n{\"text\": \"caf\xe9\"}").unwrap_err();
        assert!(error.starts_with("a.jsonl: is not UTF-8 from byte 27 on"), "{error}");
    }

    #[test]
    fn a_plain_file_is_one_document_in_pieces_of_whole_lines() {
        // Lines of 3 letters, of which two characters have 2 bytes, and pairs of line breaks, where no piece ends.
        let text = "aüb\n\ncé d\n".repeat(PIECE / 6);
        let pieces = documents(|mut see| plain(Path::new("a"), text.as_bytes(), &mut see)).unwrap();
        assert!(pieces.len() > 1);
        assert_eq!(pieces.iter().map(|piece| &*piece.text).collect::<String>(), text);
        let (last, before) = pieces.split_last().unwrap();
        assert!(last.last && before.iter().all(|piece| !piece.last));
        assert!(before.iter().all(|piece| piece.text.ends_with("d\n") && piece.text.len() <= PIECE));
        // Without a line break, a piece is as long as it must be.
        let long = "x".repeat(2 * PIECE + 5);
        let pieces = documents(|mut see| plain(Path::new("a"), long.as_bytes(), &mut see)).unwrap();
        assert_eq!(pieces, [Piece { text: long.clone(), last: true }]);
        let wrong = [long.as_bytes(), b"\xff"].concat();
        let error = documents(|mut see| plain(Path::new("a"), &wrong[..], &mut see)).unwrap_err();
        assert!(error.starts_with(&format!("a: is not UTF-8 from byte {} on", 2 * PIECE + 5)), "{error}");
    }

    #[test]
    fn a_changed_file_has_another_fingerprint() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a.txt"), folder.path().join("b.md"));
        let print = || Texts::find(folder.path()).unwrap().fingerprint().unwrap();
        fs::write(&a, "one").unwrap();
        let one = print();
        assert_eq!(one, print());
        fs::write(&a, "owe").unwrap();
        let owe = print();
        assert_ne!(one, owe);
        fs::write(&b, "").unwrap();
        assert_ne!(owe, print());
        fs::remove_file(&b).unwrap();
        fs::rename(&a, folder.path().join("c.txt")).unwrap();
        assert_ne!(owe, print());
        // A sparse file is longer than what is hashed as a whole.
        File::create(&a).unwrap().set_len(1 << 40).unwrap();
        let sparse = print();
        File::options().write(true).open(&a).unwrap().set_len((1 << 40) + 1).unwrap();
        assert_ne!(sparse, print());
    }
}
