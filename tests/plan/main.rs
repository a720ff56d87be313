//! The program `plan` as a user runs it: flags in; standard output, standard error and exit codes out.

#[path = "../example/mod.rs"]
mod example;

use serde_json::Value;
use std::process::{Command, Stdio};

/// (exit code, standard output, standard error) of words without spaces, from the root of the repository.
fn run(line: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(example::program("plan"));
    command.args(line.split_whitespace()).current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null());
    let ended = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code(), text(ended.stdout), text(ended.stderr))
}

fn lines(line: &str) -> Vec<Value> {
    let (code, out, err) = run(line);
    assert_eq!(code, Some(0), "{line}: {err}");
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn bad_input_ends_with_what_would_be_valid() {
    for (line, words) in [
        ("", "--cluster"),
        ("--cluster dgx-h1000", "there is no cluster \"dgx-h1000\"; known: dgx-a100, dgx-h100"),
        ("--cluster dgx-h100 --cards 12", "12 cards are no whole hosts; use a multiple of 8, or 1 to 8"),
        ("--cluster dgx-h100 --cards 8 --set parallelism.tpp=2", "the nearest is parallelism.tp"),
        (
            "--cluster dgx-h100 --cards 8 --one --set parallelism.dp=16",
            "the configuration has 16 ranks; use --cards 16",
        ),
        ("--cluster dgx-h100 --tokens-per-batch many", "--tokens-per-batch"),
        ("--errors --system meshwork", "cannot be used with"),
        ("--table crates/plan/published/vtrain.toml --name nodes", "multi_node"),
        ("--table crates/plan/published/vtrain.toml --name multi_node --system nobody", "megatron-deepspeed-a100"),
    ] {
        let (code, out, err) = run(line);
        assert_eq!((code, &*out), (Some(2), ""), "{line}: {err}");
        assert!(err.contains(words), "{line}: {err}");
    }
}

/// The names are those that scripts read.
#[test]
fn a_search_and_one_configuration_are_told_in_json() {
    let search = "--cluster dgx-h100 --cards 2 --preset tiny --tokens-per-batch 16K --json";
    let found = lines(search);
    assert!(found.len() > 2 && found == lines(search), "{found:?}");
    let one = "--cluster dgx-h100 --cards 2 --one --set parallelism.tp=2 --set model.preset=tiny";
    let [one] = &lines(one)[..] else { panic!("not one line") };
    for line in found.iter().chain([one]) {
        assert!(line["predicted_s"].as_f64().unwrap() > 0.0 && line["memory_bytes"].as_u64().unwrap() > 0, "{line}");
        assert_eq!(line["fits"], true, "{line}");
    }
}

/// By how much it does not fit, and what holds it.
#[test]
fn a_model_that_fits_nowhere_is_told_with_the_nearest_cluster_that_holds_it() {
    let (code, _, err) = run("--cluster dgx-h100 --cards 1 --tokens-per-batch 16K --set model.num_layers=2 --set \
                              model.hidden_size=32768 --set model.num_heads=256 --set model.seq_len=1024");
    assert_eq!(code, Some(2), "{err}");
    for words in ["nothing fits: the smallest plan takes", "GB too much", "the nearest that fits are", "gpt_train"] {
        assert!(err.contains(words), "{words}: {err}");
    }
}
