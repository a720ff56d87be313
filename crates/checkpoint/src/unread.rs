//! Errors of reading a checkpoint or a part of one.
//!
//! Damaged content and failed reads have two different types: only [`Damage`] permits the use of an older checkpoint,
//! and no system error becomes damage by accident. [`failed`] is the only place that distinguishes them.

use crate::Damage;
use crate::index::FORMAT;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Failure to read a part of a checkpoint.
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

/// A file that cannot be read now, or not by this program. Its content may be intact.
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
