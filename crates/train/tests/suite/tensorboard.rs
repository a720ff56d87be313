//! `metrics.tensorboard`: TensorBoard's own reader finds every scalar of a run.

use crate::small;
use meshwork_train::train;
use serde_json::Value;
use std::process::Command;
use std::sync::atomic::AtomicBool;

/// Prints what TensorBoard reads in a folder: `{tag: [[step, value], ...]}`.
const READER: &str = "
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1]).Reload()
print(json.dumps({tag: [[s.step, s.value] for s in events.Scalars(tag)] for tag in events.Tags()['scalars']}))
";

#[test]
fn tensorboard_reads_the_scalars_of_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let (board, lines) = (folder.path().join("board"), folder.path().join("run.jsonl"));
    let config = small::config(&format!(
        "dp=2,tp=2 --set training.steps=3 --set validation.every=2 --set validation.steps=1 --set metrics.tensorboard={}",
        board.display()
    ));
    train(&config, &small::data().hold_out(0.25), Some(&lines), &AtomicBool::new(false)).unwrap();

    let python = std::env::var("MESHWORK_PEER_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    if !Command::new(&python).args(["-c", "import tensorboard"]).output().is_ok_and(|run| run.status.success()) {
        eprintln!("skipped: {python} has no tensorboard (set MESHWORK_PEER_PYTHON to a Python that has)");
        return;
    }
    let read = Command::new(&python).args(["-c", READER]).arg(&board).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    let read: Value = serde_json::from_slice(&read.stdout).unwrap();
    let text = std::fs::read_to_string(&lines).unwrap();
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let series = |event: &str, key: &str| -> Vec<(u64, f64)> {
        let of = events.iter().filter(|line| line["event"] == event);
        of.map(|line| (line["step"].as_u64().unwrap(), line[key].as_f64().unwrap())).collect()
    };
    for (tag, wanted) in [
        ("train/loss", series("step", "loss")),
        ("train/gradient_norm", series("step", "grad_norm")),
        ("train/learning_rate", series("step", "lr")),
        ("speed/tokens_per_s", series("step", "tokens_per_s")),
        ("validation/loss", series("validation", "loss")),
    ] {
        assert!(!wanted.is_empty(), "{tag}");
        let got = read[tag].as_array().unwrap_or_else(|| panic!("{tag} is not in {read}"));
        assert_eq!(got.len(), wanted.len(), "{tag}");
        for (got, (step, value)) in got.iter().zip(wanted) {
            assert_eq!((got[0].as_u64().unwrap(), got[1].as_f64().unwrap() as f32), (step, value as f32), "{tag}");
        }
    }
    assert!(read["memory/rank 3"].is_array() && read["communication/tp"].is_array(), "{read}");
}
