//! Folders as stores of what is offloaded.

use meshwork_engine::offload::{Backing, Folder};
use std::fs;

#[test]
fn a_file_reads_what_was_written_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let folder = Folder(dir.path().to_path_buf());
    let (mut one, mut other) = (folder.open(0).unwrap(), folder.open(0).unwrap());
    for store in [&mut one, &mut other] {
        store.reserve(10_000).unwrap();
    }
    one.write(5_000, &[7; 100]).unwrap();
    let mut read = [1; 200];
    one.read(4_950, &mut read).unwrap();
    assert_eq!((&read[..50], &read[50..150], &read[150..]), (&[0; 50][..], &[7; 100][..], &[0; 50][..]));
    other.read(5_000, &mut read).unwrap();
    assert_eq!(read, [0; 200], "a file of its own");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "no name stays while a run is under way");
    assert!(one.read(9_900, &mut read).is_err(), "beyond the end");
}

#[test]
fn a_folder_that_is_missing_or_a_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [dir.path().join("missing"), file] {
        let error = Folder(path.clone()).open(3).unwrap_err().to_string();
        assert!(error.starts_with(&format!("offload to {}: ", path.display())), "{error}");
        assert!(error.ends_with("name a folder that exists and that this process may write"), "{error}");
    }
}
