//! Folders of Hugging Face: what is read, what is refused and in which words, and what is written.

mod exports;
mod folders;
mod messages;

use meshwork_models::huggingface::Pretrained;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// A copy of a fixture.
fn copy(name: &str) -> tempfile::TempDir {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/huggingface").join(name);
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::write(folder.path().join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
    }
    folder
}

/// Changes an object of JSON in a file.
fn edit(path: &Path, change: impl Fn(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut value);
    fs::write(path, value.to_string()).unwrap();
}

/// Changes the header of a file of tensors; the bytes of the tensors stay.
fn edit_header(path: &Path, change: impl Fn(&mut Value)) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    change(&mut header);
    let header = header.to_string().into_bytes();
    let all = [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[8 + length..]].concat();
    fs::write(path, all).unwrap();
}

fn refused(folder: &tempfile::TempDir) -> String {
    Pretrained::open(folder.path()).map(drop).unwrap_err().to_string()
}
