//! Memory and initial values of one rank's parameters.
//!
//! More than 400 lines, with the tests of what each rank gets of an initial value.

use super::packed::Packed;
use super::{Declarations, LocalSlice, ParamId, ParamSpec};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::shape::Shape;
use crate::tensor::Tensor;
use meshwork_core::{Axis, Buffer, Coords, DType, Mesh, Types, bf16, f16, tree};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// The values of one rank's parameters: flat, contiguous buffers, so that reductions and optimizers work on long
/// vectors. Each parameter is a slice of a buffer. Readers share memory; writing needs that there are no readers.
///
/// Of a flat buffer a rank may store a [window](Self::window) alone, where other ranks have the rest. Its parameters
/// are then [brought together](Gather) when they are read. A flat buffer of [packed](ParamSpec::packed) parameters has
/// bytes, and each read restores the numbers of a parameter in memory of their own.
#[derive(Clone, Debug)]
pub struct Params {
    declarations: Arc<Declarations>,
    types: Vec<Types>,
    flats: Vec<Buffer>,
    /// Per flat buffer: the elements of it that are stored.
    windows: Vec<Range<usize>>,
    gather: Option<Arc<dyn Gather>>,
    /// Per parameter: (flat, range within it, local shape).
    places: Vec<(usize, Range<usize>, Shape)>,
    /// Per parameter: where its bytes are, if it is packed.
    packed: Vec<Option<Packed>>,
    updates: u64,
    device: Arc<dyn Device>,
}

/// Brings together flat buffers of weights of which each rank stores a part.
pub trait Gather: Debug + Send + Sync {
    /// All elements of flat buffer `flat`, of which `window` is stored here.
    ///
    /// # Errors
    /// No memory; ranks that do not answer.
    fn whole(&self, flat: usize, window: &Buffer) -> Result<Buffer>;

    /// Whether ranks share out flat buffer `flat`. All of them say the same, also one whose window has all of its
    /// elements: the others need this rank for theirs.
    fn is_shared(&self, flat: usize) -> bool;
}

impl Params {
    /// Allocates and initialises this rank's slices. `layout` lists, per flat buffer, its parameters in order; every
    /// parameter must occur once.
    pub fn new(
        declarations: Arc<Declarations>,
        mesh: &Mesh,
        coords: Coords,
        device: &Arc<dyn Device>,
        layout: &[Vec<ParamId>],
        seed: u64,
    ) -> Result<Self> {
        Self::in_windows(declarations, mesh, coords, device, layout, &[], seed)
    }

