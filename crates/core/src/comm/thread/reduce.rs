//! Elementwise reduction in a fixed order.
//!
//! The order is a balanced binary tree over the ranks, split at the largest power of two below their number: three
//! ranks give (a + b) + c, five give ((a + b) + (c + d)) + e. 16-bit floats are added in f32 and rounded once. The bits
//! of an element therefore depend on the ranks' values alone, not on where the element lies, which thread reduces it,
//! or how the work is cut.

use crate::comm::ReduceOp;
use crate::dtype::{DType, Element};
use crate::simd::Wide;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// Number of elements reduced at a time: small enough that each is in a register from its first read to its write. All
/// ranks' buffers tend to have the same offset in a page, so larger blocks would push each other out of the first-level
/// cache.
pub(super) const BLOCK: usize = 64;

/// An element type that can be reduced.
pub(super) trait Reduce: Element {
    /// The type of sums.
    type Acc: Copy + Default;

    /// Elements as accumulators, in `room` if they are not already.
    fn widen<'a>(from: &'a [Self; BLOCK], room: &'a mut [Self::Acc; BLOCK]) -> &'a [Self::Acc; BLOCK];

    /// Accumulators as elements, rounded if need be into `room`.
    fn narrow<'a>(from: &'a [Self::Acc; BLOCK], room: &'a mut [Self; BLOCK]) -> &'a [Self; BLOCK];

    /// The sum; integers wrap around.
    fn sum(a: Self::Acc, b: Self::Acc) -> Self::Acc;

    /// The larger; NaN if one is NaN.
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;

    /// The smaller; NaN if one is NaN.
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
}

macro_rules! exact {
    ($($t:ty: $sum:expr, $max:expr, $min:expr;)*) => { $(impl Reduce for $t {
        type Acc = $t;

        #[inline(always)]
        fn widen<'a>(from: &'a [$t; BLOCK], _room: &'a mut [$t; BLOCK]) -> &'a [$t; BLOCK] {
            from
        }

        #[inline(always)]
        fn narrow<'a>(from: &'a [$t; BLOCK], _room: &'a mut [$t; BLOCK]) -> &'a [$t; BLOCK] {
            from
        }

        #[inline(always)]
        fn sum(a: $t, b: $t) -> $t {
            $sum(a, b)
        }

        #[inline(always)]
        fn max(a: $t, b: $t) -> $t {
            $max(a, b)
        }

        #[inline(always)]
        fn min(a: $t, b: $t) -> $t {
            $min(a, b)
        }
    })* };
}

macro_rules! rounded {
    ($($t:ty: $widen:expr, $narrow:expr;)*) => { $(impl Reduce for $t {
        type Acc = f32;

        #[inline(always)]
        fn widen<'a>(from: &'a [$t; BLOCK], room: &'a mut [f32; BLOCK]) -> &'a [f32; BLOCK] {
            $widen(from, &mut *room);
            room
        }

        #[inline(always)]
        fn narrow<'a>(from: &'a [f32; BLOCK], room: &'a mut [$t; BLOCK]) -> &'a [$t; BLOCK] {
            $narrow(from, &mut *room);
            room
        }

        #[inline(always)]
        fn sum(a: f32, b: f32) -> f32 {
            a + b
        }

        #[inline(always)]
        fn max(a: f32, b: f32) -> f32 {
            <f32 as Reduce>::max(a, b)
        }

        #[inline(always)]
        fn min(a: f32, b: f32) -> f32 {
            <f32 as Reduce>::min(a, b)
        }
    })* };
}

// Written so that a NaN on either side wins: comparisons with NaN are false.
exact! {
    f32: |a, b| a + b, |a: f32, b| if a > b || a.is_nan() { a } else { b },
        |a: f32, b| if a < b || a.is_nan() { a } else { b };
    f64: |a, b| a + b, |a: f64, b| if a > b || a.is_nan() { a } else { b },
        |a: f64, b| if a < b || a.is_nan() { a } else { b };
    i32: i32::wrapping_add, Ord::max, Ord::min;
    i64: i64::wrapping_add, Ord::max, Ord::min;
    u8: u8::wrapping_add, Ord::max, Ord::min;
}
rounded! {
    bf16: widen_bf16, narrow_bf16;
    // f16 has its own machine instructions, which `half` uses where they exist.
    f16: |from: &[f16; BLOCK], to: &mut [f32; BLOCK]| from.convert_to_f32_slice(to),
        |from: &[f32; BLOCK], to: &mut [f16; BLOCK]| to.convert_from_f32_slice(from);
}

