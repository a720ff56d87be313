//! Results stored in `bf16`, which only products in [`Precision::Bf16`](super::matmul::Precision) read.
//!
//! Such products round their operands anyway, and rounding twice changes nothing: an operand that is rounded when
//! stored gives the same bits as one that is rounded when read, with half the memory.

use super::Float;
use super::gemm;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use meshwork_core::simd::wide;

/// Number of elements computed at a time before they are rounded; they stay in the L1 cache.
const PIECE: usize = 256;

/// Elements that wait to be rounded, each vector of them in one cache line.
#[repr(align(64))]
struct Piece<T>([T; PIECE]);

/// The nearest `bf16` of each, ties to even, as products in [`Precision::Bf16`](super::matmul::Precision) round their
/// operands: subnormals become zeros of their sign, and NaN stays NaN. The same bits on every CPU. Overwrites `to`.
///
/// Panics if the lengths differ.
///
/// ```
/// use half::bf16;
/// let mut stored = [bf16::ZERO; 3];
/// meshwork_tensor::cpu::kernels::round::round(&[1.0, 1.0 + 2_f32.powi(-8), 1e-40], &mut stored);
/// assert_eq!(stored, [bf16::ONE, bf16::ONE, bf16::ZERO]);
/// ```
pub fn round(from: &[f32], to: &mut [bf16]) {
    gemm::round(from, to);
}

/// These values as f32, which has all of them. Panics if the lengths differ.
pub fn from_bf16(from: &[bf16], to: &mut [f32]) {
    assert_eq!(from.len(), to.len());
    wide(|| to.iter_mut().zip(from).for_each(|(to, from)| *to = f32::from_bits(u32::from(from.to_bits()) << 16)));
}

/// The nearest `f16` of each, ties to even; beyond its range infinity. Panics if the lengths differ.
pub fn to_f16(from: &[f32], to: &mut [f16]) {
    to.convert_from_f32_slice(from);
}

/// These values as f32, which has all of them. Panics if the lengths differ.
pub fn from_f16(from: &[f16], to: &mut [f32]) {
    from.convert_to_f32_slice(to);
}

/// The destination of results, as contiguous elements.
#[derive(Debug)]
pub enum Stored<'a, T> {
    /// In the type they are computed in.
    Full(&'a mut [T]),
    /// Rounded by [`round`]; only for `f32`.
    Rounded(&'a mut [bf16]),
}

impl<'a, T> Stored<'a, T> {
    /// The number of elements.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        match self {
            Stored::Full(to) => to.len(),
            Stored::Rounded(to) => to.len(),
        }
    }

    /// The same destination, borrowed for a shorter time.
    pub fn reborrow(&mut self) -> Stored<'_, T> {
        match self {
            Stored::Full(to) => Stored::Full(to),
            Stored::Rounded(to) => Stored::Rounded(to),
        }
    }

    /// The first `len` elements, and the elements after them. Panics if there are fewer.
    pub fn split_at(self, len: usize) -> (Stored<'a, T>, Stored<'a, T>) {
        match self {
            Stored::Full(to) => {
                let (first, rest) = to.split_at_mut(len);
                (Stored::Full(first), Stored::Full(rest))
            }
            Stored::Rounded(to) => {
                let (first, rest) = to.split_at_mut(len);
                (Stored::Rounded(first), Stored::Rounded(rest))
            }
        }
    }

    /// Consecutive parts of `len` elements; the last part has the rest. Panics if `len` is zero.
    pub fn chunks(self, len: usize) -> impl Iterator<Item = Stored<'a, T>> {
        assert!(len > 0, "parts of no elements");
        let mut rest = Some(self);
        std::iter::from_fn(move || {
            let whole = rest.take().filter(|rest| rest.len() > 0)?;
            let len = len.min(whole.len());
            let (part, after) = whole.split_at(len);
            rest = Some(after);
            Some(part)
        })
    }
}

impl<T: Float> Stored<'_, T> {
    /// Fills it by `compute`, which gets the index of the first element and memory for some elements.
    ///
    /// Panics for rounded elements of another type than `f32`.
    #[inline(always)]
    pub(super) fn fill(self, mut compute: impl FnMut(usize, &mut [T])) {
        match self {
            Stored::Full(to) => compute(0, to),
            Stored::Rounded(to) => {
                let Piece(piece) = &mut Piece([T::ZERO; PIECE]);
                let (whole, rest) = to.as_chunks_mut::<PIECE>();
                let last = whole.len() * PIECE;
                // A separate loop, in which the compiler knows the length.
                for (i, to) in whole.iter_mut().enumerate() {
                    compute(i * PIECE, piece);
                    T::round(piece, to);
                }
                if !rest.is_empty() {
                    let piece = &mut piece[..rest.len()];
                    compute(last, piece);
                    T::round(piece, rest);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_and_cover_all() {
        let (mut full, mut rounded) = ([0.0_f32; 10], [bf16::ZERO; 10]);
        for (len, want) in [(1, 10), (3, 4), (5, 2), (10, 1), (11, 1)] {
            let mut at = 0;
            for stored in [Stored::Full(&mut full), Stored::Rounded(&mut rounded)] {
                assert_eq!(stored.chunks(len).count(), want);
            }
            for part in Stored::Rounded(&mut rounded).chunks(len) {
                at += part.len();
                part.fill(|_, part| part.fill(at as f32));
            }
            assert_eq!(at, 10);
            let ends: Vec<f32> = (0..10).map(|i| (i / len * len + len).min(10) as f32).collect();
            assert_eq!(rounded.map(|x| x.to_f32()).to_vec(), ends);
        }
    }

    #[test]
    fn pieces_are_computed_where_they_lie() {
        let mut to = vec![bf16::ZERO; 2 * PIECE + 3];
        let index = |at: usize| (at % 251) as f32;
        Stored::Rounded(&mut to).fill(|at, piece| {
            piece.iter_mut().enumerate().for_each(|(i, x): (usize, &mut f32)| *x = index(at + i));
        });
        assert!(to.iter().enumerate().all(|(at, x)| x.to_f32() == index(at)));
    }

    #[test]
    #[should_panic(expected = "elements to round against their places")]
    fn lengths_must_agree() {
        round(&[1.0; 3], &mut [bf16::ZERO; 2]);
    }
}
