//! The program `mesh_diff` as a user runs it: flags in; standard output and exit codes out.

#[path = "../example/mod.rs"]
mod example;

use std::path::Path;
use std::process::{Command, Stdio};

/// A model that trains in an instant.
const SMALL: &str =
    "--set model.hidden_size=16 --set model.num_layers=2 --set model.seq_len=16 --set training.global_batch_size=8";

/// (exit code, standard output, standard error) of a command line of words without spaces.
fn run(line: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(example::program("mesh_diff"));
    // The kernels of the emulated device are kept among the files of the tests.
    command.env("XDG_CACHE_HOME", Path::new(env!("CARGO_TARGET_TMPDIR")).join("caches"));
    let ended = command.args(line.split_whitespace()).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code(), text(ended.stdout), text(ended.stderr))
}

#[track_caller]
fn succeed(line: &str) -> String {
    let (code, out, err) = run(&format!("{line} {SMALL}"));
    assert_eq!((code, &*err), (Some(0), ""), "{line}\n{out}");
    out
}

#[test]
fn the_same_mesh_twice_is_identical() {
    let out = succeed("--mesh dp=2,tp=2 --mesh tp=2,dp=2 --steps 2");
    let side = "dp=2,tp=2,pp=1, 1f1b, 1 micro-batch of 4";
    let tensors =
        out.strip_prefix(&format!("A: {side}\nB: {side}\nidentical: 2 steps, ")).unwrap_or_else(|| panic!("{out}"));
    let tensors: u32 = tensors.strip_suffix(" tensors\n").unwrap_or_else(|| panic!("{out}")).parse().unwrap();
    // Each of two steps has 28 parameters with gradient, weights and two states, and further values.
    assert!(tensors > 2 * 4 * 28, "{out}");
}

#[test]
fn a_side_can_be_set_alone() {
    let out = succeed(
        "--mesh pp=2 --mesh=pp=2 --set-b pipeline.schedule=gpipe --set-a=pipeline.num_microbatches=2 --steps=1",
    );
    assert!(out.starts_with("A: dp=1,tp=1,pp=2, 1f1b, 2 micro-batches of 4\nB: dp=1,tp=1,pp=2, gpipe, "), "{out}");
    // With four micro-batches or two, each sample is computed with the same bits, but sums over samples are not.
    let (_, first) = out.split_once("\nthe first to differ: step 1, the ").unwrap_or_else(|| panic!("{out}"));
    assert!(first.starts_with("loss\n") || first.starts_with("reduced gradient of "), "{out}");
    let values: Vec<&str> = out.lines().filter(|line| line.starts_with("  bias_residual ")).collect();
    assert!(values.len() == 2 && values.iter().all(|line| line.contains(" 100.00% ")), "{out}");
}

#[test]
fn every_axis_of_a_side_is_told() {
    let mesh = "--mesh dp=2,cp=2,ep=2 --set moe.num_experts=4";
    let out = succeed(&format!("--mesh dp=2 {mesh} --set parallelism.context_parallel_method=ring --steps 1"));
    assert!(out.contains("A: dp=2,tp=1,pp=1, ") && out.contains("B: dp=2,tp=1,pp=1,cp=2,ep=2, "), "{out}");
}

#[test]
fn two_meshes_in_fast_numerics_show_a_table() {
    let out = succeed("--mesh dp=1 --mesh dp=2,tp=2,pp=2 --steps 1 --numerics fast");
    let rows = ["forward", "  causal_attention", "backward", "  linear_bias_gelu", "step", "  optimizer states"];
    for row in rows {
        assert!(out.lines().any(|line| line == row || line.starts_with(&format!("{row} "))), "{row} in\n{out}");
    }
    let head: Vec<&str> = out.lines().nth(4).unwrap_or_default().split_whitespace().collect();
    assert_eq!(head, ["tensors", "elements", "identical", "median", "99%", "max", "error", "first", "at"], "{out}");
    assert!(out.contains("\nnothing differs by more than rounding\n"), "{out}");
}

#[test]
fn a_fault_is_found_where_it_was_put() {
    let out = succeed("--mesh dp=2,tp=2 --mesh dp=2,tp=2 --steps 1 --break causal_attention:backward");
    let (_, broken) = out.split_once("\nchanged on purpose: ").unwrap();
    let place = "backward: gradient of qkv by operation #6, causal_attention (after h.0.attn.qkv)";
    assert!(broken.starts_with(place), "{out}");
    assert!(out.contains(&format!("\nthe first to differ: step 1, {place}\n")), "{out}");
}

#[test]
fn canonical_numerics_are_a_promise_and_the_exit_code_tells() {
    let meshes = "--mesh dp=1 --mesh dp=2,tp=2,pp=2 --numerics canonical";
    let out = succeed(meshes);
    assert!(out.contains("\nidentical: 3 steps, "), "{out}");
    let (code, out, err) = run(&format!("{meshes} --break bias_residual {SMALL}"));
    assert_eq!((code, &*err), (Some(1), ""), "{out}");
    let place = "forward: output of operation #9, bias_residual (h.0.attn.out)";
    assert!(out.contains(&format!("\nthe first divergence: step 1, {place}\n")), "{out}");
    assert!(!out.contains("median"), "no table: {out}");
}

