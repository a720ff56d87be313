//! The programs `partition` and `pipeline_only` as a user runs them: flags in; standard output and exit codes out.

#[path = "../example/mod.rs"]
mod example;

use serde_json::{Value, json};
use std::process::{Command, Stdio};

const VGG16: &str = "--profile crates/pipeline/tests/partition/profiles/vgg16.txt";

/// (exit code, standard output, standard error) of an example, from the root of the repository, and words without
/// spaces.
fn run(example: &str, line: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(example::program(example));
    command.args(line.split_whitespace()).current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
    let ended = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code(), text(ended.stdout), text(ended.stderr))
}

#[track_caller]
fn succeed(line: &str) -> String {
    let (code, out, err) = run("partition", line);
    assert_eq!((code, &*err), (Some(0), ""), "{line}\n{out}");
    out
}

#[test]
fn the_table_is_that_of_the_guide() {
    let guide = include_str!("../../docs/partition.md");
    let out = succeed(&format!("{VGG16} --machines 16 --bandwidth 3.125e9 --activation-compression-ratio 1"));
    assert!(guide.contains(&format!("```text\n{out}```")), "{out}");
}

#[test]
fn json_holds_what_scripts_read_the_outermost_level_first() {
    let json = |line: &str| -> Value { serde_json::from_str(&succeed(&format!("{VGG16} {line} --json"))).unwrap() };
    let flat = json("--machines 4 --bandwidth 1e9 --activation-compression-ratio 1");
    let keys: Vec<&String> = flat.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["states", "levels", "time_per_stage_s", "single_machine_s", "data_parallel_s"]);
    let stages = flat["levels"][0]["stages"].as_array().unwrap();
    let place = |stage: &Value| json!([stage["start"], stage["end"], stage["replication"]]);
    assert_eq!(stages.iter().map(place).collect::<Vec<_>>(), [json!([0, 17, 3]), json!([17, 40, 1])]);
    assert!((stages[1]["compute_s"].as_f64().unwrap() - 0.158297).abs() < 1e-6);
    assert_eq!((&flat["states"], flat["levels"].as_array().unwrap().len()), (&json!(40), 1));
    assert!((flat["time_per_stage_s"].as_f64().unwrap() - 0.205520896).abs() < 1e-9);

    // Two servers of three machines: 2 stages or copies outside, 3 inside each.
    let two = json("--machines 3,2 --bandwidth 1e10,1e9 --straight --method paper");
    let ends = |level: usize| -> Vec<u64> {
        two["levels"][level]["stages"].as_array().unwrap().iter().map(|stage| stage["end"].as_u64().unwrap()).collect()
    };
    let (outer, inner) = (ends(0), ends(1));
    assert_eq!((outer.len(), inner.len()), (2, 6));
    assert_eq!((inner[2], inner[5]), (outer[0], outer[1]));
}

#[test]
fn help_names_every_flag() {
    let out = succeed("--help");
    let flags = ["profile", "machines", "bandwidth", "method", "activation-compression-ratio", "straight", "json"];
    assert!(flags.iter().all(|flag| out.contains(&format!("--{flag}"))), "{out}");
}

#[test]
fn bad_input_is_refused_with_what_would_be_valid() {
    let sound = "--machines 4 --bandwidth 1e9";
    for (line, told) in [
        (String::new(), "--profile <FILE>\n  --machines <N,..>\n  --bandwidth <B,..>\n"),
        (sound.to_owned(), "--profile <FILE>\n"),
        (format!("--profile no/such/file {sound}"), "error: --profile no/such/file: cannot be read: No such file"),
        (
            format!("--profile Cargo.toml {sound}"),
            "error: --profile Cargo.toml, line 1: \"[workspace]\" is neither a layer nor an edge, such as",
        ),
        (
            format!("{VGG16} --machines 4,2 --bandwidth 1e9"),
            "error: --bandwidth 1000000000: for 1 levels, and --machines has 2; give each level both",
        ),
        (
            format!("{VGG16} --machines 4,0 --bandwidth 1e9,1e9"),
            "invalid value '0' for '--machines <N,..>': use whole numbers of at least 1, innermost level first",
        ),
        (
            format!("{VGG16} --machines -4 --bandwidth 1e9"),
            "invalid value '-4' for '--machines <N,..>': use whole numbers of at least 1",
        ),
        (
            format!("{VGG16} --machines 4 --bandwidth fast"),
            "invalid value 'fast' for '--bandwidth <B,..>': use bytes per second of at least 1",
        ),
        (
            format!("{VGG16} {sound} --method both"),
            "invalid value 'both' for '--method <METHOD>'\n  [possible values: code, paper]",
        ),
        (
            format!("{VGG16} {sound} --activation-compression-ratio 0"),
            "invalid value '0' for '--activation-compression-ratio <R>': use a number above 0",
        ),
        (
            format!("{VGG16} {sound} --strait"),
            "unexpected argument '--strait' found\n\n  tip: a similar argument exists: '--straight'",
        ),
        (format!("{VGG16} {sound} --method"), "a value is required for '--method <METHOD>' but none was supplied"),
        (
            format!("{VGG16} --machines 41 --bandwidth 1e9 --straight"),
            "error: a straight pipeline over 41 machines needs as many stages, and there can be only 40",
        ),
        (format!("{VGG16} --machines 5000 --bandwidth 1e9"), "error: 5000 machines on level 1; use 1 to 4096"),
    ] {
        let (code, out, err) = run("partition", &line);
        assert_eq!((code, &*out), (Some(2), ""), "{line}\n{err}");
        assert!(err.contains(told), "{line}\n{err}\n{told}");
    }
}

#[test]
fn a_network_on_plain_vectors_trains_through_the_pipeline() {
    let (code, out, err) = run("pipeline_only", "");
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    let loss = |line: &str| -> f64 { line.split([' ', ',']).filter_map(|word| word.parse().ok()).next_back().unwrap() };
    let lines: Vec<&str> = out.lines().collect();
    let [first, .., last, same] = &lines[..] else { panic!("{out}") };
    assert!(loss(last) < loss(first) / 2.0, "{out}");
    assert!(first.contains("zb_h1") && last.contains("interleaved_1f1b"), "{out}");
    assert_eq!(*same, "The weights are the same, bit for bit.");
}
