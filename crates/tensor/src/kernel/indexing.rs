//! Elements chosen along a dim by integers.

use super::table::*;
use meshwork_core::Buffer;

/// The elements that are taken along the middle dim of a tensor `[outer, extent, inner]`: the result has `count` of
/// them, `[outer, count, inner]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Picks {
    /// Indices of the dims before.
    pub outer: usize,
    /// Extent of the dim that is indexed.
    pub extent: usize,
    /// Indices of the dims behind it.
    pub inner: usize,
    /// Elements that are taken.
    pub count: usize,
    /// Whether each element of the result has an index of its own, `[outer, count, inner]`; else all with the same
    /// place along the dim have one, `[count]`.
    pub each: bool,
}

impl Picks {
    /// The operation that takes them, for errors.
    pub fn op(&self) -> &'static str {
        if self.each { "take_along_dim" } else { "index_select" }
    }

    /// Elements of the tensor.
    pub fn from(&self) -> usize {
        self.outer * self.extent * self.inner
    }

    /// Elements of the result.
    pub fn taken(&self) -> usize {
        self.outer * self.count * self.inner
    }

    /// The place in the index of the element (o, j, i) of the result.
    pub fn place(&self, [o, j, i]: [usize; 3]) -> usize {
        if self.each { (o * self.count + j) * self.inner + i } else { j }
    }
}

kernels! {
    /// Elements chosen by i32 indices along a dim. They are exact copies; a gradient sums the uses of an element in the
    /// order of their places along the dim, from zero.
    pub trait Indexing at indexing {
        /// The index of the largest element along the middle dim, of at least one: the first of equal ones, and the
        /// first NaN if there is one. `[outer, extent, inner] → [outer, inner]` in i32.
        fn argmax(&self, x: &Buffer, shape: [usize; 3]) -> Result<Buffer>
            | profile(Pointwise: x), halves(wide x), meta(I32 => shape[0] * shape[2]);
        /// `out[o, j, i] = x[o, index[o, j, i], i]`.
        ///
        /// # Errors
        /// An index outside of the dim.
        fn pick(&self, x: &Buffer, index: &Buffer, picks: Picks) -> Result<Buffer>
            | profile(Memory: x, index), halves(wide x -> x), meta(x => picks.taken());
        /// `dx[o, e, i] = Σ_j dy[o, j, i]` over the j whose index is e.
        fn pick_grad(&self, dy: &Buffer, index: &Buffer, picks: Picks) -> Result<Buffer>
            | profile(Memory: dy, index), halves(wide dy -> dy), meta(dy => picks.from());
    }
}
