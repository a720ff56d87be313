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
