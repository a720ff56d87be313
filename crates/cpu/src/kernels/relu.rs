//! The rectifier: `relu(x) = max(x, 0)`, whose derivative at 0 is defined as 0 (Glorot, Bordes and Bengio, 2011).
//!
//! Backward only needs to know which elements are above 0: one bit per element (Gist, Jain et al. 2018, "binarize"),
//! the first of eight elements in the lowest bit of a byte.

use super::prelude::*;

/// Elements per byte of bits.
pub const PER_BYTE: usize = u8::BITS as usize;

/// `out = max(x, 0)`, and one bit in `above`: whether x is above 0. NaN stays NaN and is not above 0, and -0 becomes 0.
/// Overwrites.
pub fn relu<T: Float>(x: &[T], out: &mut [T], above: &mut [u8]) {
    assert_eq!(
        [x.len(), above.len()],
        [out.len(), out.len().div_ceil(PER_BYTE)],
        "elements of x and bytes against out"
    );
    wide!(for ((out, x), above) in out.chunks_mut(PER_BYTE).zip(x.chunks(PER_BYTE)).zip(above) {
        let mut bits = 0;
        for (at, (out, &x)) in out.iter_mut().zip(x).enumerate() {
            *out = if x <= T::ZERO { T::ZERO } else { x };
            bits |= u8::from(x > T::ZERO) << at;
        }
        *above = bits;
    });
}

/// `dx = dy` where the bit in `above` is set, else 0. Overwrites.
pub fn relu_backward<T: Float>(above: &[u8], dy: &[T], dx: &mut [T]) {
    assert_eq!([dy.len(), above.len()], [dx.len(), dx.len().div_ceil(PER_BYTE)], "elements of dy and bytes against dx");
    wide!(for ((dx, dy), &bits) in dx.chunks_mut(PER_BYTE).zip(dy.chunks(PER_BYTE)).zip(above) {
        for (at, (dx, &dy)) in dx.iter_mut().zip(dy).enumerate() {
            *dx = if bits >> at & 1 == 1 { dy } else { T::ZERO };
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn below_zero_there_is_nothing_and_nan_is_not_hidden() {
        let x = [-2.0, -0.0, 0.0, 3.0, f32::NAN, f32::NEG_INFINITY, f32::INFINITY];
        let (mut y, mut dx, mut above) = ([9.0; 7], [9.0; 7], [0xff]);
        relu(&x, &mut y, &mut above);
        assert_eq!(y.map(f32::to_bits), [0.0, 0.0, 0.0, 3.0, f32::NAN, 0.0, f32::INFINITY].map(f32::to_bits));
        assert_eq!(above, [0b100_1000]);
        relu_backward(&above, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &mut dx);
        assert_eq!(dx, [0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 7.0]);
    }

    #[test]
    fn each_element_has_its_bit_at_any_length() {
        for length in 0..40_usize {
            let x: Vec<f32> = (0..length).map(|at| (at * 7 % 5) as f32 - 2.0).collect();
            let dy: Vec<f32> = (0..length).map(|at| at as f32 + 1.0).collect();
            let (mut y, mut dx, mut above) = (dy.clone(), dy.clone(), vec![9; length.div_ceil(PER_BYTE)]);
            relu(&x, &mut y, &mut above);
            relu_backward(&above, &dy, &mut dx);
            for at in 0..length {
                assert_eq!(
                    (y[at], dx[at]),
                    (x[at].max(0.0), if x[at] > 0.0 { dy[at] } else { 0.0 }),
                    "{at} of {length}"
                );
            }
        }
    }
}
