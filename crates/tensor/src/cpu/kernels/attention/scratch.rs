//! Memory of the calling thread for one head at a time. It grows to what the largest head needed and stays.

use std::cell::RefCell;

/// One cache line: every piece begins on one.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

thread_local! {
    static LINES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with pieces of these lengths, whose contents are anything. Not to be nested.
pub(super) fn with<T: bytemuck::Pod, const N: usize, R>(lens: [usize; N], f: impl FnOnce([&mut [T]; N]) -> R) -> R {
    let lines = lens.map(|len| (len * size_of::<T>()).div_ceil(size_of::<Line>()));
    LINES.with_borrow_mut(|buffer| {
        let total = lines.iter().sum();
        if buffer.len() < total {
            buffer.resize(total, bytemuck::Zeroable::zeroed());
        }
        let mut rest = buffer.as_mut_slice();
        let mut at = 0;
        let pieces = lens.map(|len| {
            let (piece, left) = std::mem::take(&mut rest).split_at_mut(lines[at]);
            (rest, at) = (left, at + 1);
            &mut bytemuck::cast_slice_mut(piece)[..len]
        });
        f(pieces)
    })
}
