//! Elementwise reduction in a fixed order.
//!
//! The order is a balanced binary tree over the ranks, split at the largest power of two below their number: three
//! ranks give (a + b) + c, five give ((a + b) + (c + d)) + e. 16-bit floats are added in f32 and rounded once. The
//! bits of an element therefore depend on the ranks' values alone, not on where the element lies, who reduces it,
//! or how the work is cut.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::comm::ReduceOp;
use crate::dtype::Element;

/// Elements reduced at a time: a few of these fit into the first-level cache.
pub(super) const CHUNK: usize = 1024;

/// An element type that can be reduced.
pub(super) trait Reduce: Element {
    /// What sums are held in.
    type Acc: Copy + Default;

    /// Reads elements into accumulators.
    fn widen(from: &[Self], to: &mut [Self::Acc]);

    /// `to = a op b`; `room` is as long as `to`.
    fn pair(op: ReduceOp, a: &[Self], b: &[Self], to: &mut [Self::Acc], room: &mut [Self::Acc]);

    /// `to = to op other`.
    fn combine(op: ReduceOp, to: &mut [Self::Acc], other: &[Self::Acc]);

    /// The accumulators as elements, rounded if need be into `room`.
    fn narrow<'a>(from: &'a [Self::Acc], room: &'a mut [Self]) -> &'a [Self];
}

/// `to = to op other` by `f`, a loop that the compiler vectorises.
fn zip<A: Copy>(to: &mut [A], other: &[A], f: impl Fn(A, A) -> A) {
    for (x, &y) in to.iter_mut().zip(other) {
        *x = f(*x, y);
    }
}

macro_rules! exact {
    ($($t:ty: $add:expr, $max:expr;)*) => { $(impl Reduce for $t {
        type Acc = $t;

        fn widen(from: &[Self], to: &mut [$t]) {
            to.copy_from_slice(from);
        }

        fn pair(op: ReduceOp, a: &[$t], b: &[$t], to: &mut [$t], _room: &mut [$t]) {
            fn zip3(a: &[$t], b: &[$t], to: &mut [$t], f: impl Fn($t, $t) -> $t) {
                for ((x, &a), &b) in to.iter_mut().zip(a).zip(b) {
                    *x = f(a, b);
                }
            }
            match op {
                ReduceOp::Sum => zip3(a, b, to, $add),
                ReduceOp::Max => zip3(a, b, to, $max),
            }
        }

        fn combine(op: ReduceOp, to: &mut [$t], other: &[$t]) {
            match op {
                ReduceOp::Sum => zip(to, other, $add),
                ReduceOp::Max => zip(to, other, $max),
            }
        }

        fn narrow<'a>(from: &'a [$t], _room: &'a mut [$t]) -> &'a [$t] {
            from
        }
    })* };
}

macro_rules! rounded {
    ($($t:ty: $widen:expr, $narrow:expr;)*) => { $(impl Reduce for $t {
        type Acc = f32;

        fn widen(from: &[Self], to: &mut [f32]) {
            $widen(from, to);
        }

        fn pair(op: ReduceOp, a: &[Self], b: &[Self], to: &mut [f32], room: &mut [f32]) {
            Self::widen(a, to);
            Self::widen(b, room);
            Self::combine(op, to, room);
        }

        fn combine(op: ReduceOp, to: &mut [f32], other: &[f32]) {
            f32::combine(op, to, other);
        }

        fn narrow<'a>(from: &'a [f32], room: &'a mut [Self]) -> &'a [Self] {
            $narrow(from, &mut *room);
            room
        }
    })* };
}

// Written so that a NaN on either side wins: comparisons with NaN are false.
exact! {
    f32: |a, b| a + b, |a: f32, b| if a > b || a.is_nan() { a } else { b };
    f64: |a, b| a + b, |a: f64, b| if a > b || a.is_nan() { a } else { b };
    i32: i32::wrapping_add, Ord::max;
    i64: i64::wrapping_add, Ord::max;
    u8: u8::wrapping_add, Ord::max;
}
rounded! {
    bf16: widen_bf16, narrow_bf16;
    // Has its own machine instructions, which `half` uses where they exist.
    f16: |from: &[f16], to: &mut [f32]| from.convert_to_f32_slice(to),
        |from: &[f32], to: &mut [f16]| to.convert_from_f32_slice(from);
}

/// As `bf16::to_f32`, in a form that the compiler vectorises: these two loops are most of a bf16 reduction.
fn widen_bf16(from: &[bf16], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = f32::from_bits(u32::from(from.to_bits()) << 16);
    }
}

/// As `bf16::from_f32`: to nearest, ties to even, NaN stays NaN.
fn narrow_bf16(from: &[f32], to: &mut [bf16]) {
    for (to, from) in to.iter_mut().zip(from) {
        let bits = from.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // Setting the quiet bit keeps a NaN with a short payload from becoming infinite.
        let nan = bits | 0x40_0000;
        let high = if from.is_nan() { nan } else { rounded };
        // A signed shift, because packing signed halves is what SSE2 can do.
        *to = bf16::from_bits(((high as i32) >> 16) as u16);
    }
}

/// Reduces what `read` gives for each of `ranks` (at least one) into `to`. `room` needs [`room_for`] elements.
pub(super) fn tree<'a, T: Reduce>(
    op: ReduceOp,
    read: &impl Fn(usize) -> &'a [T],
    ranks: Range<usize>,
    to: &mut [T::Acc],
    room: &mut [T::Acc],
) {
    match ranks.len() {
        1 => T::widen(read(ranks.start), to),
        2 => {
            let (a, b) = (read(ranks.start), read(ranks.start + 1));
            T::pair(op, a, b, to, &mut room[..to.len()]);
        }
        n => {
            let middle = ranks.start + n.next_power_of_two() / 2;
            tree(op, read, ranks.start..middle, to, room);
            let (right, room) = room.split_at_mut(to.len());
            tree(op, read, middle..ranks.end, right, room);
            T::combine(op, to, right);
        }
    }
}

/// Accumulators that [`tree`] needs over `ranks` ranks: a chunk for each level.
pub(super) fn room_for(ranks: usize) -> usize {
    CHUNK * (ranks.next_power_of_two().ilog2() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce<T: Reduce>(op: ReduceOp, ranks: &[T]) -> T {
        let (mut to, mut room) = ([T::Acc::default()], vec![T::Acc::default(); room_for(ranks.len())]);
        let read = |rank: usize| &ranks[rank..rank + 1];
        tree(op, &read, 0..ranks.len(), &mut to, &mut room);
        T::narrow(&to, &mut [ranks[0]])[0]
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
            assert_eq!(wide[0].to_bits() >> 16, u32::from(high));
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let wide = f32::from_bits(u32::from(high) << 16 | low);
                let mut narrow = [bf16::ZERO];
                narrow_bf16(&[wide], &mut narrow);
                assert_eq!(narrow[0].to_bits(), bf16::from_f32(wide).to_bits(), "{wide:e}");
            }
        }
    }

    #[test]
    fn max_propagates_nan_from_either_side_and_integers_wrap() {
        for ranks in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            assert!(reduce(ReduceOp::Max, &ranks).is_nan());
        }
        assert!(reduce(ReduceOp::Max, &[bf16::NAN, bf16::ONE, bf16::ZERO]).is_nan());
        assert_eq!(reduce(ReduceOp::Max, &[-3i64, -1, -2]), -1);
        assert_eq!(reduce(ReduceOp::Sum, &[i32::MAX, 1]), i32::MIN);
        assert_eq!(reduce(ReduceOp::Sum, &[200u8, 100]), 44);
    }
}
