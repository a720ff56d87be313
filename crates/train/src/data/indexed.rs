//! Megatron's indexed datasets: tokens in a `.bin` file, and where sequences and documents begin in an `.idx` file
//! beside it.
//!
//! The index, little-endian: the magic bytes `MMIDIDX\0\0`, version u64 = 1, type of the ids u8, number of sequences
//! u64, number of document indices u64; then the tokens of each sequence i32, the byte in the `.bin` file at which each
//! begins i64, and the document indices i64: the sequence with which each document begins, and after the last one the
//! number of sequences. Modes of a multimodal dataset, u8 for each sequence, may follow and are not read.
//!
//! An index is read by position like the tokens. So an index of any length takes no memory.

use super::prelude::*;
use super::tokens::{Positioned, Width};
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const VERSION: u64 = 1;
/// Magic bytes, version, type and two numbers.
const HEADER_BYTES: u64 = 34;
/// The types of ids; those that are missing are floating-point numbers.
const DTYPES: [(u8, Width); 6] =
    [(1, Width::U8), (2, Width::I8), (3, Width::I16), (4, Width::I32), (5, Width::I64), (8, Width::U16)];
/// Of an index with at most this many sequences or documents each is checked when it is opened, of a longer one this
/// many of them. The others are checked when they are read.
const CHECKED: u64 = 1 << 14;

/// Where the documents of an indexed dataset begin.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    file: Positioned,
    sequences: u64,
    /// Document indices: one more than documents.
    documents: u64,
    width: Width,
    bytes: u64,
}

/// The paths of the index and the tokens of a dataset, by one of them or their common beginning, which is how Megatron
/// names it. `None` if there is no such dataset.
pub(super) fn paths(path: &Path) -> Option<(PathBuf, PathBuf)> {
    let with = |extension: &str| path.with_extension(extension);
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("idx") => Some((path.to_path_buf(), with("bin"))),
        Some("bin") => Some((with("idx"), path.to_path_buf())).filter(|(index, _)| index.is_file()),
        _ => {
            let [index, tokens] = ["idx", "bin"].map(|extension| path.with_added_extension(extension));
            (!path.exists() && index.is_file()).then_some((index, tokens))
        }
    }
}

/// The tokens of a dataset and the index of its documents.
pub(super) fn open(index: &Path, tokens: &Path) -> Result<(Tokens, Index), DataError> {
    for (path, partner) in [(tokens, index), (index, tokens)] {
        if !path.is_file() {
            return Err(match partner.is_file() {
                true => Problem::NoPartner(path.to_path_buf()).in_file(partner),
                false => Problem::Missing.in_file(path),
            });
        }
    }
    let (file, data) = (Positioned::open(index)?, Positioned::open(tokens)?);
    let refuse = |problem: Problem| Err(problem.in_file(index));
    if file.bytes() < HEADER_BYTES || file.array(0)? != *MAGIC {
        return refuse(Problem::IndexMagic);
    }
    let number = |at: u64| file.array(at).map(u64::from_le_bytes);
    let (version, [dtype], sequences, documents) = (number(9)?, file.array(17)?, number(18)?, number(26)?);
    if version != VERSION {
        return refuse(Problem::IndexVersion(version));
    }
    let Some((_, width)) = DTYPES.into_iter().find(|(code, _)| *code == dtype) else {
        return refuse(Problem::IndexDtype(dtype));
    };
    let wanted = u128::from(HEADER_BYTES) + 12 * u128::from(sequences) + 8 * u128::from(documents);
    let found = u128::from(file.bytes());
    if found != wanted && found != wanted + u128::from(sequences) {
        return refuse(Problem::IndexLength { found: file.bytes(), sequences, documents, wanted });
    }
    let bytes = data.bytes();
    if bytes == 0 {
        return Err(Problem::Empty.in_file(tokens));
    }
    if !bytes.is_multiple_of(width.bytes()) {
        return Err(Problem::PartOfAnId { bytes, width: width.bytes() }.in_file(tokens));
    }
    let index = Index { file, sequences, documents, width, bytes };
    index.check()?;
    Ok((Tokens::File { file: data, start: 0, count: bytes / width.bytes(), width }, index))
}

