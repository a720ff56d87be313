//! Memory and initial values of one rank's parameters.

use super::{Declarations, Init, LocalSlice, ParamId, ParamSpec};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::random;
use crate::shape::Shape;
use crate::tensor::Tensor;
use meshwork_core::{Axis, Buffer, Coords, DType, Mesh, Types, tree};
use std::ops::Range;
use std::sync::Arc;

/// The values of one rank's parameters: flat, contiguous buffers, so that reductions and optimizers work on long
/// vectors. Each parameter is a slice of a buffer. Readers share memory; writing needs that there are no readers.
#[derive(Clone, Debug)]
pub struct Params {
    declarations: Arc<Declarations>,
    types: Vec<Types>,
    flats: Vec<Buffer>,
    /// Per parameter: (flat, range within it, local shape).
    places: Vec<(usize, Range<usize>, Shape)>,
    device: Arc<dyn Device>,
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
        declarations.specs().iter().try_for_each(|spec| require_fit(spec, declarations.reduction_blocks(), mesh))?;
        let mut places = vec![None; declarations.specs().len()];
        let mut flats = Vec::with_capacity(layout.len());
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
            flats.push(device.zeros(DType::F32, end)?);
        }
        let places: Vec<_> = places
            .into_iter()
            .zip(declarations.specs())
            .map(|(place, spec)| place.ok_or_else(|| Error::Layout { name: spec.name.clone(), times: 0 }))
            .collect::<Result<_>>()?;
        if device.has_values() {
            let mut values = Vec::new();
            for (spec, (flat, range, local)) in declarations.specs().iter().zip(&places) {
                let flat = &mut flats[*flat];
                if flat.is_host() {
                    initialise(spec, local, seed, &mut flat.as_mut_slice::<f32>()?[range.clone()]);
                    continue;
                }
                // Drawn in host memory, one parameter at a time.
                values.clear();
                values.resize(range.len(), 0.0);
                initialise(spec, local, seed, &mut values);
                device.upload_into(&Buffer::from_slice(&values), flat, range.start)?;
            }
        }
        Ok(Self {
            types: declarations.specs().iter().map(|spec| spec.types(mesh)).collect(),
            places: places.into_iter().map(|(flat, range, local)| (flat, range, local.stored)).collect(),
            declarations,
            flats,
            device: Arc::clone(device),
        })
    }

    /// The declarations.
    pub fn declarations(&self) -> &Arc<Declarations> {
        &self.declarations
    }

    /// The value of a parameter, sharing memory.
    ///
    /// # Errors
    /// An id that other declarations gave.
    pub fn value(&self, id: ParamId) -> Result<Tensor> {
        self.declarations.require_own(id)?;
        let (flat, range, shape) = &self.places[id.index()];
        Tensor::from_buffer(&self.device, self.flats[*flat].slice(range.clone())?, *shape)
    }

    /// Downloads the elements of a parameter as this rank holds it, padding included.
    pub fn read(&self, id: ParamId) -> Result<Vec<f32>> {
        Ok(self.download(id, None)?.as_slice::<f32>()?.to_vec())
    }

    /// Replaces the elements of a parameter as this rank holds it, padding included.
    ///
    /// # Errors
    /// When the number of values is wrong, or when something reads the weights.
    pub fn write(&mut self, id: ParamId, values: &[f32]) -> Result<()> {
        let flat = self.places[self.index(id)].0;
        let mut buffer = std::mem::replace(&mut self.flats[flat], Buffer::empty());
        let written = self.write_into(id, &mut buffer, values);
        self.flats[flat] = buffer;
        written
    }

    /// Downloads the elements at the place of a parameter in `flat`: a vector with the layout of the parameter's flat
    /// buffer, such as its bucket of gradients or its optimizer states.
    pub fn read_from(&self, id: ParamId, flat: &Buffer) -> Result<Vec<f32>> {
        Ok(self.download(id, Some(flat))?.as_slice::<f32>()?.to_vec())
    }

    /// The elements at the place of a parameter in `flat`, or in the weights, in host memory: without a copy where the device computes there.
    pub fn download(&self, id: ParamId, flat: Option<&Buffer>) -> Result<Buffer> {
        let (weights, range, _) = &self.places[self.index(id)];
        self.device.download(&flat.unwrap_or(&self.flats[*weights]).slice(range.clone())?)
    }

    /// Replaces the elements at the place of a parameter in `flat`: the counterpart of [`read_from`](Self::read_from).
    ///
    /// # Errors
    /// When the number of values is wrong, or when `flat` is shared.
    pub fn write_into(&self, id: ParamId, flat: &mut Buffer, values: &[f32]) -> Result<()> {
        let (_, range, shape) = &self.places[self.index(id)];
        if values.len() != range.len() {
            return Err(Error::Shape {
                op: "write a parameter",
                problem: format!("{} elements for the {} that this rank holds", values.len(), range.len()),
                shapes: vec![shape.to_vec()],
            });
        }
        self.device.upload_into(&Buffer::from_slice(values), flat, range.start)
    }

    /// Where a parameter lies in the tables here. Panics if other declarations gave the id, as [`Declarations::spec`] does.
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
        let flats = self.flats.iter().map(|flat| layout.copy(flat)).collect::<Result<_>>()?;
        Ok(Self { flats, ..self.clone() })
    }

    /// The flat buffers, for writing.
    pub fn flats_mut(&mut self) -> &mut [Buffer] {
        &mut self.flats
    }
}

