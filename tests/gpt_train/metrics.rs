//! The metrics file, line by line, and what must not depend on the mesh or the run.

use crate::program::{SMALL, events, folder, metrics, numbers, succeed};
use serde_json::{Map, Value};
use std::fs;

fn keys(object: &Value) -> Vec<&str> {
    object.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn every_line_has_every_field() {
    let mesh = "--mesh dp=2,tp=2,pp=2 --steps 5 --set validation.every=2";
    let run = metrics(&folder("fields"), &format!("{SMALL} {mesh}"));
    let order: Vec<&str> = run.iter().map(|line| line["event"].as_str().unwrap()).collect();
    assert_eq!(order, ["start", "step", "step", "validation", "step", "step", "validation", "step", "end"]);

    let start = &run[0];
    assert_eq!(keys(start), ["event", "version", "mesh", "parameters", "data_hash", "memory_predicted", "config"]);
    assert_eq!(start["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(start["mesh"], serde_json::json!({"dp": 2, "tp": 2, "pp": 2, "cp": 1, "ep": 1}));
    let block = 12 * 16 * 16 + 13 * 16;
    assert_eq!(start["parameters"], (256 + 16) * 16 + 2 * block + 2 * 16);
    assert_eq!(start["data_hash"], "9077de3e4cc85b18", "the built-in text drifts");
    let config = &start["config"];
    let sections = [
        "model",
        "lora",
        "parallelism",
        "moe",
        "pipeline",
        "training",
        "dpo",
        "optimizer",
        "lr_scheduler",
        "data",
        "validation",
        "memory",
        "checkpoint",
        "metrics",
        "comm",
        "cuda",
        "compress",
        "numerics",
        "device",
    ];
    assert_eq!(keys(config), sections);
    // Resolved: defaults are included, and given values replace them.
    assert_eq!((&config["model"]["hidden_size"], &config["model"]["ffn_hidden_size"]), (&16.into(), &64.into()));
    assert_eq!(
        (&config["pipeline"]["num_microbatches"], &config["training"]["micro_batch_size"]),
        (&4.into(), &1.into())
    );
    assert_eq!((&config["lr_scheduler"]["decay_steps"], &config["data"]["path"]), (&5.into(), &Value::Null));

    for (place, step) in events(&run, "step").into_iter().enumerate() {
        let fields =
            ["event", "step", "loss", "grad_norm", "lr", "step_ms", "tokens_per_s", "comm_bytes", "peak_bytes"];
        assert_eq!(keys(step), [&fields[..], &["compute_ms", "wait_ms"]].concat());
        for times in ["compute_ms", "wait_ms"].map(|key| step[key].as_array().unwrap()) {
            assert!(times.len() == 8 && times.iter().all(|time| time.as_f64().unwrap() >= 0.0), "{step}");
        }
        assert_eq!((step["step"].as_u64(), step["lr"].as_f64()), (Some(place as u64 + 1), Some(3e-4)));
        let number = |key: &str| step[key].as_f64().unwrap();
        assert!((4.0..6.0).contains(&number("loss")) && number("grad_norm") > 0.0, "{step}");
        let tokens = number("tokens_per_s") * number("step_ms") / 1e3;
        assert!((tokens - 8.0 * 16.0).abs() < 1e-6, "{tokens}");
        for axis in ["dp", "tp", "pp"] {
            assert!(step["comm_bytes"][axis].as_u64().unwrap() > 0, "{axis} in {step}");
        }
        assert_eq!(step["comm_bytes"]["cp"], 0);
        let peaks = step["peak_bytes"].as_array().unwrap();
        assert!(peaks.len() == 8 && peaks.iter().all(|peak| peak.as_u64().unwrap() > 10_000), "{step}");
    }
    for validation in events(&run, "validation") {
        assert_eq!(keys(validation), ["event", "step", "loss"]);
    }
    let end = run.last().unwrap();
    assert_eq!(keys(end), ["event", "steps", "loss", "seconds", "memory_measured"]);
    let ranks = |line: &Value, key: &str| line[key].as_array().unwrap().clone();
    let (predicted, measured) = (ranks(start, "memory_predicted"), ranks(end, "memory_measured"));
    assert_eq!((predicted.len(), measured.len()), (8, 8));
    for (rank, (predicted, measured)) in predicted.iter().zip(&measured).enumerate() {
        let categories = ["parameters", "gradients", "optimizer", "activations", "buffers", "other"];
        assert_eq!((keys(predicted), keys(measured)), (categories.to_vec(), categories.to_vec()));
        for category in categories {
            let [predicted, measured] = [predicted, measured].map(|bytes| bytes[category].as_f64().unwrap());
            assert!(
                (predicted - measured).abs() <= 0.05 * measured,
                "{category} of rank {rank}: {predicted}, {measured}"
            );
        }
    }
    let last = numbers(&run, "step", "loss")[4];
    assert_eq!((end["steps"].as_u64(), end["loss"].as_f64()), (Some(5), Some(last)));
    assert!(end["seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn numbers_are_in_full_precision() {
    let folder = folder("precision");
    let path = folder.join("run.jsonl");
    let shown = succeed(&format!("{SMALL} --steps 9 --metrics {}", path.display()));
    let text = fs::read_to_string(&path).unwrap();
    let mut beyond_f32 = 0;
    for (line, shown) in text.lines().skip(1).take(9).zip(shown.lines()) {
        let (_, rest) = line.split_once("\"loss\":").unwrap();
        let written = rest.split([',', '}']).next().unwrap();
        let loss: f64 = written.parse().unwrap();
        // The shortest text that gives exactly these bits: nothing was rounded.
        assert_eq!(format!("{loss:?}"), written);
        assert!(shown.contains(&format!("  loss {loss:.4}  ")), "{shown}");
        beyond_f32 += usize::from(f64::from(loss as f32) != loss);
    }
    assert_eq!(beyond_f32, 9, "{text}");
}

/// A line without times.
fn timeless(line: &Value) -> Map<String, Value> {
    let mut line = line.as_object().unwrap().clone();
    line.retain(|key, _| !["step_ms", "tokens_per_s", "seconds", "compute_ms", "wait_ms"].contains(&key.as_str()));
    line
}

#[test]
fn two_runs_of_a_mesh_are_bit_identical() {
    let folder = folder("twice");
    for line in [
        "--mesh dp=2,tp=2,pp=2 --set validation.every=2",
        "--mesh dp=4,tp=2 --set parallelism.sequence_parallel=true --set model.dropout=0.1",
    ] {
        let line = format!("{SMALL} --steps 6 {line}");
        let [first, second] = [(); 2].map(|()| metrics(&folder, &line).iter().map(timeless).collect::<Vec<_>>());
        assert_eq!(first, second);
    }
}

#[test]
fn every_mesh_gives_the_same_numbers() {
    let folder = folder("meshes");
    let settings = "--set model.num_layers=4 --set training.global_batch_size=16 --set validation.every=3 --steps 8";
    let run = |mesh: &str| metrics(&folder, &format!("{SMALL} {settings} {mesh}"));
    let one = run("--mesh dp=1");
    assert_eq!(numbers(&one, "validation", "step"), [3.0, 6.0]);
    for mesh in [
        "--mesh dp=4",
        "--mesh tp=4",
        "--mesh pp=4 --set pipeline.schedule=gpipe",
        "--mesh dp=2,tp=4,pp=2",
        "--mesh pp=2,dp=2,tp=2 --set parallelism.sequence_parallel=true --set pipeline.num_microbatches=2",
        "--set training.micro_batch_size=1",
    ] {
        let other = run(mesh);
        for (kind, key) in [("step", "loss"), ("step", "grad_norm"), ("validation", "loss"), ("validation", "step")] {
            let (expected, got) = (numbers(&one, kind, key), numbers(&other, kind, key));
            let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * a.abs();
            assert!(
                expected.len() == got.len() && expected.iter().zip(&got).all(near),
                "{mesh}: {kind} {key}\n{expected:?}\n{got:?}"
            );
        }
        assert_eq!(one[0]["parameters"], other[0]["parameters"]);
        assert_eq!(one[0]["data_hash"], other[0]["data_hash"]);
    }
}

#[test]
fn validation_comes_when_asked() {
    let folder = folder("validation");
    for (every, steps, expected) in
        [(0, 4, &[][..]), (1, 2, &[1.0, 2.0]), (2, 4, &[2.0, 4.0]), (3, 4, &[3.0]), (9, 4, &[])]
    {
        let run = metrics(&folder, &format!("{SMALL} --steps {steps} --set validation.every={every}"));
        assert_eq!(numbers(&run, "validation", "step"), expected, "every {every}");
    }
    // Held-out data is not trained on, and validation does not affect training.
    let plain = metrics(&folder, &format!("{SMALL} --steps 4 --set data.shuffle=false"));
    let validated = metrics(&folder, &format!("{SMALL} --steps 4 --set data.shuffle=false --set validation.every=1"));
    assert_eq!(numbers(&plain, "step", "loss"), numbers(&validated, "step", "loss"));
}

#[test]
fn a_profile_prints_a_table_and_leaves_a_timeline() {
    let path = folder("profile").join("trace.json");
    let profile = format!("--set metrics.profile=true --set metrics.trace={}", path.display());
    let out = succeed(&format!("{SMALL} --mesh dp=2,tp=2 --steps 3 {profile}"));
    let table = out.split_once("\nA step takes ").unwrap_or_else(|| panic!("no table in\n{out}")).1;
    assert!(table.lines().next().unwrap().ends_with(" ms: mean of steps 2 to 3 on 4 ranks."), "{table}");
    for class in
        ["products", "attention", "norm", "pointwise", "loss", "optimizer", "communication", "waiting", "the rest"]
    {
        assert_eq!(table.lines().filter(|line| line.starts_with(class)).count(), 1, "{class} in\n{table}");
    }
    assert!(out.contains("\nA sample of the trained model:\n"), "{out}");
    let trace: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let tracks = trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == "thread_name");
    let names: Vec<&str> = tracks.map(|event| event["args"]["name"].as_str().unwrap()).collect();
    assert_eq!(names[3], "rank 3 (dp=1,tp=1,pp=0)");
    assert_eq!(names.len(), 4);
}
