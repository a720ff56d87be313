//! What a person sees: texts that fit 80 columns, and the steps of a run on any terminal.

use crate::program::{SMALL, UNSAMPLED, folder, path, succeed};
use std::process::Command;

#[track_caller]
fn fits(line: &str) {
    let out = succeed(line);
    let wide: Vec<&str> = out.lines().filter(|line| line.chars().count() > 80 && line.contains(' ')).collect();
    assert!(!out.is_empty() && wide.iter().all(|line| one_word(line)), "{line}:\n{}", wide.join("\n"));
}

/// A word that is longer than the terminal is wide, such as a path, stays whole.
fn one_word(line: &str) -> bool {
    line.split_whitespace().any(|word| word.chars().count() > 60)
}

#[test]
fn texts_and_tables_fit_80_columns() {
    fits("--help");
    for mesh in [
        "--mesh dp=1",
        "--mesh dp=2,tp=2,pp=2",
        "--set model.preset=gpt2 --mesh dp=8,tp=4,pp=4 --set training.global_batch_size=512",
        "--set model.preset=llama-tiny --mesh tp=4,pp=2 --set parallelism.sequence_parallel=true",
        "--set moe.num_experts=8 --set parallelism.ep=4 --set parallelism.dp=4 --set parallelism.zero_stage=3",
        "--set model.preset=llama3-8b --mesh dp=4,tp=8,pp=4 --set training.global_batch_size=64",
        "--mesh dp=2 --set compress.gradients=topk:0.01 --set memory.offload=all --set memory.offload_dir=.",
    ] {
        fits(&format!("{mesh} --steps 0"));
    }
    // With as many micro-batches as there can be: fewer settings to try.
    let wider =
        "--mesh dp=2,tp=3,pp=2 --set model.num_heads=6 --set model.hidden_size=96 --set training.global_batch_size=8";
    for mesh in ["--mesh dp=2,pp=2", wider] {
        fits(&format!("{mesh} --plan-memory"));
    }
    let trace = folder("narrow").join("t.json");
    fits(&format!(
        "{SMALL} {UNSAMPLED} --mesh dp=2,tp=2 --steps 2 --set metrics.profile=true --set metrics.trace={}",
        trace.display()
    ));
}

/// A terminal that cannot move its cursor gets the lines that a file would.
#[cfg(unix)]
#[test]
fn a_terminal_that_draws_no_bar_has_the_steps_as_lines() {
    let script = |terminal: &str| {
        let line = format!("{terminal} {} {SMALL} {UNSAMPLED} --steps 3", path().display());
        Command::new("script").args(["-qec", &line, "/dev/null"]).output()
    };
    for terminal in ["TERM=dumb", "env -u TERM", "TERM=dumb NO_COLOR=1", "env -u TERM CI=1"] {
        let Ok(ended) = script(terminal) else { return eprintln!("left out: there is no program `script`") };
        let out = String::from_utf8_lossy(&ended.stdout).into_owned();
        assert!(ended.status.success(), "{terminal}: {out}");
        for step in 1..=3 {
            assert!(out.contains(&format!("step {step}/3  loss ")), "{terminal}: {out}");
        }
    }
    let bar = String::from_utf8_lossy(&script("TERM=xterm").unwrap().stdout).into_owned();
    assert!(bar.contains("3/3 ") && !bar.contains("step 3/3"), "{bar}");
}