/// Refuses a cut over ranks that would not each hold whole subtrees of the blocks of canonical numerics.
fn require_fit(spec: &ParamSpec, blocks: Option<usize>, mesh: &Mesh) -> Result<()> {
    let Some(blocks) = blocks else { return Ok(()) };
    let unfit = |&&(axis, _): &&(Axis, usize)| !tree::fits(blocks, mesh.degree(axis));
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

/// Draws the part of a parameter that `local` holds; padding stays zero.
fn initialise(spec: &ParamSpec, local: &LocalSlice, seed: u64, values: &mut [f32]) {
    let key = random::key(seed, &spec.name);
    local.for_each_run(spec.dims, |start, range| match spec.init {
        Init::Zeros => {}
        Init::Ones => values[range].fill(1.0),
        Init::Normal { std } => {
            random::fill_normal(key, start, &mut values[range.clone()]);
            values[range].iter_mut().for_each(|value| *value *= std);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::{Placement, Role};
    use super::*;

    fn spec(dims: &[usize], placement: Placement) -> ParamSpec {
        ParamSpec {
            name: "w".to_owned(),
            dims: Shape::new(dims),
            placement,
            role: Role::Weight,
            init: Init::Normal { std: 0.5 },
            group: super::super::ParamGroup::of(Role::Weight),
        }
    }

    #[test]
    fn ranks_that_hold_no_whole_subtrees_of_leaves_are_refused() {
        let mut all = Declarations::canonical(8);
        let placement = Placement::replicated().shard(Axis::Tp, 1);
        let id = all.declare("w", &[2, 6], placement, Role::Weight, Init::Zeros).unwrap();
        let all = Arc::new(all);
        let build = |degree: usize| {
            let mesh = Mesh::new([(Axis::Tp, degree)]).unwrap();
            Params::new(all.clone(), &mesh, mesh.coords(0), &crate::meta::Meta::device(), &[vec![id]], 0)
        };
        build(2).unwrap();
        assert_eq!(
            build(3).unwrap_err().to_string(),
            "w: dim 1 of extent 6 cannot be cut over tp=3: 8 reduction blocks fit degrees [1, 2, 4, 8]"
        );
    }

    #[test]
    fn slices_of_any_mesh_are_pieces_of_one_draw() {
        for (dims, dim) in [(vec![6, 4], 0), (vec![6, 4], 1), (vec![3, 8, 2, 5], 1), (vec![7], 0), (vec![7, 3], 0)] {
            let spec = spec(&dims, Placement::replicated().shard(Axis::Tp, dim));
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

    #[test]
    fn a_layout_must_name_every_parameter_once() {
        let mut all = Declarations::new();
        let id = all.declare("w", &[2], Placement::replicated(), Role::Bias, Init::Zeros).unwrap();
        let (all, device, mesh) = (Arc::new(all), crate::meta::Meta::device(), Mesh::default());
        for (layout, times) in [(vec![], 0), (vec![vec![id], vec![id]], 2)] {
            let error = Params::new(all.clone(), &mesh, mesh.coords(0), &device, &layout, 0).unwrap_err();
            let want = format!("parameter w lies in {times} flat buffers of the layout: it must lie in one");
            assert_eq!(error.to_string(), want);
        }
    }
}
