//! Several axes of a mesh at once.

use crate::mesh::Axis;
use std::ops::Deref;

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

impl std::fmt::Debug for Axes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(f)
    }
}