/// As `bf16::to_f32`, in a form that the compiler vectorises: these two loops are most of a bf16 reduction.
#[inline(always)]
fn widen_bf16(from: &[bf16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// As `bf16::from_f32`: to nearest, ties to even, NaN stays NaN.
#[inline(always)]
fn narrow_bf16(from: &[f32], to: &mut [bf16]) {
    for (to, from) in to.iter_mut().zip(from) {
        let bits = from.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // Setting the quiet bit prevents a NaN with a short payload from becoming infinite.
        let nan = bits | 0x40_0000;
        let high = if from.is_nan() { nan } else { rounded };
        // A signed shift, because packing signed halves is what SSE2 can do.
        *to = bf16::from_bits(((high as i32) >> 16) as u16);
    }
}

/// Memory of [`tree`] for sums, made once for many blocks.
pub(super) struct Scratch<A> {
    /// Blocks that are not accumulators already.
    leaves: [[A; BLOCK]; 8],
    /// Sums that wait for their right neighbours, with their numbers of ranks. Empty between blocks.
    waiting: Vec<(usize, [A; BLOCK])>,
}

impl<A: Copy + Default> Default for Scratch<A> {
    fn default() -> Scratch<A> {
        Scratch { leaves: [[A::default(); BLOCK]; 8], waiting: Vec::new() }
    }
}

/// Reduces the elements that `read` returns for each of `ranks` (at least one) by `f`, and passes the result to `put`.
///
/// Up to eight ranks, a power of two of them, are added up in registers. Beyond that, sums wait for their right
/// neighbours: sums of equally many ranks are joined at once, which builds the tree from its leaves; the remaining ones
/// are joined from the right.
#[inline(always)]
pub(super) fn tree<'a, T: Reduce>(
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    read: impl Fn(usize) -> &'a [T; BLOCK],
    ranks: Range<usize>,
    scratch: &mut Scratch<T::Acc>,
    put: impl FnOnce(&[T; BLOCK]),
) {
    let mut sum = [T::Acc::default(); BLOCK];
    let mut rest = ranks;
    loop {
        let mut weight = leaves(f, &read, rest.clone(), &mut scratch.leaves, &mut sum);
        rest.start += weight;
        while let Some((_, left)) = scratch.waiting.pop_if(|(ranks, _)| *ranks == weight || rest.is_empty()) {
            for (right, left) in sum.iter_mut().zip(left) {
                *right = f(left, *right);
            }
            weight *= 2;
        }
        if rest.is_empty() {
            return put(T::narrow(&sum, &mut [T::zeroed(); BLOCK]));
        }
        scratch.waiting.push((weight, sum));
    }
}

/// Adds up the first of `ranks`, up to eight: as many as the largest power of two. Returns that number.
#[inline(always)]
fn leaves<'a, T: Reduce>(
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    read: &impl Fn(usize) -> &'a [T; BLOCK],
    ranks: Range<usize>,
    [a, b, c, d, e, g, h, i]: &mut [[T::Acc; BLOCK]; 8],
    sum: &mut [T::Acc; BLOCK],
) -> usize {
    let leaf = |at: usize| read(ranks.start + at);
    let two = |a, b| f(a, b);
    let four = |a, b, c, d| f(f(a, b), f(c, d));
    match ranks.len() {
        1 => sum.copy_from_slice(T::widen(leaf(0), a)),
        2 | 3 => {
            let (a, b) = (T::widen(leaf(0), a), T::widen(leaf(1), b));
            (0..BLOCK).for_each(|k| sum[k] = two(a[k], b[k]));
        }
        4..8 => {
            let (a, b) = (T::widen(leaf(0), a), T::widen(leaf(1), b));
            let (c, d) = (T::widen(leaf(2), c), T::widen(leaf(3), d));
            (0..BLOCK).for_each(|k| sum[k] = four(a[k], b[k], c[k], d[k]));
        }
        _ => {
            let (a, b) = (T::widen(leaf(0), a), T::widen(leaf(1), b));
            let (c, d) = (T::widen(leaf(2), c), T::widen(leaf(3), d));
            let (e, g) = (T::widen(leaf(4), e), T::widen(leaf(5), g));
            let (h, i) = (T::widen(leaf(6), h), T::widen(leaf(7), i));
            (0..BLOCK).for_each(|k| sum[k] = f(four(a[k], b[k], c[k], d[k]), four(e[k], g[k], h[k], i[k])));
        }
    }
    1 << ranks.len().min(8).ilog2()
}

