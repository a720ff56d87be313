//! A state that four ranks save is read whole, in slices and onto other meshes, by this crate and by `safetensors`.

use crate::world::{WORLD, bytes_of, left, plan, save, save_with, slice_on, start_save, tensors};
use meshwork_checkpoint::{
    Checkpoint, Difference, Lock, Slice, Summary, Writer, diff, folder_name, latest_complete, share, steps, threads,
};
use safetensors::SafeTensors;
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

fn open(dir: &Path, step: u64) -> Checkpoint {
    Checkpoint::open(&dir.join(folder_name(step))).unwrap()
}

#[test]
fn every_element_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let outcomes = save(dir.path(), 2, &[10]);
    for (rank, of_rank) in outcomes.iter().enumerate() {
        let [Ok(saved)] = &of_rank[..] else { panic!("{of_rank:?}") };
        assert_eq!((saved.step, &saved.path), (10, &dir.path().join("step-00000010")));
        assert_eq!((saved.bytes, saved.removed.len()), (plan().bytes(rank), 0), "as predicted");
    }
    let checkpoint = open(dir.path(), 10);
    assert_eq!((checkpoint.index().step, &checkpoint.index().metadata), (10, &json!({"seed": 7, "rank": 0})));
    for (at, tensor) in tensors().iter().enumerate() {
        assert_eq!(checkpoint.tensor(&tensor.name), Some(tensor));
        let whole = Slice::whole(&tensor.dims);
        assert_eq!(checkpoint.read(&tensor.name, &whole).unwrap(), bytes_of(at, &whole, 10), "{}", tensor.name);
    }
    assert!(checkpoint.verify(&checkpoint.units()).unwrap().is_empty());
}

/// Ranks of other meshes: `tp=3` by columns, rows of a pipeline that no writer had. Each reads its bytes and no others.
#[test]
fn a_slice_takes_its_own_bytes_from_the_files() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 2, &[10]);
    for (tensor, slices) in [
        (0, vec![Slice::new([0..60, 0..32]), Slice::new([7..8, 0..32]), Slice::new([25..35, 5..6])]),
        (1, vec![Slice::new([0..32, 16..32]), Slice::new([0..32, 20..28]), Slice::new([31..32, 47..48])]),
        (3, vec![Slice::new(std::iter::once(1..1)), Slice::new(std::iter::once(30..33))]),
    ] {
        let name = &tensors()[tensor].name;
        for slice in slices {
            let checkpoint = open(dir.path(), 10);
            let bytes = checkpoint.read(name, &slice).unwrap();
            assert_eq!(bytes, bytes_of(tensor, &slice, 10), "{name} {slice}");
            assert_eq!(checkpoint.bytes_read(), bytes.len() as u64, "{name} {slice}");
        }
    }
}

#[test]
fn a_slice_is_read_into_padded_memory() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 2, &[10]);
    let (checkpoint, slice) = (open(dir.path(), 10), Slice::new([10..12, 0..32]));
    let mut into = vec![9; 3 * 34 * 4];
    checkpoint.read_into("table", &slice, &[3, 34], &mut into).unwrap();
    let rows = bytes_of(0, &slice, 10);
    for (row, stored) in into.chunks(34 * 4).enumerate() {
        let wanted = rows.chunks(32 * 4).nth(row).map_or(vec![9; 34 * 4], |row| [row, &[9; 8]].concat());
        assert_eq!(stored, wanted, "row {row}");
    }
}

#[test]
fn what_cannot_be_read_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 2, &[10]);
    let checkpoint = open(dir.path(), 10);
    let refused = |name: &str, slice| checkpoint.read(name, &slice).unwrap_err().to_string();
    assert!(refused("tables", Slice::new([])).ends_with("step-00000010 has no tensor tables"));
    let out_of_range = |ranges: &[Range<u64>], why: &str| {
        let slice = Slice::new(ranges.iter().cloned());
        let (refused, says) =
            (refused("table", slice.clone()), format!("step-00000010 cannot give slice {slice} of table: {why}"));
        assert!(refused.ends_with(&says), "{refused} is not {says}");
    };
    out_of_range(
        &[0..61, 0..32],
        "its range 0..61 in dim 0 goes past the extent there, 60; the whole is table [60, 32]",
    );
    out_of_range(
        &[0..1, 32..33],
        "its range 32..33 in dim 1 goes past the extent there, 32; the whole is table [60, 32]",
    );
    let all = u64::MAX;
    out_of_range(
        &[0..all, 0..all],
        &format!("its range 0..{all} in dim 0 goes past the extent there, 60; the whole is table [60, 32]"),
    );
    let backwards = Range { start: 5, end: 3 };
    out_of_range(&[0..1, backwards], "its range 5..3 in dim 1 ends before it begins; the extent there is 32");
    out_of_range(
        &[Range { start: 0, end: 60 }],
        "it has ranges of 1 dims, and table has 2, of extents [60, 32]: give one of each",
    );
    let padded = checkpoint.read_into("table", &Slice::new([0..61, 0..32]), &[64, 32], &mut [0; 64 * 32 * 4]);
    assert!(padded.unwrap_err().to_string().contains("its range 0..61 in dim 0 goes past"));
    let short =
        checkpoint.read_into("table", &Slice::new([0..2, 0..2]), &[2, 2], &mut [0; 15]).unwrap_err().to_string();
    assert_eq!(short, "15 bytes of extents [2, 2] cannot take slice [0:2, 0:2] of table [60, 32]");
}

