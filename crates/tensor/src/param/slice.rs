//! The slice of a parameter that a rank holds.

use crate::shape::Shape;
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
    /// Elements held, padding not counted.
    pub fn elements(&self) -> usize {
        self.ranges.iter().map(Range::len).product()
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
        let inner: usize = dims[split + 1..].iter().product();
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
