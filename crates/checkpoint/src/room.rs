//! Disk space: free bytes, and the old checkpoints that may be removed before the next one is written.

use crate::folder::{folder_name, steps};
use std::fs;
use std::io;
use std::path::Path;

/// Bytes that this process may still write to the file system of a folder, or of its nearest parent that exists. `None`
/// if the system does not report it; quotas are not considered.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let mut parents = dir.ancestors().map(|at| if at.as_os_str().is_empty() { Path::new(".") } else { at });
    free(parents.find(|at| at.exists())?)
}

#[cfg(unix)]
fn free(dir: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(dir).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(not(unix))]
fn free(_: &Path) -> Option<u64> {
    None
}

/// The bytes of the files of a complete checkpoint.
///
/// # Errors
/// A folder that cannot be read.
pub fn stored_bytes(dir: &Path, step: u64) -> io::Result<u64> {
    fs::read_dir(dir.join(folder_name(step)))?.map(|entry| Ok(entry?.metadata()?.len())).sum()
}

/// The checkpoints that may be removed before the next one is written, in this order: all but the newest intact one
/// and the one that `stays`.
/// Later checkpoints are removed first, because they must be damaged (else the run would have resumed from them); then
/// the oldest. If no checkpoint is known to be intact, none may be removed.
pub(crate) fn spare(dir: &Path, whole: Option<u64>, stays: Option<u64>) -> io::Result<Vec<u64>> {
    let Some(whole) = whole else { return Ok(Vec::new()) };
    let mut steps: Vec<u64> = steps(dir)?.into_iter().filter(|&step| step != whole && Some(step) != stays).collect();
    steps.sort_unstable_by_key(|&step| (step < whole, step));
    Ok(steps)
}

/// Whether a write failed because the disk was full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_whole_checkpoint_is_never_spare() {
        let dir = tempfile::tempdir().unwrap();
        for step in [10, 20, 30, 40] {
            fs::create_dir(dir.path().join(folder_name(step))).unwrap();
        }
        assert_eq!(spare(dir.path(), Some(40), None).unwrap(), [10, 20, 30]);
        assert_eq!(
            spare(dir.path(), Some(20), None).unwrap(),
            [30, 40, 10],
            "the run went on from 20: later ones are damaged"
        );
        assert_eq!(spare(dir.path(), Some(40), Some(20)).unwrap(), [10, 30]);
        assert!(spare(dir.path(), None, None).unwrap().is_empty());
    }

    #[test]
    fn a_folder_that_is_not_there_yet_has_the_room_of_its_parent() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(free_bytes(&dir.path().join("a/b")).is_some(), cfg!(unix));
        assert_eq!(free_bytes(Path::new("no-such-folder")).is_some(), cfg!(unix));
    }
}
