//! Flat slices: how the ranks of a group share out a vector.

use std::ops::Range;

/// One rank's slice of a vector that ranks share out in equal, contiguous slices. The vector is padded at its end to a
/// multiple of their number.
///
/// ```
/// use meshwork_core::FlatSlice;
///
/// let slice = FlatSlice::new(10, 4, 2); // ten elements over four ranks: three each, two of padding
/// assert_eq!((slice.padded(), slice.range()), (12, 6..9));
/// assert_eq!(slice.part_of(4..8), 6..8); // of elements 4 to 8 it has these
/// assert_eq!(slice.part_of(0..4).len(), 0);
/// assert_eq!(FlatSlice::whole(10).range(), 0..10);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatSlice {
    elements: usize,
    parts: usize,
    index: usize,
}

impl FlatSlice {
    /// Slice `index` of `parts` of a vector of `elements` elements.
    ///
    /// # Panics
    /// If there is no such slice.
    pub fn new(elements: usize, parts: usize, index: usize) -> Self {
        assert!(index < parts, "slice {index} of {parts}");
        Self { elements, parts, index }
    }

    /// The only slice of a vector that nobody shares out.
    pub fn whole(elements: usize) -> Self {
        Self::new(elements, 1, 0)
    }

    /// Its number among the slices, and their number.
    pub fn place(self) -> [usize; 2] {
        [self.index, self.parts]
    }

    /// Elements of the vector, without padding.
    pub fn elements(self) -> usize {
        self.elements
    }

    /// Elements of the vector, padding included.
    pub fn padded(self) -> usize {
        self.count() * self.parts
    }

    /// Elements of the slice, padding included: the same on every rank.
    pub fn count(self) -> usize {
        self.elements.div_ceil(self.parts)
    }

    /// Where the slice lies in the padded vector.
    pub fn range(self) -> Range<usize> {
        self.index * self.count()..(self.index + 1) * self.count()
    }

    /// The elements of `range` that lie in the slice, numbered in the vector; an empty range within `range`
    /// if there are none.
    pub fn part_of(self, range: Range<usize>) -> Range<usize> {
        let start = self.range().start.clamp(range.start, range.end);
        start..self.range().end.clamp(start, range.end)
    }
}
