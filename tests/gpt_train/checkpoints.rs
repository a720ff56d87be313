//! Runs that are saved, stopped, killed and resumed.

use crate::program::{
    Running, SMALL, command, events, folder, lines, metrics, numbers, run, succeed, unwrapped, wait_for,
};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// The flags of a run that is saved in `folder`, in numerics whose bits no mesh changes.
fn saved(folder: &Path) -> String {
    let dir = folder.join("run");
    format!("{SMALL} --set training.numerics=canonical --set model.dropout=0.1 --set checkpoint.dir={}", dir.display())
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder.join("run"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn losses(lines: &[Value]) -> Vec<(f64, f64)> {
    numbers(lines, "step", "step").into_iter().zip(numbers(lines, "step", "loss")).collect()
}

#[test]
fn a_run_goes_on_from_mesh_to_mesh_and_its_metrics_too() {
    let (folder, alone) = (folder("resume"), folder("resume_alone"));
    let flags = saved(&folder);
    let wanted =
        metrics(&alone, &format!("{SMALL} --set training.numerics=canonical --set model.dropout=0.1 --steps 6"));
    let first = succeed(&format!("{flags} --set checkpoint.every=1 --mesh dp=2,tp=2 --steps 6"));
    assert!(first.contains("step 6  saved in "), "{first}");
    assert_eq!(names(&folder), ["lock", "step-00000005", "step-00000006"], "the newest two, and the last step once");

    // The same in three parts; the last one has nothing to do but a sample.
    fs::remove_dir_all(folder.join("run")).unwrap();
    metrics(&folder, &format!("{flags} --mesh dp=2,tp=2 --steps 2"));
    for (mesh, steps) in [("pp=2", 5), ("dp=1", 6), ("tp=2", 6)] {
        metrics(&folder, &format!("{flags} --mesh {mesh} --steps {steps} --set checkpoint.resume=true"));
    }
    let found = lines(&folder.join("metrics.jsonl"));
    assert_eq!(losses(&found), losses(&wanted));
    let resumed: Vec<_> = events(&found, "start").iter().map(|start| start["resumed"].as_u64()).collect();
    assert_eq!(resumed, [None, Some(2), Some(5), Some(6)]);
}

#[test]
fn resume_says_from_where() {
    let folder = folder("resume_says");
    let flags = format!("{} --set checkpoint.resume=true", saved(&folder));
    let new = succeed(&format!("{flags} --steps 1"));
    let dir = folder.join("run");
    assert!(new.starts_with(&format!("no checkpoint in {}: the run starts anew\n", dir.display())), "{new}");
    let next = succeed(&format!("{flags} --steps 2"));
    assert!(next.starts_with("resumed after step 1\nstep 2/2  loss "), "{next}");
    fs::write(dir.join("step-00000002/index.json"), "").unwrap();
    let damaged = succeed(&format!("{flags} --steps 2"));
    assert!(damaged.starts_with("warning: a damaged checkpoint is not used: "), "{damaged}");
    assert!(
        damaged.contains("step-00000002/index.json: it ends in its checksum\nresumed after step 1\nstep 2/2  loss "),
        "{damaged}"
    );
}

/// A checkpoint behind the last step that is asked for: nothing is trained, which is said, and the export is that of
/// the checkpoint.
#[test]
fn fewer_steps_than_the_checkpoint_has_are_said_and_still_export() {
    let folder = folder("resume_behind");
    let (flags, out) = (saved(&folder), folder.join("exported"));
    succeed(&format!("{flags} --steps 3"));
    let resume = format!("{flags} --set checkpoint.resume=true --set checkpoint.export={}", out.display());
    let told = succeed(&format!("{resume} --steps 2"));
    assert!(
        told.contains("the checkpoint is behind step 3, and training.steps = 2: nothing is left to train\n"),
        "{told}"
    );
    assert!(told.contains(&format!("step 3  exported to {}\n", out.display())), "{told}");
    assert!(out.join("model.safetensors").is_file());
}

#[test]
fn another_run_is_refused_with_what_differs() {
    let folder = folder("resume_other");
    let flags = saved(&folder);
    succeed(&format!("{flags} --steps 1"));
    let anew = run(&format!("{flags} --steps 1"));
    assert_eq!(anew.code, Some(2), "{}", anew.err);
    assert!(
        anew.err.contains("has checkpoints of another run, up to step 1; use checkpoint.resume = true"),
        "{}",
        anew.err
    );

    let other =
        "--steps 2 --set checkpoint.resume=true --set optimizer.lr=1e-2 --set training.seed=9 --set data.shuffle=false";
    let different = run(&format!("{flags} {other}"));
    assert_eq!(different.code, Some(1), "{}", different.err);
    for told in [
        "is of another run:",
        "optimizer.lr: the checkpoint has 0.0003, this run 0.01",
        "training.seed: the checkpoint has 1234, this run 9",
        "data.shuffle: the checkpoint has true, this run false",
        "or permit them by checkpoint.permit = \"training.seed,optimizer.lr,data.shuffle\"",
    ] {
        assert!(different.err.contains(told), "{told}: {}", different.err);
    }
    // The reason of rank 0, and not what the others would find next.
    let wider = run(&format!("{flags} {other} --mesh dp=2 --set model.hidden_size=32"));
    assert!(wider.err.contains("rank 0 returned an error: the newest checkpoint in "), "{}", wider.err);
    let went_on = succeed(&format!("{flags} {other} --set checkpoint.permit=optimizer,seed,data"));
    assert!(went_on.contains("permitted: optimizer.lr: the checkpoint has 0.0003, this run 0.01\n"), "{went_on}");

    let permitted = format!("{flags} {other} --set checkpoint.permit=model,optimizer,seed,data");
    let wider = run(&format!("{permitted} --set model.hidden_size=32"));
    assert!(wider.err.contains("wpe.weight: the checkpoint has F32 [16, 16], the model F32 [16, 32]"), "{}", wider.err);
    let unknown = run(&format!("{flags} --set checkpoint.resume=true --set checkpoint.permit=modle"));
    assert_eq!(unknown.code, Some(2));
    assert!(unknown.err.contains("checkpoint.permit = modle: unknown; the nearest is model"), "{}", unknown.err);
}

/// SIGTERM is what schedulers send before they kill.
#[cfg(unix)]
#[test]
fn a_run_that_is_told_to_end_saves_and_goes_on_later() {
    let folder = folder("resume_term");
    let path = folder.join("run.jsonl");
    let flags = format!("{} --metrics {} --mesh dp=2", saved(&folder), path.display());
    let running = Running::start(command(&format!("{flags} --steps 1000000")));
    wait_for("some steps", || (lines(&path).len() > 5).then_some(()));
    let second = run(&format!("{flags} --steps 3 --set checkpoint.resume=true"));
    assert_eq!(second.code, Some(1), "{}", second.err);
    assert!(second.err.contains(&format!("of another run, process {} on ", running.child.id())), "{}", second.err);
    let kill = std::process::Command::new("kill").args(["-TERM", &running.child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let ended = running.end();
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let last = *numbers(&lines(&path), "step", "step").last().unwrap() as u64;
    assert!(ended.out.ends_with(&format!("stopped after step {last} as asked\n")), "{}", ended.out);
    assert_eq!(names(&folder), ["lock".to_owned(), format!("step-{last:08}")]);
    let out = succeed(&format!("{flags} --set checkpoint.resume=true --steps {}", last + 1));
    assert!(out.starts_with(&format!("resumed after step {last}\n")), "{out}");
}

/// The folder goes away while the run is on: it trains to its end, and says with its exit code that the end was not
/// kept.
#[test]
fn a_run_whose_folder_went_away_trains_on() {
    let folder = folder("resume_gone");
    let path = folder.join("run.jsonl");
    let flags = format!("{} --metrics {} --set checkpoint.every=2", saved(&folder), path.display());
    let running = Running::start(command(&format!("{flags} --steps 200")));
    wait_for("some steps", || (lines(&path).len() > 5).then_some(()));
    fs::rename(folder.join("run"), folder.join("away")).unwrap();
    let ended = running.end();
    assert_eq!(numbers(&lines(&path), "step", "step").len(), 200);
    assert!(ended.out.contains("warning: no checkpoint of step "), "{}", ended.out);
    assert_eq!(ended.code, Some(1), "{}", ended.out);
    assert!(
        ended
            .err
            .contains("the run ended, and its last state was not saved: no checkpoint of step 200: rank 0 failed: "),
        "{}",
        ended.err
    );
}

#[test]
fn a_dry_run_tells_what_a_checkpoint_takes() {
    let folder = folder("resume_dry");
    let out = unwrapped(&succeed(&format!("{} --mesh dp=2 --steps 0", saved(&folder))));
    // Three vectors of 4-byte numbers for each of 10,944 parameters, and half of it on each rank.
    assert!(
        out.contains(" checkpoints of 128.2 KiB; to save one, up to 6") && out.contains(" of host memory on a rank "),
        "{out}"
    );
    assert!(
        out.contains(" checkpoint.keep = 2 takes ") && out.contains(" of disk while one more is written; "),
        "{out}"
    );
    assert!(!folder.join("run").exists());
}

#[cfg(unix)]
#[test]
fn signals_end_a_run_after_its_step_unless_sigterm_shall_end_it_at_once() {
    let folder = folder("signals");
    let (path, saving) = (folder.join("run.jsonl"), saved(&folder));
    let at_once = format!("{saving} --set checkpoint.on_sigterm=false");
    // A run that nothing saves stops after its step too.
    for (flags, signal, code) in [(SMALL, "TERM", Some(0)), (&at_once, "TERM", None), (&at_once, "HUP", Some(0))] {
        let running = Running::start(command(&format!("{flags} --metrics {} --steps 1000000", path.display())));
        wait_for("some steps", || (lines(&path).len() > 5).then_some(()));
        let id = running.child.id().to_string();
        assert!(std::process::Command::new("kill").args([&format!("-{signal}"), &id]).status().unwrap().success());
        let ended = running.end();
        assert_eq!((ended.code, ended.out.contains("\nstopped after step ")), (code, code.is_some()), "{ended:?}");
        fs::remove_file(&path).unwrap();
    }
    assert_eq!(names(&folder).len(), 2, "the lock, and what SIGHUP left");
}

/// A limit on the size of files stands for a full disk: writes beyond it fail. The lock and the metrics are smaller.
#[cfg(unix)]
#[test]
fn a_run_that_can_keep_nothing_trains_on_and_says_so_with_its_exit_code() {
    let folder = folder("disk_full");
    let path = folder.join("run.jsonl");
    let flags = format!("{} --metrics {} --set checkpoint.every=2 --steps 6", saved(&folder), path.display());
    let program = crate::program::path();
    let mut limited = std::process::Command::new("sh");
    // In units of 512 bytes; the signal that goes with it is ignored, so that the write itself fails.
    limited.args(["-c", "trap '' XFSZ; ulimit -f 32; exec \"$0\" $1"]).arg(program).arg(&flags);
    let ended = Running::start(limited).end();
    assert_eq!(ended.code, Some(1), "{}", ended.err);
    assert_eq!(numbers(&lines(&path), "step", "step"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    for step in [2, 4, 6] {
        let told = format!("warning: no checkpoint of step {step}: rank 0 failed: ");
        assert!(ended.out.contains(&told) && ended.out.contains("File too large"), "{told}: {}", ended.out);
    }
    assert!(ended.err.contains("its last state was not saved: no checkpoint of step 6: "), "{}", ended.err);
    assert_eq!(names(&folder), ["lock"], "what was written is removed");
}

/// A file in the place of the folder: also root cannot write there.
#[test]
fn a_folder_that_cannot_be_made_is_refused_before_the_first_step() {
    let folder = folder("unwritable");
    fs::write(folder.join("run"), "").unwrap();
    let ended = run(&format!("{} --steps 2", saved(&folder)));
    assert!(matches!(ended.code, Some(1 | 2)), "{ended:?}");
    assert!(ended.err.contains(folder.join("run").to_str().unwrap()) && !ended.out.contains("step 1"), "{ended:?}");
}

/// The checkpoint has the weights in f32: a run goes on in another type on another mesh. The loss scale goes along.
#[test]
fn a_run_in_16_bits_goes_on_in_others_and_ends_with_a_sample() {
    let folder = folder("resume_half");
    let dir = folder.join("run");
    let flags = format!("{SMALL} --set optimizer.lr=0.01 --set checkpoint.dir={}", dir.display());
    let f16 = "--set training.dtype=f16 --set training.loss_scale_initial=4294967296";
    let first = succeed(&format!("{flags} {f16} --mesh dp=2 --steps 30 --set parallelism.zero_stage=1"));
    let skipped = "step 1/30  loss 5.5";
    assert!(first.contains(skipped), "{first}");
    assert!(first.contains("skipped: a gradient overflowed at loss scale 4294967296\nstep 2/30"), "{first}");
    let run = metrics(&folder, &format!("{flags} {f16} --mesh dp=2 --steps 40 --set checkpoint.resume=true"));
    let (losses, scales) = (numbers(&run, "step", "loss"), numbers(&run, "step", "loss_scale"));
    assert!(scales[0] < 1e7, "the scale of the run before: {scales:?}");
    assert!(losses.iter().all(|&loss| loss < 5.2), "{losses:?}");
    for (dtype, mesh, steps) in [("bf16", "pp=2", 45), ("f32", "tp=2", 50)] {
        let flags = format!("{flags} --set training.dtype={dtype} --mesh {mesh} --steps {steps}");
        let refused = crate::program::run(&format!("{flags} --set checkpoint.resume=true"));
        assert!(
            refused.code == Some(1) && refused.err.contains("training.dtype: the checkpoint has"),
            "{}",
            refused.err
        );
        let out = succeed(&format!("{flags} --set checkpoint.resume=true --set checkpoint.permit=training"));
        assert!(out.contains("A sample of the trained model:"), "{out}");
    }
}
