//! Parameters with placements. A parameter states its structural dims, and per axis whether one of them is cut, once.
//! These determine its slice on each rank, its initial values, and how its gradient is synchronised.

mod gradients;
mod group;
mod piece;
mod slice;
mod statistic;
mod values;

pub use gradients::{Gradients, reduction_axes};
pub use group::ParamGroup;
pub use piece::{Conflict, Piece, assemble};
pub use slice::LocalSlice;
pub use statistic::{Statistic, StatisticId, StatisticRule};
pub use values::Params;

use crate::error::{Error, Result};
use crate::shape::Shape;
use meshwork_core::{Axis, Coords, Mesh, Ty, Types};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

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

/// Initial values, drawn for the whole parameter from a generator keyed by its name and the global element, then
/// sliced: any mesh starts from the same model, and no rank needs the whole parameter.
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

/// How a parameter is distributed over the mesh: which axis cuts which dim. It is replicated over all other axes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Placement {
    shards: Vec<(Axis, usize)>,
    multiple: Option<usize>,
}

impl Placement {
    /// Whole on every rank.
    pub fn replicated() -> Self {
        Self::default()
    }

    /// Cut along `dim` over `axis`, in addition to earlier cuts.
    pub fn shard(mut self, axis: Axis, dim: usize) -> Self {
        self.shards.push((axis, dim));
        self.shards.sort_unstable();
        self
    }

    /// Stores a cut dim as if its extent were the next multiple of `multiple`, so that blocks have the same size for
    /// any degree.
    pub fn in_multiples_of(mut self, multiple: usize) -> Self {
        self.multiple = Some(multiple);
        self
    }

    /// The (axis, dim) pairs.
    pub fn shards(&self) -> &[(Axis, usize)] {
        &self.shards
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.shards.is_empty() {
            return f.write_str("replicated");
        }
        let parts: Vec<String> = self.shards.iter().map(|(axis, dim)| format!("Shard({dim}) on {axis}")).collect();
        f.write_str(&parts.join(", "))
    }
}

/// The declaration of a parameter, the same on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Global name, unique in the model; two declarations with the same name are one (tied) parameter.
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
            let whole = stored[dim].next_multiple_of(self.placement.multiple.unwrap_or(1));
            let held = whole.div_ceil(mesh.degree(axis));
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

/// Names a parameter within its [`Declarations`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(usize);

impl ParamId {
    /// Position in the order of declaration.
    pub fn index(self) -> usize {
        self.0
    }
}

/// The parameters that a part of a model declares, in order. This is plain data: any rank can create the declarations
/// of every stage.
#[derive(Clone, Debug, Default)]
pub struct Declarations {
    blocks: Option<usize>,
    specs: Vec<ParamSpec>,
    by_name: HashMap<String, ParamId>,
    statistics: Vec<Statistic>,
}

impl Declarations {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty registry for canonical numerics, with `blocks` reduction blocks (at least 1) along each dim that a mesh may cut:
    /// see [`tape::reduction_blocks`](crate::tape::reduction_blocks).
    pub fn canonical(blocks: usize) -> Self {
        Self { blocks: Some(blocks.max(1)), ..Self::default() }
    }

    /// Reduction blocks along a dim that a mesh may cut, in canonical numerics; `None` in fast ones.
    pub fn reduction_blocks(&self) -> Option<usize> {
        self.blocks
    }

    /// Declares a parameter. Declaring the same name again means the same parameter (weight tying), and must agree in
    /// everything.
    pub fn declare(
        &mut self,
        name: impl Into<String>,
        dims: &[usize],
        placement: Placement,
        role: Role,
        init: Init,
    ) -> Result<ParamId> {
        self.declare_in(name, dims, placement, role, init, ParamGroup::of(role))
    }

    /// The same in a given parameter group: another learning rate, another weight decay, or frozen.
    ///
    /// ```
    /// use meshwork_tensor::param::ParamGroup;
    /// use meshwork_tensor::{Declarations, Init, Placement, Role};
    ///
    /// let mut params = Declarations::new();
    /// let slow = ParamGroup { learning_rate: 0.1, ..ParamGroup::of(Role::Weight) };
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
        let spec = ParamSpec { name: name.into(), dims: Shape::new(dims), placement, role, init, group };
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

    /// Declares a statistic: a vector that each micro-batch of a training step leaves with
    /// [`Tape::note`](crate::Tape::note), and the buffers that are updated from its sum over the whole batch at the end of the
    /// step.
    pub fn declare_statistic(&mut self, buffers: Vec<ParamId>, rule: impl StatisticRule + 'static) -> StatisticId {
        self.statistics.push(Statistic { buffers, rule: std::sync::Arc::new(rule) });
        StatisticId(self.statistics.len() - 1)
    }

    /// All statistics, indexed by [`StatisticId::index`].
    pub fn statistics(&self) -> &[Statistic] {
        &self.statistics
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

    /// The parameter with this name.
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
            first = format!("{first} {:?} {:?} {:?}", self.role, self.init, self.group);
            second = format!("{second} {:?} {:?} {:?}", other.role, other.init, other.group);
        }
        Err(Error::Tied { name: self.name.clone(), first, second })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
