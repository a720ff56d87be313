//! Reads a checkpoint, slice by slice.
//!
//! A read takes only the bytes of the slice from the files. It verifies the checksum of each piece that the slice
//! covers completely. Partly covered pieces must be verified before the read: [`Checkpoint::units_not_read_whole`]
//! lists them.

use crate::checksum::Summing;
use crate::slice::for_each_run;
use crate::unread::failed;
use crate::{Block, Checksum, Damage, FORMAT, Index, Slice, StoredPiece, Tensor, Unread, index};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes per read; they are still in the cache when they are added to the checksum.
const BLOCK: usize = 256 << 10;

/// A checkpoint with a sound index and files of the stated sizes.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    index: Index,
    names: BTreeMap<String, usize>,
    bytes_read: AtomicU64,
}

/// Failure to read a slice.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant names its fields")]
pub enum ReadError {
    /// An unknown tensor.
    #[error("{} has no tensor {name}", path.display())]
    Unknown { path: PathBuf, name: String },
    /// A slice outside its tensor.
    #[error("{} cannot give slice {slice} of {name}: {}", path.display(), out_of_range(name, slice, dims))]
    OutOfRange { path: PathBuf, name: String, dims: Vec<u64>, slice: Slice },
    /// Memory that does not fit the slice.
    #[error("{given} bytes of extents {extents:?} cannot take slice {slice} of {name} {dims:?}")]
    Misfit { name: String, dims: Vec<u64>, slice: Slice, extents: Vec<u64>, given: usize },
    /// A file that is damaged, or cannot be read now.
    #[error(transparent)]
    Unread(#[from] Unread),
}

debug_as_display!(ReadError);

/// Explains why a slice is outside its tensor, and which slices are valid.
fn out_of_range(name: &str, slice: &Slice, dims: &[u64]) -> String {
    let (ranges, ndim) = (slice.ranges(), dims.len());
    if ranges.len() != ndim {
        return format!(
            "it has ranges of {} dims, and {name} has {ndim}, of extents {dims:?}: give one of each",
            ranges.len()
        );
    }
    match ranges.zip(dims).enumerate().find(|(_, (range, extent))| range.start > range.end || range.end > **extent) {
        Some((dim, (range, extent))) if range.start > range.end => {
            format!("its range {range:?} in dim {dim} ends before it begins; the extent there is {extent}")
        }
        Some((dim, (range, extent))) => {
            format!(
                "its range {range:?} in dim {dim} goes past the extent there, {extent}; the whole is {name} {dims:?}"
            )
        }
        None => format!("the whole is {name} {dims:?}"),
    }
}

impl Checkpoint {
    /// Opens the checkpoint in a folder: reads its index, and compares the sizes of its files. Needs memory of a small
    /// multiple of the index's size.
    ///
    /// # Errors
    /// [`Damage`]: an index that is missing, damaged or inconsistent; files that are missing or have the wrong size.
    /// Otherwise files that cannot be read now, or have another format.
    pub fn open(path: &Path) -> Result<Self, Unread> {
        let file = path.join(index::FILE);
        let bytes = fs::read(&file).map_err(failed(&file))?;
        let index = Index::decode(&file, &bytes)?;
        debug_assert_eq!(index.format, FORMAT);
        for of in &index.files {
            let path = path.join(&of.name);
            let found = fs::metadata(&path).map_err(failed(&path))?;
            if !found.is_file() || found.len() != of.bytes {
                return Err(Damage::Size { path, found: found.len(), written: of.bytes }.into());
            }
        }
        let names = index.tensors.iter().enumerate().map(|(at, stored)| (stored.tensor.name.clone(), at)).collect();
        Ok(Self { path: path.to_path_buf(), index, names, bytes_read: AtomicU64::new(0) })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its contents.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.names.get(name).map(|&at| &self.index.tensors[at].tensor)
    }

    pub(crate) fn pieces(&self, name: &str) -> &[StoredPiece] {
        self.names.get(name).map_or(&[], |&at| &self.index.tensors[at].pieces)
    }

