//! Damage of every kind is found and named, and the checkpoint before is used.

use crate::world::{index_of, save, signed};
use meshwork_checkpoint::{
    Checkpoint, Damage, Latest, ReadError, Slice, Unread, Unreadable, folder_name, latest_complete,
};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Checkpoints of steps 10 and 20.
fn two() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 2, &[10, 20]);
    dir
}

fn file(dir: &TempDir, step: u64, name: &str) -> PathBuf {
    dir.path().join(folder_name(step)).join(name)
}

fn files(dir: &TempDir) -> Vec<PathBuf> {
    let names = crate::world::left(&dir.path().join(folder_name(20)));
    assert_eq!(names.len(), 5, "an index and a file of each rank");
    names.iter().map(|name| file(dir, 20, name)).collect()
}

/// The damage of step 20, for which step 10 is used.
#[track_caller]
fn damage(dir: &Path) -> Vec<Damage> {
    let Latest { checkpoint, mut passed_over } = latest_complete(dir).unwrap();
    assert_eq!(checkpoint.map(|of| of.index().step), Some(10), "{passed_over:?}");
    let [over] = &mut passed_over[..] else { panic!("{passed_over:?}") };
    assert_eq!(over.path, dir.join(folder_name(20)));
    assert!(!over.damage.is_empty());
    std::mem::take(&mut over.damage)
}

/// What is said of step 20.
#[track_caller]
fn told(dir: &TempDir) -> String {
    damage(dir.path()).iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_flipped_bit_is_found_wherever_it_is() {
    let dir = two();
    for path in files(&dir) {
        let sound = fs::read(&path).unwrap();
        // All of the beginning, and of the rest one byte in 41.
        for at in (0..40).chain((40..sound.len()).step_by(41)).chain([sound.len() - 1]) {
            let mut bytes = sound.clone();
            bytes[at] ^= 1 << (at % 8);
            fs::write(&path, &bytes).unwrap();
            let told = told(&dir);
            assert!(told.contains(path.to_str().unwrap()), "byte {at} of {}: {told}", path.display());
        }
        fs::write(&path, sound).unwrap();
    }
    assert_eq!(latest_complete(dir.path()).unwrap().checkpoint.unwrap().index().step, 20);
}

#[test]
fn a_file_that_was_cut_or_grew_is_found() {
    let dir = two();
    for path in files(&dir) {
        let sound = fs::read(&path).unwrap();
        let lengths = [0, 1, 7, 8, 30, sound.len() / 2, sound.len() - 1];
        let grown = [&sound[..], b" "].concat();
        for bytes in lengths.iter().map(|&length| &sound[..length]).chain([&grown[..]]) {
            fs::write(&path, bytes).unwrap();
            let told = told(&dir);
            assert!(told.contains(path.to_str().unwrap()), "{} bytes of {}: {told}", bytes.len(), path.display());
        }
        fs::write(&path, sound).unwrap();
    }
    let path = file(&dir, 20, "rank-00002.safetensors");
    let sound = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    assert!(told(&dir).ends_with(&format!("rank-00002.safetensors: has 100 bytes, and was written with {sound}")));
}

#[test]
fn a_missing_file_is_found() {
    let dir = two();
    for path in files(&dir) {
        let away = path.with_extension("away");
        fs::rename(&path, &away).unwrap();
        let told = told(&dir);
        assert!(told.contains(path.to_str().unwrap()) && told.contains("there is no such file"), "{told}");
        fs::create_dir(&path).unwrap();
        assert!(matches!(damage(dir.path())[0], Damage::Size { .. } | Damage::Missing { .. }), "a folder in its place");
        fs::remove_dir(&path).unwrap();
        fs::rename(&away, &path).unwrap();
    }
}

/// What the system cannot read is not damage, for no reader and whatever it was about to read. Root may read what has
/// no permissions, so the test needs a file that nobody can read: a link to itself (ELOOP), which stands for EACCES,
/// EIO and EMFILE.
#[cfg(unix)]
#[test]
fn a_file_that_cannot_be_read_now_is_no_damage_and_no_older_checkpoint_is_used() {
    let dir = two();
    for path in files(&dir) {
        let away = path.with_extension("away");
        fs::rename(&path, &away).unwrap();
        // A link that leads nowhere: the disk that it leads to may come back.
        for target in [path.clone(), dir.path().join("not/mounted")] {
            std::os::unix::fs::symlink(&target, &path).unwrap();
            let error = latest_complete(dir.path()).unwrap_err();
            assert!(matches!(&error, Unreadable::Io { path: named, .. } if *named == path), "{error}");
            let told = error.to_string();
            assert!(told.contains(path.to_str().unwrap()) && told.contains(" cannot be read: "), "{told}");
            fs::remove_file(&path).unwrap();
        }
        fs::rename(&away, &path).unwrap();
    }
    // A whole folder that leads nowhere.
    let folder = dir.path().join(folder_name(20));
    fs::rename(&folder, dir.path().join("away")).unwrap();
    std::os::unix::fs::symlink(dir.path().join("not/mounted"), &folder).unwrap();
    assert!(matches!(latest_complete(dir.path()), Err(Unreadable::Io { .. })));
    fs::remove_file(&folder).unwrap();
    fs::rename(dir.path().join("away"), &folder).unwrap();

    // A file that becomes unreadable after the checkpoint was opened.
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let path = file(&dir, 20, "rank-00001.safetensors");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&path, &path).unwrap();
    assert!(checkpoint.verify(&checkpoint.units()).is_err());
    let read = |of: &meshwork_checkpoint::StoredTensor| {
        let whole = Slice::whole(&of.tensor.dims);
        checkpoint.read(&of.tensor.name, &whole).err()
    };
    let errors: Vec<_> = checkpoint.index().tensors.iter().filter_map(read).collect();
    assert!(!errors.is_empty());
    for error in errors {
        assert!(matches!(error, ReadError::Unread(Unread::Unreadable(Unreadable::Io { .. }))), "{error}");
    }
}

