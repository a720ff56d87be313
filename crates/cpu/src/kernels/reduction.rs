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

#[cfg(test)]
mod tests {
    use super::super::oracle::{assert_close, check_gradient, dot, values, widen};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The documented order, element by element: other elements do not change a sum.
        #[test]
        fn sums_run_in_order(outer in 0..5_usize, extent in 0..20_usize, inner in 1..20_usize, from in 0.0..1.0) {
            let x: Vec<f32> = values("x", outer * extent * inner);
            let from = (from * extent as f64) as usize;
            let mut out = vec![9.0; outer * inner];
            sum(&x, extent, inner, from..extent, 0.25, &mut out);
            for (at, &out) in out.iter().enumerate() {
                let (o, i) = (at / inner, at % inner);
                let terms = (from..extent).map(|e| f64::from(x[(o * extent + e) * inner + i]));
                prop_assert_eq!(out, (terms.fold(0.0, |sum, x| sum + x) * 0.25) as f32);
            }
        }

        #[test]
        fn what_is_spread_is_the_same_everywhere(outer in 0..5_usize, extent in 0..9_usize, inner in 1..9_usize) {
            let dy: Vec<f32> = values("dy", outer * inner);
            let mut dx = vec![9.0; outer * extent * inner];
            spread(&dy, extent, inner, 0.1, &mut dx);
            let want = |at: usize| dy[at / (extent * inner) * inner + at % inner] * 0.1_f32;
            prop_assert!((0..dx.len()).all(|at| dx[at] == want(at)));
        }
    }

    #[test]
    fn softmax_is_its_definition_and_huge_numbers_do_not_overflow() {
        let x: Vec<f32> = values::<f32>("x", 5 * 37).iter().map(|x| 3.0 * x).collect();
        let want: Vec<f64> = widen(&x)
            .chunks(37)
            .flat_map(|row| {
                let sum: f64 = row.iter().map(|x| x.exp()).sum();
                row.iter().map(|x| x.exp() / sum).collect::<Vec<_>>()
            })
            .collect();
        let mut y = vec![9.0; x.len()];
        softmax(&x, 37, &mut y);
        assert_close(&y, &want, 1e-6);
        let mut y = [9.0_f32; 4];
        softmax(&[1e30, 1e30, -1e30, f32::NEG_INFINITY], 4, &mut y);
        assert_eq!(y, [0.5, 0.5, 0.0, 0.0]);
    }

    #[test]
    fn the_gradient_of_softmax() {
        let (x, dy): (Vec<f64>, Vec<f64>) = (values("x", 24), values("dy", 24));
        let forward = |x: &[f64]| {
            let mut y = vec![0.0; 24];
            softmax(x, 8, &mut y);
            y
        };
        let mut dx = vec![9.0; 24];
        softmax_backward(&forward(&x), &dy, 8, &mut dx);
        check_gradient(&x, &dx, |x| dot(&forward(x), &dy));
    }

    #[test]
    fn squared_errors_of_integers_are_exact() {
        assert_eq!(squared_error(1.0, &[3.0_f32, -2.0], &[1.0, 1.0]), 14.0);
        let mut dx = [9.0; 2];
        squared_error_backward(&[3.0_f32, -2.0], &[1.0, 1.0], 0.5, &mut dx);
        assert_eq!(dx, [1.0, -1.5]);
    }
}