    /// The same, of which only these windows of the flat buffers are stored; of buffers without a window all is. A
    /// window may reach beyond the last parameter: what lies there is zero. Of packed parameters it is all, nothing,
    /// or, of one that has its flat buffer to itself, one of the ranges of the window's length, which cuts no block.
    ///
    /// # Errors
    /// Packed parameters in a flat buffer with others; a mesh that cuts their blocks.
    pub fn in_windows(
        declarations: Arc<Declarations>,
        mesh: &Mesh,
        coords: Coords,
        device: &Arc<dyn Device>,
        layout: &[Vec<ParamId>],
        windows: &[Range<usize>],
        seed: u64,
    ) -> Result<Self> {
        for spec in declarations.specs() {
            require_fit(spec, declarations.reduction_blocks(), mesh)?;
            spec.require_whole_blocks(mesh)?;
        }
        let _category = device.meter().enter(Category::Parameters);
        let mut places = vec![None; declarations.specs().len()];
        let mut packed = vec![None; places.len()];
        let (mut flats, mut held) = (Vec::new(), Vec::with_capacity(layout.len()));
        for (flat, members) in layout.iter().enumerate() {
            let mut end = 0;
            for &id in members {
                declarations.require_own(id)?;
                let local = declarations.spec(id).local(mesh, coords);
                let range = end..end + local.stored.count();
                end = range.end;
                if places[id.index()].replace((flat, range, local)).is_some() {
                    return Err(Error::Layout { name: declarations.spec(id).name.clone(), times: 2 });
                }
            }
            let window = windows.get(flat).cloned().unwrap_or(0..end);
            let are_packed = require_alike(&declarations, members)?;
            if are_packed && !window.is_empty() {
                let mut bytes = 0;
                for &id in members {
                    let Some((_, range, _)) = &places[id.index()] else { continue }; // placed above
                    let share = if window.len() < end { window.len() } else { range.len() };
                    let part = from(range.start, shared(range, &window));
                    packed[id.index()] = Packed::new(declarations.spec(id), range.len(), share, part, bytes)?;
                    bytes = packed[id.index()].as_ref().map_or(bytes, Packed::end);
                }
                flats.push(device.zeros(DType::U8, bytes)?);
            } else {
                flats.push(device.zeros(flat_dtype(&declarations, members), window.len())?);
            }
            held.push(window);
        }
        let places: Vec<_> = places
            .into_iter()
            .zip(declarations.specs())
            .map(|(place, spec)| place.ok_or_else(|| Error::Layout { name: spec.name.clone(), times: 0 }))
            .collect::<Result<_>>()?;
        if device.has_values() {
            let mut values = Vec::new();
            for ((spec, (flat, range, local)), packed) in declarations.specs().iter().zip(&places).zip(&packed) {
                let (flat, window) = (&mut flats[*flat], &held[*flat]);
                let here = shared(range, window);
                if let Some(packed) = packed {
                    packed.write(&**device, &spec.name, &spec.initial(local, seed)[from(range.start, here)], flat)?;
                } else if flat.is_host() && here == *range && flat.dtype() == DType::F32 {
                    let to = from(window.start, here);
                    initialise(spec, local, seed, &mut flat.as_mut_slice::<f32>()?[to]);
                } else if !here.is_empty() {
                    // Drawn in host memory, one parameter at a time.
                    values.clear();
                    values.resize(range.len(), 0.0);
                    initialise(spec, local, seed, &mut values);
                    let (part, at) = (&values[from(range.start, here.clone())], here.start - window.start);
                    upload(&**device, part, flat, at)?;
                }
            }
        }
        Ok(Self {
            types: declarations.specs().iter().map(|spec| spec.types(mesh)).collect(),
            places: places.into_iter().map(|(flat, range, local)| (flat, range, local.stored)).collect(),
            declarations,
            flats,
            packed,
            windows: held,
            gather: None,
            updates: 0,
            device: Arc::clone(device),
        })
    }

    /// Sets what brings together flat buffers of which only a window is stored.
    pub fn gather_with(&mut self, gather: Arc<dyn Gather>) {
        self.gather = Some(gather);
    }

    /// The number of updates behind these values, as it was [set](Self::set_updates) last; 0 at first.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Sets the number of updates behind these values.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// The declarations.
    pub fn declarations(&self) -> &Arc<Declarations> {
        &self.declarations
    }

    /// The value of a parameter, sharing memory: with that of the flat buffer, or, of one that is stored in part, with
    /// what brings it together. A packed one is restored in memory of its own.
    ///
    /// # Errors
    /// An id that other declarations gave; of a flat buffer that is stored in part, those of [`Gather::whole`].
    pub fn value(&self, id: ParamId) -> Result<Tensor> {
        self.read_by(id, Packed::restore)
    }

    /// The value of a parameter as [products](crate::kernel::Matmul) read it: a packed one in bf16 as it is stored, in
    /// shared memory, if one rank stores all of it; any other as [`value`](Self::value).
    ///
    /// # Errors
    /// As [`value`](Self::value).
    pub fn matrix(&self, id: ParamId) -> Result<Tensor> {
        self.read_by(id, Packed::matrix)
    }

    /// The value of a parameter; a packed one by `unpack`, from all flat buffers of its bytes.
    fn read_by(
        &self,
        id: ParamId,
        unpack: fn(&Packed, &dyn Device, &Buffer, DType) -> Result<Buffer>,
    ) -> Result<Tensor> {
        self.declarations.require_own(id)?;
        let (flat, range, shape) = &self.places[id.index()];
        let (buffer, window) = (&self.flats[*flat], &self.windows[*flat]);
        let value = match (&self.gather, &self.packed[id.index()]) {
            (Some(gather), packed) if !self.is_whole(id) => {
                let whole = gather.whole(*flat, buffer)?;
                match packed {
                    Some(packed) => unpack(packed, &*self.device, &whole, self.declarations.dtype())?,
                    None => whole.slice(range.clone())?,
                }
            }
            (_, Some(packed)) => unpack(packed, &*self.device, buffer, self.declarations.dtype())?,
            _ => buffer.slice(from(window.start, shared(range, window)))?,
        };
        Tensor::from_buffer(&self.device, value, *shape)
    }

