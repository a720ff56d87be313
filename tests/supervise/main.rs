//! The program `supervise` as a user runs it.

#[path = "../example/mod.rs"]
mod example;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// (exit code, standard output, standard error).
fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let ended = Command::new(example::program("supervise")).args(arguments).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code(), text(ended.stdout), text(ended.stderr))
}

/// A file that counts starts, removed at the end.
struct Count(PathBuf);

impl Count {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("meshwork-{test}-{}", std::process::id()));
        _ = fs::remove_file(&path);
        Self(path)
    }

    /// A script that counts its start in `$n`, and goes on with `then`.
    fn script(&self, then: &str) -> String {
        let path = self.0.display();
        format!("echo x >>{path}; n=$(wc -l <{path}); {then}")
    }

    fn starts(&self) -> usize {
        fs::read_to_string(&self.0).unwrap_or_default().lines().count()
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        _ = fs::remove_file(&self.0);
    }
}

#[test]
fn a_program_that_fails_or_is_killed_is_started_again_until_it_ends_well() {
    let count = Count::new("supervise-again");
    let script = count.script("case $n in 1) exit 1;; 2) kill -9 $$;; *) echo done;; esac");
    let (code, out, errors) = run(&["--restarts", "5", "--", "sh", "-c", &script]);
    assert_eq!((code, &*out, count.starts()), (Some(0), "done\n", 3), "{errors}");
    assert_eq!(
        errors,
        "supervise: the program ended with code 1, start 1 of 5 more\n\
         supervise: the program was ended by signal 9, start 2 of 5 more\n"
    );
}

#[test]
fn bad_input_is_not_tried_again_and_the_last_failure_is_passed_on() {
    let count = Count::new("supervise-input");
    let (code, _, errors) = run(&["--", "sh", "-c", &count.script("exit 2")]);
    assert_eq!((code, count.starts(), &*errors), (Some(2), 1, ""));
    let count = Count::new("supervise-last");
    let (code, ..) = run(&["--restarts", "1", "--", "sh", "-c", &count.script("exit 7")]);
    assert_eq!((code, count.starts()), (Some(7), 2));
}

/// What a killed launcher leaves behind would write to the same files.
#[test]
fn nothing_of_a_program_is_left_behind() {
    let count = Count::new("supervise-left");
    let left = Count::new("supervise-left-pid");
    let pid = left.0.display();
    let script = count.script(&format!("[ $n = 2 ] && exit 0; sleep 100 & echo $! >{pid}; kill -9 $$"));
    let (code, ..) = run(&["--", "sh", "-c", &script]);
    assert_eq!((code, count.starts()), (Some(0), 2));
    let pid = fs::read_to_string(&left.0).unwrap();
    // It may be a zombie until the system has reaped it.
    let state = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    assert!(state.is_empty() || state.contains(" Z "), "{state}");
}

/// A host does not come back, then none is there for a moment, then both are.
#[test]
fn each_start_has_as_many_ranks_as_there_is_room_for() {
    let (asked, count) = (Count::new("supervise-asked"), Count::new("supervise-ranks"));
    let ask = asked.script("case $n in 1|4) echo 4;; 2) echo 2;; *) echo none;; esac");
    let script = count.script("echo $0; [ $n = 3 ]");
    let (code, out, errors) = run(&["--ranks", &ask, "--", "sh", "-c", &script, "{ranks}"]);
    assert_eq!((code, &*out), (Some(0), "4\n2\n4\n"), "{errors}");
    assert!(errors.contains("printed \"none\", no number of ranks above 0, asked again: 3 of 20"), "{errors}");
    let (code, _, errors) = run(&["--ranks", "echo 4", "--", "true"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("--ranks: no word of the program has {ranks}"), "{errors}");
}

#[test]
fn a_wrong_command_line_is_told() {
    let (code, _, errors) = run(&["--restart", "3"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("--restart: unknown flag") && errors.contains("COMMAND: there is none"), "{errors}");
    let (code, _, errors) = run(&["--", "/no/such/program"]);
    assert_eq!(code, Some(2));
    assert!(errors.contains("/no/such/program cannot be started"), "{errors}");
}

/// A test of an earlier build's program would say nothing of the code as it is.
#[test]
fn a_program_that_is_older_than_its_sources_is_noticed() {
    let folder = std::env::temp_dir().join(format!("meshwork-older program-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let [old, new, program] = ["old.rs", "new.rs", "program"].map(|name| folder.join(name));
    let written = |path: &PathBuf, minutes: u64| {
        let file = fs::File::create(path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(60 * minutes)).unwrap();
    };
    for (path, minutes) in [(&old, 1), (&program, 2), (&new, 1)] {
        written(path, minutes);
    }
    let escaped = |path: &PathBuf| path.display().to_string().replace(' ', "\\ ");
    fs::write(folder.join("program.d"), format!("{}: {} {}\n", escaped(&program), escaped(&old), escaped(&new)))
        .unwrap();
    assert_eq!(example::newer_source(&program), None);
    written(&new, 3);
    assert_eq!(example::newer_source(&program), Some(new.clone()));
    fs::remove_file(&new).unwrap();
    assert_eq!(example::newer_source(&program), Some(new));
    fs::remove_dir_all(folder).unwrap();
}
