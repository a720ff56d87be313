//! Slices of tensors: a range per dim. Slices are the unit of cutting, assignment, writing and reading.

use crate::Tensor;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// A slice of a tensor: a range per dim. A tensor without dims has one element, and one slice.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Slice(Vec<(u64, u64)>);

impl Slice {
    /// A slice of these ranges, outermost dim first.
    pub fn new(ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        Self(ranges.into_iter().map(|range| (range.start, range.end)).collect())
    }

    /// The slice that is the whole tensor.
    pub fn whole(dims: &[u64]) -> Self {
        Self::new(dims.iter().map(|&dim| 0..dim))
    }

    /// The range of each dim.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = Range<u64>> + '_ {
        self.0.iter().map(|&(start, end)| start..end)
    }

    /// The extent in each dim.
    pub fn extents(&self) -> Vec<u64> {
        self.0.iter().map(|&(start, end)| end.saturating_sub(start)).collect()
    }

    /// The number of elements.
    pub fn elements(&self) -> u64 {
        self.0.iter().fold(1, |product, &(start, end)| product.saturating_mul(end.saturating_sub(start)))
    }

    /// Whether it is a slice of a tensor of these extents.
    pub fn fits(&self, dims: &[u64]) -> bool {
        self.0.len() == dims.len() && self.0.iter().zip(dims).all(|(&(start, end), &dim)| start <= end && end <= dim)
    }

    /// Whether it holds all of `other`.
    pub fn contains(&self, other: &Self) -> bool {
        let inside = |(&(start, end), &(from, to)): (&(u64, u64), &(u64, u64))| start <= from && to <= end;
        other.elements() == 0 || self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(inside)
    }

    /// The intersection; `None` if it is empty.
    pub fn overlap(&self, other: &Self) -> Option<Self> {
        if self.0.len() != other.0.len() {
            return None;
        }
        let both = self.0.iter().zip(&other.0).map(|(&(start, end), &(from, to))| (start.max(from), end.min(to)));
        let both: Vec<_> = both.collect();
        both.iter().all(|(start, end)| start < end).then_some(Self(both))
    }

    /// The elements outside `other`, as disjoint slices.
    pub fn minus(&self, other: &Self) -> Vec<Self> {
        let Some(both) = self.overlap(other) else {
            return if self.elements() == 0 { Vec::new() } else { vec![self.clone()] };
        };
        let (mut left, mut rest) = (self.clone(), Vec::new());
        for dim in 0..left.0.len() {
            let ((start, end), (from, to)) = (left.0[dim], both.0[dim]);
            for part in [(start, from), (to, end)] {
                if part.0 < part.1 {
                    rest.push(left.with(dim, part));
                }
            }
            left.0[dim] = (from, to);
        }
        rest
    }

    /// Cuts it into slices of at most `most` elements, as equal as possible, along the outermost dims.
    pub fn cut(&self, most: u64) -> Vec<Self> {
        let elements = self.elements();
        let wide = self.0.iter().position(|&(start, end)| end.saturating_sub(start) > 1);
        let Some(dim) = wide.filter(|_| elements > most.max(1)) else { return vec![self.clone()] };
        let (start, end) = self.0[dim];
        let extent = end - start;
        let parts = elements.div_ceil(most.max(1)).min(extent);
        let at = |part: u64| start + (u128::from(extent) * u128::from(part) / u128::from(parts)) as u64;
        (0..parts).flat_map(|part| self.with(dim, (at(part), at(part + 1))).cut(most)).collect()
    }

    fn with(&self, dim: usize, range: (u64, u64)) -> Self {
        let mut other = self.clone();
        other.0[dim] = range;
        other
    }
}

/// In Python notation: `[0:32, 0:768]`.
impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (dim, (start, end)) in self.0.iter().enumerate() {
            write!(f, "{}{start}:{end}", if dim > 0 { ", " } else { "" })?;
        }
        f.write_str("]")
    }
}

/// A row-major array in memory or in a file that holds a slice from its first element on. Its extents may be larger
/// than the slice's: padding at the end of a dim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    origin: Vec<u64>,
    extents: Vec<u64>,
}

