//! The program `digits` as a user runs it: flags in; standard output and exit codes out. Both networks must learn to
//! read real images, over the pipeline.

use std::path::Path;
use std::process::{Command, Stdio};

/// (exit code, standard output, standard error) of a command line of words without spaces.
fn run(line: &str) -> (Option<i32>, String, String) {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let program = profile.join("examples").join(format!("digits{}", std::env::consts::EXE_SUFFIX));
    assert!(
        program.is_file(),
        "{} is missing: build it with `cargo build --features digits --example digits`",
        program.display()
    );
    let ended = Command::new(program).args(line.split_whitespace()).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code(), text(ended.stdout), text(ended.stderr))
}

#[track_caller]
fn succeed(line: &str) -> String {
    let (code, out, err) = run(line);
    assert_eq!((code, &*err), (Some(0), ""), "{line}\n{out}");
    out
}

/// The number in a line between two words.
#[track_caller]
fn number(line: &str, before: &str, after: &str) -> f64 {
    let (_, rest) = line.rsplit_once(before).unwrap_or_else(|| panic!("no {before} in {line}"));
    rest.split_once(after).and_then(|(number, _)| number.trim().parse().ok()).unwrap_or_else(|| panic!("{line}"))
}

/// Both networks, on other cuts, with and without re-materialisation, from several seeds. Most reach 98%.
#[test]
fn both_networks_read_more_than_95_of_100_digits_that_they_never_saw() {
    for line in [
        "--model resnet --pp 2 --schedule gpipe --micro 4 --recompute",
        "--model resnet --pp 2 --schedule interleaved_1f1b --virtual 3 --seed 1",
        "--model vgg --pp 4 --schedule 1f1b --seed 2",
        "--model vgg --pp 2 --dp 2 --micro 2 --seed 3",
    ] {
        let out = succeed(line);
        assert_eq!(out.lines().count(), 1 + 8, "a head and a line for each epoch\n{out}");
        let last = out.lines().last().unwrap();
        assert!(number(last, "accuracy ", "%") > 95.0, "{line}\n{out}");
        assert!(number(last, "epoch  8 | loss ", " ") < 0.1, "{line}\n{out}");
    }
}

#[test]
fn stages_and_rematerialisation_change_no_number() {
    let of = |line: &str| {
        let out = succeed(&format!("--epochs 1 {line}"));
        let epoch = out.lines().last().unwrap().to_owned();
        let (numbers, memory) = epoch.split_once(" | peak ").unwrap();
        (numbers.to_owned(), number(&format!("peak {memory}"), "peak ", " MiB"))
    };
    let (alone, whole) = of("--pp 1");
    for line in ["--pp 2", "--pp 6 --schedule=gpipe", "--pp 4 --schedule 1f1b", "--pp 2 --schedule zb_v"] {
        assert_eq!(of(line).0, alone, "{line}");
    }
    let (again, less) = of("--pp 1 --recompute");
    assert_eq!(again, alone);
    assert!(less < whole, "{less} MiB of {whole}");
}

#[test]
fn bad_flags_end_with_2_and_what_would_be_valid() {
    let (code, out, err) = run("--modle vgg --pp 0 --schedule gpip");
    assert_eq!((code, &*out), (Some(2), ""));
    let lines: Vec<&str> = err.lines().collect();
    assert_eq!(lines.len(), 3, "all faults at once\n{err}");
    assert!(
        lines[0].starts_with("error: --modle: unknown flag; the nearest is --model; use one of --model, "),
        "{err}"
    );
    assert_eq!(lines[1], "--pp 0: expected 1 to 4096; --help says what --pp takes");
    assert!(lines[2].starts_with("--schedule gpip: unknown; the nearest is gpipe; use one of gpipe, 1f1b, "), "{err}");
    let help = succeed("--help");
    for flag in [
        "--model",
        "--pp",
        "--dp",
        "--schedule",
        "--virtual",
        "--micro",
        "--batch",
        "--recompute",
        "--epochs",
        "--seed",
    ] {
        assert!(help.contains(flag), "{flag}\n{help}");
    }
}
