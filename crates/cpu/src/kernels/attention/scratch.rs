//! Scratch memory of the calling thread for one head at a time. It grows to the size of the largest head, and is kept.

use meshwork_core::Block;
use std::cell::RefCell;

/// Every piece begins on a cache line.
const LINE: usize = 64;

thread_local! {
    static SCRATCH: RefCell<Block> = RefCell::default();
}

/// Calls `f` with pieces of these lengths, with unspecified contents. Calls must not be nested.
pub(super) fn with<T: bytemuck::Pod, const N: usize, R>(lens: [usize; N], f: impl FnOnce([&mut [T]; N]) -> R) -> R {
    let sizes = lens.map(|len| (len * size_of::<T>()).next_multiple_of(LINE));
    SCRATCH.with_borrow_mut(|block| {
        let total = sizes.iter().sum();
        if block.bytes() < total {
            *block = Block::zeroed(total);
        }
        let mut rest = block.as_mut_slice();
        let mut at = 0;
        let pieces = lens.map(|len| {
            let (piece, left) = std::mem::take(&mut rest).split_at_mut(sizes[at]);
            (rest, at) = (left, at + 1);
            &mut bytemuck::cast_slice_mut(piece)[..len]
        });
        f(pieces)
    })
}
