//! Common parts of language models. A sample is a sequence of token ids; the target of each is the id that follows it.

use meshwork_core::{Axis, DType, Mesh, Ty, Types};
use meshwork_nn::{Activation, Batch, Field};
use meshwork_tensor::{Error, Result, Shape};
use meshwork_tensor_parallel::Region;
use std::ops::Range;

/// The field of token ids, `[seq]` for each sample.
pub const TOKENS: &str = "tokens";

/// The field of targets, `[seq]` for each sample; negative ones are masked.
pub const TARGETS: &str = "targets";

/// The fields of sequences of `seq_len` tokens.
pub fn fields(seq_len: usize) -> Vec<Field> {
    [TOKENS, TARGETS].map(|name| Field::new(name, DType::I32, [seq_len])).to_vec()
}

/// A batch of sequences of `seq_len` token ids, one after another, with the target of each.
///
/// # Errors
/// Different numbers of tokens and targets, or incomplete sequences.
pub fn batch(tokens: Vec<i32>, targets: Vec<i32>, seq_len: usize) -> Result<Batch> {
    Batch::new(tokens.len() / seq_len.max(1)).with(TOKENS, [seq_len], tokens)?.with(TARGETS, [seq_len], targets)
}

/// The terms of the loss: unmasked targets.
pub fn unmasked(batch: &Batch, samples: Range<usize>) -> Result<u64> {
    let part = batch.part(samples)?;
    Ok(part.values::<i32>(TARGETS)?.iter().filter(|&&target| target >= 0).count() as u64)
}

/// The types of a hidden state `[samples, seq, hidden]` between blocks: those of samples, and on tp that of the region.
pub fn hidden_types(mesh: &Mesh, region: Region) -> Types {
    let ty = |axis| match axis {
        Axis::Tp => region.ty(),
        Axis::Dp => Ty::Shard(0),
        _ => Ty::Invariant,
    };
    mesh.value_axes().fold(Types::NONE, |types, axis| types.with(axis, ty(axis)))
}

/// The hidden state that travels between stages.
pub fn hidden(mesh: &Mesh, region: Region, hidden_size: usize, batch: &Batch) -> Result<Activation> {
    let held = region.local_seq(batch.dims(TOKENS)?[0], mesh.degree(Axis::Tp));
    let shape = Shape::new(&[batch.samples(), held, hidden_size]);
    Ok(Activation { dtype: DType::F32, shape, types: hidden_types(mesh, region) })
}

/// The error of a later stage that runs without the hidden state of the previous one.
pub fn no_input(model: &'static str) -> Error {
    Error::Shape {
        op: model,
        problem: "a stage behind the first takes the hidden state of the one before, and none was given".to_owned(),
        shapes: Vec::new(),
    }
}