/// Four ranks that share two heads of keys and values gather them, which one rank does not.
#[test]
fn a_ready_model_is_compared_on_a_mesh_that_gathers_keys_and_values() {
    let line = "--mesh dp=1 --mesh tp=4 --numerics canonical --set model.preset=llama-tiny --steps 1 \
                --set training.global_batch_size=2 --set model.seq_len=16";
    let (code, out, err) = run(line);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    assert!(out.contains("\nidentical: 1 step, "), "{out}");
}

/// Each (command line, parts of the faults, in their order).
#[test]
fn bad_input_is_told_at_once() {
    let cases: [(&str, &[&str]); 9] = [
        ("", &["--mesh: two meshes are compared, and none is given; use --mesh A --mesh B"]),
        ("--mesh dp=2", &["--mesh dp=2: two meshes are compared, not 1; use --mesh A --mesh B"]),
        ("--mesh dp=2 --mesh dp=2 --mesh dp=2", &["--mesh dp=2 dp=2 dp=2: two meshes are compared, not 3; "]),
        (
            "--mesh dp=2 --mesh tp=3",
            &["model.hidden_size = 16: is not divisible by parallelism.tp = 3; ", "model.num_heads"],
        ),
        (
            "--mesh dp=2 --mesh xp=3 --stepps 3",
            &["--stepps: unknown flag; the nearest is --steps; ", "--mesh xp=3: unknown axis; "],
        ),
        // A fault of both sides is reported once.
        ("--mesh dp=1 --mesh dp=2 --set model.num_head=3", &["model.num_head = 3 (from --set): unknown key; "]),
        ("--mesh dp=1 --mesh dp=2 --steps 0 --set-b", &["--steps 0: expected 1 or more; ", "--set-b: no value; "]),
        (
            "--mesh dp=1 --mesh dp=2 --break layernorm",
            &[
                "--break layernorm: no operation of that name; the nearest is layer_norm; use one of vocab_parallel_embedding, ",
            ],
        ),
        (
            "--mesh dp=1 --mesh dp=2 --set-b model.num_layers=1",
            &[
                "--mesh dp=1 dp=2: the two runs cannot be compared: A has a parameter h.1.ln_1.weight [16] where B has ln_f.weight [16]; ",
            ],
        ),
    ];
    for (line, parts) in cases {
        let (code, out, err) = run(&format!("{line} {SMALL}"));
        let told = err.strip_prefix("error: ").unwrap_or_default();
        assert_eq!((code, &*out), (Some(2), ""), "{line}: {err}");
        for part in parts {
            assert_eq!(told.matches(part).count(), 1, "{line}: {part} in\n{err}");
        }
        let first_line = told.lines().next().unwrap_or_default();
        assert!(first_line.starts_with(parts[0]), "{line}\n{err}");
    }
}

#[test]
fn help_names_every_flag() {
    let (code, out, err) = run("--help");
    assert_eq!((code, &*err), (Some(0), ""));
    for flag in
        ["--mesh", "--steps", "--config", "--data", "--device", "--set", "--set-a", "--set-b", "--numerics", "--break"]
    {
        assert!(out.lines().any(|line| line.trim_start().starts_with(&format!("{flag} "))), "{flag} in\n{out}");
    }
}

/// The bits of the CPU on a mesh of emulated CUDA devices, and a fault on one of them is named by the operation that
/// has it.
#[cfg(feature = "emulator")]
#[test]
fn sides_may_have_different_devices() {
    if Command::new("g++").arg("--version").output().is_err() || !cfg!(target_arch = "x86_64") {
        return eprintln!("left out: there is no g++, or this is not x86-64");
    }
    let devices = "--device cpu --device cuda-emulated:5 --numerics canonical --steps 2";
    let out = succeed(&format!("--mesh dp=1 --mesh dp=2,tp=2,pp=2 {devices}"));
    assert!(out.contains("\nidentical: 2 steps, "), "{out}");
    let (code, out, err) = run(&format!("--mesh dp=1 --mesh tp=2 {devices} --break bias_residual {SMALL}"));
    assert_eq!((code, &*err), (Some(1), ""), "{out}");
    let place = "forward: output of operation #9, bias_residual (h.0.attn.out)";
    assert!(out.contains(&format!("\nthe first divergence: step 1, {place}\n")), "{out}");
    let (code, _, err) = run(&format!("--mesh dp=1 --mesh dp=1 {devices} --device cpu {SMALL}"));
    let told = "error: --device cpu cuda-emulated:5 cpu: two sides are compared, and 3 devices are given; give one for both, or one for each\n";
    assert_eq!((code, &*err), (Some(2), told));
}