/// Reduces equally many elements of several ranks in the balanced tree of [`tree`](crate::tree), as this backend does,
/// bit for bit: for backends that bring the elements together themselves. `parts` has the bytes of each rank, in the
/// order of the group; `None` stands for the elements that `into` has before. The bytes need not be aligned.
///
/// # Panics
/// If there are no parts, or one of another length than `into`.
pub fn reduce_parts(op: ReduceOp, dtype: DType, parts: &[Option<&[u8]>], into: &mut [u8]) {
    fn typed<T: Reduce>(op: ReduceOp, parts: &[Option<&[u8]>], into: &mut [u8]) {
        match op {
            ReduceOp::Sum => (Parts { f: T::sum, parts, into, elements: PhantomData::<T> }).wide(),
            ReduceOp::Max => (Parts { f: T::max, parts, into, elements: PhantomData::<T> }).wide(),
            ReduceOp::Min => (Parts { f: T::min, parts, into, elements: PhantomData::<T> }).wide(),
        }
    }
    match dtype {
        DType::F32 => typed::<f32>(op, parts, into),
        DType::F64 => typed::<f64>(op, parts, into),
        DType::Bf16 => typed::<bf16>(op, parts, into),
        DType::F16 => typed::<f16>(op, parts, into),
        DType::I32 => typed::<i32>(op, parts, into),
        DType::I64 => typed::<i64>(op, parts, into),
        DType::U8 => typed::<u8>(op, parts, into),
    }
}

/// The parts of [`reduce_parts`], to be reduced by `f`.
struct Parts<'a, T, F> {
    f: F,
    parts: &'a [Option<&'a [u8]>],
    into: &'a mut [u8],
    elements: PhantomData<T>,
}

