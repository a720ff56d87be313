//! The study of compression as a user runs it, in a short form: it goes on where it was interrupted, and its directions
//! are those of the published table.

#[path = "../example/mod.rs"]
mod example;

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// (exit code, standard output, standard error) of a command line of words without spaces, and `more`.
fn run(line: &str, more: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(example::program("compression_study"));
    command.args(line.split_whitespace()).args(more).current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
    let ended = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code(), text(ended.stdout), text(ended.stderr))
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// The settings whose directions are tested, and one with feedback to go on with.
const SETTINGS: [&str; 4] = ["none", "top10", "top2", "top10 ef21"];

/// Means over the seeds, with compression at inference and without, by task and setting.
fn means(text: &str) -> BTreeMap<(String, String), [f64; 2]> {
    let mut all: BTreeMap<_, Vec<[f64; 2]>> = BTreeMap::new();
    for line in text.lines() {
        let run: Value = serde_json::from_str(line).unwrap();
        let name = |key: &str| run[key].as_str().unwrap().to_owned();
        let scores = ["on", "off"].map(|key| run[key].as_f64().unwrap_or(f64::NAN));
        all.entry((name("task"), name("setting"))).or_default().push(scores);
    }
    let mean = |runs: &[[f64; 2]], at: usize| runs.iter().map(|run| run[at]).sum::<f64>() / runs.len() as f64;
    all.into_iter().map(|(key, runs)| (key, [mean(&runs, 0), mean(&runs, 1)])).collect()
}

/// Trains one task; `sign` is 1 where a higher score is better. Then goes on where it is interrupted.
fn short_study(task: &str, sign: f64) {
    let results = file(&format!("study_{task}.jsonl"));
    _ = fs::remove_file(&results);
    let only: Vec<&str> = SETTINGS.iter().flat_map(|setting| ["--only", setting]).collect();
    let line = format!("--quick --task {task} --seeds 2 --results {}", results.display());
    let (code, out, err) = run(&line, &only);
    assert_eq!(code, Some(0), "{err}");
    let asked = format!("| A model trained with TopK does well only where inference is compressed too. | {task} |");
    assert!(out.contains(&asked), "{out}");
    let text = fs::read_to_string(&results).unwrap();
    let means = means(&text);
    let of = |setting: &str| means[&(task.to_owned(), setting.to_owned())];
    let better = |what: &str, a: f64, b: f64| assert!(sign * (a - b) > 0.0, "{task}: {what}: {a} and {b}\n{text}");
    better("nothing lost beats TopK 2%", of("none")[0], of("top2")[0]);
    better("TopK 10% beats 2%", of("top10")[0], of("top2")[0]);
    better("TopK 10% needs compressed inference", of("top10")[0], of("top10")[1]);
    assert_eq!(of("none")[0], of("none")[1], "{task}: nothing is compressed");

    // Interrupted in the middle of a line, it trains what is missing and nothing else.
    let lines: Vec<&str> = text.lines().collect();
    let cut = format!("{}\n{}", lines[..lines.len() - 1].join("\n"), &lines[lines.len() - 1][..20]);
    fs::write(&results, cut).unwrap();
    let (code, again, err) = run(&line, &only);
    assert_eq!((code, again), (Some(0), out), "{err}");
    assert_eq!(fs::read_to_string(&results).unwrap(), text);
}

// The directions of the long study, in a short one. A task a test: they run side by side.

/// In a sweep alone, as in `.ci/nightly`: it takes three times as long as that of digits.
#[test]
fn a_short_study_of_language_has_the_directions_of_the_long_one() {
    if std::env::var("MESHWORK_SWEEP").is_ok_and(|sweep| sweep == "all") {
        short_study("language", -1.0);
    }
}

#[test]
fn a_short_study_of_digits_has_the_directions_of_the_long_one() {
    short_study("digits", 1.0);
}

#[test]
fn results_that_cannot_be_read_are_named() {
    let results = file("study_unread.jsonl");
    fs::write(&results, "{\"task\": \"language\"}\n").unwrap();
    let (code, _, err) = run(&format!("--results {}", results.display()), &["--write"]);
    assert_eq!(code, Some(1));
    assert!(err.ends_with("study_unread.jsonl: line 1: no \"seed\"\n"), "{err}");
}
