//! Parameters in fewer bits: frozen weights that are stored as messages of `meshwork-compress`, in blocks with a scale
//! each, and restored to numbers by each read (QLoRA; Dettmers et al., 2023, section 3).
//!
//! The blocks are those of the whole parameter: each rank's slice consists of whole ones, so that every mesh restores
//! the same numbers. A mesh that cuts a block is refused.

use super::ParamSpec;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Category;
use meshwork_compress::{CompressError, Draws, Fold, Per, Scales, Scheme, Shape, Values, wire_bytes};
use meshwork_core::{Buffer, DType, Mesh};
use std::ops::Range;
use std::sync::Arc;

/// Messages begin at multiples of this many bytes.
const ALIGNMENT: usize = 16;

/// The place of a packed parameter in its flat buffer of bytes. The parameter is one message; where ZeRO-3 shares it
/// out, each rank stores one message. The parts are whole numbers of quantisation blocks.
#[derive(Clone, Debug)]
pub(super) struct Packed {
    scheme: Scheme,
    /// Elements of the parameter.
    count: usize,
    /// Elements of each message but the last.
    share: usize,
    /// The elements that are stored here.
    part: Range<usize>,
    bytes: Range<usize>,
}

impl Packed {
    /// Places a parameter of `count` elements behind the first `end` bytes of a flat buffer. It is cut into messages of
    /// `share` elements, and this rank stores the elements `part`, which one message carries. `None` if it is not
    /// packed.
    pub fn new(spec: &ParamSpec, count: usize, share: usize, part: Range<usize>, end: usize) -> Result<Option<Self>> {
        let Some(values) = spec.packed else { return Ok(None) };
        let (scheme, share) = (Scheme::Values(values), share.min(count));
        let start = end.next_multiple_of(ALIGNMENT);
        let bytes = start..start + wire_bytes(&scheme, Shape::vector(share).map_err(failed)?).map_err(failed)?;
        Ok(Some(Self { scheme, count, share, part, bytes }))
    }

    /// The end of its bytes.
    pub fn end(&self) -> usize {
        self.bytes.end
    }

    /// The number of its elements that are stored here.
    pub fn stored(&self) -> usize {
        self.part.len()
    }

    /// All of its numbers, in memory of their own, from the flat buffers of all ranks that share it out, one behind the
    /// other.
    pub fn restore(&self, device: &dyn Device, flats: &Buffer, dtype: DType) -> Result<Buffer> {
        let _category = device.meter().enter(Category::Buffers);
        let mut values = device.alloc(dtype, self.count)?;
        for (rank, first) in (0..self.count).step_by(self.share.max(1)).enumerate() {
            let count = self.share.min(self.count - first);
            let mut to = values.window(first..first + count)?;
            self.unpack(device, flats, rank * self.bytes.end + self.bytes.start, &mut to)?;
        }
        Ok(values)
    }

    /// The numbers as products read them: those in bf16 where they lie, if one message has all of them; others
    /// [restored](Self::restore).
    pub fn matrix(&self, device: &dyn Device, flats: &Buffer, dtype: DType) -> Result<Buffer> {
        let (size, end) = (DType::Bf16.size(), flats.offset() + self.bytes.end);
        let lies = cfg!(target_endian = "little") && self.share == self.count && end.is_multiple_of(size);
        match self.scheme {
            Scheme::Values(Values::Bf16) if lies => {
                // The elements are the end of the message.
                let end = end / size;
                let all = Buffer::from_memory(Arc::clone(flats.memory()), DType::Bf16, end)?;
                Ok(all.slice(end - self.count..end)?)
            }
            _ => self.restore(device, flats, dtype),
        }
    }

    /// The numbers that are stored here, in memory of their own.
    pub fn restore_part(&self, device: &dyn Device, flat: &Buffer) -> Result<Buffer> {
        let _category = device.meter().enter(Category::Buffers);
        let mut values = device.alloc(DType::F32, self.part.len())?;
        if !self.part.is_empty() {
            self.unpack(device, flat, self.bytes.start, &mut values)?;
        }
        Ok(values)
    }

    /// Restores the message that begins at byte `from`, of as many elements as `to` has.
    fn unpack(&self, device: &dyn Device, bytes: &Buffer, from: usize, to: &mut Buffer) -> Result<()> {
        let shape = Shape::vector(to.count()).map_err(failed)?;
        let message = bytes.slice(from..from + wire_bytes(&self.scheme, shape).map_err(failed)?)?;
        device.compression()?.unpack(&self.scheme, shape, &message, Fold::Replace, to)
    }

