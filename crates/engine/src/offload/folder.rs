//! A file of a rank in a folder.

use super::{Backing, OffloadError, Store};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

/// A folder with a file for each rank. A file has a name of its own, so that any number of runs may share a folder, and
/// loses that name as soon as it is open: however a run ends, the system takes the room back.
#[derive(Clone, Debug)]
pub struct Folder(pub PathBuf);

/// Distinguishes the files of this process.
static OPENED: AtomicU64 = AtomicU64::new(0);

/// Bytes of zeros that are written at once where the system cannot reserve room.
const ZEROS: usize = 1 << 20;

impl Backing for Folder {
    fn open(&self, rank: usize) -> Result<Box<dyn Store>, OffloadError> {
        let refuse = |source| OffloadError::Open { path: self.0.clone(), source };
        let name = |number: u64| format!("meshwork-offload-{}-{number}-rank-{rank}", process::id());
        loop {
            let path = self.0.join(name(OPENED.fetch_add(1, Ordering::Relaxed)));
            // A name of a process that ended without removing it is passed over.
            match OpenOptions::new().read(true).write(true).create_new(true).open(&path) {
                Ok(file) => return unnamed(file, &path).map(|file| Box::new(file) as Box<dyn Store>).map_err(refuse),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(refuse(error)),
            }
        }
    }
}

/// A file, and its name where the system does not let go of it before the file is closed.
#[derive(Debug)]
struct RankFile {
    file: File,
    folder: PathBuf,
    name: Option<PathBuf>,
    reserved: u64,
}

fn unnamed(file: File, path: &Path) -> io::Result<RankFile> {
    let name = fs::remove_file(path).err().map(|_| path.to_path_buf());
    Ok(RankFile { file, folder: path.parent().unwrap_or(path).to_path_buf(), name, reserved: 0 })
}

impl Drop for RankFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            _ = fs::remove_file(name); // nothing can be done about a file that stays
        }
    }
}

impl Store for RankFile {
    fn name(&self) -> String {
        self.folder.display().to_string()
    }

    fn reserve(&mut self, bytes: u64) -> io::Result<()> {
        if bytes > self.reserved {
            reserve(&mut self.file, self.reserved, bytes - self.reserved)?;
            self.reserved = bytes;
        }
        Ok(())
    }

    fn read(&mut self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(at))?;
        self.file.read_exact(into)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(at))?;
        self.file.write_all(bytes)
    }
}

/// Gives a file `bytes` more bytes behind its first `at`, all zero, that are its own on the disk.
fn reserve(file: &mut File, at: u64, bytes: u64) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    match rustix::fs::fallocate(&*file, rustix::fs::FallocateFlags::empty(), at, bytes) {
        Err(rustix::io::Errno::OPNOTSUPP) => {} // a file system without it
        done => return Ok(done?),
    }
    file.seek(SeekFrom::Start(at))?;
    let (zeros, mut left) = (vec![0; ZEROS], bytes);
    while left > 0 {
        let now = left.min(ZEROS as u64);
        file.write_all(&zeros[..now as usize])?;
        left -= now;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that is always full takes no reserved byte.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_found_when_room_is_reserved() {
        let mut full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert!(reserve(&mut full, 0, 4096).is_err());
    }
}
