//! Parameters with placements. A parameter states its structural dims, and per axis whether one of them is cut, once.
//! These determine its slice on each rank, its initial values, and how its gradient is synchronised.
//!
//! More than 400 lines: the documented declarations of one type, and the refusals that belong to them.

mod adapters;
mod gradients;
mod group;
mod id;
mod init;
mod packed;
mod piece;
mod placement;
mod slice;
mod statistic;
mod values;

pub use adapters::{Adapter, AdapterSpec, Adapters, MatrixOf};
pub use gradients::{Gradients, reduction_axes};
pub use group::{Matrices, ParamGroup};
pub use id::ParamId;
pub use init::Init;
pub use piece::{Conflict, Piece, assemble};
pub use placement::Placement;
pub use slice::LocalSlice;
pub use statistic::{Statistic, StatisticId, StatisticRule};
pub use values::{Gather, Params, host_floats};

use crate::error::{Error, Result};
use crate::shape::Shape;
use crate::tape::HalfType;
use id::Registry;
use meshwork_compress::Values;
use meshwork_core::{Coords, DType, Mesh, Ty, Types};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// The role of a parameter. It determines the [group](ParamGroup) of the parameter, unless the declaration has another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A matrix or table.
    Weight,
    /// An additive vector.
    Bias,
    /// Scale or shift of a norm.
    Norm,
    /// State that is not trained, such as running statistics. Frozen.
    Buffer,
}

/// The declaration of a parameter, the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Global name, unique in the model. Layers that share the parameter [tie](Declarations::tie) it by this name.
    pub name: String,
    /// Global structural dims: a fused qkv weight is [3, heads, head_dim, hidden].
    pub dims: Shape,
    /// How it is distributed over the mesh.
    pub placement: Placement,
    /// Its role.
    pub role: Role,
    /// Initial values.
    pub init: Init,
    /// How it is updated.
    pub group: ParamGroup,
    /// The form in which it is stored in fewer bits, as a frozen weight may be: each read restores its numbers, or
    /// products [read](crate::Tape::matrix) those in bf16 as they are.
    pub packed: Option<Values>,
}

impl ParamSpec {
    /// Number of elements of the whole parameter.
    pub fn global_elements(&self) -> usize {
        self.dims.count()
    }

