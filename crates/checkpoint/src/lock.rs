//! The lock of a folder of checkpoints: only one run at a time writes there.

use crate::folder::remove_leftovers;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The exclusive right to write to a folder. The operating system releases the lock when this is dropped or the process
/// ends, even by a crash.
#[derive(Debug)]
pub struct Lock {
    dir: PathBuf,
    removed: Vec<PathBuf>,
    _file: File,
}

/// Failure to lock a folder.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant names its fields")]
pub enum LockError {
    /// Another run holds the lock.
    #[error("{} is the checkpoint folder of another run, {holder}: wait for it, end it, or use another folder", dir.display())]
    Held { dir: PathBuf, holder: String },
    /// The folder cannot be used.
    #[error("the checkpoint folder {} cannot be used: {source}", dir.display())]
    Io { dir: PathBuf, source: io::Error },
}

debug_as_display!(LockError);

#[derive(Serialize, Deserialize)]
struct Holder {
    pid: u32,
    host: String,
}

const FILE: &str = "lock";
/// A larger file was not written by this crate.
const MOST_BYTES: u64 = 4096;

impl Lock {
    /// Takes the lock of a folder, creates the folder if necessary, and removes the leftovers of killed runs.
    ///
    /// # Errors
    /// A folder that another run holds, in this process or another; a folder that cannot be created or written to.
    pub fn take(dir: &Path) -> Result<Self, LockError> {
        let failed = |source| LockError::Io { dir: dir.to_path_buf(), source };
        fs::create_dir_all(dir).map_err(failed)?;
        let mut open = File::options();
        let open = open.read(true).write(true).create(true).truncate(false);
        let mut file = open.open(dir.join(FILE)).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(failed(error)),
            Err(TryLockError::WouldBlock) => {
                return Err(LockError::Held { dir: dir.to_path_buf(), holder: holder(&mut file) });
            }
        }
        let me = Holder { pid: std::process::id(), host: gethostname::gethostname().to_string_lossy().into_owned() };
        write_holder(&mut file, &me).map_err(failed)?;
        let removed = remove_leftovers(dir).map_err(failed)?;
        Ok(Self { dir: dir.to_path_buf(), removed, _file: file })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Leftovers of killed runs, which were removed.
    pub fn removed(&self) -> &[PathBuf] {
        &self.removed
    }
}

fn write_holder(file: &mut File, holder: &Holder) -> io::Result<()> {
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&serde_json::to_vec(holder)?)
}

fn holder(file: &mut File) -> String {
    let mut text = Vec::new();
    _ = file.take(MOST_BYTES).read_to_end(&mut text);
    match serde_json::from_slice(&text) {
        Ok(Holder { pid, host }) => format!("process {pid} on {host}"),
        Err(_) => "which did not say who it is".to_owned(),
    }
}
