//! Recognises a file by its first bytes: text, JSON, or a format that must not be learnt as text.
//!
//! A name can be missing or wrong: of a link, of standard input, of a download. So the content of a file says its
//! format; its extension decides only where the content leaves it open.

use super::prelude::*;
use serde::de::IgnoredAny;

/// The mark at the beginning of some UTF-8 files. It is no part of the text.
pub(super) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Bytes by which a file is recognised.
pub(super) const HEAD: usize = 1 << 16;
/// Lines by which JSON lines are recognised.
const LINES: usize = 16;

/// The extensions of the files that are read from a folder. Other files may be UTF-8 without being text to learn: SVG
/// pictures, settings, a `tokenizer.json`.
pub(super) const EXTENSIONS: [&str; 9] = ["txt", "text", "md", "markdown", "rst", "tex", "org", "jsonl", "ndjson"];

/// A format that is not text, and the way to text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Its format, with an article.
    pub name: &'static str,
    /// How to get text out of it.
    pub advice: &'static str,
}

const fn foreign_of(name: &'static str, advice: &'static str) -> Foreign {
    Foreign { name, advice }
}

const TABLE: &str = "convert it to JSON lines, as docs/data.md shows";
const UNPACK: &str = "unpack it, or give what unpacks it on standard input: zcat FILE | ... --data /dev/stdin";
const ARCHIVE: &str = "unpack it, and give the folder";
const ARRAY: &str = "write its ids with numpy: ids.astype(\"uint16\").tofile(\"train.bin\")";
const WEIGHTS: &str = "give texts here, and a folder of weights in model.init_from";
const RECODE: &str = "convert it to UTF-8: iconv -f UTF-16 -t UTF-8";
const TEXT: &str = "extract its text";
const MARKUP: &str = "extract its text, or set data.format = \"text\" to learn its markup";
const BINARY: &str = "give text, JSON lines or token ids";

/// The stand-in for a large file that was not fetched into a repository.
pub(super) const LFS: Foreign = foreign_of("a Git LFS pointer, not the file", "fetch the file: git lfs pull");

/// The place of the bytes, the bytes, and the format. Longer bytes stand before their own beginning.
const MAGIC: [(usize, &[u8], Foreign); 42] = [
    (0, b"version https://git-lfs.github.com/spec/", LFS),
    (0, b"PAR1", foreign_of("a Parquet file", TABLE)),
    (0, b"PARE", foreign_of("an encrypted Parquet file", TABLE)),
    (0, b"ARROW1", foreign_of("an Arrow file", TABLE)),
    (0, b"FEA1", foreign_of("a Feather file", TABLE)),
    (0, b"ORC", foreign_of("an ORC file", TABLE)),
    (0, b"Obj\x01", foreign_of("an Avro file", TABLE)),
    (0, b"SQLite format 3\0", foreign_of("an SQLite database", TABLE)),
    (0, b"\x1f\x8b\x08", foreign_of("compressed by gzip", UNPACK)),
    (0, b"\x28\xb5\x2f\xfd", foreign_of("compressed by zstd", UNPACK)),
    (0, b"BZh", foreign_of("compressed by bzip2", UNPACK)),
    (0, b"\xfd7zXZ\0", foreign_of("compressed by xz", UNPACK)),
    (0, b"\x04\x22\x4d\x18", foreign_of("compressed by lz4", UNPACK)),
    (0, b"\xff\x06\0\0sNaPpY", foreign_of("compressed by snappy", UNPACK)),
    (0, b"PK\x03\x04", foreign_of("a zip archive, as .zip, .npz, .docx and the files of torch.save are", ARCHIVE)),
    (0, b"PK\x05\x06", foreign_of("an empty zip archive", ARCHIVE)),
    (0, b"7z\xbc\xaf\x27\x1c", foreign_of("a 7z archive", ARCHIVE)),
    (0, b"Rar!\x1a\x07", foreign_of("a RAR archive", ARCHIVE)),
    (257, b"ustar", foreign_of("a tar archive", ARCHIVE)),
    (0, b"\x93NUMPY", foreign_of("an array of NumPy", ARRAY)),
    (0, b"\x89HDF\r\n\x1a\n", foreign_of("an HDF5 file", TABLE)),
    (0, b"CDF\x01", foreign_of("a NetCDF file", TABLE)),
    (0, b"GGUF", foreign_of("a GGUF model", WEIGHTS)),
    (
        0,
        b"MMIDIDX\0\0",
        foreign_of("the index of a Megatron dataset", "keep it as .idx beside its .bin, and name either"),
    ),
    (0, b"%PDF-", foreign_of("a PDF", TEXT)),
    (0, b"<!DOCTYPE html", foreign_of("a web page", MARKUP)),
    (0, b"<!doctype html", foreign_of("a web page", MARKUP)),
    (0, b"<html", foreign_of("a web page", MARKUP)),
    (0, b"<?xml", foreign_of("XML", MARKUP)),
    (0, b"{\\rtf", foreign_of("an RTF document", TEXT)),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", foreign_of("a document of Microsoft Office", TEXT)),
    (0, b"\x89PNG\r\n\x1a\n", foreign_of("a PNG picture", BINARY)),
    (0, b"\xff\xd8\xff", foreign_of("a JPEG picture", BINARY)),
    (0, b"GIF8", foreign_of("a GIF picture", BINARY)),
    (0, b"RIFF", foreign_of("a RIFF file (WAV, AVI or WebP)", BINARY)),
    (0, b"\x7fELF", foreign_of("a program", BINARY)),
    (0, b"\xff\xfe\0\0", foreign_of("UTF-32 text", "convert it to UTF-8: iconv -f UTF-32 -t UTF-8")),
    (0, b"\0\0\xfe\xff", foreign_of("UTF-32 text", "convert it to UTF-8: iconv -f UTF-32 -t UTF-8")),
    (0, b"\xff\xff\xff\xff", foreign_of("an Arrow stream", TABLE)),
    (0, b"\xff\xfe", foreign_of("UTF-16 text", RECODE)),
    (0, b"\xfe\xff", foreign_of("UTF-16 text", RECODE)),
    (0, b"\x80", foreign_of("a pickle of Python, or other binary data", BINARY)),
];

