//! Many vectors in one launch: the table of their addresses that such kernels read (`vectors.cuh`), which is
//! [kept](CudaDevice::kept) from step to step.

use super::CudaDevice;
use crate::driver::{Address, Argument};
use meshwork_core::Buffer;
use meshwork_tensor::Result;

/// Vectors that a launch works on, in pieces.
#[derive(Debug)]
pub(super) struct Vectors {
    /// Lists, one after the other: for each of `places` arguments the addresses of the vectors; the number of each
    /// vector's first piece, and behind them the number of pieces; the number of elements of each vector.
    table: Buffer,
    places: usize,
    /// The number of vectors.
    pub(super) count: usize,
    /// The number of pieces of all vectors.
    pub(super) pieces: usize,
}

impl CudaDevice {
    /// The table of some vectors, which are cut into pieces of `piece` elements. Each vector is given by its addresses,
    /// one for each list of the kernel's arguments, and its number of elements. Empty vectors are left out; the result
    /// is `None` if all are empty.
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

    /// The arguments of a kernel that stand for vectors: a list of places for each, the first pieces, the counts, and
    /// the number of vectors.
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
