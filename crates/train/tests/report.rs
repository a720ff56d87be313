//! Reports of runs: what a page holds, and files that are not metrics.

mod small;

use meshwork_train::report::{Run, page};
use meshwork_train::train;
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn run(folder: &Path, name: &str, mesh: &str) -> Run {
    let path = folder.join(format!("{name}.jsonl"));
    let config =
        small::config(&format!("{mesh} --set training.steps=4 --set validation.every=2 --set validation.steps=1"));
    train(&config, &small::data().hold_out(0.25), Some(&path), &AtomicBool::new(false)).unwrap();
    Run::read(&path).unwrap()
}

#[test]
fn a_page_has_every_run_and_needs_no_network() {
    let folder = tempfile::tempdir().unwrap();
    let runs =
        [run(folder.path(), "one", "dp=1"), run(folder.path(), "<eight>", "dp=2,tp=2,pp=2 --set optimizer.lr=0.5")];
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
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("moved.jsonl");
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
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
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
    assert!(Run::read(&folder.path().join("none")).unwrap_err().to_string().starts_with("cannot read "));
}
