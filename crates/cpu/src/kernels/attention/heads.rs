//! Splits a tensor with interleaved heads, so that different threads can write different heads.

use std::marker::PhantomData;
use std::ops::Range;

/// Mutable rows of a matrix: `width` elements each, `step` apart. Rows of different heads are interleaved.
pub(super) struct RowsMut<'a, T> {
    start: *mut T,
    rows: usize,
    step: usize,
    width: usize,
    tensor: PhantomData<&'a mut [T]>,
}

// SAFETY: it is the only access to its elements, like the exclusive reference from which it was made.
unsafe impl<T: Send> Send for RowsMut<'_, T> {}

impl<'a, T> RowsMut<'a, T> {
    /// The whole rows of `step` elements in a slice.
    pub(super) fn new(slice: &'a mut [T], step: usize) -> Self {
        RowsMut { start: slice.as_mut_ptr(), rows: slice.len() / step, step, width: step, tensor: PhantomData }
    }

    /// The start of the first row.
    pub(super) fn as_ptr(&self) -> *const T {
        self.start
    }

    /// Elements of a row.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Elements of all rows.
    pub(super) fn len(&self) -> usize {
        self.rows * self.width
    }

    /// The elements of row `i`.
    pub(super) fn row(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: a row of this matrix, inside the tensor; no other value has it, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.step), self.width) }
    }

    /// Sets every element to 0.
    pub(super) fn zero(&mut self)
    where
        T: bytemuck::Zeroable,
    {
        (0..self.rows).for_each(|i| self.row(i).fill_with(T::zeroed));
    }

    /// Adds rows without gaps.
    pub(super) fn add(&mut self, from: &[T])
    where
        T: Copy + std::ops::AddAssign,
    {
        for (i, from) in from.chunks_exact(self.width.max(1)).enumerate() {
            self.row(i).iter_mut().zip(from).for_each(|(to, &from)| *to += from);
        }
    }

    /// Some rows, from a column on.
    pub(super) fn part(&mut self, rows: Range<usize>, column: usize) -> RowsMut<'_, T> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        assert!(column <= self.width, "column {column} of {}", self.width);
        // In bounds by the asserts, if there is an element.
        let start = self.start.wrapping_add(rows.start * self.step + column);
        RowsMut { start, rows: rows.len(), step: self.step, width: self.width - column, tensor: PhantomData }
    }

    /// The start of the first row and the distance of the rows, for writing `rows` by `columns` elements.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "for vector instructions"))]
    pub(super) fn block(&mut self, [rows, columns]: [usize; 2]) -> (*mut T, usize) {
        assert!(rows <= self.rows && columns <= self.width, "{rows} by {columns} of {} by {}", self.rows, self.width);
        (self.start, self.step)
    }
}

/// Every head of `tensor[samples, rows, PARTS, heads, width]`, sample by sample, with all its parts.
pub(super) fn heads_mut<const PARTS: usize, T: Send>(
    tensor: &mut [T],
    [samples, rows, heads, width]: [usize; 4],
) -> impl Iterator<Item = [RowsMut<'_, T>; PARTS]> + Send {
    let step = PARTS * heads * width;
    assert_eq!(tensor.len(), samples * rows * step, "elements of [{samples}, {rows}, {PARTS}, {heads}, {width}]");
    let start = Start(tensor.as_mut_ptr());
    (0..samples * heads).map(move |item| {
        let (sample, head) = (item / heads, item % heads);
        std::array::from_fn(|part| RowsMut {
            // In bounds by the assert, if there is a row; no two (sample, part, head) share an element of any row.
            start: start.get().wrapping_add(sample * rows * step + (part * heads + head) * width),
            rows,
            step,
            width,
            tensor: PhantomData,
        })
    })
}

/// The start of the tensor.
struct Start<T>(*mut T);

impl<T> Start<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: as for `RowsMut`; each head is made of it once.
unsafe impl<T: Send> Send for Start<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element is in exactly one row of one head, at the place given by the layout. The parts of a head are rows
    /// too.
    #[test]
    fn heads_take_the_tensor_apart() {
        let [samples, rows, heads, width] = [2, 3, 4, 5];
        let mut tensor = vec![usize::MAX; samples * rows * 2 * heads * width];
        for (item, parts) in heads_mut::<2, _>(&mut tensor, [samples, rows, heads, width]).enumerate() {
            for (part, mut head) in parts.into_iter().enumerate() {
                for i in 0..rows {
                    let (sample, h) = (item / heads, item % heads);
                    let first = (((sample * rows + i) * 2 + part) * heads + h) * width;
                    let (left, right) = (head.row(i)[..2].to_vec(), head.part(i..rows, 2).row(0).to_vec());
                    assert_eq!([left, right].concat(), [usize::MAX; 5]);
                    head.part(i..rows, 2).row(0).iter_mut().enumerate().for_each(|(e, to)| *to = first + 2 + e);
                    head.row(i)[..2].iter_mut().enumerate().for_each(|(e, to)| *to = first + e);
                }
            }
        }
        assert!(tensor.iter().copied().eq(0..tensor.len()));
    }
}