/// All of `0..count`, or [`CHECKED`] of them with the first and the last.
fn spread(count: u64) -> impl Iterator<Item = u64> {
    let steps = count.min(CHECKED);
    (0..steps).map(move |step| (u128::from(count - 1) * u128::from(step) / u128::from(steps.max(2) - 1)) as u64)
}

impl Index {
    /// Number of documents.
    pub fn documents(&self) -> u64 {
        self.documents.saturating_sub(1)
    }

    fn check(&self) -> Result<(), DataError> {
        spread(self.sequences).try_for_each(|sequence| self.check_sequence(sequence))?;
        let ends = [
            (0, 0, "documents begin with sequence 0"),
            (self.documents.saturating_sub(1), self.sequences as i64, "the last one is the number of sequences"),
        ];
        for (at, wanted, why) in ends {
            let found = if self.documents == 0 { -1 } else { self.document(at)? };
            if found != wanted {
                return Err(Problem::IndexDocument { at, found, why }.in_file(self.file.path()));
            }
        }
        spread(self.documents()).try_for_each(|document| self.start(document).map(drop))
    }

    /// Checks that a sequence begins where the one before ends, and that the last one ends with the tokens.
    fn check_sequence(&self, sequence: u64) -> Result<(), DataError> {
        let refuse = |problem: Problem| Err(problem.in_file(self.file.path()));
        let size = i64::from(i32::from_le_bytes(self.file.array(HEADER_BYTES + 4 * sequence)?));
        if size < 0 {
            return refuse(Problem::IndexSize { sequence, size });
        }
        let (start, last) = (self.pointer(sequence)?, sequence + 1 == self.sequences);
        if sequence == 0 && start != 0 {
            return refuse(Problem::IndexPointer {
                what: "sequence 0 begins at byte".to_owned(),
                found: start,
                wanted: 0,
            });
        }
        let end = start.saturating_add(size * self.width.bytes() as i64);
        let wanted = if last { self.bytes as i64 } else { self.pointer(sequence + 1)? };
        match end == wanted {
            true => Ok(()),
            false => {
                refuse(Problem::IndexPointer { what: format!("sequence {sequence} ends at byte"), found: end, wanted })
            }
        }
    }

    /// The byte of the tokens at which a sequence begins.
    fn pointer(&self, sequence: u64) -> Result<i64, DataError> {
        self.file.array(HEADER_BYTES + 4 * self.sequences + 8 * sequence).map(i64::from_le_bytes)
    }

    fn document(&self, at: u64) -> Result<i64, DataError> {
        self.file.array(HEADER_BYTES + 12 * self.sequences + 8 * at).map(i64::from_le_bytes)
    }

    /// The token with which a document begins; for the number of documents, the number of tokens.
    fn start(&self, document: u64) -> Result<u64, DataError> {
        let (sequence, tokens) = (self.document(document)?, self.bytes / self.width.bytes());
        if sequence == self.sequences as i64 {
            return Ok(tokens);
        }
        if !(0..self.sequences as i64).contains(&sequence) {
            let why = "there is no such sequence";
            return Err(Problem::IndexDocument { at: document, found: sequence, why }.in_file(self.file.path()));
        }
        let byte = self.pointer(sequence as u64)?;
        let width = self.width.bytes() as i64;
        if !(0..=self.bytes as i64).contains(&byte) || byte % width != 0 {
            let what = format!("sequence {sequence} begins at byte");
            let wanted = byte.clamp(0, self.bytes as i64) / width * width;
            return Err(Problem::IndexPointer { what, found: byte, wanted }.in_file(self.file.path()));
        }
        Ok((byte / width) as u64)
    }

