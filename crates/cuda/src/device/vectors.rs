//! Many vectors in one launch: the table of their addresses that such kernels read (`vectors.cuh`), which is [kept](CudaDevice::kept) from step to step.

use super::CudaDevice;
use crate::driver::{Address, Argument};
use meshwork_core::Buffer;
use meshwork_tensor::Result;

/// Vectors that a launch works on, in pieces.
#[derive(Debug)]
pub(super) struct Vectors {
    /// Lists, one after the other: the places of the vectors for each argument that has one, their first pieces with the number of all, their counts.
    table: Buffer,
    places: usize,
    /// How many.
    pub(super) count: usize,
    /// Pieces of all of them.
    pub(super) pieces: usize,
}

impl CudaDevice {
    /// Vectors in pieces of so many elements: of each its places, one for each argument of the kernel, and its count. Those without elements are left out;
    /// none if there are no others.
    pub(super) fn vectors(&self, vectors: Vec<(Vec<Address>, usize)>, piece: u64) -> Result<Option<Vectors>> {
        let vectors: Vec<_> = vectors.into_iter().filter(|(_, count)| *count > 0).collect();
        let Some(places) = vectors.first().map(|(places, _)| places.len()) else { return Ok(None) };
        let of_argument = |at: usize| vectors.iter().map(move |(places, _)| places[at].0 as i64);
        let mut table: Vec<i64> = (0..places).flat_map(of_argument).collect();
        let mut pieces = 0;
        for (_, count) in &vectors {
            table.push(pieces as i64);
            pieces += count.div_ceil(piece as usize);
        }
        table.push(pieces as i64);
        table.extend(vectors.iter().map(|(_, count)| *count as i64));
        Ok(Some(Vectors { table: self.kept(table)?, places, count: vectors.len(), pieces }))
    }

    /// The arguments of a kernel that stand for vectors: a list of places for each, the first pieces, the counts, and the number of vectors.
    pub(super) fn arguments(&self, op: &'static str, vectors: &Vectors) -> Result<Vec<Argument>> {
        let Vectors { table, places, count, .. } = vectors;
        let (table, starts) = (self.place(op, table)?, self.first_pieces(op, vectors)?);
        let lists = (0..*places).map(|list| table.offset(8 * list * count).into());
        Ok(lists.chain([starts.into(), starts.offset(8 * (count + 1)).into(), (*count).into()]).collect())
    }

    /// Where the first pieces stand.
    pub(super) fn first_pieces(&self, op: &'static str, vectors: &Vectors) -> Result<Address> {
        Ok(self.place(op, &vectors.table)?.offset(8 * vectors.places * vectors.count))
    }
}