#[test]
fn safetensors_reads_the_files() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 2, &[10]);
    let checkpoint = open(dir.path(), 10);
    let mut pieces = 0;
    for (number, file) in checkpoint.index().files.iter().enumerate() {
        let bytes = fs::read(checkpoint.path().join(&file.name)).unwrap();
        let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header as u64 + 8, file.header_bytes);
        let origin = metadata.metadata().as_ref().unwrap();
        assert_eq!((origin["step"].as_str(), origin["rank"].as_str()), ("10", &*number.to_string()));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for stored in &checkpoint.index().tensors {
            for piece in stored.pieces.iter().filter(|piece| piece.file == number) {
                let (tensor, whole) = (&stored.tensor, Slice::whole(&stored.tensor.dims));
                let slice = if piece.slice == whole { String::new() } else { piece.slice.to_string() };
                let view = file.tensor(&format!("{}{slice}", tensor.name)).unwrap();
                assert_eq!(view.data(), checkpoint.read(&tensor.name, &piece.slice).unwrap());
                let shape: Vec<u64> = view.shape().iter().map(|&extent| extent as u64).collect();
                assert_eq!((shape, view.dtype().to_string()), (piece.slice.extents(), tensor.dtype.name().to_owned()));
                pieces += 1;
            }
        }
    }
    assert!(pieces > tensors().len());
}

#[test]
fn the_newest_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let outcomes = save(dir.path(), 2, &[10, 20, 30, 40]);
    assert_eq!(steps(dir.path()).unwrap(), [40, 30]);
    let removed = |step: u64| vec![dir.path().join(folder_name(step))];
    for of_rank in outcomes {
        let found: Vec<_> = of_rank.into_iter().map(|saved| saved.unwrap().removed).collect();
        assert_eq!(found, [vec![], vec![], removed(10), removed(20)]);
    }
    let latest = latest_complete(dir.path()).unwrap();
    assert_eq!(latest.checkpoint.unwrap().index().step, 40);
    assert!(latest.passed_over.is_empty());
}

#[test]
fn an_empty_folder_has_no_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let none = |path: &Path| {
        let latest = latest_complete(path).unwrap();
        latest.checkpoint.is_none() && latest.passed_over.is_empty()
    };
    assert!(none(dir.path()) && none(&dir.path().join("not/there")));
}

#[test]
fn a_snapshot_holds_what_its_rank_writes_and_no_more() {
    let (plan, dir) = (Arc::new(plan()), tempfile::tempdir().unwrap());
    let total: u64 = (0..WORLD).map(|rank| plan.bytes(rank)).sum();
    let tensor_bytes: u64 = tensors().iter().filter_map(|tensor| tensor.size()).map(|(_, bytes)| bytes).sum();
    assert_eq!(total, tensor_bytes);
    let mut ends = threads(1);
    let mut writer = Writer::follow(dir.path(), 1, plan, ends.remove(0));
    let (mut snapshot, _) = writer.snapshot();
    let wanted: Vec<bool> = tensors().iter().map(|tensor| writer.plan().writes(1, &tensor.name)).collect();
    assert!(wanted.iter().any(|&wanted| wanted) && !writer.plan().writes(1, "updates"), "rank 3 alone has the counter");
    let unknown = snapshot.put("tables", &Slice::new([]), &[], &[0; 8]).unwrap_err().to_string();
    assert_eq!(unknown, "the plan of the checkpoint has no tensor tables");
    let short = snapshot.put("norm", &Slice::new(std::iter::once(0..33)), &[33], &[0; 65]).unwrap_err().to_string();
    assert_eq!(short, "65 bytes of extents [33] are not slice [0:33] of norm [33]");
    drop(writer); // without a save: nothing to wait for
}

