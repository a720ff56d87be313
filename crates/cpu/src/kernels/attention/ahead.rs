//! Prefetches the memory that the next head reads and writes, while this head is computed: its rows are a few cache
//! lines each and far apart, so no CPU prefetches them by itself.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Bytes of a common L2 cache.
const CACHE: usize = 1 << 20;

/// Whether `matrices` matrices of this size stay in the L2 cache until their use.
pub(super) fn stay<T>(matrices: usize, [rows, columns]: [usize; 2]) -> bool {
    matrices * rows * columns * size_of::<T>() <= CACHE
}

/// The start of a matrix, and the distance of its rows.
pub(super) type Start<T> = (*const T, usize);

/// The lines of some matrices that are still to be prefetched. For each matrix, the first lines of all rows come first,
/// then the second lines.
pub(super) struct Ahead<'a, T> {
    matrices: &'a [Start<T>],
    rows: usize,
    /// Lines of a row.
    lines: usize,
    /// The next line of the first matrix, and its next row.
    line: usize,
    row: usize,
}

impl<'a, T> Ahead<'a, T> {
    /// Prefetches matrices of this number of rows and columns. They are only prefetched, so their addresses need not be
    /// valid.
    pub(super) fn new(matrices: &'a [Start<T>], [rows, columns]: [usize; 2]) -> Ahead<'a, T> {
        Ahead { matrices, rows, lines: (columns * size_of::<T>()).div_ceil(LINE), line: 0, row: 0 }
    }

    /// The next `lines` lines, each in its own row; lines past the last row are useless but harmless. `None` when there
    /// are no more.
    pub(super) fn take(&mut self, lines: usize) -> Option<Start<T>> {
        let (&(start, step), others) = self.matrices.split_first()?;
        let first = self.row * step + self.line * (LINE / size_of::<T>());
        self.row += lines;
        if self.row >= self.rows {
            (self.row, self.line) = (0, self.line + 1);
        }
        if self.line == self.lines {
            (self.line, self.matrices) = (0, others);
        }
        Some((start.wrapping_add(first), step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every line of every row, in pieces of any length.
    #[test]
    fn every_line_is_handed_out() {
        let memory = [0.0_f32; 1000];
        let (rows, columns, step) = (7, 40, 50);
        let matrices = [(memory.as_ptr(), step), (memory[400..].as_ptr(), step)];
        for piece in [1, 3, 7, 10] {
            let mut ahead = Ahead::new(&matrices, [rows, columns]);
            let mut lines = Vec::new();
            while let Some((start, step)) = ahead.take(piece) {
                lines.extend((0..piece).map(|line| start.wrapping_add(line * step)));
            }
            for start in [0, 400] {
                for line in (0..rows).flat_map(|row| [0, 16, 32].map(|column| start + row * step + column)) {
                    assert!(lines.contains(&memory[line..].as_ptr()), "line {line} of {piece} at a time");
                }
            }
        }
    }
}