impl<T: Reduce, F: Fn(T::Acc, T::Acc) -> T::Acc + Copy> Wide for Parts<'_, T, F> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let mut scratch = Scratch::default();
        let mut blocks = vec![[T::zeroed(); BLOCK]; self.parts.len()];
        let step = BLOCK * size_of::<T>();
        for start in (0..self.into.len()).step_by(step) {
            let range = start..self.into.len().min(start + step);
            for (block, part) in blocks.iter_mut().zip(self.parts) {
                let from = &part.unwrap_or(self.into)[range.clone()];
                bytemuck::cast_slice_mut(block)[..from.len()].copy_from_slice(from);
            }
            let into = &mut self.into[range];
            let put = |block: &[T; BLOCK]| into.copy_from_slice(&bytemuck::cast_slice(block)[..into.len()]);
            tree(self.f, |rank| &blocks[rank], 0..blocks.len(), &mut scratch, put);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce<T: Reduce>(op: ReduceOp, ranks: &[T]) -> T {
        let blocks: Vec<_> = ranks.iter().map(|&value| [value; BLOCK]).collect();
        let (mut result, mut scratch) = (T::zeroed(), Scratch::default());
        let (read, put) = (|rank: usize| &blocks[rank], |block: &[T; BLOCK]| result = block[BLOCK - 1]);
        match op {
            ReduceOp::Sum => tree(T::sum, read, 0..ranks.len(), &mut scratch, put),
            ReduceOp::Max => tree(T::max, read, 0..ranks.len(), &mut scratch, put),
            ReduceOp::Min => tree(T::min, read, 0..ranks.len(), &mut scratch, put),
        }
        assert!(scratch.waiting.is_empty());
        result
    }

    /// The tree of the whole workspace, which its own module tests against its definition.
    fn by_definition(ranks: &[f32]) -> f32 {
        crate::tree::sum(ranks, |a, b| a + b).unwrap()
    }

    #[test]
    fn every_number_of_ranks_adds_up_as_defined() {
        let ranks: Vec<f32> = (0..70).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut orders = 0;
        for n in 1..=ranks.len() {
            assert_eq!(reduce(ReduceOp::Sum, &ranks[..n]).to_bits(), by_definition(&ranks[..n]).to_bits(), "{n} ranks");
            orders += usize::from(by_definition(&ranks[..n]) != ranks[..n].iter().sum::<f32>());
        }
        assert!(orders > 30, "the values must tell orders apart");
    }

    #[test]
    fn the_tree_splits_at_the_largest_power_of_two_below() {
        let [a, b, c, d, e] = [1e8f32, 3.3, -1e8, 7.7, 0.1];
        assert_eq!(reduce(ReduceOp::Sum, &[a, b, c]), (a + b) + c);
        assert_eq!(reduce(ReduceOp::Sum, &[a, b, c, d]), (a + b) + (c + d));
        assert_eq!(reduce(ReduceOp::Sum, &[a, b, c, d, e]), ((a + b) + (c + d)) + e);
        assert_ne!((a + b) + (c + d), ((a + b) + c) + d, "the values must tell orders apart");
    }

    #[test]
    fn sixteen_bit_sums_round_once() {
        // Each addend is below half a unit of 256 in bf16: rounding after every addition would lose all of them.
        let ranks = [256.0, 0.75, 0.75, 0.75, 0.75].map(bf16::from_f32);
        assert_eq!(reduce(ReduceOp::Sum, &ranks), bf16::from_f32(259.0));
        let ranks = [2048.0, 0.75, 0.75, 0.75].map(f16::from_f32);
        assert_eq!(reduce(ReduceOp::Sum, &ranks), f16::from_f32(2050.25));
    }

    #[test]
    fn bf16_conversions_are_those_of_half() {
        // All bf16s, and around each of them the f32s where rounding decides.
        for high in 0..=u16::MAX {
            let value = bf16::from_bits(high);
            let mut wide = [0.0];
            widen_bf16(&[value], &mut wide);
            assert_eq!(wide[0].to_bits(), u32::from(high) << 16);
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let wide = f32::from_bits(u32::from(high) << 16 | low);
                let mut narrow = [bf16::ZERO];
                narrow_bf16(&[wide], &mut narrow);
                assert_eq!(narrow[0].to_bits(), bf16::from_f32(wide).to_bits(), "{wide:e}");
            }
        }
    }

    #[test]
    fn max_and_min_propagate_nan_from_either_side_and_integers_wrap() {
        for op in [ReduceOp::Max, ReduceOp::Min] {
            for ranks in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
                assert!(reduce(op, &ranks).is_nan());
                assert!(reduce(op, &ranks.map(f64::from)).is_nan());
                assert!(reduce(op, &ranks.map(f16::from_f32)).is_nan());
            }
            assert!(reduce(op, &[bf16::NAN, bf16::ONE, bf16::ZERO]).is_nan());
        }
        assert_eq!(reduce(ReduceOp::Max, &[-3i64, -1, -2]), -1);
        assert_eq!(reduce(ReduceOp::Min, &[-1i64, -3, -2]), -3);
        assert_eq!(reduce(ReduceOp::Min, &[7u8, 200, 5]), 5);
        assert_eq!(reduce(ReduceOp::Min, &[f32::INFINITY, f32::NEG_INFINITY, 0.0]), f32::NEG_INFINITY);
        assert_eq!(reduce(ReduceOp::Sum, &[i32::MAX, 1]), i32::MIN);
        assert_eq!(reduce(ReduceOp::Sum, &[200u8, 100]), 44);
    }

    #[test]
    fn parts_add_up_as_ranks_do_wherever_they_lie() {
        let values: Vec<Vec<f32>> =
            (0..5).map(|rank| (0..150).map(|i| ((rank * 150 + i) as f32 * 0.7).sin() * 1e3).collect()).collect();
        let bytes: Vec<Vec<u8>> =
            values.iter().map(|rank| [&[0], bytemuck::cast_slice::<f32, u8>(rank)].concat()).collect(); // not aligned
        let mut parts: Vec<_> = bytes.iter().map(|rank| Some(&rank[1..])).collect();
        parts[2] = None;
        let mut into = bytes[2][1..].to_vec();
        reduce_parts(ReduceOp::Sum, DType::F32, &parts, &mut into);
        for (i, sum) in into.chunks(4).enumerate() {
            let column: Vec<f32> = values.iter().map(|rank| rank[i]).collect();
            assert_eq!(sum, by_definition(&column).to_le_bytes(), "element {i}");
        }
    }
}