impl Block {
    /// The array that holds exactly a slice.
    pub fn from_slice(slice: &Slice) -> Self {
        Self::padded(slice, slice.extents())
    }

    /// The array of `extents` that holds a slice; `extents` are at least the slice's.
    pub fn padded(slice: &Slice, extents: Vec<u64>) -> Self {
        Self { origin: slice.ranges().map(|range| range.start).collect(), extents }
    }

    /// The array of `extents` in `bytes` bytes of memory that holds a slice of a tensor; `None` if they do not fit.
    pub(crate) fn in_memory(tensor: &Tensor, slice: &Slice, extents: &[u64], bytes: usize) -> Option<Self> {
        let large = slice.extents().iter().zip(extents).all(|(extent, stored)| extent <= stored);
        let block = Self::padded(slice, extents.to_vec());
        let fits = slice.fits(&tensor.dims) && large && extents.len() == tensor.dims.len();
        let wanted = block.elements().checked_mul(tensor.dtype.size());
        (fits && wanted == Some(bytes as u64)).then_some(block)
    }

    /// The elements of the array.
    pub fn elements(&self) -> u64 {
        self.extents.iter().fold(1, |product, &extent| product.saturating_mul(extent))
    }
}

/// Copies a slice from one array to another. Both hold the slice.
pub fn copy<T: Copy>(slice: &Slice, (from, source): (&Block, &[T]), (to, target): (&Block, &mut [T])) {
    let copied = for_each_run(slice, from, to, |from, to, run| {
        let [from, to, run] = [from, to, run].map(|elements| elements as usize);
        target[to..to + run].copy_from_slice(&source[from..from + run]);
        Ok::<_, std::convert::Infallible>(())
    });
    copied.unwrap_or_else(|never| match never {});
}

/// Calls `visit(first element in from, first element in to, elements)` for each run of elements of `slice` that is
/// contiguous in both arrays, in order. Both hold the slice.
pub(crate) fn for_each_run<E>(
    slice: &Slice,
    from: &Block,
    to: &Block,
    mut visit: impl FnMut(u64, u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    if slice.elements() == 0 {
        return Ok(());
    }
    let extents = slice.extents();
    // Innermost dims that are complete in both arrays merge with the run of the dim before them.
    let whole = |&dim: &usize| extents[dim] == from.extents[dim] && extents[dim] == to.extents[dim];
    let inner = (0..extents.len()).rev().take_while(whole).count();
    let outer = (extents.len() - inner).saturating_sub(1);
    let run: u64 = extents[outer..].iter().product();
    let (from_strides, to_strides) = (strides(&from.extents), strides(&to.extents));
    let start = |block: &Block, strides: &[u64]| -> u64 {
        slice
            .ranges()
            .zip(&block.origin)
            .zip(strides)
            .map(|((range, origin), stride)| (range.start - origin) * stride)
            .sum()
    };
    let (mut at, mut from, mut to) = (vec![0; outer], start(from, &from_strides), start(to, &to_strides));
    loop {
        visit(from, to, run)?;
        let mut dim = outer;
        loop {
            let Some(next) = dim.checked_sub(1) else { return Ok(()) };
            dim = next;
            at[dim] += 1;
            from += from_strides[dim];
            to += to_strides[dim];
            if at[dim] < extents[dim] {
                break;
            }
            from -= from_strides[dim] * extents[dim];
            to -= to_strides[dim] * extents[dim];
            at[dim] = 0;
        }
    }
}

/// The stride of each dim.
fn strides(extents: &[u64]) -> Vec<u64> {
    let mut strides = vec![1; extents.len()];
    for dim in (1..extents.len()).rev() {
        strides[dim - 1] = strides[dim] * extents[dim];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_rows_are_one_run() {
        let rows = Slice::new([1..3, 0..4]);
        let mut runs = Vec::new();
        let whole = Block::from_slice(&Slice::whole(&[8, 4]));
        for_each_run(&rows, &whole, &Block::from_slice(&rows), |from, to, run| -> Result<(), ()> {
            runs.push((from, to, run));
            Ok(())
        })
        .unwrap();
        assert_eq!(runs, [(4, 0, 8)]);
    }
}
