//! Many vectors in one launch: the table of addresses for such kernels (`vectors.cuh`), which is
//! [cached](CudaDevice::kept) across steps.

use super::prelude::*;

/// A vector of a launch.
#[derive(Debug)]
pub(super) struct Vector {
    /// Its address for each list argument of the kernel.
    pub(super) places: Vec<Address>,
    /// Its number of elements.
    pub(super) count: usize,
}

/// The vectors of a launch, cut into pieces.
#[derive(Debug)]
pub(super) struct Vectors {
    /// Consecutive lists: for each of `places` arguments the addresses of the vectors; the number of each vector's
    /// first piece, then the number of pieces; the number of elements of each vector.
    table: Buffer,
    places: usize,
    /// The number of vectors.
    pub(super) count: usize,
    /// The number of pieces of all vectors.
    pub(super) pieces: usize,
}

impl CudaDevice {
    /// The table of some vectors, cut into pieces of `piece` elements. Empty vectors are left out; the result is `None`
    /// if all are empty.
    pub(super) fn vectors(&self, mut vectors: Vec<Vector>, piece: u64) -> Result<Option<Vectors>> {
        vectors.retain(|vector| vector.count > 0);
        let Some(places) = vectors.first().map(|vector| vector.places.len()) else { return Ok(None) };
        let of_argument = |at: usize| vectors.iter().map(move |vector| vector.places[at].0 as i64);
        let mut table: Vec<i64> = (0..places).flat_map(of_argument).collect();
        let mut pieces = 0;
        for vector in &vectors {
            table.push(pieces as i64);
            pieces += vector.count.div_ceil(piece as usize);
        }
        table.push(pieces as i64);
        table.extend(vectors.iter().map(|vector| vector.count as i64));
        Ok(Some(Vectors { table: self.kept(table)?, places, count: vectors.len(), pieces }))
    }

    /// The address of the numbers of the first pieces.
    pub(super) fn first_pieces(&self, op: &'static str, vectors: &Vectors) -> Result<Address> {
        Ok(self.place(op, &vectors.table)?.offset(8 * vectors.places * vectors.count))
    }
}

/// A list of addresses for each argument, the first pieces, the numbers of elements, and the number of vectors.
impl Operand for &Vectors {
    fn add_to(self, operands: &mut Operands<'_>) -> Result<()> {
        let (device, op) = (operands.device, operands.op);
        let (table, starts) = (device.place(op, &self.table)?, device.first_pieces(op, self)?);
        (0..self.places).try_for_each(|list| table.offset(8 * list * self.count).add_to(operands))?;
        [starts, starts.offset(8 * (self.count + 1))].add_to(operands)?;
        self.count.add_to(operands)
    }
}
