//! A process that saves all the time is killed at random moments. Each time, a whole checkpoint is there, at least as
//! new as the last one that the process had heard of.

use crate::world::{bytes_of, save, tensors};
use meshwork_checkpoint::{Lock, Slice, latest_complete, steps};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The folder in which this program is to save, where it is the one that will be killed.
const CHILD: &str = "MESHWORK_CRASH_TEST_DIR";
const KILLS: u64 = 10;
const KEEP: usize = 2;

#[test]
fn a_killed_run_leaves_a_whole_checkpoint() {
    if let Some(dir) = std::env::var_os(CHILD) {
        return save_forever(Path::new(&dir));
    }
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let dir = tempfile::tempdir().unwrap();
    let mut state = seed | 1;
    let mut newest = 0;
    let mut in_the_middle = 0;
    for kill in 0..KILLS {
        let told = run_and_kill(dir.path(), Duration::from_micros(crate::world::random(&mut state) % 60_000));
        in_the_middle += usize::from(crate::world::left(dir.path()).iter().any(|name| name.contains('.')));
        // What a run does at its start.
        drop(Lock::take(dir.path()).unwrap());
        let left = crate::world::left(dir.path());
        assert!(!left.iter().any(|name| name.contains('.')), "seed {seed}, kill {kill}: {left:?}");
        let latest = latest_complete(dir.path()).unwrap();
        assert!(latest.passed_over.is_empty(), "seed {seed}, kill {kill}: {:?}", latest.passed_over);
        let checkpoint =
            latest.checkpoint.unwrap_or_else(|| panic!("seed {seed}, kill {kill}: nothing, after {told:?}"));
        let step = checkpoint.index().step;
        assert!(Some(step) >= told && step >= newest, "seed {seed}, kill {kill}: {step}, after {told:?} and {newest}");
        for (at, tensor) in tensors().iter().enumerate() {
            let whole = Slice::whole(&tensor.dims);
            assert_eq!(checkpoint.read(&tensor.name, &whole).unwrap(), bytes_of(at, &whole, step), "seed {seed}");
        }
        assert!(steps(dir.path()).unwrap().len() <= KEEP + 1, "seed {seed}, kill {kill}");
        newest = step;
    }
    println!("{newest} steps were saved; {in_the_middle} of {KILLS} kills fell into a save");
    assert!(newest > 0);
}

/// Starts this program as one that saves, and kills it some time after it has saved once. The last step it told of.
fn run_and_kill(dir: &Path, after: Duration) -> Option<u64> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash::a_killed_run_leaves_a_whole_checkpoint", "--nocapture"])
        .env(CHILD, dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let saved = |line: String| line.rsplit_once("saved ").and_then(|(_, step)| step.parse().ok());
    let first = lines.by_ref().find_map(saved);
    std::thread::sleep(after);
    child.kill().unwrap(); // SIGKILL
    child.wait().unwrap();
    lines.filter_map(saved).last().or(first)
}

/// Goes on from the newest checkpoint, one step at a time.
fn save_forever(dir: &Path) {
    let newest = latest_complete(dir).unwrap().checkpoint.map_or(0, |checkpoint| checkpoint.index().step);
    for step in newest + 1.. {
        for of_rank in save(dir, KEEP, &[step]) {
            of_rank.into_iter().for_each(|saved| drop(saved.unwrap()));
        }
        println!("saved {step}");
    }
}