/// A file that is cut while it is read is damage.
#[test]
fn a_file_that_is_cut_after_the_checkpoint_was_opened_is_damage() {
    let dir = two();
    let checkpoint = Checkpoint::open(&dir.path().join(folder_name(20))).unwrap();
    let path = file(&dir, 20, "rank-00002.safetensors");
    fs::File::options().write(true).open(path).unwrap().set_len(4).unwrap();
    let damage = checkpoint.verify(&checkpoint.units()).unwrap();
    assert!(damage.iter().all(|damage| matches!(damage, Damage::Size { found: 4, .. })), "{damage:?}");
}

/// A checkpoint of a newer version of this program is as it was written: a run must not go on from an older one and
/// replace it.
#[test]
fn a_sound_index_of_another_format_is_no_damage() {
    let dir = two();
    let path = file(&dir, 20, "index.json");
    let mut index = index_of(&path);
    index["format"] = json!(2);
    fs::write(&path, signed(&index)).unwrap();
    let error = latest_complete(dir.path()).unwrap_err();
    assert!(matches!(error, Unreadable::Format { found: 2, .. }), "{error}");
    assert!(error.to_string().ends_with("has format 2, and this program reads 1: use the version that wrote it"));
}

#[test]
fn a_file_of_another_step_or_rank_is_told_by_its_header() {
    let dir = two();
    let (mine, other) = ("rank-00001.safetensors", file(&dir, 10, "rank-00001.safetensors"));
    fs::copy(other, file(&dir, 20, mine)).unwrap();
    let found = told(&dir);
    let first = found.lines().next().unwrap();
    assert!(
        first.ends_with("its header is not the one that was written: it says to be of rank 1 at step 10"),
        "{found}"
    );

    let dir = two();
    fs::copy(file(&dir, 20, "rank-00000.safetensors"), file(&dir, 20, mine)).unwrap();
    assert!(matches!(damage(dir.path())[0], Damage::Size { .. } | Damage::Header { .. }), "{}", told(&dir));
    // The same, cut to the size of the file it stands for.
    let dir = two();
    let (mut bytes, size) = (
        fs::read(file(&dir, 20, "rank-00000.safetensors")).unwrap(),
        fs::metadata(file(&dir, 20, mine)).unwrap().len(),
    );
    bytes.resize(size as usize, 0);
    fs::write(file(&dir, 20, mine), bytes).unwrap();
    assert!(told(&dir).contains("it says to be of rank 0 at step 20"), "{}", told(&dir));
    fs::write(file(&dir, 20, mine), vec![b'x'; size as usize]).unwrap();
    assert!(told(&dir).contains("it does not begin as a file of safetensors"), "{}", told(&dir));
}

