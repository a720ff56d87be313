//! The log of each rank, if one is asked for by `comm.log_dir`: a file of lines with the seconds since the world began.

use crate::error::OutputError;
use meshwork_core::Group;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The log of one rank.
#[derive(Debug)]
pub(crate) struct RankLog {
    path: PathBuf,
    file: File,
    origin: Instant,
}

impl RankLog {
    /// Opens `rank-N.log` in `dir`, which is made if there is none. Lines are added after what it has.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn open(dir: &Path, world: &Group) -> Result<Self, OutputError> {
        let path = dir.join(format!("rank-{}.log", world.rank()));
        let open = || {
            fs::create_dir_all(dir)?;
            File::options().append(true).create(true).open(&path)
        };
        let file = open().map_err(OutputError::writing("the log of a rank", &path))?;
        Ok(Self { path, file, origin: world.communicator().membership().origin() })
    }

    /// Writes a line.
    ///
    /// # Errors
    /// A disk that is full.
    pub fn line(&mut self, text: impl Display) -> Result<(), OutputError> {
        let line = format!("{:.3} {text}\n", self.origin.elapsed().as_secs_f64());
        self.file.write_all(line.as_bytes()).map_err(OutputError::writing("the log of a rank", &self.path))
    }
}
