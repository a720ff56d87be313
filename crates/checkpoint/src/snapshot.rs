//! A copy of the elements that one rank writes, laid out as its file is.

use crate::slice::for_each_run;
use crate::{Block, SavePlan, Slice};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A copy of the data that one rank writes, in the order of its file. It takes [`SavePlan::bytes`] of memory, however
/// much the rank holds.
#[derive(Debug)]
pub struct Snapshot {
    plan: Arc<SavePlan>,
    rank: usize,
    data: Vec<u8>,
    /// Number of missing elements of each piece.
    missing: Vec<u64>,
    /// The pieces of each tensor.
    of_tensor: BTreeMap<usize, Vec<usize>>,
}

/// A tensor that cannot go into a snapshot, or a snapshot that cannot be written.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message of a variant names its fields")]
pub enum SnapshotError {
    /// A tensor that is not in the plan.
    #[error("the plan of the checkpoint has no tensor {name}")]
    Unknown { name: String },
    /// A slice that does not fit its tensor, or memory that does not fit the slice.
    #[error("{given} bytes of extents {extents:?} are not slice {slice} of {name} {dims:?}")]
    Misfit { name: String, dims: Vec<u64>, slice: Slice, extents: Vec<u64>, given: usize },
    /// No memory for the copy.
    #[error("rank {rank} has no memory for the {bytes} bytes that it writes")]
    Memory { rank: usize, bytes: u64 },
    /// Elements that this rank must write but was not given.
    #[error("rank {rank} was not given {missing} elements of slice {slice} of {name}, which it writes")]
    Missing { rank: usize, name: String, slice: Slice, missing: u64 },
}

debug_as_display!(SnapshotError);

impl Snapshot {
    /// An empty snapshot that reuses the memory of an older one. If memory cannot be allocated, it accepts no tensors,
    /// and the save fails on every rank.
    pub(crate) fn new(plan: Arc<SavePlan>, rank: usize, mut memory: Vec<u8>) -> Self {
        let bytes = plan.bytes(rank) as usize;
        if memory.try_reserve_exact(bytes.saturating_sub(memory.len())).is_ok() {
            memory.resize(bytes, 0);
        } else {
            memory = Vec::new();
        }
        let mut of_tensor: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (at, piece) in plan.pieces(rank).iter().enumerate() {
            of_tensor.entry(piece.tensor).or_default().push(at);
        }
        let missing = plan.pieces(rank).iter().map(|piece| piece.slice.elements()).collect();
        Self { plan, rank, data: memory, missing, of_tensor }
    }

    /// Copies the part of a tensor that this rank writes, from the slice that it holds. `bytes` are the elements of the
    /// held slice as a row-major array of `extents`, which may be larger than the slice: padding at the end of each
    /// dim.
    ///
    /// # Errors
    /// A tensor that is not in the plan, or a slice that does not fit.
    pub fn put(&mut self, name: &str, slice: &Slice, extents: &[u64], bytes: &[u8]) -> Result<(), SnapshotError> {
        let Some(tensor) = self.plan.tensor(name) else {
            return Err(SnapshotError::Unknown { name: name.to_owned() });
        };
        let of = &self.plan.tensors()[tensor];
        let size = of.dtype.size();
        let Some(held) = Block::in_memory(of, slice, extents, bytes.len()) else {
            let (name, dims, given) = (of.name.clone(), of.dims.clone(), bytes.len());
            return Err(SnapshotError::Misfit { name, dims, slice: slice.clone(), extents: extents.to_vec(), given });
        };
        for &at in self.of_tensor.get(&tensor).into_iter().flatten() {
            let piece = &self.plan.pieces(self.rank)[at];
            let Some(both) = slice.overlap(&piece.slice) else { continue };
            let Some(into) = self.data.get_mut(piece.bytes.start as usize..piece.bytes.end as usize) else { continue };
            let range = |start: u64, run: u64| (start * size) as usize..((start + run) * size) as usize;
            let copied = for_each_run(&both, &held, &Block::from_slice(&piece.slice), |from, to, run| {
                into[range(to, run)].copy_from_slice(&bytes[range(from, run)]);
                Ok::<_, std::convert::Infallible>(())
            });
            copied.unwrap_or_else(|never| match never {});
            self.missing[at] = self.missing[at].saturating_sub(both.elements());
        }
        Ok(())
    }

    /// The bytes of the snapshot, if it is complete.
    pub(crate) fn into_data(self) -> Result<Vec<u8>, SnapshotError> {
        let (rank, bytes) = (self.rank, self.plan.bytes(self.rank));
        if self.data.len() as u64 != bytes {
            return Err(SnapshotError::Memory { rank, bytes });
        }
        let Some(at) = self.missing.iter().position(|&missing| missing > 0) else { return Ok(self.data) };
        let piece = &self.plan.pieces(self.rank)[at];
        let name = self.plan.tensors()[piece.tensor].name.clone();
        let missing = self.missing[at];
        Err(SnapshotError::Missing { rank, name, slice: piece.slice.clone(), missing })
    }
}