/// Two runs with the same mesh, names and steps: only the values differ.
#[test]
fn a_file_of_another_run_is_told_by_its_checksums() {
    let (dir, other) = (two(), two());
    let name = "rank-00003.safetensors";
    let mut bytes = fs::read(file(&other, 20, name)).unwrap();
    let end = bytes.len() - 1;
    bytes[end] ^= 1;
    fs::write(file(&dir, 20, name), bytes).unwrap();
    assert!(matches!(&damage(dir.path())[..], [Damage::Piece { .. }]), "{}", told(&dir));
}

#[test]
fn a_folder_that_was_renamed_is_told() {
    let dir = two();
    fs::remove_dir_all(dir.path().join(folder_name(20))).unwrap();
    let copy = dir.path().join(folder_name(20));
    fs::create_dir(&copy).unwrap();
    for name in crate::world::left(&dir.path().join(folder_name(10))) {
        fs::copy(file(&dir, 10, &name), copy.join(&name)).unwrap();
    }
    assert!(told(&dir).ends_with("step-00000020: holds step 10"));
}

#[test]
fn an_index_that_contradicts_itself_is_refused() {
    let dir = two();
    let path = file(&dir, 20, "index.json");
    let sound = index_of(&path);
    for (at, value, problem) in [
        ("/files/0/name", json!("../lock"), "\"../lock\" is no name of one file in its folder"),
        ("/files/0/name", json!("rank-00001.safetensors"), "is no name of one file"),
        ("/files/1/header_bytes", json!(1u64 << 40), "and a header of 1099511627776"),
        ("/tensors/1/name", json!("table"), "two tensors are called table"),
        ("/tensors/0/dims", json!([1u64 << 40, 1u64 << 40]), "more bytes than can be counted"),
        ("/tensors/0/dims", json!([61, 32]), "the pieces of table [61, 32] have 1920 elements"),
        ("/tensors/0/dims", json!([59, 32]), "table [59, 32] has slice "),
        ("/tensors/0/pieces/0/bytes", json!([0, 1]), "table [60, 32] has slice "),
        ("/tensors/0/pieces/0/file", json!(9), "of file 9"),
        ("/tensors/0/pieces/1/slice", sound["tensors"][0]["pieces"][0]["slice"].clone(), "which overlap"),
        ("/tensors/0/pieces/1/bytes", sound["tensors"][0]["pieces"][0]["bytes"].clone(), "follow each other"),
        ("/tensors/0/pieces/0/checksum", json!("x"), "a checksum is 16 hexadecimal digits"),
        ("/tensors/0/dtype", json!("F8"), "unknown variant `F8`"),
        ("/step", json!(-1), "invalid value: integer `-1`"),
    ] {
        let mut index = sound.clone();
        *index.pointer_mut(at).unwrap() = value;
        fs::write(&path, signed(&index)).unwrap();
        let told = told(&dir);
        assert!(told.starts_with(path.to_str().unwrap()) && told.contains(problem), "{at}: {told}");
    }
    fs::write(&path, signed(&sound)).unwrap();
    assert_eq!(
        latest_complete(dir.path()).unwrap().checkpoint.unwrap().index().step,
        20,
        "the checksum is not the reason"
    );
}
