//! Why a checkpoint, or a part of one, was not read.
//!
//! Content that is not what was written, and a read that failed, are two types: only [`Damage`] permits to use an older
//! checkpoint, and no error of the system becomes one by accident. [`failed`] is the only place that sorts them.

use crate::Damage;
use crate::index::FORMAT;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Why something of a checkpoint was not read.
#[derive(thiserror::Error)]
pub enum Unread {
    /// Its content is not what was written, and will not be at another time.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// It may be as it was written.
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
}

debug_as_display!(Unread);

/// What cannot be read now or by this program, which says nothing about its content.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Unreadable {
    /// Permissions, a failing disk, a file system that is not mounted, too many open files.
    #[error("{} cannot be read: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// The error of the system.
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
            // Of a link that leads nowhere, or in a folder that is one, the target may come back: a disk that is not
            // mounted.
            ErrorKind::NotFound if is_gone(&path) => Damage::Missing { path }.into(),
            ErrorKind::NotADirectory | ErrorKind::IsADirectory => Damage::Missing { path }.into(),
            _ => Unreadable::Io { path, source }.into(),
        }
    }
}

/// Whether a folder that can be read lacks the name of a file.
fn is_gone(path: &Path) -> bool {
    let named = fs::symlink_metadata(path);
    let absent = named.is_err_and(|error| error.kind() == ErrorKind::NotFound);
    absent && path.parent().is_some_and(|folder| fs::read_dir(folder).is_ok())
}
