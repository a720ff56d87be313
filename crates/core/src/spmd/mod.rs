//! SPMD types: how a value is distributed over each axis of its mesh.
//!
//! | type | value over the axis | gradient |
//! |---|---|---|
//! | `Replicate` | same everywhere, used differently per rank | `Partial` |
//! | `Invariant` | same everywhere, and the same work is done everywhere | `Invariant` |
//! | `Shard(dim)` | each rank holds its slice of `dim` | `Shard(dim)` |
//! | `Varying` | each rank holds a value of its own | `Varying` |
//! | `Partial` | the true value is the sum over ranks, not yet taken | `Replicate` |
//!
//! Local operations infer the type of their result ([`rules`]) and refuse operands that would need hidden
//! communication. Only the named collectives of `meshwork-tensor` change a type. The reason: if the `copy` before a
//! column-parallel layer is forgotten, the forward pass is right, the gradient is wrong, and nothing else notices it.

pub mod rules;

use crate::axes::Axis;
use crate::mesh::{Coords, Mesh};
use std::fmt;

/// The type of a value over one mesh axis. See the table above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ty {
    /// Same everywhere, used differently per rank.
    Replicate,
    /// Same everywhere, and the same work is done everywhere.
    Invariant,
    /// Each rank holds its slice of this dim.
    Shard(usize),
    /// Each rank holds a value of its own.
    Varying,
    /// The true value is the sum over the ranks, not yet taken.
    Partial,
}

impl Ty {
    /// The type of the gradient of a value of this type.
    pub fn dual(self) -> Ty {
        match self {
            Ty::Replicate => Ty::Partial,
            Ty::Partial => Ty::Replicate,
            Ty::Invariant | Ty::Shard(_) | Ty::Varying => self,
        }
    }

    /// The sharded dim.
    pub fn dim(self) -> Option<usize> {
        if let Ty::Shard(dim) = self { Some(dim) } else { None }
    }

    /// Four bits for [`Types::signature`]; dims from 11 on share a code.
    fn code(self) -> u64 {
        match self {
            Ty::Replicate => 1,
            Ty::Invariant => 2,
            Ty::Varying => 3,
            Ty::Partial => 4,
            Ty::Shard(dim) => 5 + dim.min(10) as u64,
        }
    }
}

impl fmt::Display for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ty::Shard(dim) => write!(f, "Shard({dim})"),
            other => write!(f, "{other:?}"),
        }
    }
}

/// One [`Ty`] per axis of the mesh that a value lies on.
///
/// Where several axes cut one dim, the cuts nest, and the slowest axis makes the outermost one: the ranks hold the
/// slices of the dim in the order of their numbers. So over dp and ep, which cut the samples, and over any other axes,
/// of values and of parameters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Types([Option<Ty>; Axis::COUNT]);

impl Types {
    /// No axes at all: a value outside any mesh.
    pub const NONE: Types = Types([None; Axis::COUNT]);

    /// The given types, nothing on other axes.
    pub fn new(types: &[(Axis, Ty)]) -> Self {
        types.iter().fold(Self::NONE, |all, &(axis, ty)| all.with(axis, ty))
    }

    /// The same type on every value axis of `mesh`.
    pub fn all(mesh: &Mesh, ty: Ty) -> Self {
        mesh.value_axes().fold(Self::NONE, |all, axis| all.with(axis, ty))
    }

    /// The type on `axis`, if the value lies on that axis.
    pub fn get(&self, axis: Axis) -> Option<Ty> {
        self.0[axis.index()]
    }

    /// The same types, with `ty` on `axis`.
    pub fn with(mut self, axis: Axis, ty: Ty) -> Self {
        self.0[axis.index()] = Some(ty);
        self
    }

    /// The axes with their types, fastest axis first.
    pub fn iter(&self) -> impl Iterator<Item = (Axis, Ty)> + use<> {
        let types = self.0;
        Axis::ALL.into_iter().filter_map(move |axis| types[axis.index()].map(|ty| (axis, ty)))
    }

    /// The axes that cut `dim`, fastest first: the innermost cut first, and the outermost last.
    pub fn cuts(&self, dim: usize) -> impl DoubleEndedIterator<Item = Axis> + use<> {
        let types = self.0;
        Axis::ALL.into_iter().filter(move |axis| types[axis.index()] == Some(Ty::Shard(dim)))
    }

    /// The types of the gradient.
    pub fn dual(&self) -> Self {
        Self(self.0.map(|ty| ty.map(Ty::dual)))
    }

    /// The axes on which the value is `Partial`.
    pub fn partial_axes(&self) -> impl Iterator<Item = Axis> + use<> {
        self.iter().filter(|&(_, ty)| ty == Ty::Partial).map(|(axis, _)| axis)
    }

    /// Refuses to report or return, as final, a value that is not the same on every rank.
    pub fn require_final(&self, what: &str) -> Result<(), SpmdError> {
        match self.iter().find(|(_, ty)| !matches!(ty, Ty::Replicate | Ty::Invariant)) {
            None => Ok(()),
            Some((axis, ty)) => Err(SpmdError {
                op: what.to_owned(),
                axis,
                problem: format!("the value is {ty}: no rank holds the true one"),
                fix: match ty {
                    Ty::Shard(_) => format!("all_gather it over {axis} first"),
                    _ => format!("all_reduce it over {axis} first"),
                },
            }),
        }
    }

    /// Whether the rank at `coords` contributes to a sum over the whole mesh: a value that is the same everywhere along
    /// an axis counts once, at position 0; a share or slice counts on every rank.
    pub fn counted_at(&self, coords: Coords) -> bool {
        self.iter().all(|(axis, ty)| match ty {
            Ty::Replicate | Ty::Invariant => coords.get(axis) == 0,
            Ty::Partial | Ty::Shard(_) | Ty::Varying => true,
        })
    }

    /// A fingerprint of these types and of a shape and element type. A pipeline message carries it, and the receiver
    /// refuses any other.
    pub fn signature(&self, dtype: crate::DType, shape: &[usize]) -> u64 {
        let codes = self.0.iter().rev().fold(0, |bits, ty| bits << 4 | ty.map_or(0, Ty::code));
        // FNV-1a over dtype and shape, folded to the 40 bits left of the types.
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for word in
            std::iter::once(dtype.size() as u64 * 31 + dtype as u64).chain(shape.iter().map(|&extent| extent as u64))
        {
            hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        }
        (hash ^ hash >> 40) << (4 * Axis::COUNT) | codes
    }
}

impl fmt::Display for Types {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self.iter().map(|(axis, ty)| format!("{axis}: {ty}")).collect();
        write!(f, "[{}]", parts.join(", "))
    }
}

impl fmt::Debug for Types {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A wrongly distributed program: the operands of an operation, the axis, and what would be valid.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{op}: on axis {axis}, {problem}; {fix}")]
pub struct SpmdError {
    /// The operation that refused.
    pub op: String,
    /// The axis on which its operands do not fit.
    pub axis: Axis,
    /// The reason.
    pub problem: String,
    /// What would be valid.
    pub fix: String,
}

crate::debug_as_display!(SpmdError);
