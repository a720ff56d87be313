//! The folder of checkpoints: names, complete checkpoints, leftovers, and the commit of a checkpoint.
//!
//! ```text
//! DIR/lock                     held by the run that writes here
//! DIR/step-00000010/           complete
//! DIR/step-00000020.partial/   being written
//! DIR/step-00000020.old/       complete, being replaced by another checkpoint of that step
//! DIR/step-00000010.removed/   being removed
//! ```

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The name of the folder of a step: `step-00000010`.
pub fn folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a complete checkpoint, by the name of its folder.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (folder_name(step) == name).then_some(step)
}

/// The steps of the complete checkpoints in a folder, the newest first; none if there is no such folder.
///
/// # Errors
/// A folder that cannot be read.
pub fn steps(dir: &Path) -> io::Result<Vec<u64>> {
    let mut steps: Vec<u64> = names(dir)?.iter().filter_map(|name| step_of(name)).collect();
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(steps)
}

fn names(dir: &Path) -> io::Result<Vec<String>> {
    match fs::read_dir(dir) {
        // A dangling link may become valid when its target is mounted.
        Err(error) if error.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(dir).is_err() => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect(),
    }
}

/// Suffixes of folders that are not complete checkpoints.
const PARTIAL: &str = "partial";
const OLD: &str = "old";
const REMOVED: &str = "removed";

/// The folder in which a step is written.
pub(crate) fn partial(dir: &Path, step: u64) -> PathBuf {
    marked(dir, step, PARTIAL)
}

fn marked(dir: &Path, step: u64, mark: &str) -> PathBuf {
    dir.join(format!("{}.{mark}", folder_name(step)))
}

/// Makes a folder's list of files durable.
pub(crate) fn sync(dir: &Path) -> io::Result<()> {
    // Windows cannot open folders, and does not need this call.
    if cfg!(unix) { File::open(dir)?.sync_all() } else { Ok(()) }
}

/// Commits the partial folder of a step as the checkpoint of that step, atomically. An older checkpoint of the same
/// step is kept until then.
pub(crate) fn commit(dir: &Path, step: u64) -> io::Result<PathBuf> {
    let (written, complete, old) = (partial(dir, step), dir.join(folder_name(step)), marked(dir, step, OLD));
    sync(&written)?;
    if complete.exists() {
        fs::rename(&complete, &old)?;
    }
    fs::rename(&written, &complete)?;
    sync(dir)?;
    if old.exists() {
        fs::remove_dir_all(&old)?;
    }
    Ok(complete)
}

/// Removes all but `keep` of the checkpoints up to `step`, the oldest first; never the checkpoint of `step` or a later
/// one, or the one that `stays`.
pub(crate) fn prune(dir: &Path, step: u64, keep: usize, stays: Option<u64>) -> io::Result<Vec<PathBuf>> {
    let older = steps(dir)?.into_iter().filter(|&other| other < step).skip(keep.saturating_sub(1));
    older.filter(|&step| Some(step) != stays).map(|step| remove(dir, step)).collect()
}

/// Removes a complete checkpoint: it is renamed first, so that a partly removed checkpoint never counts as complete.
pub(crate) fn remove(dir: &Path, step: u64) -> io::Result<PathBuf> {
    let (complete, going) = (dir.join(folder_name(step)), marked(dir, step, REMOVED));
    fs::rename(&complete, &going)?;
    fs::remove_dir_all(&going)?;
    Ok(complete)
}

/// Removes the leftovers of killed runs. A complete checkpoint that was about to be replaced gets its name back.
pub(crate) fn remove_leftovers(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for name in names(dir)? {
        let Some((step, mark)) = name.rsplit_once('.').and_then(|(step, mark)| Some((step_of(step)?, mark))) else {
            continue;
        };
        let (path, complete) = (dir.join(&name), dir.join(folder_name(step)));
        match mark {
            OLD if !complete.exists() => fs::rename(&path, &complete)?,
            PARTIAL | OLD | REMOVED => {
                fs::remove_dir_all(&path)?;
                removed.push(path);
            }
            _ => {}
        }
    }
    removed.sort();
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(dir: &Path, names: &[&str]) {
        names.iter().for_each(|name| fs::create_dir(dir.join(name)).unwrap());
    }

    fn left(dir: &Path) -> Vec<String> {
        let mut names = names(dir).unwrap();
        names.sort();
        names
    }

    #[test]
    fn only_whole_names_are_checkpoints() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), &["step-00000010", "step-123456789", "step-10", "step-00000020.partial", "step-", "other"]);
        assert_eq!(steps(dir.path()).unwrap(), [123_456_789, 10]);
        assert!(steps(&dir.path().join("none")).unwrap().is_empty());
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("not/mounted", dir.path().join("link")).unwrap();
            assert!(steps(&dir.path().join("link")).is_err(), "what it leads to may have some");
        }
    }

    #[test]
    fn pruning_keeps_the_newest_and_never_the_later() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), &["step-00000010", "step-00000020", "step-00000030", "step-00000040", "step-00000090"]);
        let removed = prune(dir.path(), 40, 2, None).unwrap();
        assert_eq!(removed, [dir.path().join("step-00000020"), dir.path().join("step-00000010")]);
        assert_eq!(left(dir.path()), ["step-00000030", "step-00000040", "step-00000090"]);
        prune(dir.path(), 40, 0, None).unwrap(); // keeps the checkpoint just written
        assert_eq!(left(dir.path()), ["step-00000040", "step-00000090"]);
    }

    #[test]
    fn a_checkpoint_that_stays_is_kept_beside_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), &["step-00000010", "step-00000020", "step-00000030", "step-00000040"]);
        prune(dir.path(), 40, 2, Some(10)).unwrap();
        assert_eq!(left(dir.path()), ["step-00000010", "step-00000030", "step-00000040"]);
        prune(dir.path(), 40, 1, Some(30)).unwrap();
        assert_eq!(left(dir.path()), ["step-00000030", "step-00000040"]);
    }

    #[test]
    fn leftovers_go_and_a_checkpoint_that_was_to_be_replaced_stays() {
        let dir = tempfile::tempdir().unwrap();
        let all = ["step-00000010", "step-00000010.old", "step-00000020.old", "step-00000030.partial", "mine.partial"];
        make(dir.path(), &all);
        make(dir.path(), &["step-00000040.removed", "step-00000050.mine"]);
        assert_eq!(remove_leftovers(dir.path()).unwrap().len(), 3);
        assert_eq!(left(dir.path()), ["mine.partial", "step-00000010", "step-00000020", "step-00000050.mine"]);
    }

    #[test]
    fn a_commit_replaces_a_checkpoint_of_the_same_step() {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), &["step-00000010", "step-00000010.partial"]);
        fs::write(dir.path().join("step-00000010.partial/new"), "").unwrap();
        commit(dir.path(), 10).unwrap();
        assert_eq!(left(dir.path()), ["step-00000010"]);
        assert!(dir.path().join("step-00000010/new").exists());
    }
}
