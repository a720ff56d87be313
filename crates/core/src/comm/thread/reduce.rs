//! Elementwise reduction in a fixed order.
//!
//! The order is a balanced binary tree over the ranks, split at the largest power of two below their number: three
//! ranks give (a + b) + c, five give ((a + b) + (c + d)) + e. 16-bit floats are added in f32 and rounded once. The bits
//! of an element therefore depend on the ranks' values alone, not on where the element lies, which thread reduces it,
//! or how the work is cut.
//!
//! More than 400 lines: the order, the types, and the tests of both.

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
    type Acc: Reduce<Acc = Self::Acc> + Default;

    /// Whether sums are compiled for [wide](Wide::wide) vectors and [in registers](at_once): those of the types that
    /// models train in, which alone are long.
    const LONG: bool;

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

    /// [`Reduce::max`] or [`Reduce::min`]: one function, so that what reduces by either is compiled once.
    #[inline(always)]
    fn extreme(largest: bool) -> impl Fn(Self::Acc, Self::Acc) -> Self::Acc + Copy {
        move |a, b| if largest { Self::max(a, b) } else { Self::min(a, b) }
    }
}

macro_rules! exact {
    ($($t:ty, $long:literal: $sum:expr, $max:expr, $min:expr;)*) => { $(impl Reduce for $t {
        type Acc = $t;

        const LONG: bool = $long;

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

        const LONG: bool = true;

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
    f32, true: |a, b| a + b, |a: f32, b| if a > b || a.is_nan() { a } else { b },
        |a: f32, b| if a < b || a.is_nan() { a } else { b };
    f64, false: |a, b| a + b, |a: f64, b| if a > b || a.is_nan() { a } else { b },
        |a: f64, b| if a < b || a.is_nan() { a } else { b };
    i32, false: i32::wrapping_add, Ord::max, Ord::min;
    i64, false: i64::wrapping_add, Ord::max, Ord::min;
    u8, false: u8::wrapping_add, Ord::max, Ord::min;
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
/// If it is `LONG`, up to eight ranks, a power of two of them, are added up in registers. Beyond that, sums wait for
/// their right neighbours: sums of equally many ranks are joined at once, which builds the tree from its leaves; the
/// remaining ones are joined from the right.
#[inline(always)]
pub(super) fn tree<'a, T: Reduce, const LONG: bool>(
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    read: impl Fn(usize) -> &'a [T; BLOCK],
    ranks: Range<usize>,
    scratch: &mut Scratch<T::Acc>,
    put: impl FnOnce(&[T; BLOCK]),
) {
    let eight = |rest: &Range<usize>| {
        let taken = 1 << rest.len().min(at_once(LONG)).ilog2();
        (taken, taken)
    };
    tree_of::<T, LONG>(f, read, ranks, eight, scratch, put);
}

/// The most parts that are added up in registers. A reduction that is not long takes them one by one, with the same
/// tree: that is a quarter of the code.
const fn at_once(long: bool) -> usize {
    if long { 8 } else { 1 }
}

/// [`tree`] over parts; a part is the sum of some ranks. Of the parts left, `next` takes the first 1, 2, 4 or 8
/// of equal size, at most [`at_once`], and returns their number and the ranks that they cover together.
#[inline(always)]
fn tree_of<'a, T: Reduce, const LONG: bool>(
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    read: impl Fn(usize) -> &'a [T; BLOCK],
    parts: Range<usize>,
    next: impl Fn(&Range<usize>) -> (usize, usize),
    scratch: &mut Scratch<T::Acc>,
    put: impl FnOnce(&[T; BLOCK]),
) {
    let mut sum = [T::Acc::default(); BLOCK];
    let mut rest = parts;
    loop {
        let (taken, mut weight) = next(&rest);
        leaves::<T, LONG>(f, &read, rest.start..rest.start + taken, &mut scratch.leaves, &mut sum);
        rest.start += taken;
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

/// Adds up 1, 2, 4 or 8 parts, at most [`at_once`].
#[inline(always)]
fn leaves<'a, T: Reduce, const LONG: bool>(
    f: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    read: &impl Fn(usize) -> &'a [T; BLOCK],
    parts: Range<usize>,
    [a, b, c, d, e, g, h, i]: &mut [[T::Acc; BLOCK]; 8],
    sum: &mut [T::Acc; BLOCK],
) {
    let leaf = |at: usize| read(parts.start + at);
    let two = |a, b| f(a, b);
    let four = |a, b, c, d| f(f(a, b), f(c, d));
    match parts.len().min(at_once(LONG)) {
        1 => sum.copy_from_slice(T::widen(leaf(0), a)),
        2 => {
            let (a, b) = (T::widen(leaf(0), a), T::widen(leaf(1), b));
            (0..BLOCK).for_each(|k| sum[k] = two(a[k], b[k]));
        }
        4 => {
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
}

/// Part of a sum over the ranks of a group.
#[derive(Clone, Debug)]
pub struct Part<'a> {
    /// The ranks that are added up in it: one, or a [node](crate::tree::nodes) of the tree.
    pub ranks: Range<usize>,
    /// Its bytes, which need not be aligned: elements, or of several ranks sums of [`sum_size`] bytes each. `None`
    /// stands for the elements of one rank that the result's memory has before.
    pub bytes: Option<&'a [u8]>,
}

/// Bytes of an element of a sum that is not complete: 16-bit floats are rounded once, at its end.
pub fn sum_size(dtype: DType) -> usize {
    match dtype {
        DType::Bf16 | DType::F16 => size_of::<f32>(),
        _ => dtype.size(),
    }
}

/// Adds up parts in the balanced tree of [`tree`](crate::tree), as this backend does, bit for bit: for backends that
/// bring the elements of ranks together themselves. The parts, in order, are the whole group, whose sum is `rounded` to
/// elements, or a node of its tree, whose sum has [`sum_size`].
///
/// # Panics
/// If there are no parts, or one of another length than `into`.
pub fn reduce_parts(op: ReduceOp, dtype: DType, parts: &[Part<'_>], into: &mut [u8], rounded: bool) {
    fn typed<T: Reduce>(op: ReduceOp, parts: &[Part<'_>], into: &mut [u8], rounded: bool) {
        let elements = PhantomData::<T>;
        match op {
            ReduceOp::Sum if T::LONG => Parts::<_, _, true> { f: T::sum, parts, into, rounded, elements }.wide(),
            ReduceOp::Sum => Parts::<_, _, false> { f: T::sum, parts, into, rounded, elements }.run(),
            op => Parts::<_, _, false> { f: T::extreme(op == ReduceOp::Max), parts, into, rounded, elements }.run(),
        }
    }
    match dtype {
        DType::F32 => typed::<f32>(op, parts, into, rounded),
        DType::F64 => typed::<f64>(op, parts, into, rounded),
        DType::Bf16 => typed::<bf16>(op, parts, into, rounded),
        DType::F16 => typed::<f16>(op, parts, into, rounded),
        DType::I32 => typed::<i32>(op, parts, into, rounded),
        DType::I64 => typed::<i64>(op, parts, into, rounded),
        DType::U8 => typed::<u8>(op, parts, into, rounded),
    }
}

/// The parts of [`reduce_parts`], to be reduced by `f`.
struct Parts<'a, T, F, const LONG: bool> {
    f: F,
    parts: &'a [Part<'a>],
    into: &'a mut [u8],
    rounded: bool,
    elements: PhantomData<T>,
}

impl<T: Reduce, F: Fn(T::Acc, T::Acc) -> T::Acc + Copy, const LONG: bool> Wide for Parts<'_, T, F, LONG> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (mut scratch, parts, first) = (Scratch::default(), self.parts, self.parts[0].ranks.start);
        // Parts of equally many ranks are added up together if they are a subtree.
        let taken = |at: usize| {
            let (start, weight) = (parts[at].ranks.start - first, parts[at].ranks.len());
            let equal = parts[at..].iter().take(at_once(LONG)).take_while(|part| part.ranks.len() == weight).count();
            let aligned = if start == 0 { 3 } else { (start / weight).trailing_zeros() };
            let taken = 1 << equal.ilog2().min(aligned);
            (taken, taken * weight)
        };
        let next: Vec<(usize, usize)> = (0..parts.len()).map(taken).collect();
        let mut blocks = vec![[T::Acc::default(); BLOCK]; parts.len()];
        let (one, sum) = (size_of::<T>(), size_of::<T::Acc>());
        let size = if self.rounded { one } else { sum };
        let elements = self.into.len() / size;
        for start in (0..elements).step_by(BLOCK) {
            let count = BLOCK.min(elements - start);
            let into = &mut self.into[start * size..(start + count) * size];
            // A whole block of sums that lies well is read where it lies.
            let lies = |part: usize| {
                let is_sum = one == sum || parts[part].ranks.len() > 1;
                let bytes = parts[part].bytes.filter(|_| is_sum && count == BLOCK)?;
                bytemuck::try_from_bytes::<[T::Acc; BLOCK]>(&bytes[start * sum..(start + count) * sum]).ok()
            };
            for (at, (block, part)) in blocks.iter_mut().zip(parts).enumerate() {
                if lies(at).is_some() {
                    continue;
                }
                if part.ranks.len() == 1 && one != sum {
                    let from = part.bytes.map_or(&*into, |bytes| &bytes[start * one..(start + count) * one]);
                    let (mut elements, mut room) = ([T::zeroed(); BLOCK], [T::Acc::default(); BLOCK]);
                    bytemuck::cast_slice_mut::<T, u8>(&mut elements)[..from.len()].copy_from_slice(from);
                    *block = *T::widen(&elements, &mut room);
                } else {
                    let from = part.bytes.map_or(&*into, |bytes| &bytes[start * sum..(start + count) * sum]);
                    bytemuck::cast_slice_mut::<T::Acc, u8>(block)[..from.len()].copy_from_slice(from);
                }
            }
            let put = |block: &[T::Acc; BLOCK]| match self.rounded {
                true => {
                    let mut room = [T::zeroed(); BLOCK];
                    into.copy_from_slice(&bytemuck::cast_slice::<T, u8>(T::narrow(block, &mut room))[..count * one]);
                }
                false => into.copy_from_slice(&bytemuck::cast_slice::<T::Acc, u8>(block)[..count * sum]),
            };
            let next = |rest: &Range<usize>| next[rest.start];
            let read = |part: usize| lies(part).unwrap_or(&blocks[part]);
            tree_of::<T::Acc, LONG>(self.f, read, 0..blocks.len(), next, &mut scratch, put);
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
            ReduceOp::Sum if T::LONG => tree::<T, true>(T::sum, read, 0..ranks.len(), &mut scratch, put),
            ReduceOp::Sum => tree::<T, false>(T::sum, read, 0..ranks.len(), &mut scratch, put),
            op => tree::<T, false>(T::extreme(op == ReduceOp::Max), read, 0..ranks.len(), &mut scratch, put),
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
        let part = |rank: usize| Part { ranks: rank..rank + 1, bytes: (rank != 2).then_some(&bytes[rank][1..]) };
        let parts: Vec<_> = (0..5).map(part).collect();
        let mut into = bytes[2][1..].to_vec();
        reduce_parts(ReduceOp::Sum, DType::F32, &parts, &mut into, true);
        for (i, sum) in into.chunks(4).enumerate() {
            let column: Vec<f32> = values.iter().map(|rank| rank[i]).collect();
            assert_eq!(sum, by_definition(&column).to_le_bytes(), "element {i}");
        }
    }

    /// Some nodes of the tree are added up before the rest, as ranks of a process do.
    #[test]
    fn sums_of_nodes_have_the_bits_of_one_sum() {
        for (ranks, dtype) in (1..=37).flat_map(|ranks| [DType::F32, DType::Bf16].map(|dtype| (ranks, dtype))) {
            let element = |rank: usize, i: usize| ((rank * 70 + i) as f32 * 0.7).sin() * 1e3;
            let bytes = |rank: usize| -> Vec<u8> {
                let values = (0..70).map(|i| element(rank, i));
                match dtype {
                    DType::Bf16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
                    _ => values.flat_map(f32::to_le_bytes).collect(),
                }
            };
            let leaves: Vec<Vec<u8>> = (0..ranks).map(bytes).collect();
            let part = |rank: usize| Part { ranks: rank..rank + 1, bytes: Some(&*leaves[rank]) };
            let all: Vec<_> = (0..ranks).map(part).collect();
            let mut whole = leaves[0].clone();
            reduce_parts(ReduceOp::Sum, dtype, &all, &mut whole, true);
            for run in [2, 3, 4, 5, 8] {
                let members: Vec<usize> = (0..ranks).collect();
                let nodes = members.chunks(run).flat_map(|run| crate::tree::nodes(run, ranks));
                let sum = |node: Range<usize>| {
                    let mut sum = vec![0; 70 * if node.len() == 1 { dtype.size() } else { sum_size(dtype) }];
                    match node.len() {
                        1 => sum.copy_from_slice(&leaves[node.start]),
                        _ => reduce_parts(ReduceOp::Sum, dtype, &all[node.clone()], &mut sum, false),
                    }
                    (node, sum)
                };
                let sums: Vec<_> = nodes.map(sum).collect();
                let parts: Vec<_> =
                    sums.iter().map(|(ranks, sum)| Part { ranks: ranks.clone(), bytes: Some(sum) }).collect();
                let mut into = leaves[0].clone();
                reduce_parts(ReduceOp::Sum, dtype, &parts, &mut into, true);
                assert_eq!(into, whole, "{ranks} ranks, {run} in each process, {dtype}");
            }
        }
    }
}
