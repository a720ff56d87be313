//! Reports of runs: what a page holds, and files that are not metrics.

#[path = "../../examples/report/chart.rs"]
mod chart;
#[path = "../../examples/report/page.rs"]
mod page;
#[path = "../../examples/report/run.rs"]
mod run;

use meshwork::prelude::*;
use meshwork::train::train;
use page::page;
use run::Run;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// An empty folder of that name.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("report").join(name);
    _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Trains a small model for four steps, and reads its metrics.
fn run(folder: &Path, name: &str, mesh: &str) -> Run {
    let path = folder.join(format!("{name}.jsonl"));
    let small = "--set model.vocab_size=61 --set model.num_layers=2 --set model.hidden_size=16 --set model.num_heads=4 \
                 --set model.seq_len=8 --set training.global_batch_size=8 --set training.steps=4 \
                 --set validation.every=2 --set validation.steps=1 --mesh";
    let words = small.split_whitespace().chain(mesh.split_whitespace());
    let config = Config::from_args(&Args::parse(words)).unwrap();
    let data = Data::from_tokens((0..513).map(|at| at * at % 61).collect(), 8).hold_out(0.25);
    train(&config, &data, Some(&path), &AtomicBool::new(false)).unwrap();
    Run::read(&path).unwrap()
}

/// The example of the shortest file that makes a page.
#[test]
fn a_start_and_a_step_make_a_page() {
    let file = folder("short").join("short.jsonl");
    let start = r#"{"event":"start","mesh":{"dp":2},"config":{"model":{"preset":"tiny"}}}"#;
    let step = r#"{"event":"step","step":1,"loss":5.5,"grad_norm":1.0,"lr":0.001,"step_ms":8.0,"tokens_per_s":256.0,"comm_bytes":{"dp":7},"peak_bytes":[5,6]}"#;
    std::fs::write(&file, format!("{start}\n{step}\n")).unwrap();
    let html = page(&[Run::read(&file).unwrap()]);
    assert!(html.starts_with("<!doctype html>") && html.contains("dp=2"));
}

#[test]
fn a_page_has_every_run_and_needs_no_network() {
    let folder = folder("every_run");
    let runs = [run(&folder, "one", "dp=1"), run(&folder, "<eight>", "dp=2,tp=2,pp=2 --set optimizer.lr=0.5")];
    assert_eq!((runs[0].steps.len(), runs[1].validation.len()), (4, 2));
    let html = page(&runs);
    for wanted in ["one", "&lt;eight&gt;", "dp=2,tp=2,pp=2", "optimizer.lr", "Peak memory of each rank", "pp 1"] {
        assert!(html.contains(wanted), "{wanted}");
    }
    assert!(!html.contains("<eight>") && !html.contains("http") && !html.contains("src=") && !html.contains("NaN"));
    // Four curves of two runs; validation are dots.
    assert_eq!(html.matches("<polyline").count(), 2 * 5);
    assert_eq!(html.matches("<circle").count(), 2 * 2);
    assert_eq!(html.matches("class=rank").count(), 1 + 8);
}

/// A run that went on on another mesh: its memory and communication are those of the mesh that is shown.
#[test]
fn behind_a_resume_memory_and_communication_are_those_of_the_mesh_shown() {
    let path = folder("moved").join("moved.jsonl");
    let start = |mesh: &str| format!("{{\"event\":\"start\",\"mesh\":{mesh}}}\n");
    let step = |step: u64, comm: &str, peaks: &str| {
        format!("{{\"event\":\"step\",\"step\":{step},\"loss\":1.0,\"comm_bytes\":{comm},\"peak_bytes\":{peaks}}}\n")
    };
    let four = [1, 2, 3].map(|at| step(at, "{\"tp\":7.0}", "[900,900,900,900]")).concat();
    let two = step(3, "{\"dp\":5.0}", "[40,41]");
    let text = [start("{\"tp\":4}"), four, start("{\"dp\":2}"), two].concat();
    std::fs::write(&path, &text).unwrap();
    let run = Run::read(&path).unwrap();
    assert_eq!((run.steps.len(), run.since, run.moved()), (3, 3, true));
    let html = page(&[run]);
    assert!(
        !html.contains("900 B") && html.contains("<title>1: 41 B</title>") && !html.contains("<title>2: "),
        "{html}"
    );
    assert!(html.contains("<title>dp: 5 B</title>") && !html.contains("<title>tp: "), "{html}");
    assert!(html.contains("<p>It trained from step 1 on tp=4, and from step 3 on this mesh.</p>"), "{html}");
    assert!(html.contains("Peak memory of each rank, on its last mesh"), "{html}");
    // Killed again before its first step on the next mesh.
    std::fs::write(&path, text + &start("{\"pp\":2}")).unwrap();
    let html = page(&[Run::read(&path).unwrap()]);
    assert!(html.contains("on tp=4, from step 3 on dp=2, and then on this mesh.") && !html.contains("41 B"), "{html}");
}

#[test]
fn files_that_are_no_metrics_are_refused_and_a_killed_run_is_read_up_to_its_end() {
    let path = folder("refused").join("run.jsonl");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        Run::read(&path).map_err(|error| error.to_string())
    };
    let (start, step) = ("{\"event\":\"start\"}\n", "{\"event\":\"step\",\"step\":1,\"loss\":null}\n");
    let killed = read(&format!("{start}{step}{{\"event\":\"st")).unwrap();
    assert!(killed.steps[&1].loss.is_nan() && killed.seconds.is_none());
    // A run that was resumed: the second time counts.
    let resumed = read(&format!("{start}{step}{start}{}", step.replace("null", "2.5"))).unwrap();
    assert_eq!(resumed.steps[&1].loss, 2.5);
    for (text, says) in [
        (String::new(), "it has no start"),
        (start.to_owned(), "it has no step"),
        (step.to_owned(), "it has no start"),
        (format!("{start}no json\n{step}"), "line 2: expected ident, column 2; "),
        (format!("{start}{{\"event\":\"step\"}}\n"), "line 2: there is no number \"step\""),
        (format!("{start}{{}}\n"), "line 2: there is no \"event\""),
    ] {
        let error = read(&text).unwrap_err();
        assert!(error.contains(says) && error.ends_with("use a file that --metrics wrote"), "{error}");
    }
    assert!(Run::read(&path.with_file_name("none")).unwrap_err().to_string().starts_with("cannot read "));
}
