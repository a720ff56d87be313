//! A folder that appears whole: it is written beside its place under another name, and then gets its own in one step of
//! the file system. A process that is killed leaves the folder that was there before, or the new one, and never a mix.

use super::content::names;
use super::{Error, tokenizer};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

/// A folder under way. Dropping it removes what was written.
#[derive(Debug)]
pub(super) struct Staged {
    /// Where it will be.
    target: PathBuf,
    /// Where it is written.
    dir: PathBuf,
    /// Held, so that two programs never write the same one.
    lock: Option<File>,
    overwrite: bool,
}

/// The largest number of names in an error.
const SHOWN: usize = 6;

impl Staged {
    /// Begins to write the folder `target`.
    ///
    /// # Errors
    /// As [`check`], and a folder that another process writes.
    pub(super) fn begin(target: &Path, overwrite: bool) -> Result<Self, Error> {
        let (target, parent) = place(target)?;
        occupied(&target, overwrite)?;
        fs::create_dir_all(&parent).map_err(|source| Error::File { path: parent.clone(), source })?;
        let mut staged = Self { dir: beside(&target, &parent), lock: None, target, overwrite };
        staged.lock()?;
        Ok(staged)
    }

    /// Makes the folder to write to, and removes what a killed process left there.
    fn lock(&mut self) -> Result<(), Error> {
        let parent = self.dir.parent().unwrap_or(&self.dir).to_owned();
        let failed = |source| Error::File { path: parent.clone(), source };
        match fs::create_dir(&self.dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
        if cfg!(unix) {
            let lock = File::open(&self.dir).map_err(failed)?;
            match lock.try_lock() {
                Err(TryLockError::WouldBlock) => {
                    let problem = format!("another process writes {} just now", self.target.display());
                    return Err(Error::Format { path: self.dir.clone(), problem });
                }
                // A file system without locks.
                Ok(()) | Err(TryLockError::Error(_)) => self.lock = Some(lock),
            }
        }
        remove_files(&self.dir, |_| true).map_err(failed)
    }

    /// Where to write the files.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Puts the folder in its place. Files of the folder before that are of no model stay in it.
    ///
    /// # Errors
    /// A place that something else has taken meanwhile, or that the system does not give. What was written then stays,
    /// and the error says where.
    pub(super) fn commit(mut self) -> Result<(), Error> {
        let moved = self.exchange();
        // Nothing is left under this name, or all of it is.
        self.lock = None;
        let (dir, target) = (std::mem::take(&mut self.dir), std::mem::take(&mut self.target));
        moved.map_err(|error| Error::Unplaced { written: dir, target, source: Box::new(error) })
    }

    fn exchange(&self) -> Result<(), Error> {
        let (dir, target) = (&*self.dir, &*self.target);
        let failed = |source| Error::File { path: target.to_owned(), source };
        occupied(target, self.overwrite)?;
        let kept: Vec<String> = names(target).into_iter().filter(|name| !of_a_model(name)).collect();
        for name in &kept {
            let (from, to) = (target.join(name), dir.join(name));
            fs::hard_link(&from, &to).or_else(|_| fs::copy(&from, &to).map(drop)).map_err(failed)?;
        }
        sync(dir);
        if names(target).is_empty() {
            fs::rename(dir, target).map_err(failed)?;
        } else {
            swap(dir, target).map_err(failed)?;
            // The folder before lies there now. A file that has appeared meanwhile stays.
            remove_files(dir, |name| of_a_model(name) || kept.iter().any(|kept| kept == name)).map_err(failed)?;
            _ = fs::remove_dir(dir);
        }
        target.parent().map(sync);
        Ok(())
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.dir.as_os_str().is_empty() && self.lock.is_some() {
            _ = remove_files(&self.dir, |_| true);
            _ = fs::remove_dir(&self.dir);
        }
    }
}

/// Whether the folder could be written now, with this many bytes. Nothing stays of the attempt.
///
/// # Errors
/// A place where it cannot be, files of another model in it unless they are to be replaced, folders in it, too little
/// room.
pub(super) fn check(target: &Path, overwrite: bool, bytes: u64) -> Result<(), Error> {
    let (target, parent) = place(target)?;
    occupied(&target, overwrite)?;
    let there = parent.ancestors().find(|path| path.exists()).unwrap_or(&parent);
    let mut staged = Staged { dir: beside(&target, there), lock: None, target: target.clone(), overwrite };
    staged.lock()?;
    drop(staged);
    match room(there) {
        Some(free) if free < bytes => Err(Error::Room { path: target, needed: bytes, free }),
        _ => Ok(()),
    }
}

/// The place of a folder and the folder that it lies in, links resolved.
fn place(target: &Path) -> Result<(PathBuf, PathBuf), Error> {
    let failed = |source| Error::File { path: target.to_owned(), source };
    let refuse = |problem: &str| Err(Error::Format { path: target.to_owned(), problem: problem.to_owned() });
    let full = match target.symlink_metadata() {
        Ok(_) => fs::canonicalize(target).map_err(failed)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => std::path::absolute(target).map_err(failed)?,
        Err(error) => return Err(failed(error)),
    };
    if full.exists() && !full.is_dir() {
        return refuse("is a file, not a folder");
    }
    if mounted(&full) {
        return refuse("is where a file system begins, and the whole folder is replaced: use a folder inside it");
    }
    match (full.parent(), full.file_name()) {
        (Some(parent), Some(_)) => Ok((full.clone(), parent.to_owned())),
        _ => refuse("is no name for a folder"),
    }
}

/// The name under which a folder is written.
fn beside(target: &Path, parent: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    parent.join(format!(".{name}.unfinished"))
}

/// Refuses a folder that has folders in it, or files of a model that are not to be replaced.
fn occupied(target: &Path, overwrite: bool) -> Result<(), Error> {
    let names = names(target);
    let folders: Vec<&String> =
        names.iter().filter(|name| *name != tokenizer::TEMPLATES && target.join(name).is_dir()).collect();
    if !folders.is_empty() {
        let shown = list(&folders);
        let problem = format!("has folders in it ({shown}), and the whole folder is replaced: use a folder of its own");
        return Err(Error::Format { path: target.to_owned(), problem });
    }
    let files: Vec<&String> = names.iter().filter(|name| of_a_model(name)).collect();
    match files.is_empty() || overwrite {
        true => Ok(()),
        false => Err(Error::Occupied { path: target.to_owned(), files: list(&files) }),
    }
}

fn list(names: &[&String]) -> String {
    let shown: Vec<&str> = names.iter().take(SHOWN).map(|name| name.as_str()).collect();
    let more = names.len().saturating_sub(SHOWN);
    if more > 0 { format!("{} and {more} more", shown.join(", ")) } else { shown.join(", ") }
}

/// Whether a file of this name belongs to a model: it is replaced together with the model. Weights in any form do, so
/// that none are left that are of another model.
fn of_a_model(name: &str) -> bool {
    let settings =
        ["config.json", "generation_config.json", "quantize_config.json", "quant_config.json", "adapter_config.json"];
    let weights = ["model.safetensors", "pytorch_model", "adapter_model", "tf_model", "flax_model"];
    settings.contains(&name)
        || weights.iter().any(|begin| name.starts_with(begin))
        || [".safetensors", ".gguf"].iter().any(|end| name.ends_with(end))
        || tokenizer::is_file(name)
        || name == tokenizer::TEMPLATES
}

/// Removes the files of these names, and files in the one folder that a model has.
fn remove_files(dir: &Path, of: impl Fn(&str) -> bool) -> io::Result<()> {
    for name in names(dir).iter().filter(|name| of(name)) {
        let path = dir.join(name);
        if name == tokenizer::TEMPLATES && path.is_dir() {
            for name in names(&path) {
                fs::remove_file(path.join(name))?;
            }
            fs::remove_dir(path)?;
        } else {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Exchanges two folders: in one step where the system has it.
fn swap(new: &Path, old: &Path) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        use rustix::io::Errno;
        match renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {}
            done => return Ok(done?),
        }
    }
    // A process that is killed between the first two leaves the old folder under a name of its own.
    let aside = new.with_extension("replaced");
    fs::rename(old, &aside)?;
    if let Err(error) = fs::rename(new, old) {
        fs::rename(&aside, old)?;
        return Err(error);
    }
    fs::rename(&aside, new)
}

/// Makes the names in a folder durable, where the system can.
fn sync(dir: &Path) {
    _ = File::open(dir).and_then(|dir| dir.sync_all());
}

/// Whether a file system is mounted at a path.
fn mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let path = path.to_string_lossy().replace('\\', "\\134").replace(' ', "\\040").replace('\t', "\\011");
    table.lines().filter_map(|line| line.split(' ').nth(4)).any(|mounted| mounted == path)
}

/// Bytes that this process may write to the disk of a folder, if the system says.
fn room(dir: &Path) -> Option<u64> {
    #[cfg(target_os = "linux")]
    return rustix::fs::statvfs(dir).ok().map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    #[cfg(not(target_os = "linux"))]
    return None;
}
