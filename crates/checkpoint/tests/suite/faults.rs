//! What happens while a run saves: disks that are full, folders that go away, a second run. No fault ends the writer,
//! and none touches an older checkpoint.

use crate::world::{WORLD, left, plan, save, start_save};
use meshwork_checkpoint::{
    Exchange, ExchangeError, Lock, LockError, SaveError, ThreadExchange, Writer, folder_name, latest_complete,
    stored_bytes, threads,
};
use serde_json::json;
use std::fs;
use std::path::Path;
use std::sync::Arc;

/// The writers of all ranks, on this thread. They keep the newest `keep` checkpoints.
fn writers(dir: &Path, keep: usize) -> Vec<Writer> {
    let (plan, lock) = (Arc::new(plan()), Lock::take(dir).unwrap());
    let mut ends = threads(WORLD).into_iter();
    let mut writers = vec![Writer::lead(lock, keep, plan.clone(), ends.next().unwrap())];
    writers.extend(ends.zip(1..).map(|(end, rank)| Writer::follow(dir, rank, plan.clone(), end)));
    writers
}

/// Saves a step: the error that every rank is told, if there is one.
fn try_save(writers: &mut [Writer], step: u64) -> Option<String> {
    for (rank, writer) in writers.iter_mut().enumerate() {
        start_save(writer, rank, step, json!({}), true);
    }
    let ends: Vec<_> =
        writers.iter_mut().map(|writer| writer.wait().unwrap().err().map(|error| error.to_string())).collect();
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    ends[0].clone()
}

fn newest(dir: &Path) -> u64 {
    latest_complete(dir).unwrap().checkpoint.unwrap().index().step
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_costs_one_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let mut writers = writers(dir.path(), 2);
    assert_eq!(try_save(&mut writers, 10), None);
    // Rank 2 finds its file on a device that is full.
    let partial = dir.path().join("step-00000020.partial");
    fs::create_dir(&partial).unwrap();
    std::os::unix::fs::symlink("/dev/full", partial.join("rank-00002.safetensors")).unwrap();
    let told = try_save(&mut writers, 20).unwrap();
    assert!(told.starts_with("no checkpoint of step 20: rank 2 failed: "), "{told}");
    let full = "rank-00002.safetensors: No space left on device (os error 28); it takes ";
    assert!(told.contains(full) && told.contains("the newest whole checkpoint stays"), "{told}");
    assert_eq!(left(dir.path()), ["lock", "step-00000010"], "what was written is removed");
    assert_eq!(try_save(&mut writers, 30), None);
    assert_eq!(left(dir.path()), ["lock", "step-00000010", "step-00000030"]);
    assert_eq!(newest(dir.path()), 30);
}

/// Where a write finds no room, older checkpoints go one by one, the newest whole one never, and all ranks try again.
#[cfg(target_os = "linux")]
#[test]
fn where_room_is_short_older_checkpoints_go_before_the_new_one_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut writers = writers(dir.path(), 3);
    for step in [10, 20, 30] {
        assert_eq!(try_save(&mut writers, step), None);
    }
    // The link, and so the lack of room, goes with what was written in vain.
    let full = |step: u64| {
        let partial = dir.path().join(format!("{}.partial", folder_name(step)));
        fs::create_dir(&partial).unwrap();
        std::os::unix::fs::symlink("/dev/full", partial.join("rank-00002.safetensors")).unwrap();
    };
    full(40);
    for (rank, writer) in writers.iter_mut().enumerate() {
        start_save(writer, rank, 40, json!({}), true);
    }
    let gone = vec![dir.path().join(folder_name(10))];
    assert!(
        writers.iter_mut().all(|writer| writer.wait().unwrap().unwrap().made_room == gone),
        "every rank reports which checkpoints made room"
    );
    assert_eq!(left(dir.path()), ["lock", "step-00000020", "step-00000030", "step-00000040"]);
    drop(writers);

    // A run that went on from 20, because those after it are damaged: they go, and not what it went on from.
    let mut writers = self::writers(dir.path(), 9);
    writers[0].goes_on_from(20);
    full(25);
    assert_eq!(try_save(&mut writers, 25), None);
    assert_eq!(left(dir.path()), ["lock", "step-00000020", "step-00000025", "step-00000040"]);
}

/// What is said of the size before a run is the size, but for the digits of the step.
#[test]
fn the_bytes_of_a_checkpoint_are_known_before() {
    let dir = tempfile::tempdir().unwrap();
    let metadata = json!({"a": [1, 2, 3]});
    let mut writers = writers(dir.path(), 1);
    for (rank, writer) in writers.iter_mut().enumerate() {
        start_save(writer, rank, 10, metadata.clone(), true);
    }
    writers.iter_mut().for_each(|writer| _ = writer.wait().unwrap().unwrap());
    let (found, said) = (stored_bytes(dir.path(), 10).unwrap(), plan().file_bytes(&metadata));
    assert!((found..found + 200).contains(&said), "{said} bytes were said of {found}");
}

#[test]
fn a_folder_that_is_gone_is_told_at_every_save() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run");
    let mut writers = writers(&path, 2);
    assert_eq!(try_save(&mut writers, 10), None);
    fs::rename(&path, dir.path().join("away")).unwrap();
    for step in [20, 30] {
        let told = try_save(&mut writers, step).unwrap();
        assert!(told.starts_with(&format!("no checkpoint of step {step}: rank 0 failed: ")), "{told}");
        assert!(told.contains("No such file or directory"), "{told}");
    }
    fs::rename(dir.path().join("away"), &path).unwrap();
    assert_eq!((try_save(&mut writers, 40), newest(&path)), (None, 40));
}