const SAFETENSORS: Foreign = foreign_of("a safetensors file", WEIGHTS);
const UNMARKED_UTF16: Foreign = foreign_of("UTF-16 text without a byte-order mark", RECODE);
const CSV: Foreign = foreign_of("a table of comma-separated values", TABLE);
const TSV: Foreign = foreign_of("a table of tab-separated values", TABLE);
const DOCUMENT: Foreign =
    foreign_of("one JSON object over several lines", "use JSON lines, one object a line: jq -c . FILE > FILE.jsonl");
/// A token file that is text.
pub(super) const TEXT_IN_BIN: Foreign = foreign_of("text, although its name ends in .bin", "name it .txt or .jsonl");

/// The format of a file that begins with `head`, if that cannot be text.
pub(super) fn foreign(head: &[u8]) -> Option<Foreign> {
    let binary = head.iter().any(|byte| matches!(byte, 0..=8 | 14..=26 | 28..=31));
    let is = |(at, magic, _): &&(usize, &[u8], Foreign)| {
        // A text may begin with the letters of some formats: ORCHESTRA.
        head.get(*at..).is_some_and(|rest| rest.starts_with(magic))
            && (binary || !magic.iter().all(u8::is_ascii_alphanumeric))
    };
    let half_zero = |parity: usize| head.len() >= 64 && head[parity..].iter().step_by(2).all(|&byte| byte == 0);
    match MAGIC.iter().find(is) {
        Some((_, _, foreign)) => Some(*foreign),
        None if is_safetensors(head) => Some(SAFETENSORS),
        None if half_zero(0) != half_zero(1) => Some(UNMARKED_UTF16),
        None => None,
    }
}

/// The format of a file named as token ids, where any two bytes are an id: only signs of four bytes or more count.
pub(super) fn foreign_to_tokens(head: &[u8]) -> Option<Foreign> {
    let certain = |(at, magic, _): &&(usize, &[u8], Foreign)| {
        magic.len() >= 4 && *magic != b"\xff\xff\xff\xff" && head.get(*at..).is_some_and(|rest| rest.starts_with(magic))
    };
    let found = MAGIC.iter().find(certain).map(|(_, _, foreign)| *foreign);
    found.or_else(|| is_safetensors(head).then_some(SAFETENSORS)).or_else(|| {
        let printable = |byte: &u8| matches!(byte, b' '..=b'~' | b'\t' | b'\n' | b'\r');
        (head.len() >= 64 && head.iter().all(printable)).then_some(TEXT_IN_BIN)
    })
}

