//! The model of a checkpoint as a Hugging Face folder.

use super::CheckpointError;
use crate::config::Config;
use crate::generate::Compressed;
use meshwork_checkpoint::{Checkpoint, Slice};
use meshwork_models::huggingface::{self, Dtype};
use std::collections::BTreeMap;
use std::path::Path;

/// Writes the weights of the checkpoint after `step` in `dir` into the folder `out`, in f32: one parameter in memory at a time, whatever
/// mesh has trained it. What the run compressed is said in the metadata of the weights.
pub(crate) fn export(config: &Config, dir: &Path, step: u64, out: &Path) -> Result<(), CheckpointError> {
    let checkpoint = Checkpoint::open_step(dir, step)?;
    let said = Compressed::of_checkpoint(checkpoint.index()).map_or_else(BTreeMap::new, |run| run.metadata());
    huggingface::export_with(out, &config.architecture(), Dtype::F32, &said, |spec| {
        let dims: Vec<u64> = spec.dims.iter().map(|&extent| extent as u64).collect();
        let bytes = checkpoint.read(&spec.name, &Slice::whole(&dims))?;
        Ok(bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
    })
    .map_err(|source| CheckpointError::Export(Box::new(source)))
}
