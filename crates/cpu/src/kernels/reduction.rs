//! Sums over a dim, softmax along rows, squared errors.
//!
//! A sum runs over its terms in order, in f64, and is rounded once: its bits depend only on its terms, not on other
//! elements.

use super::prelude::*;

/// `out[o, i] = scale Σ_e x[o, e, i]` over a range of the middle dim, which has `extent` elements. Overwrites.
pub fn sum<T: Float>(x: &[T], extent: usize, inner: usize, range: Range<usize>, scale: f64, out: &mut [T]) {
    let block = extent * inner;
    assert_eq!(x.len() * inner, out.len() * block, "elements of x against out");
    let mut sums = vec![0.0; inner];
    if inner == 0 || block == 0 {
        return out.fill(T::ZERO);
    }
    wide!(for (x, out) in x.chunks_exact(block).zip(out.chunks_exact_mut(inner)) {
        sums.fill(0.0);
        for row in x[range.start * inner..range.end * inner].chunks_exact(inner) {
            for (sum, &x) in sums.iter_mut().zip(row) {
                *sum += x.to_f64();
            }
        }
        for (out, &sum) in out.iter_mut().zip(&sums) {
            *out = T::from_f64(sum * scale);
        }
    });
}

/// `dx[o, e, i] = scale dy[o, i]`. Overwrites.
pub fn spread<T: Float>(dy: &[T], extent: usize, inner: usize, scale: f64, dx: &mut [T]) {
    assert_eq!(dy.len() * extent, dx.len(), "elements of dy against dx");
    let (block, scale) = ((extent * inner).max(1), T::from_f64(scale));
    wide!(for (dx, dy) in dx.chunks_exact_mut(block).zip(dy.chunks_exact(inner.max(1))) {
        for dx in dx.chunks_exact_mut(inner.max(1)) {
            for (dx, &dy) in dx.iter_mut().zip(dy) {
                *dx = dy * scale;
            }
        }
    });
}

/// `y = e^(x - max x) / Σ e^(x - max x)` along rows of `n`. Overwrites.
pub fn softmax<T: Float>(x: &[T], n: usize, y: &mut [T]) {
    assert_eq!(x.len(), y.len(), "elements of x against y");
    wide!(for (y, x) in y.chunks_exact_mut(n.max(1)).zip(x.chunks_exact(n.max(1))) {
        let max = reduce::max(x);
        for (y, &x) in y.iter_mut().zip(x) {
            *y = (x - max).exp();
        }
        let by = T::ONE / inlined!(reduce::sum, (y), |y| y);
        for y in y {
            *y *= by;
        }
    });
}

/// `dx = y (dy - Σ dy y)` along rows of `n`, where `y` is the softmax. Overwrites.
pub fn softmax_backward<T: Float>(y: &[T], dy: &[T], n: usize, dx: &mut [T]) {
    assert_eq!([y.len(), dy.len()], [dx.len(); 2], "elements of y, dy against dx");
    wide!({
        let rows = y.chunks_exact(n.max(1)).zip(dy.chunks_exact(n.max(1)));
        for (dx, (y, dy)) in dx.chunks_exact_mut(n.max(1)).zip(rows) {
            let [sum] = inlined!(reduce::sums, (y, dy, dy), |y, dy, _| [y * dy]);
            for ((dx, &y), &dy) in dx.iter_mut().zip(y).zip(dy) {
                *dx = y * (dy - sum);
            }
        }
    });
}

/// `sum + Σ (x - t)²`, in order and in f64.
pub fn squared_error<T: Float>(sum: f64, x: &[T], targets: &[T]) -> f64 {
    assert_eq!(x.len(), targets.len(), "elements of x against targets");
    x.iter().zip(targets).fold(sum, |sum, (x, t)| {
        let error = x.to_f64() - t.to_f64();
        sum + error * error
    })
}

/// `dx = scale (x - t)`. Overwrites.
pub fn squared_error_backward<T: Float>(x: &[T], targets: &[T], scale: T, dx: &mut [T]) {
    assert_eq!([x.len(), targets.len()], [dx.len(); 2], "elements of x, targets against dx");
    wide!(for ((dx, &x), &t) in dx.iter_mut().zip(x).zip(targets) {
        *dx = scale * (x - t);
    });
}
