//! Ranks that are threads, and a state whose every element says which it is.
#![allow(dead_code, reason = "each test uses a part of it")]

use meshwork_checkpoint::{
    Checksum, Dtype, Held, Lock, SaveError, SavePlan, Saved, Slice, Tensor, TensorKind, Writer, threads,
};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::thread;

/// dp=2, tp=2: rank = 2 · dp rank + tp rank. tp cuts the rows of `table` and the columns of `down`; the norm is on
/// every rank, and rank 3 alone has the counter.
pub const WORLD: usize = 4;

pub fn tensors() -> Vec<Tensor> {
    let tensor =
        |name: &str, kind, dtype, dims: &[u64]| Tensor { name: name.to_owned(), kind, dtype, dims: dims.to_vec() };
    vec![
        tensor("table", TensorKind::Weight, Dtype::F32, &[60, 32]),
        tensor("down", TensorKind::Weight, Dtype::F32, &[32, 48]),
        tensor("down:exp_avg", TensorKind::OptimizerState, Dtype::F32, &[32, 48]),
        tensor("norm", TensorKind::Buffer, Dtype::Bf16, &[33]),
        tensor("updates", TensorKind::Counter, Dtype::U64, &[]),
    ]
}

/// The slice of a tensor that a rank holds.
pub fn slice_on(rank: usize, tensor: usize) -> Option<Slice> {
    let tp = rank as u64 % 2;
    match tensor {
        0 => Some(Slice::new([30 * tp..30 * (tp + 1), 0..32])),
        1 | 2 => Some(Slice::new([0..32, 24 * tp..24 * (tp + 1)])),
        3 => Some(Slice::new(std::iter::once(0..33))),
        _ => (rank == 3).then(|| Slice::new([])),
    }
}

pub fn plan() -> SavePlan {
    let on = |rank| (0..tensors().len()).map(move |tensor| (rank, tensor));
    let held = (0..WORLD)
        .flat_map(on)
        .filter_map(|(rank, tensor)| Some(Held { tensor, slice: slice_on(rank, tensor)?, ranks: vec![rank] }));
    SavePlan::new(WORLD, tensors(), &held.collect::<Vec<_>>()).unwrap()
}

/// The bytes of an element at a step: a function of the tensor, the place of the element and the step.
fn element(tensor: usize, at: u64, step: u64) -> Vec<u8> {
    let number = (tensor as u64 * 7919 + at) * 31 + step;
    match tensors()[tensor].dtype.size() {
        8 => number.to_le_bytes().to_vec(),
        4 => (number as u32).to_le_bytes().to_vec(),
        _ => (number as u16).to_le_bytes().to_vec(),
    }
}

/// The bytes of a slice of a tensor at a step.
pub fn bytes_of(tensor: usize, slice: &Slice, step: u64) -> Vec<u8> {
    let dims = &tensors()[tensor].dims;
    let mut places = vec![0u64];
    for (range, &dim) in slice.ranges().zip(dims) {
        places = places.iter().flat_map(|place| range.clone().map(move |at| place * dim + at)).collect();
    }
    places.iter().flat_map(|&at| element(tensor, at, step)).collect()
}

/// Starts to save the state of a step: all of it, or nothing.
pub fn start_save(
    writer: &mut Writer,
    rank: usize,
    step: u64,
    metadata: Value,
    all: bool,
) -> Option<Result<Saved, SaveError>> {
    let (mut snapshot, before) = writer.snapshot();
    for (tensor, of) in tensors().iter().enumerate().filter(|_| all) {
        if let Some(slice) = slice_on(rank, tensor) {
            snapshot.put(&of.name, &slice, &slice.extents(), &bytes_of(tensor, &slice, step)).unwrap();
        }
    }
    writer.save(step, metadata, snapshot);
    before
}

/// Saves these steps from all ranks: the outcomes of each rank, step by step.
pub fn save(dir: &Path, keep: usize, steps: &[u64]) -> Vec<Vec<Result<Saved, SaveError>>> {
    save_with(dir, keep, steps, |_, _| true)
}

/// A random number, and the next state: xorshift. The state is not 0.
pub fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// The names in a folder.
pub fn left(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// The same, where a rank gives nothing in steps that `gives` does not let pass.
pub fn save_with(
    dir: &Path,
    keep: usize,
    steps: &[u64],
    gives: impl Fn(usize, u64) -> bool + Clone + Send + 'static,
) -> Vec<Vec<Result<Saved, SaveError>>> {
    let (plan, lock) = (Arc::new(plan()), Lock::take(dir).unwrap());
    let mut lock = Some(lock);
    let ranks: Vec<_> = threads(WORLD)
        .into_iter()
        .enumerate()
        .map(|(rank, exchange)| {
            let (plan, dir, steps) = (plan.clone(), dir.to_path_buf(), steps.to_vec());
            let (lock, gives) = (lock.take(), gives.clone());
            thread::spawn(move || {
                let mut writer = match lock {
                    Some(lock) => Writer::lead(lock, keep, plan, exchange),
                    None => Writer::follow(&dir, rank, plan, exchange),
                };
                let mut outcomes = Vec::new();
                for step in steps {
                    outcomes.extend(start_save(
                        &mut writer,
                        rank,
                        step,
                        json!({"seed": 7, "rank": rank}),
                        gives(rank, step),
                    ));
                }
                outcomes.extend(writer.wait());
                outcomes
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

/// An index with the checksum that belongs to it.
pub fn signed(index: &Value) -> Vec<u8> {
    let text = index.to_string();
    let body = &text.as_bytes()[1..];
    [b"{\"checksum\":\"", Checksum::hash(body).to_string().as_bytes(), b"\",", body].concat()
}

/// The index in a file, without its checksum.
pub fn index_of(path: &Path) -> Value {
    let mut index: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    index.as_object_mut().unwrap().shift_remove("checksum");
    index
}
