//! The slice of a parameter that a rank holds.

use crate::shape::Shape;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::ops::Range;

/// The part of a parameter that one rank holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalSlice {
    /// Extents in memory, padding included.
    pub stored: Shape,
    /// Global range per dim.
    pub ranges: Vec<Range<usize>>,
}

impl LocalSlice {
    /// All of a parameter of these extents, without padding: what files have. A rank alone may
    /// [store](super::ParamSpec::local) more.
    pub fn whole(dims: Shape) -> Self {
        Self { stored: dims, ranges: dims.iter().map(|&extent| 0..extent).collect() }
    }

    /// Elements held, padding not counted.
    pub fn elements(&self) -> usize {
        self.ranges.iter().map(Range::len).product()
    }

    /// The elements `range` of the array in memory as boxes, one after the other, each with its place in the array: a
    /// run of rows, at most two rows that are cut, and so on for each dim of those. Padding is stored and not held, as
    /// it is here.
    ///
    /// ```
    /// use meshwork_tensor::{Shape, param::LocalSlice};
    ///
    /// let matrix = LocalSlice { stored: Shape::new(&[4, 3]), ranges: vec![8..12, 0..3] };
    /// let boxes = matrix.boxes(2..10); // the last element of a row, two rows, the first of the next
    /// let told: Vec<_> = boxes.iter().map(|(part, place)| (&part.ranges[..], place.clone())).collect();
    /// assert_eq!(told, [(&[8..9, 2..3][..], 2..3), (&[9..11, 0..3], 3..9), (&[11..12, 0..1], 9..10)]);
    /// ```
    pub fn boxes(&self, range: Range<usize>) -> Vec<(LocalSlice, Range<usize>)> {
        let (mut boxes, mut end) = (Vec::new(), range.start);
        if !range.is_empty() {
            self.add_boxes(&mut Vec::new(), range, &mut boxes);
        }
        let place = |part: LocalSlice| {
            let start = end;
            end += part.stored.count();
            (part, start..end)
        };
        boxes.into_iter().map(place).collect()
    }

    /// Adds the boxes of a range of the sub-array at position `at` of the first dims.
    fn add_boxes(&self, at: &mut Vec<usize>, range: Range<usize>, boxes: &mut Vec<LocalSlice>) {
        let dim = at.len();
        let inner: usize = self.stored.get(dim + 1..).unwrap_or_default().iter().product();
        if dim + 1 >= self.stored.len() || range.start.is_multiple_of(inner) && range.end.is_multiple_of(inner) {
            // Whole rows.
            let rows = range.start / inner..range.end / inner;
            let held = |dim: usize| match dim.cmp(&at.len()) {
                Ordering::Less => at[dim]..at[dim] + 1,
                Ordering::Equal => rows.clone(),
                Ordering::Greater => 0..self.stored[dim],
            };
            let local: Vec<Range<usize>> = (0..self.stored.len()).map(held).collect();
            let global = |(range, of): (&Range<usize>, &Range<usize>)| {
                (of.start + range.start).min(of.end)..(of.start + range.end).min(of.end)
            };
            let stored = Shape::new(&local.iter().map(Range::len).collect::<Vec<_>>());
            let ranges = local.iter().zip(&self.ranges).map(global).collect();
            return boxes.push(LocalSlice { stored, ranges });
        }
        let (first, last) = (range.start / inner, range.end / inner);
        if first == last {
            return self.inside(first, at, range.start % inner..range.end % inner, boxes);
        }
        let whole = range.start.div_ceil(inner);
        if whole > first {
            self.inside(first, at, range.start % inner..inner, boxes);
        }
        if last > whole {
            self.add_boxes(at, whole * inner..last * inner, boxes);
        }
        if !range.end.is_multiple_of(inner) {
            self.inside(last, at, 0..range.end % inner, boxes);
        }
    }

    fn inside(&self, row: usize, at: &mut Vec<usize>, range: Range<usize>, boxes: &mut Vec<LocalSlice>) {
        at.push(row);
        self.add_boxes(at, range, boxes);
        at.pop();
    }

    /// Calls `visit(global start, local range)` for each run of elements contiguous both globally and here, in order.
    /// `dims` are the extents of the whole parameter.
    pub fn for_each_run(&self, dims: Shape, mut visit: impl FnMut(u64, Range<usize>)) {
        if self.elements() == 0 {
            return;
        }
        // The innermost dims that are held whole are part of the run of the dim before them.
        let mut split = dims.len();
        while split > 0 && self.ranges[split - 1].len() == dims[split - 1] && self.stored[split - 1] == dims[split - 1]
        {
            split -= 1;
        }
        let split = split.saturating_sub(1);
        let inner: usize = dims.get(split + 1..).unwrap_or_default().iter().product();
        let run = self.ranges.get(split).map_or(1, Range::len) * inner;
        let outer = Shape::new(&self.ranges[..split].iter().map(Range::len).collect::<Vec<_>>());
        for index in 0..outer.count() {
            let (mut rest, mut global, mut local) = (index, 0, 0);
            let (mut global_stride, mut local_stride) = (1, 1);
            for dim in (0..dims.len()).rev() {
                let at = match dim {
                    dim if dim < split => {
                        let at = rest % outer[dim];
                        rest /= outer[dim];
                        at
                    }
                    _ => 0,
                };
                global += (self.ranges[dim].start + at) * global_stride;
                local += at * local_stride;
                global_stride *= dims[dim];
                local_stride *= self.stored[dim];
            }
            visit(global as u64, local..local + run);
        }
    }
}