    /// Bytes of tensors read from the files so far. Bytes that were only verified do not count.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// The elements of a slice, row-major.
    ///
    /// # Errors
    /// As [`read_into`](Self::read_into).
    pub fn read(&self, name: &str, slice: &Slice) -> Result<Vec<u8>, ReadError> {
        let size = self.tensor(name).map_or(0, |tensor| tensor.dtype.size());
        let fits = self.tensor(name).is_some_and(|tensor| slice.fits(&tensor.dims));
        // A slice that does not fit is rejected below, so its size must not be used here.
        let mut bytes = vec![0; if fits { (slice.elements() * size) as usize } else { 0 }];
        self.read_into(name, slice, &slice.extents(), &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a slice into a row-major array of `extents`, which may be larger than the slice: padding at the end of a
    /// dim, which is not changed.
    ///
    /// # Errors
    /// An unknown tensor, a slice that does not fit, a file that cannot be read, or a damaged piece. The array may then
    /// contain bytes of the damaged piece.
    pub fn read_into(&self, name: &str, slice: &Slice, extents: &[u64], into: &mut [u8]) -> Result<(), ReadError> {
        let Some(tensor) = self.tensor(name) else {
            return Err(ReadError::Unknown { path: self.path.clone(), name: name.to_owned() });
        };
        if !slice.fits(&tensor.dims) {
            let (path, name, dims) = (self.path.clone(), name.to_owned(), tensor.dims.clone());
            return Err(ReadError::OutOfRange { path, name, dims, slice: slice.clone() });
        }
        let size = tensor.dtype.size();
        let Some(wanted) = Block::in_memory(tensor, slice, extents, into.len()) else {
            let (name, dims, given) = (name.to_owned(), tensor.dims.clone(), into.len());
            return Err(ReadError::Misfit { name, dims, slice: slice.clone(), extents: extents.to_vec(), given });
        };
        let bytes = |start: u64, run: u64| (start * size) as usize..((start + run) * size) as usize;
        for piece in self.pieces(name) {
            let Some(both) = slice.overlap(&piece.slice) else { continue };
            let stored = Block::from_slice(&piece.slice);
            let failed = |source| self.failed(piece.file, source);
            if both == piece.slice {
                let mut checksum = Summing::default();
                let length = piece.bytes.1 - piece.bytes.0;
                self.bytes_read.fetch_add(length, Ordering::Relaxed);
                // Buffered, because runs may be short; reads of whole blocks bypass the buffer.
                let file = self.open_at(piece.file, piece.bytes.0)?.take(length);
                let mut file = BufReader::with_capacity(length.min(BLOCK as u64) as usize, file);
                // The runs are consecutive in the file, because the slice covers the whole piece.
                for_each_run(&both, &stored, &wanted, |_, to, run| {
                    for block in into[bytes(to, run)].chunks_mut(BLOCK) {
                        file.read_exact(block).map_err(failed)?;
                        checksum.add(block);
                    }
                    Ok::<_, Unread>(())
                })?;
                self.require_written(tensor, piece, checksum.checksum()).map_err(Unread::from)?;
            } else {
                let mut file = self.open_at(piece.file, 0)?;
                for_each_run(&both, &stored, &wanted, |from, to, run| {
                    let taken = &mut into[bytes(to, run)];
                    self.bytes_read.fetch_add(taken.len() as u64, Ordering::Relaxed);
                    let read =
                        file.seek(SeekFrom::Start(piece.bytes.0 + from * size)).and_then(|_| file.read_exact(taken));
                    read.map_err(failed)
                })?;
            }
        }
        Ok(())
    }

    pub(crate) fn require_written(&self, tensor: &Tensor, piece: &StoredPiece, found: Checksum) -> Result<(), Damage> {
        if found == piece.checksum {
            return Ok(());
        }
        let (path, tensor, slice) = (self.file_path(piece.file), tensor.name.clone(), piece.slice.clone());
        Err(Damage::Piece { path, tensor, slice, found, written: piece.checksum })
    }

    /// The error of a read from a file that had the right size when the checkpoint was opened.
    fn failed(&self, file: usize, source: io::Error) -> Unread {
        let path = self.file_path(file);
        match source.kind() {
            io::ErrorKind::UnexpectedEof => {
                let found = fs::metadata(&path).map_or(0, |found| found.len());
                Damage::Size { path, found, written: self.index.files[file].bytes }.into()
            }
            _ => failed(&path)(source),
        }
    }

    pub(crate) fn file_path(&self, file: usize) -> PathBuf {
        self.path.join(&self.index.files[file].name)
    }

    /// A file, to be read from byte `at` on.
    fn open_at(&self, file: usize, at: u64) -> Result<File, Unread> {
        let open = || {
            let mut opened = File::open(self.file_path(file))?;
            opened.seek(SeekFrom::Start(at)).map(|_| opened)
        };
        open().map_err(|source| self.failed(file, source))
    }

    pub(crate) fn file_checksum(&self, file: usize, range: (u64, u64)) -> Result<Checksum, Unread> {
        let mut checksum = Summing::default();
        self.for_each_block(file, range, |block| checksum.add(block))?;
        Ok(checksum.checksum())
    }

    pub(crate) fn file_bytes(&self, file: usize, range: (u64, u64)) -> Result<Vec<u8>, Unread> {
        let mut bytes = Vec::new();
        self.for_each_block(file, range, |block| bytes.extend_from_slice(block))?;
        Ok(bytes)
    }

    /// Reads a range of a file block by block. The index is sound, so the range was inside the file when the checkpoint
    /// was opened.
    fn for_each_block(&self, file: usize, (start, end): (u64, u64), mut see: impl FnMut(&[u8])) -> Result<(), Unread> {
        let (mut from, mut left) = (self.open_at(file, start)?, end - start);
        let mut block = vec![0; left.min(BLOCK as u64) as usize];
        while left > 0 {
            let block = &mut block[..left.min(BLOCK as u64) as usize];
            from.read_exact(block).map_err(|source| self.failed(file, source))?;
            see(block);
            left -= block.len() as u64;
        }
        Ok(())
    }
}
