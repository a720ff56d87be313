//! Elementwise sums and products, biases and their gradients. Each element is one fixed expression of its inputs.

use super::prelude::*;

/// `out = a + b`. Overwrites.
pub fn add<T: Float>(a: &[T], b: &[T], out: &mut [T]) {
    assert_eq!([a.len(), b.len()], [out.len(); 2], "elements of a, b against out");
    wide!(for ((out, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *out = a + b;
    });
}

/// `acc += x`.
pub fn add_assign<T: Float>(acc: &mut [T], x: &[T]) {
    assert_eq!(acc.len(), x.len(), "elements of acc against x");
    wide!(for (acc, &x) in acc.iter_mut().zip(x) {
        *acc += x;
    });
}

/// `out[i, j] = x[i, j] + bias[j]`. Overwrites.
pub fn bias<T: Float>(x: &[T], bias: &[T], out: &mut [T]) {
    inlined!(for_rows, (bias, [x, x], out), |b, [x, _]| x + b);
}

/// `out[i, j] = (x[i, j] + bias[j]) + residual[i, j]`. Overwrites.
pub fn bias_residual<T: Float>(x: &[T], bias: &[T], residual: &[T], out: &mut [T]) {
    inlined!(for_rows, (bias, [x, residual], out), |b, [x, r]| (x + b) + r);
}

/// `dbias[j] += sum_i dy[i, j]`, the rows one after another.
pub fn bias_backward<T: Float>(dy: &[T], dbias: &mut [T]) {
    assert_rows(dy.len(), dbias.len());
    wide!(for dy in dy.chunks_exact(dbias.len().max(1)) {
        for (dbias, &dy) in dbias.iter_mut().zip(dy) {
            *dbias += dy;
        }
    });
}

/// The sum of the vectors of `n` elements in `x`, in the [tree](meshwork_core::tree), by `add(left, right)`, which adds
/// the right vector to the left. The first vector becomes the sum; the others are overwritten.
pub fn tree_sum<T: Float>(x: &mut [T], n: usize, add: impl Fn(&mut [T], &[T])) {
    assert_rows(x.len(), n);
    let n = n.max(1);
    // First all pairs of neighbours, then all pairs of pairs, and so on; a vector without a neighbour waits for the
    // next round.
    let mut step = n;
    while step < x.len() {
        for pair in x.chunks_mut(2 * step).filter(|pair| pair.len() > step) {
            let (left, right) = pair.split_at_mut(step);
            add(&mut left[..n], &right[..n]);
        }
        step *= 2;
    }
}

/// `out[i, j] = f(row[j], [x[i, j], y[i, j]])` over rows as long as `row`.
#[inline(always)]
pub(super) fn for_rows<T: Float>(row: &[T], [x, y]: [&[T]; 2], out: &mut [T], f: impl Fn(T, [T; 2]) -> T) {
    assert_eq!([x.len(), y.len()], [out.len(); 2], "elements of the inputs against out");
    assert_rows(out.len(), row.len());
    let n = row.len().max(1);
    wide!(for ((out, x), y) in out.chunks_exact_mut(n).zip(x.chunks_exact(n)).zip(y.chunks_exact(n)) {
        for (((out, &x), &y), &b) in out.iter_mut().zip(x).zip(y).zip(row) {
            *out = f(b, [x, y]);
        }
    });
}

pub(super) fn assert_rows(len: usize, n: usize) {
    assert!(if n == 0 { len == 0 } else { len.is_multiple_of(n) }, "{len} elements are no rows of {n}");
}
