//! Parameters with placements. A parameter states its structural dims, and per axis whether one of them is cut, once.
//! From that follow its slice on each rank, its initial values, and how its gradient is synchronised.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::random;
use crate::shape::Shape;
use crate::tensor::Tensor;
use meshwork_core::{Axis, Buffer, Coords, DType, Mesh, Ty, Types};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// What a parameter is for. Weight decay goes by role: weights only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A matrix or table.
    Weight,
    /// An additive vector.
    Bias,
    /// Scale or shift of a norm.
    Norm,
}

/// Initial values, drawn for the whole parameter from a generator keyed by its name and the global element, then
/// sliced: any mesh starts from the same model, and no rank holds the whole.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f32,
    },
    /// All zero.
    Zeros,
    /// All one.
    Ones,
}

/// How a parameter lies on the mesh: which axis cuts which dim. Replicated over all other axes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Placement(Vec<(Axis, usize)>);

impl Placement {
    /// Whole on every rank.
    pub fn replicated() -> Self {
        Self::default()
    }

    /// Cut along `dim` over `axis`, besides what is cut already.
    pub fn shard(mut self, axis: Axis, dim: usize) -> Self {
        self.0.push((axis, dim));
        self.0.sort_unstable();
        self
    }

    /// The (axis, dim) pairs.
    pub fn shards(&self) -> &[(Axis, usize)] {
        &self.0
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("replicated");
        }
        let parts: Vec<String> = self.0.iter().map(|(axis, dim)| format!("Shard({dim}) on {axis}")).collect();
        f.write_str(&parts.join(", "))
    }
}

/// The declaration of a parameter, the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Global name, unique in the model; two declarations of one name are one (tied) parameter.
    pub name: String,
    /// Global structural dims: a fused qkv weight is [3, heads, head_dim, hidden].
    pub dims: Shape,
    /// How it lies on the mesh.
    pub placement: Placement,
    /// What it is for.
    pub role: Role,
    /// Initial values.
    pub init: Init,
}

impl ParamSpec {
    /// Number of elements of the whole parameter.
    pub fn global_elements(&self) -> usize {
        self.dims.count()
    }

    /// The slice that the rank at `coords` holds. A dim that the degree does not divide is padded at its end: every rank
    /// stores ⌈extent / degree⌉, and the last ones hold fewer elements than they store.
    pub fn local(&self, mesh: &Mesh, coords: Coords) -> LocalSlice {
        let mut stored = self.dims;
        let mut ranges: Vec<Range<usize>> = self.dims.iter().map(|&extent| 0..extent).collect();
        for &(axis, dim) in self.placement.shards() {
            let held = stored[dim].div_ceil(mesh.degree(axis));
            let start = ranges[dim].start + coords.get(axis) * held;
            let end = (start + held).min(ranges[dim].end);
            ranges[dim] = start.min(end)..end;
            stored = stored.with(dim, held);
        }
        LocalSlice { stored, ranges }
    }

    /// The types of this parameter as an operand: `Shard` where its placement says so, else `Replicate`.
    pub fn types(&self, mesh: &Mesh) -> Types {
        self.placement
            .shards()
            .iter()
            .filter(|(axis, _)| mesh.has(*axis))
            .fold(Types::all(mesh, Ty::Replicate), |types, &(axis, dim)| types.with(axis, Ty::Shard(dim)))
    }

    fn summary(&self) -> String {
        format!("{:?} {}", self.dims, self.placement)
    }
}

/// The part of a parameter that one rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalSlice {
    /// Extents in memory, padding included.
    pub stored: Shape,
    /// Global range per dim.
    pub ranges: Vec<Range<usize>>,
}

impl LocalSlice {
    /// Elements held, padding not counted.
    pub fn elements(&self) -> usize {
        self.ranges.iter().map(Range::len).product()
    }

    /// Calls `visit(global start, local range)` for each run of elements contiguous both globally and here, in order.
    /// `dims` are those of the whole parameter.
    pub fn for_each_run(&self, dims: Shape, mut visit: impl FnMut(u64, Range<usize>)) {
        if self.elements() == 0 {
            return;
        }
        // The innermost dims that are held whole join the run of the dim before them.
        let mut split = dims.len();
        while split > 0 && self.ranges[split - 1].len() == dims[split - 1] && self.stored[split - 1] == dims[split - 1]
        {
            split -= 1;
        }
        let split = split.saturating_sub(1);
        let inner: usize = dims[split + 1..].iter().product();
        let run = self.ranges.get(split).map_or(1, Range::len) * inner;
        let outer = Shape::new(&self.ranges[..split].iter().map(Range::len).collect::<Vec<_>>());
        for index in 0..outer.count() {
            let (mut rest, mut global, mut local) = (index, 0, 0);
            let (mut global_stride, mut local_stride) = (1, 1);
            for dim in (0..dims.len()).rev() {
                let at = match dim {
                    dim if dim < split => {
                        let at = rest % outer[dim];
                        rest /= outer[dim];
                        at
                    }
                    _ => 0,
                };
                global += (self.ranges[dim].start + at) * global_stride;
                local += at * local_stride;
                global_stride *= dims[dim];
                local_stride *= self.stored[dim];
            }
            visit(global as u64, local..local + run);
        }
    }
}

/// Names a parameter within its [`Declarations`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(usize);

impl ParamId {
    /// Position in the order of declaration.
    pub fn index(self) -> usize {
        self.0
    }
}

