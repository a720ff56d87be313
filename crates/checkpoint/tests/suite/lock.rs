//! One run at a time has a folder.

use meshwork_checkpoint::{Lock, LockError};
use std::fs;

#[test]
fn the_second_run_is_told_who_has_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new/folder");
    let first = Lock::take(&path).unwrap();
    assert_eq!((first.dir(), first.removed()), (&*path, &[][..]));
    let error = Lock::take(&path).unwrap_err();
    assert!(matches!(error, LockError::Held { .. }));
    let (pid, host) = (std::process::id(), gethostname::gethostname().to_string_lossy().into_owned());
    assert!(error.to_string().contains(&format!("another run, process {pid} on {host}: wait for it")), "{error}");
    drop(first);
    fs::create_dir(path.join("step-00000007.partial")).unwrap();
    assert_eq!(Lock::take(&path).unwrap().removed(), [path.join("step-00000007.partial")]);
}

#[test]
fn a_folder_that_cannot_be_made_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "").unwrap();
    let error = Lock::take(&dir.path().join("file/folder")).unwrap_err();
    assert!(
        matches!(error, LockError::Io { .. }) && error.to_string().contains("file/folder cannot be used: "),
        "{error}"
    );
}