    /// Replaces the numbers that are stored here, of the parameter of this name.
    ///
    /// # Errors
    /// A number that no scale of 8 bits reaches.
    pub fn write(&self, device: &dyn Device, name: &str, values: &[f32], flat: &mut Buffer) -> Result<()> {
        if self.part.is_empty() {
            return Ok(());
        }
        let rounded = matches!(self.scheme, Scheme::Values(Values::Nf4 { scales: Scales::E5M3, .. }));
        if let Some(beyond) = values.iter().find(|value| rounded && value.abs() > Scales::LARGEST) {
            return Err(Error::Declaration {
                name: name.to_owned(),
                problem: format!("{beyond} is beyond {}, the largest scale of 8 bits", Scales::LARGEST),
                valid: "use scales of 32 bits".to_owned(),
            });
        }
        let shape = Shape::vector(self.part.len()).map_err(failed)?;
        let values = device.upload(&Buffer::from_slice(values))?;
        let draws = Draws::new(0, "", 0); // nothing is drawn
        let mut message = flat.window(self.bytes.clone())?;
        device.compression()?.pack(&self.scheme, shape, draws, &values, &mut message)
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
    use meshwork_compress::Message;
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
            let [nf4, double] = [Scales::F32, Scales::E5M3].map(|scales| Values::Nf4 { per, scales });
            for values in [nf4, double, Values::Int8 { per }, Values::Bf16] {
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
            let values = Values::Nf4 { per: Per::Block(block), scales: Scales::F32 };
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

    /// Ranks that share out 50 elements in blocks of 8: two blocks each, but the last one has two elements.
    #[test]
    fn shares_of_ranks_restore_the_numbers_of_the_whole() {
        let device = crate::meta::Meta::device();
        let spec = spec(&[5, 10], Placement::replicated(), Values::Nf4 { per: Per::Block(8), scales: Scales::E5M3 });
        let of = |part: Range<usize>| Packed::new(&spec, 50, 16, part, 0).unwrap().unwrap();
        let counts = [0..16, 16..32, 32..48, 48..50, 50..50].map(|part| (of(part.clone()).stored(), of(part).end()));
        let bytes = 16 + 2 + 8;
        assert_eq!(counts, [(16, bytes), (16, bytes), (16, bytes), (2, bytes), (0, bytes)]);
        let all = device.zeros(DType::U8, 5 * bytes).unwrap();
        assert_eq!(of(0..16).restore(&*device, &all, DType::F32).unwrap().count(), 50);
        assert_eq!(of(48..50).restore_part(&*device, &all).unwrap().count(), 2);
    }

    /// Products read a message in bf16 where it lies; parts of several ranks, and other forms, are restored.
    #[test]
    fn products_read_bf16_as_it_is_stored() {
        let device = crate::meta::Meta::device();
        let read = |values, share: usize, ranks: usize| {
            let spec = spec(&[6, 8], Placement::replicated(), values);
            let packed = Packed::new(&spec, 48, share, 0..share, 5).unwrap().unwrap();
            let flats = device.zeros(DType::U8, ranks * packed.end()).unwrap();
            let matrix = packed.matrix(&*device, &flats, DType::F32).unwrap();
            assert_eq!(matrix.count(), 48);
            (matrix.dtype(), matrix.memory().bytes() == flats.bytes(), matrix.offset())
        };
        assert_eq!(read(Values::Bf16, 48, 1), (DType::Bf16, true, (ALIGNMENT + 16) / 2));
        assert_eq!(read(Values::Bf16, 24, 2), (DType::F32, false, 0));
        assert_eq!(read(Values::Int8 { per: Per::Block(8) }, 48, 1), (DType::F32, false, 0));
    }

    #[test]
    fn what_no_scale_reaches_is_refused() {
        let device = crate::meta::Meta::device();
        let per = Per::Block(8);
        let write = |scales, x: f32| {
            let packed = Packed::new(&spec(&[8], Placement::replicated(), Values::Nf4 { per, scales }), 8, 8, 0..8, 0);
            let packed = packed.unwrap().unwrap();
            let mut flat = device.zeros(DType::U8, packed.end()).unwrap();
            packed.write(&*device, "w", &[x; 8], &mut flat).map_err(|error| error.to_string())
        };
        let error = write(Scales::E5M3, -3585.0).unwrap_err();
        assert_eq!(error, "parameter w: -3585 is beyond 3584, the largest scale of 8 bits; use scales of 32 bits");
        assert_eq!([write(Scales::E5M3, 3584.0), write(Scales::F32, 1e9)], [Ok(()), Ok(())]);
    }
}
