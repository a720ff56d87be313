//! The program `checkpoint_info` as a user runs it.

#[path = "../example/mod.rs"]
mod example;

use meshwork::checkpoint::{Alone, Dtype, Held, Lock, SavePlan, Slice, Tensor, TensorKind, Writer};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

/// (exit code, standard output, standard error).
fn run(arguments: &[&Path]) -> (Option<i32>, String, String) {
    let ended =
        Command::new(example::program("checkpoint_info")).args(arguments).stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (ended.status.code(), text(ended.stdout), text(ended.stderr))
}

/// A folder with two checkpoints of one rank, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("meshwork-{test}-{}", std::process::id()));
        let tensor = |name: &str, dims: &[u64]| Tensor {
            name: name.to_owned(),
            kind: TensorKind::Weight,
            dtype: Dtype::F32,
            dims: dims.to_vec(),
        };
        let tensors = vec![tensor("table", &[3, 2]), tensor("norm", &[2])];
        let held: Vec<_> =
            (0..2).map(|at| Held { tensor: at, slice: Slice::whole(&tensors[at].dims), ranks: vec![0] }).collect();
        let plan = Arc::new(SavePlan::new(1, tensors, &held).unwrap());
        let mut writer = Writer::lead(Lock::take(&dir).unwrap(), 2, plan, Alone);
        for step in [10u32, 20] {
            let (mut snapshot, _) = writer.snapshot();
            let values = [1.0, 2.0, 3.0, 4.0, 5.0, step as f32];
            snapshot.put("table", &held[0].slice, &[3, 2], &values.map(f32::to_le_bytes).concat()).unwrap();
            snapshot.put("norm", &held[1].slice, &[2], &[1f32; 2].map(f32::to_le_bytes).concat()).unwrap();
            writer.save(u64::from(step), json!({"config": {"lr": 0.5, "steps": step}}), snapshot);
            writer.wait().unwrap().unwrap();
        }
        Self(dir)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn it_tells_what_is_in_the_newest_checkpoint() {
    let folder = Folder::new("checkpoint-info");
    let (code, out, err) = run(&[&folder.0]);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    for told in [
        "step-00000020: step 20, format 1\n2 tensors of 32 bytes in 1 files of",
        "all 3 checksums are right\n",
        "\"lr\": 0.5",
        "table  weight           F32   [3, 2]  in rank-00000.safetensors\n",
    ] {
        assert!(out.contains(told), "{told}: {out}");
    }
}

#[test]
fn it_tells_in_what_two_checkpoints_differ() {
    let folder = Folder::new("checkpoint-diff");
    let (first, second) = (folder.0.join("step-00000010"), folder.0.join("step-00000020"));
    let (code, out, err) = run(&[&first, "--diff".as_ref(), &second]);
    assert_eq!((code, &*err), (Some(0), ""), "{out}");
    let wanted = "1 tensors differ, 1 are the same\n  table: 1 of 6 elements differ, by 1.000e1 at most and 8.032e-1 in norm\n\
                  1 values of the metadata differ\n  config.steps: 10 and 20\n";
    assert!(out.ends_with(wanted), "{out}");
}

#[test]
fn damage_and_bad_input_have_exit_codes() {
    let folder = Folder::new("checkpoint-damage");
    let file = folder.0.join("step-00000020/rank-00000.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let (code, out, _) = run(&[&folder.0]);
    assert!(code == Some(1) && out.contains("1 of 3 checksums are wrong:\n"), "{out}");
    assert!(out.contains("slice [0:2] of norm has checksum ") || out.contains(" of table has checksum "), "{out}");
    std::fs::write(folder.0.join("step-00000020/index.json"), "{").unwrap();
    let (code, _, err) = run(&[&folder.0]);
    assert!(code == Some(1) && err.contains("index.json: it ends in its checksum"), "{err}");
    let (code, _, err) = run(&[&folder.0.join("none")]);
    assert!(code == Some(2) && err.contains("give a checkpoint, such as DIR/step-00000010"), "{err}");
}