/// The parameters that a part of a model declares, in order. Plain data: any rank can draw up those of every stage.
#[derive(Clone, Debug, Default)]
pub struct Declarations {
    specs: Vec<ParamSpec>,
    by_name: HashMap<String, ParamId>,
}

impl Declarations {
    /// Nothing declared yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Declares a parameter. The same name again is the same parameter (weight tying) and must agree in everything.
    pub fn declare(
        &mut self,
        name: impl Into<String>,
        dims: &[usize],
        placement: Placement,
        role: Role,
        init: Init,
    ) -> Result<ParamId> {
        let spec = ParamSpec { name: name.into(), dims: Shape::new(dims), placement, role, init };
        if let Some((axis, dim)) = spec.placement.shards().iter().find(|(_, dim)| *dim >= dims.len()) {
            return Err(Error::Placement {
                what: spec.name,
                dim: *dim,
                extent: 0,
                axis: *axis,
                degree: 0,
                problem: format!("it has only {} dims", dims.len()),
            });
        }
        if let Some(&id) = self.by_name.get(&spec.name) {
            self.specs[id.0].require_tied(&spec)?;
            return Ok(id);
        }
        let id = ParamId(self.specs.len());
        self.by_name.insert(spec.name.clone(), id);
        self.specs.push(spec);
        Ok(id)
    }

    /// All declarations, indexed by [`ParamId::index`].
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// Every parameter's id, in order.
    pub fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        (0..self.specs.len()).map(ParamId)
    }

    /// One declaration.
    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        &self.specs[id.0]
    }

    /// The parameter of that name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.by_name.get(name).copied()
    }
}

impl ParamSpec {
    /// Refuses another declaration of the same name that differs in dims, placement, role or initial values.
    pub fn require_tied(&self, other: &ParamSpec) -> Result<()> {
        if self == other {
            return Ok(());
        }
        let (mut first, mut second) = (self.summary(), other.summary());
        if first == second {
            first = format!("{first} {:?} {:?}", self.role, self.init);
            second = format!("{second} {:?} {:?}", other.role, other.init);
        }
        Err(Error::Tied { name: self.name.clone(), first, second })
    }
}

/// The values of one rank's parameters: flat, contiguous buffers of which each parameter is a slice, so that
/// reductions and optimizers see long vectors. Readers share memory; writing needs every reader gone.
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
    /// Allocates and initialises this rank's slices. `layout` lists, per flat buffer, the parameters that lie in it, in
    /// order; every parameter must be in it once.
    pub fn new(
        declarations: Arc<Declarations>,
        mesh: &Mesh,
        coords: Coords,
        device: &Arc<dyn Device>,
        layout: &[Vec<ParamId>],
        seed: u64,
    ) -> Result<Self> {
        let mut places = vec![None; declarations.specs().len()];
        let mut flats = Vec::with_capacity(layout.len());
        for (flat, members) in layout.iter().enumerate() {
            let mut end = 0;
            for &id in members {
                let local = declarations.spec(id).local(mesh, coords);
                let range = end..end + local.stored.count();
                end = range.end;
                if places[id.0].replace((flat, range, local)).is_some() {
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
        for (spec, (flat, range, local)) in declarations.specs().iter().zip(&places) {
            if flats[*flat].is_host() {
                initialise(spec, local, seed, &mut flats[*flat].as_mut_slice::<f32>()?[range.clone()]);
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

    /// What was declared.
    pub fn declarations(&self) -> &Arc<Declarations> {
        &self.declarations
    }

    /// The value of a parameter, sharing memory.
    pub fn value(&self, id: ParamId) -> Result<Tensor> {
        let (flat, range, shape) = &self.places[id.0];
        Tensor::from_buffer(&self.device, self.flats[*flat].slice(range.clone())?, *shape)
    }

    /// Its types as an operand.
    pub fn types(&self, id: ParamId) -> Types {
        self.types[id.0]
    }

    /// Where a parameter lies: (flat buffer, range within it).
    pub fn place(&self, id: ParamId) -> (usize, Range<usize>) {
        let (flat, range, _) = &self.places[id.0];
        (*flat, range.clone())
    }

    /// The flat buffers.
    pub fn flats(&self) -> &[Buffer] {
        &self.flats
    }

    /// The flat buffers, to be written.
    pub fn flats_mut(&mut self) -> &mut [Buffer] {
        &mut self.flats
    }
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
    use super::*;

    fn spec(dims: &[usize], placement: Placement) -> ParamSpec {
        ParamSpec {
            name: "w".to_owned(),
            dims: Shape::new(dims),
            placement,
            role: Role::Weight,
            init: Init::Normal { std: 0.5 },
        }
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

    #[test]
    fn two_declarations_of_a_name_must_agree() {
        let mut all = Declarations::new();
        let vocab = Placement::replicated().shard(Axis::Tp, 0);
        let init = Init::Normal { std: 0.02 };
        let first = all.declare("wte.weight", &[256, 128], vocab.clone(), Role::Weight, init).unwrap();
        assert_eq!(all.declare("wte.weight", &[256, 128], vocab, Role::Weight, init).unwrap(), first);
        let hidden = Placement::replicated().shard(Axis::Tp, 1);
        let error = all.declare("wte.weight", &[256, 128], hidden, Role::Weight, init).unwrap_err();
        assert_eq!(
            error.to_string(),
            "parameter wte.weight is declared twice, as [256, 128] Shard(0) on tp and as [256, 128] Shard(1) on tp: \
             tied parameters share one placement"
        );
    }
}