    /// Whether a parameter is stored here for good; others are brought together to be read.
    pub fn is_whole(&self, id: ParamId) -> bool {
        let flat = self.places[self.index(id)].0;
        self.gather.as_ref().is_none_or(|gather| !gather.is_shared(flat))
    }

    /// Whether a parameter is stored here in fewer bits, so that each read restores it.
    pub fn is_packed(&self, id: ParamId) -> bool {
        self.packed[self.index(id)].is_some()
    }

    /// Whether a read of a parameter shares memory that is there anyway; else it is made for the read.
    pub fn is_kept(&self, id: ParamId) -> bool {
        self.is_whole(id) && !self.is_packed(id)
    }

    /// The elements of a flat buffer that are stored here.
    pub fn window(&self, flat: usize) -> Range<usize> {
        self.windows[flat].clone()
    }

    /// The elements of a parameter, as this rank holds it and counted from its first one, that lie in a window of its
    /// flat buffer.
    pub fn part(&self, id: ParamId, window: &Range<usize>) -> Range<usize> {
        let range = &self.places[self.index(id)].1;
        let here = shared(range, window);
        from(range.start, here)
    }

    /// Downloads the elements of a parameter that are stored here, padding included.
    pub fn read(&self, id: ParamId) -> Result<Vec<f32>> {
        let flat = self.places[self.index(id)].0;
        match self.restored(id)? {
            Some(values) => host_floats(&self.device.download(&values)?),
            None => host_floats(&self.download(id, &self.flats[flat], &self.windows[flat])?),
        }
    }

    /// The elements of a packed parameter that are stored here, restored in memory of their own; `None` of another one.
    pub fn restored(&self, id: ParamId) -> Result<Option<Buffer>> {
        let flat = &self.flats[self.places[self.index(id)].0];
        self.packed[id.index()].as_ref().map(|packed| packed.restore_part(&*self.device, flat)).transpose()
    }

    /// Replaces the elements of a parameter as this rank holds it, padding included; of a parameter that is stored in
    /// part, that part is kept.
    ///
    /// # Errors
    /// When the number of values is wrong, or when something reads the weights.
    pub fn write(&mut self, id: ParamId, values: &[f32]) -> Result<()> {
        let (flat, range, shape) = self.places[self.index(id)].clone();
        if values.len() != range.len() {
            return Err(wrong_count(values.len(), range.len(), shape));
        }
        let part = self.part(id, &self.windows[flat]);
        self.write_part(id, &values[part])
    }

