//! How a parameter is cut over the mesh.

use meshwork_core::Axis;
use std::fmt;

/// How a parameter is distributed over the mesh: which axis cuts which dim. It is replicated over all other axes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Placement {
    shards: Vec<(Axis, usize)>,
    multiple: Option<usize>,
    each: Option<usize>,
    in_blocks: Option<usize>,
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

    /// Each rank stores a multiple of `multiple` of a cut dim, so that what it computes has rows of whole vectors.
    /// Where the ranks' numbers are no multiples, all of them store the next one.
    pub fn each_in_multiples_of(mut self, multiple: usize) -> Self {
        self.each = Some(multiple);
        self
    }

    /// Canonical numerics sum over `dim` in the blocks of a dim that is cut, though it is not cut here: for a parameter
    /// that some meshes cut along it and others do not.
    pub fn summed_in_blocks(mut self, dim: usize) -> Self {
        self.in_blocks = Some(dim);
        self
    }

    /// The dim that is summed in blocks without being cut.
    pub(crate) fn in_blocks(&self) -> Option<usize> {
        self.in_blocks
    }

    /// Elements that each of `degree` ranks stores of a cut dim of this extent.
    pub(super) fn stored(&self, extent: usize, degree: usize) -> usize {
        let next = |count: usize, multiple: Option<usize>| count.next_multiple_of(multiple.unwrap_or(1).max(1));
        next(next(extent, self.multiple).div_ceil(degree), self.each)
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
        f.write_str(&parts.join(", "))?;
        let all = self.multiple.map(|multiple| format!("of {multiple}"));
        let each = self.each.map(|multiple| format!("of {multiple} on each rank"));
        match all.into_iter().chain(each).collect::<Vec<_>>() {
            multiples if multiples.is_empty() => Ok(()),
            multiples => write!(f, " (stored in multiples {})", multiples.join(", ")),
        }
    }
}