/// The length of a header, and the header, which is a JSON object.
fn is_safetensors(head: &[u8]) -> bool {
    let length = head.first_chunk().map(|length| u64::from_le_bytes(*length));
    length.is_some_and(|length| (2..1 << 32).contains(&length)) && head[8..].starts_with(b"{\"")
}

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// As one document.
    Text,
    /// As an object a line.
    JsonLines,
    /// As a list of objects or strings.
    JsonArray,
    Foreign(Foreign),
}

/// The format of a file, by its first bytes, at most [`HEAD`], and where these leave it open by its name.
pub(super) fn recognise(path: &Path, head: &[u8], text_key: &str) -> Format {
    let whole = head.len() < HEAD;
    let head = head.strip_prefix(BYTE_ORDER_MARK).unwrap_or(head);
    if let Some(foreign) = foreign(head) {
        return Format::Foreign(foreign);
    }
    let extension = extension(path);
    let named = |names: &[&str]| extension.as_deref().is_some_and(|of| names.contains(&of));
    match json(head, whole) {
        Some(format) => format,
        None if named(&["jsonl", "ndjson", "json"]) => Format::JsonLines,
        None if named(&["csv"]) => Format::Foreign(CSV),
        None if named(&["tsv"]) => Format::Foreign(TSV),
        None => table(head, text_key).map_or(Format::Text, Format::Foreign),
    }
}

/// The extension of a file, in lower case.
pub(super) fn extension(path: &Path) -> Option<String> {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase())
}

/// How much of some bytes is JSON: a value and nothing else, the beginning of one, or neither.
#[derive(Clone, Copy, PartialEq)]
enum Parsed {
    Whole,
    Begun,
    Not,
}

fn parse(bytes: &[u8]) -> Parsed {
    // The head may end in the middle of a character.
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or(""),
        Err(_) => return Parsed::Not,
    };
    match serde_json::from_str::<IgnoredAny>(text) {
        Ok(_) => Parsed::Whole,
        Err(error) if error.is_eof() => Parsed::Begun,
        Err(_) => Parsed::Not,
    }
}

/// The JSON that a file is, if it is. `whole`: whether `head` is the whole file.
fn json(head: &[u8], whole: bool) -> Option<Format> {
    let first = *head.iter().find(|byte| !byte.is_ascii_whitespace())?;
    if !matches!(first, b'{' | b'[') {
        return None;
    }
    let all = parse(head);
    let all = all == Parsed::Whole || all == Parsed::Begun && !whole;
    let lines = head.split_inclusive(|&byte| byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty());
    let lines: Vec<&[u8]> = lines.take(LINES + 1).collect();
    // A line that the head cuts counts if it is JSON as far as it goes.
    let cut = |at: usize| !whole && at + 1 == lines.len() && !head.ends_with(b"\n");
    let object = |(at, line): (usize, &&[u8])| {
        line[0] == b'{' && (parse(line) == Parsed::Whole || cut(at) && parse(line) == Parsed::Begun)
    };
    let objects = lines.iter().enumerate().map(object).take(LINES);
    let (objects, others): (Vec<bool>, Vec<bool>) = objects.partition(|is| *is);
    // Of two lines and more, a few may be damaged.
    if first == b'{' && objects.len() > others.len() {
        return Some(Format::JsonLines);
    }
    match first {
        b'[' if all => Some(Format::JsonArray),
        b'{' if all => Some(Format::Foreign(DOCUMENT)),
        _ => None,
    }
}

/// The table that a file is, if its first line names a column of texts among others, and the second has as many.
fn table(head: &[u8], text_key: &str) -> Option<Foreign> {
    let mut lines = head.split(|&byte| byte == b'\n').map(|line| line.trim_ascii_end());
    let (names, row) = (lines.next()?, lines.next()?);
    [(b',', CSV), (b'\t', TSV)].into_iter().find_map(|(separator, foreign)| {
        let columns: Vec<&[u8]> = names.split(|&byte| byte == separator).collect();
        let is_text = |column: &&[u8]| {
            let column = column.trim_ascii();
            let quoted = column.strip_prefix(b"\"").and_then(|column| column.strip_suffix(b"\""));
            quoted.unwrap_or(column) == text_key.as_bytes()
        };
        let named = columns.len() > 1 && columns.iter().any(is_text);
        (named && row.contains(&separator)).then_some(foreign)
    })
}

#[cfg(test)]
mod tests;