    /// Replaces the elements of a parameter that are stored here.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn write_part(&mut self, id: ParamId, values: &[f32]) -> Result<()> {
        let flat = self.places[self.index(id)].0;
        let mut buffer = std::mem::replace(&mut self.flats[flat], Buffer::empty());
        let written = match &self.packed[id.index()] {
            Some(packed) if values.len() == packed.stored() => {
                packed.write(&*self.device, &self.declarations.spec(id).name, values, &mut buffer)
            }
            Some(packed) => Err(wrong_count(values.len(), packed.stored(), self.places[id.index()].2)),
            None => self.write_into(id, &mut buffer, &self.windows[flat], values),
        };
        self.flats[flat] = buffer;
        written
    }

    /// The elements at the place of a parameter in `vector`, which has the window `window` of a vector with the layout
    /// of the parameter's flat buffer, such as its gradients or its optimizer states. In host memory: without a copy
    /// where the device computes there.
    pub fn download(&self, id: ParamId, vector: &Buffer, window: &Range<usize>) -> Result<Buffer> {
        let here = shared(&self.places[self.index(id)].1, window);
        self.device.download(&vector.slice(from(window.start, here))?)
    }

    /// The same of a whole vector, copied.
    pub fn read_from(&self, id: ParamId, vector: &Buffer) -> Result<Vec<f32>> {
        host_floats(&self.download(id, vector, &(0..vector.count()))?)
    }

    /// Replaces the elements at the place of a parameter in such a vector.
    ///
    /// # Errors
    /// When the number of values is wrong, or when `vector` is shared.
    pub fn write_into(&self, id: ParamId, vector: &mut Buffer, window: &Range<usize>, values: &[f32]) -> Result<()> {
        let (_, range, shape) = &self.places[self.index(id)];
        let here = shared(range, window);
        if values.len() != here.len() {
            return Err(wrong_count(values.len(), here.len(), *shape));
        }
        if here.is_empty() { Ok(()) } else { upload(&*self.device, values, vector, here.start - window.start) }
    }

    /// Where a parameter lies in the tables here. Panics if other declarations gave the id, as [`Declarations::spec`]
    /// does.
    #[track_caller]
    fn index(&self, id: ParamId) -> usize {
        _ = self.declarations.spec(id);
        id.index()
    }

    /// Its types as an operand.
    pub fn types(&self, id: ParamId) -> Types {
        self.types[self.index(id)]
    }

    /// Its extents on this rank, padding included.
    pub fn shape(&self, id: ParamId) -> Shape {
        self.places[self.index(id)].2
    }

    /// The place of a parameter: (flat buffer, range within it).
    pub fn place(&self, id: ParamId) -> (usize, Range<usize>) {
        let (flat, range, _) = &self.places[self.index(id)];
        (*flat, range.clone())
    }

    /// The flat buffers.
    pub fn flats(&self) -> &[Buffer] {
        &self.flats
    }

    /// A copy of the weights in new memory, as another version.
    pub fn copy(&self) -> Result<Self> {
        let layout = self.device.layout()?;
        let _category = self.device.meter().enter(Category::Parameters);
        let flats = self.flats.iter().map(|flat| layout.copy(flat)).collect::<Result<_>>()?;
        Ok(Self { flats, ..self.clone() })
    }

    /// The flat buffers, for writing.
    pub fn flats_mut(&mut self) -> &mut [Buffer] {
        &mut self.flats
    }
}

/// The type of a flat buffer of these parameters.
fn flat_dtype(declarations: &Declarations, members: &[ParamId]) -> DType {
    let mut dtypes = members.iter().map(|&id| declarations.stored_dtype(id));
    dtypes.find(|&dtype| dtype != DType::F32).unwrap_or(DType::F32)
}

/// Whether the parameters of a flat buffer are packed: all of them, or none.
fn require_alike(declarations: &Declarations, members: &[ParamId]) -> Result<bool> {
    let is_packed = |&&id: &&ParamId| declarations.spec(id).packed.is_some();
    let count = members.iter().filter(is_packed).count();
    match members.iter().find(is_packed) {
        Some(&id) if count < members.len() => Err(Error::Declaration {
            name: declarations.spec(id).name.clone(),
            problem: "it is stored in fewer bits, and shares a flat buffer with parameters that are not".to_owned(),
            valid: "give such parameters a flat buffer of their own, as Declarations::flats does".to_owned(),
        }),
        found => Ok(found.is_some()),
    }
}

/// Copies numbers to the elements of `vector` from `at` on, rounded as the device rounds.
fn upload(device: &dyn Device, values: &[f32], vector: &mut Buffer, at: usize) -> Result<()> {
    let values = Buffer::from_slice(values);
    match vector.dtype().is_half() {
        false => device.upload_into(&values, vector, at),
        true => {
            let rounded = device.pointwise()?.cast(&device.upload(&values)?, vector.dtype())?;
            device.layout()?.copy_into(&rounded, 0..rounded.count(), vector, at)
        }
    }
}

/// The numbers in host memory.
pub fn host_floats(host: &Buffer) -> Result<Vec<f32>> {
    Ok(match host.dtype() {
        DType::Bf16 => host.as_slice::<bf16>()?.iter().map(|value| value.to_f32()).collect(),
        DType::F16 => host.as_slice::<f16>()?.iter().map(|value| value.to_f32()).collect(),
        _ => host.as_slice::<f32>()?.to_vec(),
    })
}

