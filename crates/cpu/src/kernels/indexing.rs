//! Elements chosen along a dim by integers.

use super::prelude::*;
use meshwork_tensor::kernel::Picks;

/// `out[o, i]`: the index of the first largest of `x[o, .., i]`, which are `extent`, or of its first NaN. Overwrites.
pub fn argmax<T: Float>(x: &[T], extent: usize, inner: usize, out: &mut [i32]) {
    assert_eq!(x.len(), out.len() * extent, "elements of x against out");
    let (inner, slab) = (inner.max(1), (extent * inner).max(1));
    let mut best = vec![T::NEG_INFINITY; inner];
    for (x, out) in x.chunks_exact(slab).zip(out.chunks_exact_mut(inner)) {
        out.fill(0);
        best.copy_from_slice(&x[..inner]);
        for (e, x) in x.chunks_exact(inner).enumerate() {
            for ((&x, best), out) in x.iter().zip(&mut best).zip(&mut *out) {
                // A NaN is larger than all, and equal to none: the first stays.
                if x > *best || is_nan(x) && !is_nan(*best) {
                    (*best, *out) = (x, e as i32);
                }
            }
        }
    }
}

/// The first index that lies outside of the dim, and its place.
pub fn outside(index: &[i32], extent: usize) -> Option<(usize, i32)> {
    let found = index.iter().position(|&at| usize::try_from(at).map_or(true, |at| at >= extent));
    found.map(|place| (place, index[place]))
}

/// `out[o, j, i] = x[o, index[o, j, i], i]` of slabs o from `first` on, all of x given. Overwrites.
pub fn pick<T: Float>(x: &[T], index: &[i32], picks: Picks, first: usize, out: &mut [T]) {
    let Picks { extent, inner, count, .. } = picks;
    for (row, out) in out.chunks_exact_mut(inner.max(1)).enumerate() {
        let (o, j) = (first + row / count.max(1), row % count.max(1));
        for (i, out) in out.iter_mut().enumerate() {
            *out = x[(o * extent + index[picks.place([o, j, i])] as usize) * inner + i];
        }
    }
}

/// `dx[o, e, i] = Σ_j dy[o, j, i]` over the j whose index is e, of slabs o from `first` on, in order. Overwrites.
pub fn pick_backward<T: Float>(dy: &[T], index: &[i32], picks: Picks, first: usize, dx: &mut [T]) {
    let Picks { extent, inner, count, .. } = picks;
    dx.fill(T::ZERO);
    for (slab, dx) in dx.chunks_exact_mut((extent * inner).max(1)).enumerate() {
        let o = first + slab;
        for j in 0..count {
            for i in 0..inner {
                dx[index[picks.place([o, j, i])] as usize * inner + i] += dy[(o * count + j) * inner + i];
            }
        }
    }
}

fn is_nan<T: PartialOrd>(x: T) -> bool {
    x.partial_cmp(&x).is_none()
}
