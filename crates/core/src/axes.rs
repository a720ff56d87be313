//! The axes of a mesh, and sets of them.

use std::fmt;
use std::ops::Deref;

crate::named! {
    /// One named axis of a [`Mesh`](crate::Mesh), declared in rank order, fastest first.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Axis {
        /// Tensor parallel: heads, features and vocabulary are split.
        Tp = "tp",
        /// Where experts are shared out over a part of context parallelism: the ranks of this part. The sequence is
        /// split over it too.
        Cep = "cep",
        /// Context parallel: the sequence itself is split, attention included. On a mesh with [`Axis::Cep`], the rest
        /// of context parallelism: the ranks that hold the same experts.
        Cp = "cp",
        /// Expert parallel: the batch is split, and the experts are.
        Ep = "ep",
        /// Data parallel: the batch is split. On a mesh with experts, the rest of data parallelism: the ranks that hold
        /// the same experts.
        Dp = "dp",
        /// Pipeline parallel: the layers are split.
        Pp = "pp",
    }
    name: "The short name used in mesh strings, errors and metrics.", ALL: "Every axis, fastest first."
}

impl Axis {
    /// The axes over which the samples of a batch are split: data parallelism.
    pub const DATA: [Axis; 2] = [Axis::Ep, Axis::Dp];
    /// The axes over which sequences are split, attention included: context parallelism.
    pub const CONTEXT: [Axis; 2] = [Axis::Cep, Axis::Cp];
    /// The axes that a mesh string names, fastest first.
    pub const NAMED: [Axis; 5] = [Axis::Tp, Axis::Cp, Axis::Ep, Axis::Dp, Axis::Pp];
    /// Number of axes.
    pub const COUNT: usize = Self::ALL.len();

    /// Whether the samples of a batch are split over it.
    pub const fn is_data(self) -> bool {
        matches!(self, Axis::Ep | Axis::Dp)
    }

    /// Whether sequences are split over it, attention included.
    pub const fn is_context(self) -> bool {
        matches!(self, Axis::Cep | Axis::Cp)
    }

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of axes, fastest first: what a collective runs over. One axis is a set too, and [`Axis::DATA`] are the axes of
/// data parallelism.
///
/// ```
/// use meshwork_core::{Axes, Axis};
/// assert_eq!(*Axes::from(Axis::DATA), [Axis::Ep, Axis::Dp]);
/// assert_eq!(Axes::from([Axis::Dp, Axis::Tp, Axis::Dp]), Axes::from(&[Axis::Tp, Axis::Dp][..]));
/// assert_eq!(*Axes::from(Axis::Tp), [Axis::Tp]);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Axes {
    /// The first `len` are the set, in order; the others fill the array.
    axes: [Axis; Axis::COUNT],
    len: usize,
}

impl Axes {
    /// No axes.
    pub const NONE: Self = Self { axes: [Axis::Tp; Axis::COUNT], len: 0 };

    /// One axis.
    pub const fn one(axis: Axis) -> Self {
        let mut axes = Self::NONE.axes;
        axes[0] = axis;
        Self { axes, len: 1 }
    }
}

impl FromIterator<Axis> for Axes {
    fn from_iter<I: IntoIterator<Item = Axis>>(given: I) -> Self {
        let named = given.into_iter().fold([false; Axis::COUNT], |mut named, axis| {
            named[axis.index()] = true;
            named
        });
        let mut set = Self { axes: Axis::ALL, len: 0 };
        for axis in Axis::ALL.into_iter().filter(|axis| named[axis.index()]) {
            set.axes[set.len] = axis;
            set.len += 1;
        }
        // Equal sets are equal arrays.
        set.axes[set.len..].fill(Axis::Tp);
        set
    }
}

impl From<Axis> for Axes {
    fn from(axis: Axis) -> Self {
        Self::one(axis)
    }
}

impl<const N: usize> From<[Axis; N]> for Axes {
    fn from(axes: [Axis; N]) -> Self {
        Self::from_iter(axes)
    }
}

impl<const N: usize> From<&[Axis; N]> for Axes {
    fn from(axes: &[Axis; N]) -> Self {
        Self::from(*axes)
    }
}

impl From<&[Axis]> for Axes {
    fn from(axes: &[Axis]) -> Self {
        axes.iter().copied().collect()
    }
}

impl Deref for Axes {
    type Target = [Axis];

    fn deref(&self) -> &[Axis] {
        &self.axes[..self.len]
    }
}

impl fmt::Debug for Axes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}
