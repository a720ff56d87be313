//! Indices and headers that were changed at random: they are refused or read, without a panic, and nothing that they
//! state takes memory that the files do not have.

mod world;

use meshwork_checkpoint::{Checkpoint, Slice, folder_name};
use peak_alloc::PeakAlloc;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use world::{WORLD, index_of, save, signed};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Mutants of each kind.
const MUTANTS: usize = 600;
/// The most memory for each byte of the files: an index is text, and its numbers, names and lists are larger when they
/// are read.
const FACTOR: usize = 16;
/// Names, paths and messages.
const CONSTANT: usize = 16 << 10;

/// Opens a checkpoint, verifies it and reads all of it. Returns whether it could be opened, and whether it was whole.
/// Fails if that takes more memory than the files justify.
fn read(folder: &Path) -> (bool, bool) {
    let files: u64 = fs::read_dir(folder).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let (mut opened, mut whole) = (false, false);
    if let Ok(checkpoint) = Checkpoint::open(folder) {
        (opened, whole) = (true, checkpoint.verify(&checkpoint.units()).unwrap().is_empty());
        for stored in &checkpoint.index().tensors {
            whole &= checkpoint.read(&stored.tensor.name, &Slice::whole(&stored.tensor.dims)).is_ok();
        }
    }
    let taken = MEMORY.peak_usage().saturating_sub(before);
    assert!(taken <= FACTOR * files as usize + CONSTANT, "{taken} bytes of memory for {files} bytes of files");
    (opened, whole)
}

/// The JSON pointers to all values of a document.
fn places(value: &Value, at: String, into: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, child)| (key.clone(), child)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(key, child)| (key.to_string(), child)).collect(),
        _ => Vec::new(),
    };
    for (key, child) in children {
        places(child, format!("{at}/{key}"), into);
    }
    into.push(at);
}

/// A copy with one or two values replaced at random.
fn changed(sound: &Value, random: &mut impl FnMut() -> u64) -> Value {
    let (mut document, mut all) = (sound.clone(), Vec::new());
    places(sound, String::new(), &mut all);
    for _ in 0..1 + random() % 2 {
        let elsewhere = document.pointer(&all[random() as usize % all.len()]).cloned().unwrap_or(Value::Null);
        let numbers = [random(), random() % 70, 1 << (random() % 64), u64::MAX].map(|number| json!(number));
        let others = [json!(-1), json!(1e300), json!("x"), json!([]), json!({}), Value::Null, elsewhere];
        let values = [&numbers[..], &others].concat();
        if let Some(place) = document.pointer_mut(&all[random() as usize % all.len()]) {
            *place = values[random() as usize % values.len()].clone();
        }
    }
    document
}

/// A copy with one to four random bytes, every second time cut off at a random place.
fn corrupted(sound: &[u8], random: &mut impl FnMut() -> u64) -> Vec<u8> {
    let mut bytes = sound.to_vec();
    if random().is_multiple_of(2) {
        bytes.truncate(random() as usize % (sound.len() + 1));
    }
    for _ in 0..1 + random() % 4 {
        let (at, end) = (random() as usize, bytes.len());
        if end > 0 {
            bytes[at % end] = random() as u8;
        }
    }
    bytes
}

/// One test, since the memory is that of the process.
#[test]
fn what_files_state_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1, &[10]);
    let folder = dir.path().join(folder_name(10));
    assert_eq!(read(&folder), (true, true));
    let mut state = 1;
    let mut random = move || world::random(&mut state);

    // With the checksum that belongs to it an index gets past the first check.
    let path = folder.join("index.json");
    let (text, sound) = (fs::read(&path).unwrap(), index_of(&path));
    let mut refused = 0;
    for _ in 0..MUTANTS {
        fs::write(&path, signed(&changed(&sound, &mut random))).unwrap();
        refused += usize::from(!read(&folder).0);
    }
    assert!((MUTANTS / 2..MUTANTS).contains(&refused), "{refused} of {MUTANTS} refused");
    for _ in 0..MUTANTS {
        let bytes = corrupted(&text, &mut random);
        fs::write(&path, &bytes).unwrap();
        assert!(!read(&folder).0 || bytes == text);
    }
    fs::write(&path, &text).unwrap();

    let files: Vec<PathBuf> = (0..WORLD).map(|rank| folder.join(format!("rank-{rank:05}.safetensors"))).collect();
    for path in files {
        let sound = fs::read(&path).unwrap();
        let length = u64::from_le_bytes(*sound.first_chunk().unwrap());
        for _ in 0..MUTANTS / WORLD {
            let (header, pieces) = sound.split_at(8 + length as usize);
            // The length at its head is that of the header, or any; the size of the file stays.
            let header: Value = serde_json::from_slice(&header[8..]).unwrap();
            let text = changed(&header, &mut random).to_string();
            let stated = [text.len() as u64, length, random(), random() % 10_000, u64::MAX][random() as usize % 5];
            let mut bytes = [&stated.to_le_bytes(), text.as_bytes(), pieces].concat();
            bytes.resize(sound.len(), b' ');
            fs::write(&path, &bytes).unwrap();
            let (opened, whole) = read(&folder);
            assert!(opened && (!whole || bytes == sound));
        }
        fs::write(&path, sound).unwrap();
    }
    assert_eq!(read(&folder), (true, true), "the reasons are the changes");
}