fn wrong_count(given: usize, held: usize, shape: Shape) -> Error {
    let problem = format!("{given} elements for the {held} that this rank holds");
    Error::Shape { op: "write a parameter", problem, shapes: vec![shape.to_vec()] }
}

/// The elements of `range` that lie in `window`.
fn shared(range: &Range<usize>, window: &Range<usize>) -> Range<usize> {
    let start = range.start.max(window.start);
    start..range.end.min(window.end).max(start)
}

/// A range counted from `origin`.
fn from(origin: usize, range: Range<usize>) -> Range<usize> {
    if range.is_empty() { 0..0 } else { range.start - origin..range.end - origin }
}

/// Refuses a cut over ranks that would not each hold whole subtrees of the blocks of canonical numerics. Ranks with
/// other samples have blocks of samples, whatever they hold of a parameter.
fn require_fit(spec: &ParamSpec, blocks: Option<usize>, mesh: &Mesh) -> Result<()> {
    let Some(blocks) = blocks else { return Ok(()) };
    let unfit = |&&(axis, _): &&(Axis, usize)| !Axis::DATA.contains(&axis) && !tree::fits(blocks, mesh.degree(axis));
    let Some(&(axis, dim)) = spec.placement.shards().iter().find(unfit) else { return Ok(()) };
    Err(Error::Placement {
        what: spec.name.clone(),
        dim,
        extent: spec.dims[dim],
        axis,
        degree: mesh.degree(axis),
        problem: format!("{blocks} reduction blocks fit degrees {:?}", tree::degrees(blocks)),
    })
}

impl ParamSpec {
    /// The initial values of the part of the parameter that `local` holds, in host memory and in f32, whatever it is
    /// stored in. Padding is zero.
    pub fn initial(&self, local: &LocalSlice, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; local.stored.count()];
        initialise(self, local, seed, &mut values);
        values
    }
}

/// Draws the part of a parameter that `local` holds; padding stays zero.
fn initialise(spec: &ParamSpec, local: &LocalSlice, seed: u64, values: &mut [f32]) {
    local.for_each_run(spec.dims, |start, range| spec.init.fill(seed, &spec.name, start, &mut values[range]));
}

#[cfg(test)]
mod tests {
    use super::super::{Init, Placement, Role};
    use super::*;

    fn spec(dims: &[usize], placement: Placement) -> ParamSpec {
        ParamSpec {
            name: "w".to_owned(),
            dims: Shape::new(dims),
            placement,
            role: Role::Weight,
            init: Init::Normal { std: 0.5 },
            group: super::super::ParamGroup::for_role(Role::Weight),
            packed: None,
        }
    }

    #[test]
    fn slices_of_any_mesh_are_pieces_of_one_draw() {
        let shapes = [(vec![6, 4], 0), (vec![6, 4], 1), (vec![3, 8, 2, 5], 1), (vec![7], 0), (vec![7, 3], 0)];
        let inits = [Init::Normal { std: 0.5 }, Init::TruncatedNormal { std: 0.5 }, Init::Constant { value: 2.0 }];
        for ((dims, dim), init) in shapes.iter().flat_map(|shape| inits.map(|init| (shape, init))) {
            let spec = ParamSpec { init, ..spec(dims, Placement::replicated().shard(Axis::Tp, *dim)) };
            let mut whole = vec![0.0; spec.global_elements()];
            let alone = Mesh::new([(Axis::Tp, 1)]).unwrap();
            initialise(&spec, &spec.local(&alone, alone.coords(0)), 7, &mut whole);
            let mut seen = 0;
            let mesh = Mesh::new([(Axis::Tp, 4), (Axis::Dp, 2)]).unwrap();
            for rank in 0..4 {
                let local = spec.local(&mesh, mesh.coords(rank));
                let mut part = vec![0.0; local.stored.count()];
                initialise(&spec, &local, 7, &mut part);
                local.for_each_run(spec.dims, |start, range| {
                    seen += range.len();
                    assert_eq!(&part[range.clone()], &whole[start as usize..start as usize + range.len()]);
                });
                let held: usize = part.iter().filter(|&&value| value != 0.0).count();
                assert_eq!(held, local.elements(), "padding stays zero");
            }
            assert_eq!(seen, whole.len(), "every element on exactly one rank");
        }
    }
}