    /// The tokens in `window` with which documents begin, ascending.
    pub fn starts(&self, window: Range<u64>) -> Result<Vec<u64>, DataError> {
        // The first document that begins in the window or behind it.
        let (mut low, mut high) = (0, self.documents());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.start(middle)? < window.start { low = middle + 1 } else { high = middle }
        }
        let mut starts: Vec<u64> = Vec::new();
        for document in low..self.documents() {
            let start = self.start(document)?;
            if start >= window.end {
                break;
            }
            match starts.last() {
                // A document without tokens begins where the next one does.
                Some(&last) if last == start => {}
                Some(&last) if last > start => {
                    let why = "documents begin one after another";
                    let found = self.document(document)?;
                    return Err(Problem::IndexDocument { at: document, found, why }.in_file(self.file.path()));
                }
                _ => starts.push(start),
            }
        }
        Ok(starts)
    }
}

/// Writes an indexed dataset as its tokens come. Memory does not grow with it.
pub(super) struct Writer {
    tokens: BufWriter<File>,
    /// The header, which is written last, and the lengths of the sequences.
    index: BufWriter<File>,
    index_path: PathBuf,
    /// The document indices, which follow the index in the end.
    documents: BufWriter<File>,
    documents_path: PathBuf,
    width: Width,
    sequences: u64,
    ended: u64,
}

impl Writer {
    /// A dataset of ids below `vocab`: u16 if they fit, else i32.
    pub fn create(index: &Path, tokens: &Path, vocab: usize) -> io::Result<Self> {
        let documents_path = index.with_extension("documents");
        let create = |path: &Path| File::options().read(true).write(true).create(true).truncate(true).open(path);
        let mut index_file = BufWriter::new(create(index)?);
        index_file.write_all(&[0; HEADER_BYTES as usize])?;
        let mut documents = BufWriter::new(create(&documents_path)?);
        documents.write_all(&0i64.to_le_bytes())?;
        Ok(Self {
            tokens: BufWriter::new(create(tokens)?),
            index: index_file,
            index_path: index.to_path_buf(),
            documents,
            documents_path,
            width: if vocab <= 1 << 16 { Width::U16 } else { Width::I32 },
            sequences: 0,
            ended: 1,
        })
    }

    /// Adds a part of a document, a sequence of its own.
    pub fn add(&mut self, ids: &[u32]) -> io::Result<()> {
        let size = i32::try_from(ids.len()).map_err(|_| io::Error::other("a sequence of more than 2³¹ tokens"))?;
        for &id in ids {
            match self.width {
                Width::U16 => self.tokens.write_all(&(id as u16).to_le_bytes())?,
                _ => self.tokens.write_all(&(id as i32).to_le_bytes())?,
            }
        }
        self.sequences += 1;
        self.index.write_all(&size.to_le_bytes())
    }

    /// Ends a document.
    pub fn end_document(&mut self) -> io::Result<()> {
        self.ended += 1;
        self.documents.write_all(&(self.sequences as i64).to_le_bytes())
    }

    /// Completes the files and brings them to the disk.
    pub fn finish(mut self) -> io::Result<()> {
        self.tokens.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        // A pointer is the sum of the lengths before.
        self.index.flush()?;
        let mut sizes = BufReader::new(File::open(&self.index_path)?);
        sizes.seek(SeekFrom::Start(HEADER_BYTES))?;
        let mut pointer = 0i64;
        for _ in 0..self.sequences {
            self.index.write_all(&pointer.to_le_bytes())?;
            let mut size = [0; 4];
            sizes.read_exact(&mut size)?;
            pointer += i64::from(i32::from_le_bytes(size)) * self.width.bytes() as i64;
        }
        let mut documents = self.documents.into_inner().map_err(io::IntoInnerError::into_error)?;
        documents.seek(SeekFrom::Start(0))?;
        io::copy(&mut documents, &mut self.index)?;
        std::fs::remove_file(&self.documents_path)?;
        let code = DTYPES.iter().find(|(_, width)| *width == self.width).map_or(0, |(code, _)| *code);
        let header = [&VERSION.to_le_bytes()[..], &[code], &self.sequences.to_le_bytes(), &self.ended.to_le_bytes()];
        self.index.seek(SeekFrom::Start(0))?;
        self.index.write_all(&[&MAGIC[..], &header.concat()].concat())?;
        self.index.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    }
}

#[cfg(test)]
mod tests;
