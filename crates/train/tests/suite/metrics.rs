//! The exact lines of a metrics file.

use meshwork_engine::ReportedStatistic;
use meshwork_tensor::MemoryUse;
use meshwork_train::config::{Args, Config};
use meshwork_train::load;
use meshwork_train::metrics::{Event, Experts, Metrics, Start, Step};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;

fn step(loss: f64) -> Step {
    Step {
        step: 1,
        loss,
        grad_norm: 0.1 + 0.2,
        lr: 3e-4,
        step_ms: 12.5,
        tokens_per_s: 1000.0,
        comm_bytes: vec![("dp".to_owned(), 7), ("tp".to_owned(), 0)],
        offload: None,
        peak_bytes: vec![5, 6],
        compute_ms: vec![1.5, 2.5],
        wait_ms: vec![0.5, 0.25],
        loss_scale: None,
        skipped: false,
        masked: false,
        moe: None,
        dpo: None,
    }
}

#[test]
fn lines_are_those_of_the_contract() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("run.jsonl");
    fs::write(&path, "an old run\n").unwrap();
    let config = Config::from_args(&Args::parse(["--mesh", "dp=2,tp=4"])).unwrap();
    let mut metrics = Metrics::create(&path).unwrap();
    let mut lines = |event| {
        metrics.write(&event).unwrap();
        // Each line is written at once, not when the file is closed.
        fs::read_to_string(&path).unwrap()
    };
    let start =
        lines(Event::Start(Start::new(&config, 123, "abc".to_string(), vec![MemoryUse::new([1, 2, 3, 4, 5, 6])])));
    let version = env!("CARGO_PKG_VERSION");
    let prefix = format!(
        "{{\"event\":\"start\",\"version\":\"{version}\",\"mesh\":{{\"dp\":2,\"tp\":4,\"pp\":1,\"cp\":1,\"ep\":1}},\
         \"parameters\":123,\"data_hash\":\"abc\",\"memory_predicted\":[{{\"parameters\":1,\"gradients\":2,\"optimizer\":3,\
         \"activations\":4,\"buffers\":5,\"other\":6}}],\"config\":{{\"model\":{{\"preset\":\"tiny\","
    );
    assert!(start.starts_with(&prefix), "{start}");
    let value: serde_json::Value = serde_json::from_str(&start).unwrap();
    assert_eq!(value["config"]["optimizer"]["lr"], 3e-4);
    assert_eq!(value["config"]["data"]["path"], serde_json::Value::Null);

    lines(Event::Step(step(5.540000000000001)));
    lines(Event::Step(step(f64::NAN)));
    lines(Event::Validation { step: 1, loss: 5.5, loss_uncompressed: None, dpo: None });
    let text = lines(Event::End {
        steps: 1,
        loss: Some(5.25),
        masked_steps: 0,
        seconds: 0.5,
        memory_measured: vec![MemoryUse::default()],
        launches: None,
    });
    let rest: Vec<&str> = text.lines().skip(1).collect();
    let tail = "\"grad_norm\":0.30000000000000004,\"lr\":0.0003,\"step_ms\":12.5,\"tokens_per_s\":1000.0,\
                \"comm_bytes\":{\"dp\":7,\"tp\":0},\"peak_bytes\":[5,6],\"compute_ms\":[1.5,2.5],\"wait_ms\":[0.5,0.25]}";
    assert_eq!(
        rest,
        [
            &format!("{{\"event\":\"step\",\"step\":1,\"loss\":5.540000000000001,{tail}"),
            &format!("{{\"event\":\"step\",\"step\":1,\"loss\":null,{tail}"),
            "{\"event\":\"validation\",\"step\":1,\"loss\":5.5}",
            "{\"event\":\"end\",\"steps\":1,\"loss\":5.25,\"seconds\":0.5,\"memory_measured\":[{\"parameters\":0,\"gradients\":0,\
             \"optimizer\":0,\"activations\":0,\"buffers\":0,\"other\":0}]}",
        ]
    );
}

