//! Parameters in fewer bits: frozen weights that are stored as messages of `meshwork-compress`, in blocks with a scale
//! each, and restored to numbers by each read (QLoRA; Dettmers et al., 2023, section 3).
//!
//! The blocks are those of the whole parameter: each rank's slice consists of whole ones, so that every mesh restores
//! the same numbers. A mesh that cuts a block is refused.

use super::{LocalSlice, ParamSpec};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Category;
use meshwork_compress::{CompressError, Draws, Fold, Per, Scheme, Shape, wire_bytes};
use meshwork_core::{Buffer, DType, Mesh};
use std::ops::Range;

/// Messages begin at multiples of this many bytes.
const ALIGNMENT: usize = 16;

/// How a parameter lies in its flat buffer, which has bytes.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    scheme: Scheme,
    shape: Shape,
    bytes: Range<usize>,
}

impl Packed {
    /// The next place of the slice `local` of a parameter, in a flat buffer that has `end` bytes so far; `None` of a
    /// parameter that is not packed.
    pub fn new(spec: &ParamSpec, local: &LocalSlice, end: usize) -> Result<Option<Self>> {
        let Some(values) = spec.packed else { return Ok(None) };
        let scheme = Scheme::Values(values);
        let shape = Shape::vector(local.stored.count()).map_err(failed)?;
        let start = end.next_multiple_of(ALIGNMENT);
        let bytes = start..start + wire_bytes(&scheme, shape).map_err(failed)?;
        Ok(Some(Self { scheme, shape, bytes }))
    }

    /// The end of its bytes.
    pub fn end(&self) -> usize {
        self.bytes.end
    }

    /// Its numbers, in memory of their own.
    pub fn restore(&self, device: &dyn Device, flat: &Buffer, dtype: DType) -> Result<Buffer> {
        let _category = device.meter().enter(Category::Buffers);
        let mut values = device.alloc(dtype, self.shape.len())?;
        if !self.shape.is_empty() {
            let message = flat.slice(self.bytes.clone())?;
            device.compression()?.unpack(&self.scheme, self.shape, &message, Fold::Replace, &mut values, 0)?;
        }
        Ok(values)
    }

    /// Replaces its numbers.
    pub fn write(&self, device: &dyn Device, values: &[f32], flat: &mut Buffer) -> Result<()> {
        if self.shape.is_empty() {
            return Ok(());
        }
        let values = device.upload(&Buffer::from_slice(values))?;
        let draws = Draws::new(0, "", 0); // nothing is drawn
        device.compression()?.pack(&self.scheme, self.shape, draws, &values, flat, self.bytes.start)
    }
}

fn failed(source: CompressError) -> Error {
    Error::Compress { op: "pack", source: Box::new(source) }
}

