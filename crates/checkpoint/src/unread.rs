//! Errors of reading a checkpoint or a part of one.
//!
//! Damaged content and failed reads have two different types: only [`Damage`] permits the use of an older checkpoint,
//! and no system error becomes damage by accident. [`failed`] is the only place that distinguishes them.

use crate::{Checksum, Slice};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The version of the format that this crate writes, and the only one that it reads.
pub const FORMAT: u32 = 1;

/// Why something of a checkpoint was not read.
#[derive(thiserror::Error)]
pub enum Unread {
    /// The content is damaged, permanently.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The read failed; the content may be intact.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
}

debug_as_display!(Unread);

/// A file of a checkpoint that is not as it was written. A file that could not be read is not damage: see [`Unread`].
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// The folder has no such name, or the name is no file.
    #[error("{}: there is no such file", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// An index that cannot be trusted.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
    /// A file that was cut, or is another one.
    #[error("{}: has {found} bytes, and was written with {written}", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        found: u64,
        /// Its bytes by the index.
        written: u64,
    },
    /// A header that was changed, or belongs to another file.
    #[error("{}: its header is not the one that was written: {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The words of the header.
        problem: String,
    },
    /// A piece that was changed.
    #[error("{}: slice {slice} of {tensor} has checksum {found}, and was written with {written}", path.display())]
    Piece {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The slice.
        slice: Slice,
        /// The checksum of its bytes.
        found: Checksum,
        /// The checksum by the index.
        written: Checksum,
    },
    /// A checkpoint in the folder of another step.
    #[error("{}: holds step {step}", path.display())]
    Step {
        /// The folder.
        path: PathBuf,
        /// The step by the index.
        step: u64,
    },
}

debug_as_display!(Damage);

/// What cannot be read now or by this program, which says nothing about its content.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Unreadable {
    /// Permissions, a failing disk, a file system that is not mounted, too many open files.
    #[error("{} cannot be read: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// A sound index of another version of the format.
    #[error("{} has format {found}, and this program reads {FORMAT}: use the version that wrote it", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u64,
    },
}

debug_as_display!(Unreadable);

/// Sorts the error of an attempt to open or read a file of a checkpoint.
pub(crate) fn failed(path: &Path) -> impl Fn(io::Error) -> Unread + '_ {
    move |source| {
        let path = path.to_path_buf();
        match source.kind() {
            // The target of a dangling link (the file or its folder) may come back: it may be on a disk that is not
            // mounted.
            ErrorKind::NotFound if is_gone(&path) => Damage::Missing { path }.into(),
            ErrorKind::NotADirectory | ErrorKind::IsADirectory => Damage::Missing { path }.into(),
            _ => Unreadable::Io { path, source }.into(),
        }
    }
}

/// Whether the folder can be read and has no file of this name.
fn is_gone(path: &Path) -> bool {
    let named = fs::symlink_metadata(path);
    let absent = named.is_err_and(|error| error.kind() == ErrorKind::NotFound);
    absent && path.parent().is_some_and(|folder| fs::read_dir(folder).is_ok())
}
