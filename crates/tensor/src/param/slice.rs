//! The slice of a parameter that a rank holds.

use crate::shape::Shape;
use std::cmp::Ordering;
use std::ops::Range;

/// The part of a parameter that one rank holds.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// `dims` are those of the whole parameter.
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

#[cfg(test)]
mod tests {
    use super::super::{Piece, assemble};
    use super::*;

    /// A parameter without dims, such as the temperature of a loss, panicked.
    #[test]
    fn a_number_is_one_run() {
        let (mut runs, number) = (Vec::new(), LocalSlice { stored: Shape::new(&[]), ranges: Vec::new() });
        number.for_each_run(Shape::new(&[]), |global, local| runs.push((global, local)));
        assert_eq!(runs, [(0, 0..1)]);
    }

    /// Every range of arrays of up to four dims, padded ones too: the boxes lie one after the other, and a piece of
    /// each holds exactly the elements of the range.
    #[test]
    fn boxes_are_the_elements_of_a_range_once_and_in_order() {
        let slice = |stored: &[usize], ranges: &[Range<usize>]| LocalSlice {
            stored: Shape::new(stored),
            ranges: ranges.to_vec(),
        };
        for (dims, slice) in [
            (vec![7], slice(&[4], std::slice::from_ref(&(3..7)))),
            (vec![4, 3], slice(&[4, 3], &[0..4, 0..3])),
            (vec![2, 5, 3], slice(&[2, 3, 3], &[0..2, 2..5, 0..3])),
            (vec![2, 5, 3], slice(&[2, 3, 3], &[0..2, 3..5, 0..3])), // a row of padding in each
            (vec![2, 3, 2, 2], slice(&[2, 3, 2, 2], &[0..2, 0..3, 0..2, 0..2])),
        ] {
            let (dims, count) = (Shape::new(&dims), slice.stored.count());
            let whole: Vec<f32> = (1..=dims.count()).map(|element| element as f32).collect();
            let here = Piece::cut(0, dims, slice.clone(), &whole).values;
            for (start, end) in (0..=count).flat_map(|start| (start..=count).map(move |end| (start, end))) {
                let boxes = slice.boxes(start..end);
                assert!(boxes.len() <= 2 * dims.len().max(1), "{start}..{end} of {slice:?}: {boxes:?}");
                let pieces: Vec<Piece> =
                    boxes.iter().map(|(part, _)| Piece::cut(0, dims, part.clone(), &whole)).collect();
                let values: Vec<f32> = pieces.iter().flat_map(|piece| piece.values.clone()).collect();
                assert_eq!(values, here[start..end], "{start}..{end} of {slice:?}");
                assert!(
                    boxes.iter().try_fold(start, |at, (_, place)| (at == place.start).then_some(place.end))
                        == Some(end)
                );
                let (assembled, conflict) = assemble(dims, &pieces);
                let held = assembled.into_iter().flatten().count();
                assert_eq!((held, conflict), (here[start..end].iter().filter(|&&value| value != 0.0).count(), None));
            }
        }
    }
}