    /// The slice that the rank at `coords` holds. A dim that the degree does not divide is padded at its end: every
    /// rank stores ⌈extent / degree⌉, or the [multiple](Placement::each_in_multiples_of) that the placement asks for,
    /// and the last ones hold fewer elements than they store. One rank alone may store padding too. Of axes that cut
    /// one dim the slowest cuts outermost.
    pub fn local(&self, mesh: &Mesh, coords: Coords) -> LocalSlice {
        let mut stored = self.dims;
        let mut ranges: Vec<Range<usize>> = self.dims.iter().map(|&extent| 0..extent).collect();
        for (dim, range) in ranges.iter_mut().enumerate() {
            let cuts = || self.placement.shards().iter().filter(|&&(_, cut)| cut == dim).map(|&(axis, _)| axis);
            if cuts().next().is_none() {
                continue;
            }
            let ranks: usize = cuts().map(|axis| mesh.degree(axis)).product();
            let rank = cuts().rev().fold(0, |rank, axis| rank * mesh.degree(axis) + coords.get(axis));
            let extent = self.dims[dim];
            let held = self.placement.stored(extent, ranks);
            *range = (rank * held).min(extent)..((rank + 1) * held).min(extent);
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

/// The parameters that a part of a model declares, in order. This is plain data: any rank can create the declarations
/// of every stage.
#[derive(Clone, Debug, Default)]
pub struct Declarations {
    blocks: Option<usize>,
    half: Option<HalfType>,
    /// Whether what is declared now is frozen.
    freezing: bool,
    /// The adapters of what is declared now.
    adapters: Option<Arc<Adapters>>,
    registry: Registry,
    specs: Vec<ParamSpec>,
    /// Per parameter, whether a layer declared it: others only tie it.
    owned: Vec<bool>,
    by_name: HashMap<String, ParamId>,
    statistics: Vec<Statistic>,
}

impl Declarations {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty registry for canonical numerics, with `blocks` reduction blocks (at least 1) along each dim that a mesh
    /// may cut: see [`tape::reduction_blocks`](crate::tape::reduction_blocks).
    pub fn canonical(blocks: usize) -> Self {
        Self { blocks: Some(blocks.max(1)), ..Self::default() }
    }

    /// The same parameters, whose values are stored in 16 bits, and with them activations and gradients: for a
    /// [`Widened`](crate::Widened) device. Running statistics stay in f32.
    pub fn stored_in(self, half: Option<HalfType>) -> Self {
        Self { half, ..self }
    }

    /// The type of values that are computed from the parameters.
    pub fn dtype(&self) -> DType {
        self.half.map_or(DType::F32, HalfType::dtype)
    }

    /// The type in which a parameter is stored.
    pub fn stored_dtype(&self, id: ParamId) -> DType {
        if self.spec(id).role == Role::Buffer { DType::F32 } else { self.dtype() }
    }

    /// Parameters that `declare` declares or ties are [frozen](ParamGroup::frozen) if `frozen`: training does not
    /// change it. Layers need not know of it.
    ///
    /// ```
    /// # use meshwork_tensor::{Declarations, Init, Placement, Role};
    /// let mut params = Declarations::new();
    /// let table = |params: &mut Declarations| {
    ///     params.declare("wte.weight", &[256, 128], Placement::replicated(), Role::Weight, Init::Zeros)
    /// };
    /// let id = params.freezing(true, table)?;
    /// assert!(params.spec(id).group.frozen);
    /// # Ok::<(), meshwork_tensor::Error>(())
    /// ```
    pub fn freezing<T>(&mut self, frozen: bool, declare: impl FnOnce(&mut Self) -> T) -> T {
        let around = self.freezing;
        self.freezing |= frozen;
        let declared = declare(self);
        self.freezing = around;
        declared
    }

    /// Whether what is declared now is frozen.
    pub fn is_freezing(&self) -> bool {
        self.freezing
    }

    /// Reduction blocks along a dim that a mesh may cut, in canonical numerics; `None` in fast ones.
    pub fn reduction_blocks(&self) -> Option<usize> {
        self.blocks
    }

    /// Declares a parameter under a name that no other layer of the model declares: two layers of one name would share
    /// a weight on one stage and hold two when they are cut apart. Layers that mean to share a weight [tie](Self::tie)
    /// it.
    ///
    /// # Errors
    /// A name that is taken, a dim that does not exist, an axis that cuts two dims.
    pub fn declare(
        &mut self,
        name: impl Into<String>,
        dims: &[usize],
        placement: Placement,
        role: Role,
        init: Init,
    ) -> Result<ParamId> {
        self.declare_in(name, dims, placement, role, init, ParamGroup::for_role(role))
    }

    /// The same in a given parameter group: another learning rate, another weight decay, or frozen.
    ///
    /// ```
    /// use meshwork_tensor::param::ParamGroup;
    /// use meshwork_tensor::{Declarations, Init, Placement, Role};
    ///
    /// let mut params = Declarations::new();
    /// let slow = ParamGroup { learning_rate: 0.1, ..ParamGroup::for_role(Role::Weight) };
    /// let whole = Placement::replicated();
    /// let id = params.declare_in("adapter", &[8, 8], whole, Role::Weight, Init::Zeros, slow)?;
    /// assert_eq!(params.spec(id).group, slow);
    /// # Ok::<(), meshwork_tensor::Error>(())
    /// ```
    pub fn declare_in(
        &mut self,
        name: impl Into<String>,
        dims: &[usize],
        placement: Placement,
        role: Role,
        init: Init,
        group: ParamGroup,
    ) -> Result<ParamId> {
        let (name, dims) = (name.into(), Shape::new(dims));
        self.declare_spec(ParamSpec { name, dims, placement, role, init, group, packed: None })
    }

    /// Declares the parameter that `spec` states: [`declare_in`](Self::declare_in).
    fn declare_spec(&mut self, spec: ParamSpec) -> Result<ParamId> {
        let id = self.enter(spec)?;
        if std::mem::replace(&mut self.owned[id.index], true) {
            return Err(Error::Declaration {
                name: self.specs[id.index].name.clone(),
                problem:
                    "two layers declare this name: they would share it on one stage, and hold one each when cut apart"
                        .to_owned(),
                valid: "give each layer a name of its own, or tie them with Declarations::tie in the second".to_owned(),
            });
        }
        Ok(id)
    }

    /// Shares the parameter that another layer [declares](Self::declare) under this name: weight tying, as of an
    /// embedding and the head. Both must agree in everything. The other layer may lie on another stage, and so on
    /// another rank: its gradient is then summed over both (Megatron's embedding group).
    ///
    /// ```
    /// # use meshwork_tensor::{Declarations, Init, Placement, Role};
    /// let mut params = Declarations::new();
    /// let (whole, init) = (Placement::replicated(), Init::Normal { std: 0.02 });
    /// let table = params.declare("wte.weight", &[256, 128], whole.clone(), Role::Weight, init)?;
    /// assert_eq!(params.tie("wte.weight", &[256, 128], whole.clone(), Role::Weight, init)?, table);
    /// assert!(params.declare("wte.weight", &[256, 128], whole, Role::Weight, init).is_err());
    /// # Ok::<(), meshwork_tensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// A declaration of that name that differs; as [`declare`](Self::declare).
    pub fn tie(
        &mut self,
        name: impl Into<String>,
        dims: &[usize],
        placement: Placement,
        role: Role,
        init: Init,
    ) -> Result<ParamId> {
        self.tie_in(name, dims, placement, role, init, ParamGroup::for_role(role))
    }

    /// The same for a parameter that is [declared in](Self::declare_in) another group than its role's: frozen, or
    /// with another learning rate.
    ///
    /// ```
    /// # use meshwork_tensor::{Declarations, Init, Placement, Role, param::ParamGroup};
    /// let mut params = Declarations::new();
    /// let (dims, whole, init, frozen) = ([256, 128], Placement::replicated(), Init::Zeros, ParamGroup::FROZEN);
    /// let table = params.declare_in("wte.weight", &dims, whole.clone(), Role::Weight, init, frozen)?;
    /// assert_eq!(params.tie_in("wte.weight", &dims, whole.clone(), Role::Weight, init, frozen)?, table);
    /// assert!(params.tie("wte.weight", &dims, whole, Role::Weight, init).is_err()); // one of them would be trained
    /// # Ok::<(), meshwork_tensor::Error>(())
    /// ```
    pub fn tie_in(
        &mut self,
        name: impl Into<String>,
        dims: &[usize],
        placement: Placement,
        role: Role,
        init: Init,
        group: ParamGroup,
    ) -> Result<ParamId> {
        let (name, dims) = (name.into(), Shape::new(dims));
        self.enter(ParamSpec { name, dims, placement, role, init, group, packed: None })
    }

    /// Puts a declared parameter into another group: what a model of ready layers trains can so be chosen from outside
    /// of them. Every stage and rank that holds the parameter does so.
    ///
    /// ```
    /// use meshwork_tensor::param::ParamGroup;
    /// use meshwork_tensor::{Declarations, Init, Placement, Role};
    ///
    /// let mut params = Declarations::new();
    /// let id = params.declare("norm", &[8], Placement::replicated(), Role::Norm, Init::Ones)?;
    /// params.set_group(id, ParamGroup::FROZEN)?;
    /// assert!(params.spec(id).group.frozen);
    /// # Ok::<(), meshwork_tensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// An id that other declarations gave; a group whose matrices the parameter does not have.
    pub fn set_group(&mut self, id: ParamId, group: ParamGroup) -> Result<()> {
        self.require_own(id)?;
        let spec = ParamSpec { group, ..self.specs[id.index].clone() };
        spec.require_placement()?;
        self.specs[id.index] = spec;
        Ok(())
    }

    /// Parameters that layers tie and none declares: of one stage they may be another stage's, of a whole model there
    /// are none.
    pub fn undeclared(&self) -> impl Iterator<Item = &ParamSpec> {
        self.specs.iter().zip(&self.owned).filter(|(_, owned)| !**owned).map(|(spec, _)| spec)
    }

    /// The id of a parameter, new or of that name.
    fn enter(&mut self, mut spec: ParamSpec) -> Result<ParamId> {
        spec.group.frozen |= self.freezing;
        spec.packed = self.adapters.as_ref().filter(|_| self.freezing).and_then(|adapters| adapters.packing(&spec));
        spec.require_placement()?;
        if let Some(&id) = self.by_name.get(&spec.name) {
            self.specs[id.index].require_tied(&spec)?;
            return Ok(id);
        }
        let id = ParamId { index: self.specs.len(), registry: self.registry };
        self.by_name.insert(spec.name.clone(), id);
        self.specs.push(spec);
        self.owned.push(false);
        Ok(id)
    }

    /// Refuses an id that other declarations gave.
    pub(crate) fn require_own(&self, id: ParamId) -> Result<()> {
        if id.registry == self.registry {
            return Ok(());
        }
        let problem = match self.specs.get(id.index) {
            Some(spec) => format!("here that is {}", spec.name),
            None => format!("here there are {}", self.specs.len()),
        };
        Err(Error::OtherDeclarations { index: id.index, problem })
    }

    /// Declares a statistic: a vector that each micro-batch of a training step leaves with
    /// [`Tape::note`](crate::Tape::note), and the buffers that are updated from its sum over the whole batch at the end
    /// of the step.
    pub fn declare_statistic(&mut self, buffers: Vec<ParamId>, rule: impl StatisticRule + 'static) -> StatisticId {
        self.statistics.push(Statistic { buffers, rule: std::sync::Arc::new(rule) });
        StatisticId(self.statistics.len() - 1)
    }

    /// All statistics, indexed by [`StatisticId::index`].
    pub fn statistics(&self) -> &[Statistic] {
        &self.statistics
    }

    /// Their ids, in the order of declaration.
    pub fn statistic_ids(&self) -> impl Iterator<Item = StatisticId> + use<> {
        (0..self.statistics.len()).map(StatisticId)
    }

    /// All declarations, indexed by [`ParamId::index`].
    pub fn specs(&self) -> &[ParamSpec] {
        &self.specs
    }

    /// Every parameter's id, in order.
    pub fn ids(&self) -> impl Iterator<Item = ParamId> + use<> {
        let registry = self.registry;
        (0..self.specs.len()).map(move |index| ParamId { index, registry })
    }

    /// A layout for [`Params::new`]: a flat buffer of all parameters, and one of those that are
    /// [packed](ParamSpec::packed), if there are some.
    pub fn flats(&self) -> Vec<Vec<ParamId>> {
        let (plain, packed): (Vec<_>, Vec<_>) = self.ids().partition(|id| self.specs[id.index].packed.is_none());
        [plain, packed].into_iter().filter(|flat| !flat.is_empty()).collect()
    }

    /// One declaration.
    ///
    /// # Panics
    /// If other declarations gave the id.
    #[track_caller]
    pub fn spec(&self, id: ParamId) -> &ParamSpec {
        if let Err(error) = self.require_own(id) {
            panic!("{error}");
        }
        &self.specs[id.index]
    }

    /// The parameter with this name.
    pub fn find(&self, name: &str) -> Option<ParamId> {
        self.by_name.get(name).copied()
    }
}

impl ParamSpec {
    /// Refuses a placement that cuts a dim that is not there, or two dims by one axis.
    fn require_placement(&self) -> Result<()> {
        let refuse = |problem, valid| Err(Error::Declaration { name: self.name.clone(), problem, valid });
        let (shards, dims) = (self.placement.shards(), self.dims.len());
        if let Some((axis, dim)) = shards.iter().find(|(_, dim)| *dim >= dims) {
            let problem = format!("{axis} cuts dim {dim}, and it has only {dims} dims");
            return refuse(problem, format!("cut a dim below {dims}"));
        }
        if let Some([(axis, first), (_, second)]) = shards.array_windows().find(|[(a, _), (b, _)]| a == b) {
            let problem =
                format!("{axis} cuts dim {first} and dim {second}: a rank would hold the blocks of a diagonal alone");
            return refuse(problem, format!("cut one dim over {axis}, and the other over another axis"));
        }
        if let Some(Matrices { stacked, interleaved, columns }) = self.group.matrices {
            let taken = stacked + interleaved + columns;
            let vectors = self.role != Role::Weight;
            if taken > dims
                || !vectors && (columns == 0 || taken == dims)
                || vectors && interleaved > 0 && taken == dims
            {
                let problem = format!(
                    "{} dims number its matrices and {columns} are columns, of {dims} dims",
                    stacked + interleaved
                );
                let valid = "leave a dim or more for the rows, and of a weight have one or more for the columns";
                return refuse(problem, valid.to_owned());
            }
        }
        Ok(())
    }

    /// Refuses another declaration of the same name that differs in dims, placement, role, initial values or group.
    pub fn require_tied(&self, other: &ParamSpec) -> Result<()> {
        if self == other {
            return Ok(());
        }
        let (mut first, mut second) = (self.summary(), other.summary());
        if first == second {
            first = format!("{first} {:?} {:?} {:?}", self.role, self.init, self.group);
            second = format!("{second} {:?} {:?} {:?}", other.role, other.init, other.group);
        }
        Err(Error::Tied { name: self.name.clone(), first, second })
    }
}