/// A rank that lacks elements fails the save for all, who go on with the next one.
#[test]
fn an_incomplete_snapshot_is_a_failed_save_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let outcomes = save_with(dir.path(), 1, &[10, 20], |rank, step| rank != 2 || step != 10);
    for of_rank in outcomes {
        let [Err(error), Ok(saved)] = &of_rank[..] else { panic!("{of_rank:?}") };
        let told = error.to_string();
        assert!(told.starts_with("no checkpoint of step 10: rank 2 failed: rank 2 was not given "), "{told}");
        assert_eq!(saved.step, 20);
    }
    assert_eq!(left(dir.path()), ["lock", "step-00000020"]);
}

#[test]
fn writers_without_a_leader_say_so() {
    let (plan, dir) = (Arc::new(plan()), tempfile::tempdir().unwrap());
    let ends: Vec<_> = threads(WORLD).into_iter().enumerate().collect();
    let mut writers: Vec<_> =
        ends.into_iter().map(|(rank, end)| Writer::follow(dir.path(), rank, plan.clone(), end)).collect();
    for (rank, writer) in writers.iter_mut().enumerate() {
        start_save(writer, rank, 10, json!({}), true);
    }
    for mut writer in writers {
        let error = writer.wait().unwrap().unwrap_err().to_string();
        assert!(error.contains("no rank leads the others"), "{error}");
    }
}

/// Ranks share the work of verifying: every unit once, evenly, and none that a read verifies anyway.
#[test]
fn ranks_share_what_their_reads_do_not_verify() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 2, &[10]);
    let checkpoint = open(dir.path(), 10);
    let units = checkpoint.units();
    for ranks in [1, 2, 3, 8] {
        let shares: Vec<_> = (0..ranks).map(|rank| share(&checkpoint, &units, rank, ranks)).collect();
        assert_eq!(shares.concat(), units, "{ranks} ranks");
    }
    let names: Vec<_> = tensors().into_iter().map(|tensor| tensor.name).collect();
    let same = |rank: usize| (0..names.len()).filter_map(move |tensor| Some((tensor, slice_on(rank, tensor)?)));
    let same: Vec<_> = (0..WORLD).flat_map(same).collect();
    let left = checkpoint.units_not_read_whole(same.iter().map(|(tensor, slice)| (&*names[*tensor], slice)));
    assert_eq!(left.len(), checkpoint.index().files.len(), "on the same mesh, the headers alone");
    let rows = Slice::new([0..1, 0..48]);
    let all: BTreeSet<_> = checkpoint.units().into_iter().collect();
    assert_eq!(checkpoint.units_not_read_whole([("down", &rows)]).into_iter().collect::<BTreeSet<_>>(), all);
}

#[test]
fn two_checkpoints_are_compared_tensor_by_tensor() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 2, &[10, 20]);
    let (first, second) = (open(dir.path(), 10), open(dir.path(), 20));
    assert_eq!(diff(&first, &first).unwrap(), []);
    let found = diff(&first, &second).unwrap();
    assert_eq!(found.len(), tensors().len());
    let Difference::Values { differing, elements, largest, .. } = found[4].difference else { panic!("{found:?}") };
    assert_eq!((&*found[4].name, differing, elements, largest), ("updates", 1, 1, 10.0));
    assert!(found[0].to_string().starts_with("table: 1920 of 1920 elements differ, by "), "{}", found[0]);
}

#[test]
fn the_summary_names_every_tensor() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 2, &[10]);
    let checkpoint = open(dir.path(), 10);
    let text = Summary::read(&checkpoint).unwrap().to_string();
    for part in ["step 10, format 1\n5 tensors of 20042 bytes in 4 files of", "checksums are right", "\"seed\": 7"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(text.contains("down:exp_avg  optimizer state  F32   [32, 48]  [0:32, 0:24] in rank-0000"), "{text}");
    let file = checkpoint.path().join(&checkpoint.index().files[0].name);
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let text = Summary::read(&checkpoint).unwrap().to_string();
    assert!(text.contains("\n1 of ") && text.contains("checksums are wrong:\n"), "{text}");
}

/// The lock goes with the writer, after its last save.
#[test]
fn the_folder_is_free_after_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let lock = Lock::take(dir.path()).unwrap();
    let (plan, mut ends) = (Arc::new(plan()), threads(1));
    let writer = Writer::lead(lock, 1, plan, ends.remove(0));
    assert!(Lock::take(dir.path()).is_err());
    drop(writer);
    assert!(Lock::take(dir.path()).is_ok());
}