/// Two layers, each with 12 tokens on four experts: the largest loads are 6 and 3, and the mean is 3. So the imbalances
/// are 2 and 1.
#[test]
fn experts_have_their_load_in_the_lines() {
    let load = |layer: &str, sums: &[f64]| ReportedStatistic {
        name: "moe_tokens",
        buffer: format!("{layer}.tokens"),
        sums: sums.to_vec(),
    };
    let other = ReportedStatistic { name: "other", ..load("x", &[7.0]) };
    let statistics = [load("h.1.mlp.router", &[6.0, 4.0, 0.0, 2.0]), other, load("h.3.mlp.router", &[3.0; 4])];
    let metrics = [("accuracy", 0.5), ("moe_aux_loss", 2.25), ("moe_dropped", 0.125)];
    let moe = Experts::from_report(&metrics, &statistics);
    let step = Step { moe, ..step(5.0) };
    assert_eq!(
        serde_json::to_value(&step).unwrap()["moe"].to_string(),
        "{\"load_imbalance\":1.5,\"aux_loss\":2.25,\"dropped\":0.125,\
         \"tokens\":{\"h.1.mlp.router\":[6,4,0,2],\"h.3.mlp.router\":[3,3,3,3]}}"
    );
    let shown: Vec<_> = step.scalars().into_iter().filter(|(tag, _)| tag.starts_with("moe/")).collect();
    assert_eq!(shown.len(), 3);
    assert_eq!(shown[0], ("moe/load_imbalance".to_owned(), 1.5));
    assert_eq!(Experts::from_report(&metrics[..1], &[]), None, "a model without experts");
}

#[test]
fn a_file_that_cannot_be_written_is_an_error() {
    let error = Metrics::create(Path::new("no/such/folder/run.jsonl")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot write metrics to no/such/folder/run.jsonl: No such file or directory (os error 2)"
    );
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_an_error_of_the_line() {
    let mut metrics = Metrics::create(Path::new("/dev/full")).unwrap();
    let error =
        metrics.write(&Event::Validation { step: 1, loss: 0.0, loss_uncompressed: None, dpo: None }).unwrap_err();
    assert!(error.to_string().starts_with("cannot write metrics to /dev/full: No space left"), "{error}");
}

/// A disk that was full may have cut the last line.
#[test]
fn a_file_that_is_continued_keeps_its_whole_lines() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("continued.jsonl");
    let next = "{\"event\":\"validation\",\"step\":3,\"loss\":2.0}\n";
    for (old, kept) in [
        ("", ""),
        ("{\"step\":1}\n", "{\"step\":1}\n"),
        ("{\"step\":1}\n{\"step\":2", "{\"step\":1}\n"),
        ("{\"step\":1}\n{\"step\":2}", "{\"step\":1}\n{\"step\":2}\n"),
        ("{", ""),
        ("no metrics", "no metrics\n"),
    ] {
        fs::write(&path, old).unwrap();
        let mut metrics = Metrics::append(&path).unwrap();
        metrics.write(&Event::Validation { step: 3, loss: 2.0, loss_uncompressed: None, dpo: None }).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{kept}{next}"), "after {old:?}");
    }
}

#[test]
fn a_path_is_tried_before_training_and_left_as_it_is() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let check = |path: &Path| {
        let args = Args::parse([OsStr::new("--metrics"), path.as_os_str()]);
        load(&args).map(drop).map_err(|error| error.to_string())
    };
    let valid = "use a file that can be written";
    assert_eq!(check(folder), Err(format!("--metrics {}: is a folder; {valid}", folder.display())));
    assert_eq!(
        check(Path::new("no/such/folder/run.jsonl")),
        Err(format!("--metrics no/such/folder/run.jsonl: its folder does not exist; {valid}"))
    );
    let (old, new) = (folder.join("old.jsonl"), folder.join("new.jsonl"));
    fs::write(&old, "kept").unwrap();
    _ = fs::remove_file(&new); // what a failed run may have left
    assert_eq!((check(&old), check(&new)), (Ok(()), Ok(())));
    assert_eq!(fs::read_to_string(old).unwrap(), "kept");
    assert!(!new.exists());
}
