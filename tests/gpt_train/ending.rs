//! How runs end: done, stopped by Ctrl-C, failed, or with standard output closed.

use crate::program::{Running, SMALL, command, events, folder, lines, numbers, path, run, succeed, wait_for};
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

fn interrupt(running: &Running) {
    let kill = Command::new("kill").args(["-INT", &running.child.id().to_string()]).status().unwrap();
    assert!(kill.success());
}

#[test]
fn a_run_shows_plain_lines_and_a_sample() {
    let out = succeed(&format!("{SMALL} --mesh dp=2,pp=2 --steps 21 --set validation.every=20"));
    let (progress, sample) = out.split_once("\n\nA sample of the trained model:\n").unwrap();
    let shown: Vec<&str> = progress.lines().filter_map(|line| line.split_once("/21  ")).map(|(step, _)| step).collect();
    let numbers = ["1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "20", "20", "21"];
    assert_eq!(shown, numbers.map(|number| format!("step {number}")));
    assert!(progress.lines().all(|line| line.contains("  loss ") || line.contains("  validation loss ")), "{progress}");
    assert!(!progress.contains('\u{1b}') && !progress.contains('\r'), "no terminal, no bar: {progress:?}");
    assert!(sample.starts_with("Non eram nescius") && sample.len() > 100, "{sample}");
    assert!(!sample.chars().any(|char| char.is_control() && char != '\n' && char != '\t'), "{sample:?}");
}

#[test]
fn a_sample_has_the_tokens_that_are_asked_for_or_is_left_out() {
    let run = |tokens: usize| succeed(&format!("{SMALL} --steps 1 --set metrics.sample_tokens={tokens}"));
    let short = run(3);
    let (_, sample) = short.split_once("\nA sample of the trained model:\n").unwrap();
    // 16 of the data, three of the model, and the end of the line.
    assert!(sample.starts_with("Non eram nescius") && (17..=20).contains(&sample.chars().count()), "{sample:?}");
    assert!(!run(0).contains("sample"));
}

#[test]
fn ctrl_c_ends_the_run_after_the_step_under_way() {
    let path = folder("interrupt").join("run.jsonl");
    let line = format!("{SMALL} --mesh dp=2,tp=2,pp=2 --steps 1000000 --metrics {}", path.display());
    let running = Running::start(command(&line));
    wait_for("some steps", || (lines(&path).len() > 5).then_some(()));
    interrupt(&running);
    let ended = running.end();
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_eq!(ended.err, "\nstopping after this step; once more to stop at once\n");
    let run = lines(&path);
    let last = *numbers(&run, "step", "step").last().unwrap();
    assert_eq!((&run.last().unwrap()["event"], &run.last().unwrap()["steps"]), (&"end".into(), &(last as u64).into()));
    assert!(ended.out.ends_with(&format!("stopped after step {last} as asked\n")), "{}", ended.out);
}

#[test]
fn a_second_ctrl_c_ends_at_once() {
    let path = folder("interrupt_twice").join("run.jsonl");
    // One step takes many seconds.
    let batch = "--set training.global_batch_size=2048 --set training.micro_batch_size=8";
    let mut running = Running::start_unread(&mut command(&format!("{batch} --metrics {}", path.display())));
    wait_for("the start", || lines(&path).pop());
    interrupt(&running);
    thread::sleep(Duration::from_millis(100));
    assert!(running.child.try_wait().unwrap().is_none(), "the first one lets the step end");
    interrupt(&running);
    let ended = running.end();
    assert_eq!(ended.code, Some(130), "{}", ended.err);
    assert_eq!(lines(&path).len(), 1, "the step was not waited for");
}

#[test]
fn ctrl_c_cuts_the_sample_short() {
    let path = folder("interrupt_sample").join("run.jsonl");
    let sizes = "--set training.global_batch_size=1 --set model.seq_len=1024 --steps 1";
    let running = Running::start(command(&format!("{sizes} --metrics {}", path.display())));
    wait_for("the end of training", || lines(&path).into_iter().find(|line| line["event"] == "end"));
    interrupt(&running);
    let ended = running.end();
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let (_, sample) = ended.out.split_once("A sample of the trained model:\n").unwrap();
    assert!(sample.starts_with("Non eram nescius") && sample.chars().count() < 100, "{sample}");
}

/// A validation of many batches, which would take half a minute: it ends at the next batch, says so, and no further
/// step is trained.
#[cfg(unix)]
#[test]
fn a_stop_cuts_a_validation_short_and_saves_the_step_before_it() {
    let folder = folder("interrupt_validation");
    let (path, dir) = (folder.join("run.jsonl"), folder.join("run"));
    let sizes = "--set training.global_batch_size=2 --set model.seq_len=512 --set validation.fraction=0.9 --set validation.steps=100000";
    for mesh in ["dp=2", "tp=2", "pp=2"] {
        _ = std::fs::remove_dir_all(&dir);
        let saved = format!("--set checkpoint.dir={} --metrics {}", dir.display(), path.display());
        let line = format!("{sizes} {saved} --mesh {mesh} --steps 5 --set validation.every=2");
        let running = Running::start(command(&line));
        wait_for("step 2", || (numbers(&lines(&path), "step", "step").last() == Some(&2.0)).then_some(()));
        let kill = Command::new("kill").args(["-TERM", &running.child.id().to_string()]).status().unwrap();
        assert!(kill.success());
        let ended = running.end();
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        let run = lines(&path);
        assert_eq!((numbers(&run, "step", "step"), events(&run, "validation").len()), (vec![1.0, 2.0], 0), "{mesh}");
        assert!(ended.out.contains("step 2  validation left out: the run was asked to stop\n"), "{}", ended.out);
        assert!(ended.out.ends_with("stopped after step 2 as asked\n"), "{}", ended.out);
        assert!(dir.join("step-00000002/index.json").exists() && !dir.join("step-00000002.partial").exists());
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_reader_that_leaves_ends_the_run_quietly() {
    let path = folder("reader").join("run.jsonl");
    let line = format!("{SMALL} --mesh dp=2 --steps 1000000 --metrics {}", path.display());
    let mut running = Running::start_unread(&mut command(&line));
    let mut first = String::new();
    BufReader::new(running.child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.starts_with("step 1/1000000  loss "), "{first}");
    let ended = running.end();
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    assert_eq!(lines(&path).last().unwrap()["event"], "end");
}

#[test]
fn help_and_report_without_a_reader_are_quiet() {
    for line in ["--help", "--steps 0"] {
        let mut shell = Command::new("sh");
        let script = format!("sleep 0.2; exec {} {line}", path().display());
        let mut running = Running::start_unread(shell.args(["-c", &script]).stdin(Stdio::null()));
        drop(running.child.stdout.take());
        let ended = running.end();
        assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{line}");
    }
}

#[test]
fn a_reader_that_pauses_does_not_fail_the_run() {
    // More lines than a pipe holds, and a pause longer than ranks wait for each other.
    let lines = "--set validation.every=1 --set validation.steps=1 --set comm.timeout_seconds=2";
    let sizes = "--set model.num_layers=1 --set model.seq_len=4 --set training.global_batch_size=2";
    let line = format!("{SMALL} --mesh dp=2 --steps 4000 {lines} {sizes}");
    let mut running = Running::start_unread(&mut command(&line));
    thread::sleep(Duration::from_secs(5));
    let mut out = String::new();
    running.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    let ended = running.end();
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
    assert_eq!(out.lines().filter(|line| line.contains("/4000  validation loss ")).count(), 4000);
}

#[test]
fn a_failure_while_running_is_told_with_exit_code_1() {
    let path = folder("failure").join("run.jsonl");
    let ended = run(&format!("{SMALL} --mesh dp=2 --steps 9 --set optimizer.lr=1e30 --metrics {}", path.display()));
    assert_eq!(ended.code, Some(1), "{}", ended.err);
    assert!(ended.err.starts_with("error: a world of 2 ranks failed: "), "{}", ended.err);
    assert!(ended.err.contains("step 2: the loss is NaN; the weights are those before this step"), "{}", ended.err);
    assert!(!ended.err.contains("panicked"), "{}", ended.err);
    assert!(ended.out.starts_with("step 1/9  loss 5.") && !ended.out.contains("sample"), "{}", ended.out);
    let run = lines(&path);
    assert_eq!((events(&run, "step").len(), events(&run, "end").len()), (1, 0), "only what happened");
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_a_failure_while_running() {
    let ended = run(&format!("{SMALL} --mesh dp=2 --steps 9 --metrics /dev/full"));
    assert_eq!(ended.code, Some(1), "{}", ended.err);
    assert!(ended.err.contains("cannot write metrics to /dev/full: No space left"), "{}", ended.err);
}
