//! Extents of a tensor, row-major.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Deref;

/// The most dims that a tensor can have.
pub const MAX_DIMS: usize = 6;

/// The extents of a tensor's dims: a small value that is copied, not allocated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Shape {
    extents: [usize; MAX_DIMS],
    ndim: usize,
}

impl Shape {
    /// A shape of at most [`MAX_DIMS`] dims.
    ///
    /// # Panics
    /// On more dims, which are a programming error and never depend on data.
    pub fn new(extents: &[usize]) -> Self {
        assert!(extents.len() <= MAX_DIMS, "a tensor has at most {MAX_DIMS} dims, not {}", extents.len());
        let mut shape = Self { ndim: extents.len(), ..Self::default() };
        shape.extents[..extents.len()].copy_from_slice(extents);
        shape
    }

    /// The number of elements.
    pub fn count(&self) -> usize {
        self.iter().product()
    }

    /// The shape with another extent in `dim`.
    pub fn with(mut self, dim: usize, extent: usize) -> Self {
        assert!(dim < self.ndim, "dim {dim} of a shape of {} dims", self.ndim);
        self.extents[dim] = extent;
        self
    }

    /// The shape read as `[outer, extent of dim, inner]`: the view of memory for an operation along one dim.
    pub fn around(&self, dim: usize) -> (usize, usize, usize) {
        (self[..dim].iter().product(), self[dim], self[dim + 1..].iter().product())
    }

    /// The shape read as `[rows, columns]` with the last `trailing` dims as columns.
    pub fn rows_columns(&self, trailing: usize) -> (usize, usize) {
        let (lead, tail) = self.split_at(self.ndim - trailing);
        (lead.iter().product(), tail.iter().product())
    }
}

/// The index of an element in each dim, from its row-major number.
pub fn unravel(mut element: usize, extents: &[usize]) -> Vec<usize> {
    let mut index = vec![0; extents.len()];
    for (at, &extent) in index.iter_mut().zip(extents).rev() {
        *at = element % extent.max(1);
        element /= extent.max(1);
    }
    index
}

impl Deref for Shape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.extents[..self.ndim]
    }
}

impl From<&[usize]> for Shape {
    fn from(extents: &[usize]) -> Self {
        Self::new(extents)
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(extents: [usize; N]) -> Self {
        Self::new(&extents)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}
