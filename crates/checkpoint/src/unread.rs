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
#[expect(missing_docs, reason = "the message of a variant names its fields")]
pub enum Damage {
    /// The folder has no such name, or the name is no file.
    #[error("{}: there is no such file", path.display())]
    Missing { path: PathBuf },
    /// An index that cannot be trusted.
    #[error("{}: {problem}", path.display())]
    Index { path: PathBuf, problem: String },
    /// A file that was cut, or is another one.
    #[error("{}: has {found} bytes, and was written with {written}", path.display())]
    Size { path: PathBuf, found: u64, written: u64 },
    /// A header that was changed, or belongs to another file.
    #[error("{}: its header is not the one that was written: {problem}", path.display())]
    Header { path: PathBuf, problem: String },
    /// A piece that was changed.
    #[error("{}: slice {slice} of {tensor} has checksum {found}, and was written with {written}", path.display())]
    Piece { path: PathBuf, tensor: String, slice: Slice, found: Checksum, written: Checksum },
    /// A checkpoint in the folder of another step.
    #[error("{}: holds step {step}", path.display())]
    Step { path: PathBuf, step: u64 },
}

debug_as_display!(Damage);

/// A file or folder that cannot be read now or by this program, which says nothing about its content.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant names its fields")]
pub enum Unreadable {
    /// Permissions, a failing disk, a file system that is not mounted, too many open files.
    #[error("{} cannot be read: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A sound index of another version of the format.
    #[error("{} has format {found}, and this program reads {FORMAT}: use the version that wrote it", path.display())]
    Format { path: PathBuf, found: u64 },
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
