//! The rectifier: `relu(x) = max(x, 0)`, whose derivative at 0 is defined as 0 (Glorot, Bordes and Bengio, 2011).

use super::Float;
use meshwork_core::simd::wide;

/// `out = max(x, 0)`; NaN stays NaN, and -0 becomes 0. Overwrites.
pub fn relu<T: Float>(x: &[T], out: &mut [T]) {
    assert_eq!(x.len(), out.len(), "elements of x against out");
    wide(
        #[inline(always)]
        || {
            for (out, &x) in out.iter_mut().zip(x) {
                *out = if x <= T::ZERO { T::ZERO } else { x };
            }
        },
    );
}

/// `dx = dy` where x is above 0, else 0. Overwrites.
pub fn relu_backward<T: Float>(x: &[T], dy: &[T], dx: &mut [T]) {
    assert_eq!([x.len(), dy.len()], [dx.len(); 2], "elements of x, dy against dx");
    wide(
        #[inline(always)]
        || {
            for ((dx, &x), &dy) in dx.iter_mut().zip(x).zip(dy) {
                *dx = if x > T::ZERO { dy } else { T::ZERO };
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn below_zero_there_is_nothing_and_nan_is_not_hidden() {
        let x = [-2.0, -0.0, 0.0, 3.0, f32::NAN, f32::NEG_INFINITY, f32::INFINITY];
        let (mut y, mut dx) = ([9.0; 7], [9.0; 7]);
        relu(&x, &mut y);
        assert_eq!(y.map(f32::to_bits), [0.0, 0.0, 0.0, 3.0, f32::NAN, 0.0, f32::INFINITY].map(f32::to_bits));
        relu_backward(&x, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &mut dx);
        assert_eq!(dx, [0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 7.0]);
    }
}