impl ParamSpec {
    /// Refuses a mesh whose ranks do not hold whole blocks of a [packed](Self::packed) parameter.
    ///
    /// # Errors
    /// The axes that cut a block, and the largest block that they would not cut.
    pub fn require_whole_blocks(&self, mesh: &Mesh) -> Result<()> {
        let Some(Per::Block(block)) = self.packed.map(|values| values.per()) else { return Ok(()) };
        // A slice consists of runs, one for each index of the dims in front of the innermost one that is cut.
        let cuts = |dim: usize| {
            let shards = self.placement.shards().iter().filter(move |(_, cut)| *cut == dim);
            shards.map(|&(axis, _)| (axis, mesh.degree(axis))).filter(|(_, degree)| *degree > 1)
        };
        let degree = |dim: usize| -> usize { cuts(dim).map(|(_, degree)| degree).product() };
        let Some(dim) = (0..self.dims.len()).rev().find(|&dim| degree(dim) > 1) else { return Ok(()) };
        let inner: usize = self.dims[dim + 1..].iter().product();
        let outer: usize = self.dims[..dim].iter().product();
        let held = self.placement.stored(self.dims[dim], degree(dim)) * inner;
        // Behind the last run of a parameter there is nothing that could share a block with it.
        let whole = if outer > 1 { self.dims[dim] * inner } else { 0 };
        if held.is_multiple_of(block) && whole.is_multiple_of(block) {
            return Ok(());
        }
        let cuts: Vec<String> = cuts(dim).map(|(axis, degree)| format!("{axis}={degree}")).collect();
        let fits = |size: &usize| held.is_multiple_of(*size) && whole.is_multiple_of(*size);
        let largest = (1..=block).rev().find(fits).unwrap_or(1);
        Err(Error::Declaration {
            name: self.name.clone(),
            problem: format!("{} cuts its blocks of {block} elements, which have a scale each", cuts.join(",")),
            valid: format!("use blocks of {largest}, or another degree"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Init, ParamGroup, Placement, Role};
    use super::*;
    use meshwork_compress::{Message, Values};
    use meshwork_core::Axis;

    fn spec(dims: &[usize], placement: Placement, values: Values) -> ParamSpec {
        ParamSpec {
            name: "w".to_owned(),
            dims: crate::Shape::new(dims),
            placement,
            role: Role::Weight,
            init: Init::Normal { std: 0.5 },
            group: ParamGroup::FROZEN,
            packed: Some(values),
        }
    }

    /// What a form makes of numbers.
    fn restored(values: Values, x: &[f32]) -> Vec<f32> {
        let (scheme, shape) = (Scheme::Values(values), Shape::vector(x.len()).unwrap());
        let mut out = vec![0.0; x.len()];
        let message = Message::compress(&scheme, x, shape, Draws::new(0, "", 0), &mut []).unwrap();
        message.restore(&scheme, shape, Fold::Replace, &mut out).unwrap();
        out
    }

    /// Rows, columns and both, with padding behind the last rank or not.
    #[test]
    fn slices_of_any_mesh_that_fits_restore_the_numbers_of_the_whole() {
        let per = Per::Block(8);
        let (mesh, alone): (Mesh, Mesh) = ("tp=4,ep=2,dp=2".parse().unwrap(), Mesh::default());
        for (dims, placement) in [
            (vec![8, 16], Placement::replicated().shard(Axis::Tp, 0)),
            (vec![5, 32], Placement::replicated().shard(Axis::Tp, 1)),
            (vec![3, 8, 2, 8], Placement::replicated().shard(Axis::Tp, 1)),
            (vec![2, 8, 32], Placement::replicated().shard(Axis::Ep, 0).shard(Axis::Tp, 2)),
            (vec![6, 8], Placement::replicated().shard(Axis::Tp, 0)),
            (vec![3, 7], Placement::replicated()),
        ] {
            for values in [Values::Nf4 { per }, Values::Int8 { per }, Values::Bf16] {
                let spec = spec(&dims, placement.clone(), values);
                spec.require_whole_blocks(&mesh).unwrap();
                let whole = restored(values, &spec.initial(&spec.local(&alone, alone.coords(0)), 3));
                assert_eq!(restored(values, &whole), whole, "stored again");
                for rank in 0..mesh.world_size() {
                    let local = spec.local(&mesh, mesh.coords(rank));
                    let here = restored(values, &spec.initial(&local, 3));
                    local.for_each_run(spec.dims, |start, range| {
                        let there = &whole[start as usize..][..range.len()];
                        assert_eq!(&here[range], there, "{dims:?} {values} on rank {rank}");
                    });
                }
            }
        }
    }

    #[test]
    fn a_mesh_that_cuts_blocks_is_refused() {
        let mesh = "tp=4".parse().unwrap();
        let refused = |dims: &[usize], cut: usize, block: usize| {
            let values = Values::Nf4 { per: Per::Block(block) };
            spec(dims, Placement::replicated().shard(Axis::Tp, cut), values).require_whole_blocks(&mesh)
        };
        assert_eq!(
            refused(&[32, 4, 8], 1, 64).unwrap_err().to_string(),
            "parameter w: tp=4 cuts its blocks of 64 elements, which have a scale each; use blocks of 8, or another degree"
        );
        assert!(refused(&[32, 4, 8], 1, 8).is_ok() && refused(&[32, 4, 8], 0, 64).is_ok());
        // 7 rows of 8, of which the first three ranks have two; 126 columns, of which they have 32 each.
        assert!(refused(&[7, 8], 0, 16).is_ok() && refused(&[1, 126], 1, 32).is_ok());
        let error = refused(&[2, 126], 1, 32).unwrap_err().to_string();
        assert!(error.contains("use blocks of 2,"), "{error}");
    }
}
