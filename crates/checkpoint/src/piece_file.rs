//! The header of a file of pieces, in the format safetensors.
//!
//! ```text
//! length of the JSON, 8 bytes little-endian │ JSON, padded with spaces to a multiple of 8 │ pieces
//! ```
//! The crate `safetensors` reads these files (a test does). It does not write them, because it puts `__metadata__` in
//! random order and needs the bytes of all tensors in memory at the same time.

use crate::{SavePlan, Slice, Tensor};
use serde_json::{Map, Value, json};

pub(crate) fn file_name(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// The name of a piece in its file: its tensor's name, with the slice unless it is all of it.
fn piece_name(tensor: &Tensor, slice: &Slice) -> String {
    if *slice == Slice::whole(&tensor.dims) { tensor.name.clone() } else { format!("{}{slice}", tensor.name) }
}

/// The header of the file that a rank writes.
pub(crate) fn header(plan: &SavePlan, rank: usize, step: u64) -> Vec<u8> {
    let mut entries = Map::new();
    let origin = json!({"format": "meshwork checkpoint", "step": step.to_string(), "rank": rank.to_string()});
    entries.insert("__metadata__".to_owned(), origin);
    for piece in plan.pieces(rank) {
        let tensor = &plan.tensors()[piece.tensor];
        let entry = json!({
            "dtype": tensor.dtype.name(),
            "shape": piece.slice.extents(),
            "data_offsets": [piece.bytes.start, piece.bytes.end],
        });
        entries.insert(piece_name(tensor, &piece.slice), entry);
    }
    let mut text = Value::Object(entries).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Describes, from its first bytes, which rank and step a file belongs to.
pub(crate) fn describe(start: &[u8]) -> String {
    let origin = || {
        let (length, text) = start.split_first_chunk::<8>()?;
        let text = text.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        let header: Value = serde_json::from_slice(text).ok()?;
        let of = |key: &str| Some(header.get("__metadata__")?.get(key)?.as_str()?.to_owned());
        Some(match (of("step"), of("rank")) {
            (Some(step), Some(rank)) => format!("it says to be of rank {rank} at step {step}"),
            _ => "it is a file of safetensors that no checkpoint wrote".to_owned(),
        })
    };
    origin().unwrap_or_else(|| "it does not begin as a file of safetensors".to_owned())
}
