//! A tensor whose heads lie interleaved, taken apart so that each can be written by another thread.

use std::marker::PhantomData;

/// The rows of one head, to write: every position's `width` elements, `step` apart.
pub(super) struct HeadMut<'a, T> {
    start: *mut T,
    rows: usize,
    step: usize,
    width: usize,
    tensor: PhantomData<&'a mut [T]>,
}

// SAFETY: it is the only way to its elements, like the exclusive reference it was made of.
unsafe impl<T: Send> Send for HeadMut<'_, T> {}

impl<T> HeadMut<'_, T> {
    /// The elements of position `i`.
    pub(super) fn row(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: a row of this head, in the tensor; `heads_mut` gave the head to nobody else, and `self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.step), self.width) }
    }
}

/// Every head of `tensor[samples, rows, PARTS, heads, width]`, sample by sample, with all its parts.
pub(super) fn heads_mut<const PARTS: usize, T: Send>(
    tensor: &mut [T],
    [samples, rows, heads, width]: [usize; 4],
) -> impl Iterator<Item = [HeadMut<'_, T>; PARTS]> + Send {
    let step = PARTS * heads * width;
    assert_eq!(tensor.len(), samples * rows * step, "elements of [{samples}, {rows}, {PARTS}, {heads}, {width}]");
    let start = Start(tensor.as_mut_ptr());
    (0..samples * heads).map(move |item| {
        let (sample, head) = (item / heads, item % heads);
        std::array::from_fn(|part| HeadMut {
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

// SAFETY: as for `HeadMut`; each head is made of it once.
unsafe impl<T: Send> Send for Start<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element is in one row of one head, where the layout says.
    #[test]
    fn heads_take_the_tensor_apart() {
        let [samples, rows, heads, width] = [2, 3, 4, 5];
        let mut tensor = vec![usize::MAX; samples * rows * 2 * heads * width];
        for (item, parts) in heads_mut::<2, _>(&mut tensor, [samples, rows, heads, width]).enumerate() {
            for (part, mut head) in parts.into_iter().enumerate() {
                for i in 0..rows {
                    let (sample, h) = (item / heads, item % heads);
                    let first = (((sample * rows + i) * 2 + part) * heads + h) * width;
                    for (e, to) in head.row(i).iter_mut().enumerate() {
                        assert_eq!(*to, usize::MAX);
                        *to = first + e;
                    }
                }
            }
        }
        assert!(tensor.iter().copied().eq(0..tensor.len()));
    }
}
