//! Finds the newest intact checkpoint.

use crate::{Checkpoint, Damage, Unread, Unreadable, folder_name, steps};
use std::path::{Path, PathBuf};

/// The newest intact checkpoint of a folder.
#[derive(Debug)]
pub struct Latest {
    /// The checkpoint, if there is one.
    pub checkpoint: Option<Checkpoint>,
    /// Newer checkpoints that are damaged.
    pub passed_over: Vec<PassedOver>,
}

/// A checkpoint that is damaged.
#[derive(Debug)]
pub struct PassedOver {
    /// Its folder.
    pub path: PathBuf,
    /// The reason.
    pub damage: Vec<Damage>,
}

/// Finds the newest checkpoint of a folder whose bytes are all as written, and lists the newer, damaged ones. A missing
/// folder has none.
///
/// # Errors
/// A folder or a checkpoint that cannot be read now. An older checkpoint is never returned instead.
pub fn latest_complete(dir: &Path) -> Result<Latest, Unreadable> {
    let mut passed_over = Vec::new();
    for step in steps(dir).map_err(|source| Unreadable::Io { path: dir.to_path_buf(), source })? {
        let path = dir.join(folder_name(step));
        let damage = match Checkpoint::open_step(dir, step) {
            Err(Unread::Unreadable(error)) => return Err(error),
            Err(Unread::Damage(damage)) => vec![damage],
            Ok(checkpoint) => match checkpoint.verify(&checkpoint.units())? {
                damage if damage.is_empty() => return Ok(Latest { checkpoint: Some(checkpoint), passed_over }),
                damage => damage,
            },
        };
        passed_over.push(PassedOver { path, damage });
    }
    Ok(Latest { checkpoint: None, passed_over })
}

impl Checkpoint {
    /// Opens the checkpoint of a step in a folder of checkpoints.
    ///
    /// # Errors
    /// As [`open`](Self::open), and a checkpoint of another step.
    pub fn open_step(dir: &Path, step: u64) -> Result<Self, Unread> {
        let checkpoint = Self::open(&dir.join(folder_name(step)))?;
        match checkpoint.index().step {
            found if found == step => Ok(checkpoint),
            found => Err(Damage::Step { path: checkpoint.path().to_path_buf(), step: found }.into()),
        }
    }
}