/// The leader alone fails: something has the name of its index.
#[test]
fn an_index_that_cannot_be_written_fails_the_save_on_every_rank() {
    let dir = tempfile::tempdir().unwrap();
    let mut writers = writers(dir.path(), 2);
    fs::create_dir_all(dir.path().join("step-00000010.partial/index.json")).unwrap();
    let told = try_save(&mut writers, 10).unwrap();
    assert!(told.starts_with("no checkpoint of step 10: rank 0 failed: ") && told.contains("index.json: "), "{told}");
    assert_eq!(try_save(&mut writers, 20), None);
}

/// A checkpoint of the same step is replaced, and stays until the new one is complete.
#[test]
fn a_step_is_saved_again() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 2, &[10]);
    let index = dir.path().join("step-00000010/index.json");
    fs::write(&index, "damaged").unwrap();
    save(dir.path(), 2, &[10]);
    assert_eq!((left(dir.path()), newest(dir.path())), (vec!["lock".to_owned(), "step-00000010".to_owned()], 10));
}

/// A rank that is early must not write before rank 0 has the lock, which removes what it takes for leftovers.
#[test]
fn no_rank_writes_before_the_folder_is_locked() {
    let dir = tempfile::tempdir().unwrap();
    let (plan, mut ends) = (Arc::new(plan()), threads(WORLD).into_iter());
    let first = ends.next().unwrap();
    let mut early: Vec<_> =
        (1..).zip(ends).map(|(rank, end)| Writer::follow(dir.path(), rank, plan.clone(), end)).collect();
    for (rank, writer) in (1..).zip(&mut early) {
        start_save(writer, rank, 10, json!({}), true);
    }
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(left(dir.path()).is_empty());
    let mut leader = Writer::lead(Lock::take(dir.path()).unwrap(), 2, plan, first);
    start_save(&mut leader, 0, 10, json!({}), true);
    assert!(early.iter_mut().chain([&mut leader]).all(|writer| writer.wait().unwrap().is_ok()));
    assert_eq!(newest(dir.path()), 10);
}

/// An exchange that does something before some round.
struct Meddling<F>(ThreadExchange, u32, F);

impl<F: FnMut(u32) + Send + 'static> Exchange for Meddling<F> {
    fn all_gather(&mut self, message: Vec<u8>) -> Result<Arc<[Vec<u8>]>, ExchangeError> {
        let Self(end, round, meddle) = self;
        meddle(*round);
        *round += 1;
        end.all_gather(message)
    }
}

/// Rank 1's file goes away after it was written, before rank 0 commits.
#[test]
fn a_file_that_went_away_fails_the_save() {
    let dir = tempfile::tempdir().unwrap();
    let (plan, lock) = (Arc::new(plan()), Lock::take(dir.path()).unwrap());
    let mut ends = threads(WORLD).into_iter();
    let mut writers = vec![Writer::lead(lock, 2, plan.clone(), ends.next().unwrap())];
    for (rank, end) in (1..).zip(ends) {
        let file = dir.path().join(format!("step-00000010.partial/rank-{rank:05}.safetensors"));
        // Round 0: all are there. Round 1: all have written.
        let meddle = move |round| {
            if (rank, round) == (1, 1) {
                fs::remove_file(&file).unwrap()
            }
        };
        writers.push(Writer::follow(dir.path(), rank, plan.clone(), Meddling(end, 0, meddle)));
    }
    let told = try_save(&mut writers, 10).unwrap();
    assert!(told.starts_with("no checkpoint of step 10: rank 0 failed: "), "{told}");
    assert!(told.contains("rank-00001.safetensors: No such file"), "{told}");
    assert_eq!(try_save(&mut writers, 20), None);
}

#[test]
fn a_rank_that_ends_fails_the_save_of_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut writers = writers(dir.path(), 2);
    assert_eq!(try_save(&mut writers, 10), None);
    drop(writers.pop());
    for (rank, writer) in writers.iter_mut().enumerate() {
        start_save(writer, rank, 20, json!({}), true);
    }
    for writer in &mut writers {
        let error = writer.wait().unwrap().unwrap_err();
        assert!(matches!(error, SaveError::Exchange { step: 20, .. }), "{error}");
        assert!(error.to_string().ends_with("the writers lost each other: rank 3 ended"), "{error}");
    }
    drop(writers);
    // Ranks meet before they write.
    assert_eq!(left(dir.path()), ["lock", "step-00000010"]);
    // As a process that is killed leaves it.
    fs::create_dir(dir.path().join("step-00000020.partial")).unwrap();
    let lock = Lock::take(dir.path()).unwrap();
    assert_eq!(lock.removed(), [dir.path().join("step-00000020.partial")], "at the next start");
}

#[test]
fn a_second_run_on_the_folder_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let writers = writers(dir.path(), 2);
    let error = Lock::take(dir.path()).unwrap_err();
    assert!(matches!(error, LockError::Held { .. }), "{error}");
    let pid = std::process::id();
    assert!(
        error.to_string().contains(&format!("is the checkpoint folder of another run, process {pid} on ")),
        "{error}"
    );
    drop(writers);
    assert!(Lock::take(dir.path()).is_ok());
}
