//! Rows of heads as stored, and as products read and write them: rows in 16 bits are copied to f32, one group of heads
//! at a time, so that the copies stay in the caches.

use super::super::Float;
use super::super::round::{self, with_room};
use super::heads::RowsMut;
use half::{bf16, f16};

/// A storage type of heads that are computed in `T`: `T` itself, or a 16-bit type for `f32`.
pub trait StoredAs<T>: bytemuck::Pod + Send + Sync {
    #[doc(hidden)]
    const COPIED: bool;

    #[doc(hidden)]
    fn widen(from: &[Self], to: &mut [T]);

    #[doc(hidden)]
    fn round(from: &[T], to: &mut [Self]);

    /// The rows themselves, if they need no copy.
    #[doc(hidden)]
    fn as_is(rows: &[Self]) -> &[T];

    #[doc(hidden)]
    #[expect(private_interfaces, reason = "for attention alone")]
    fn as_is_mut(rows: RowsMut<'_, Self>) -> RowsMut<'_, T>;
}

/// `T` is stored as `T`.
macro_rules! as_it_is {
    ($t:ty) => {
        impl StoredAs<$t> for $t {
            const COPIED: bool = false;

            fn widen(from: &[$t], to: &mut [$t]) {
                to.copy_from_slice(from);
            }

            fn round(from: &[$t], to: &mut [$t]) {
                to.copy_from_slice(from);
            }

            fn as_is(rows: &[$t]) -> &[$t] {
                rows
            }

            #[expect(private_interfaces, reason = "for attention alone")]
            fn as_is_mut(rows: RowsMut<'_, $t>) -> RowsMut<'_, $t> {
                rows
            }
        }
    };
}
as_it_is!(f32);
as_it_is!(f64);

/// `f32` is stored in 16 bits.
macro_rules! in_16_bits {
    ($t:ty, $widen:path, $round:path) => {
        impl StoredAs<f32> for $t {
            const COPIED: bool = true;

            fn widen(from: &[$t], to: &mut [f32]) {
                $widen(from, to);
            }

            fn round(from: &[f32], to: &mut [$t]) {
                $round(from, to);
            }

            fn as_is(_: &[$t]) -> &[f32] {
                unreachable!("16 bits are copied")
            }

            #[expect(private_interfaces, reason = "for attention alone")]
            fn as_is_mut(_: RowsMut<'_, $t>) -> RowsMut<'_, f32> {
                unreachable!("16 bits are copied")
            }
        }
    };
}
in_16_bits!(bf16, round::from_bf16, round::round);
in_16_bits!(f16, round::from_f16, round::to_f16);

/// Rows in memory.
#[derive(Clone, Copy)]
pub(super) struct Placed<'a, S> {
    /// Their number.
    pub(super) rows: usize,
    /// What begins with the first of them.
    pub(super) from: &'a [S],
    /// From one to the next.
    pub(super) row: usize,
    /// The elements of one that count.
    pub(super) width: usize,
}

/// Calls `f` with the rows of each operand: in place, or copies without gaps.
pub(super) fn read<S: StoredAs<T>, T: Float, const N: usize, R>(
    operands: [Placed<'_, S>; N],
    f: impl FnOnce([&[T]; N]) -> R,
) -> R {
    if !S::COPIED {
        return f(operands.map(|placed| S::as_is(placed.from)));
    }
    with_room(operands.iter().map(|placed| placed.rows * placed.width).sum(), |mut room| {
        f(operands.map(|Placed { rows, from, row, width }| {
            let (copy, rest) = std::mem::take(&mut room).split_at_mut(rows * width);
            room = rest;
            for (i, to) in copy.chunks_exact_mut(width).enumerate() {
                S::widen(&from[i * row..][..width], to);
            }
            &*copy
        }))
    })
}

/// Calls `f` with room for the rows of each result: the rows themselves, or copies without gaps that are rounded
/// afterwards.
pub(super) fn write<S: StoredAs<T>, T: Float, const N: usize, R>(
    results: [RowsMut<'_, S>; N],
    f: impl FnOnce([RowsMut<'_, T>; N]) -> R,
) -> R {
    if !S::COPIED {
        return f(results.map(S::as_is_mut));
    }
    let lens = results.each_ref().map(RowsMut::len);
    with_room(lens.iter().sum(), |all: &mut [T]| {
        let mut room = &mut *all;
        let result = f(results.each_ref().map(|rows| {
            let (copy, rest) = std::mem::take(&mut room).split_at_mut(rows.len());
            room = rest;
            RowsMut::new(copy, rows.width())
        }));
        let mut from = &*all;
        for mut to in results {
            let (copy, rest) = from.split_at(to.len());
            from = rest;
            for (i, from) in copy.chunks_exact(to.width()).enumerate() {
                S::round(from, to.row(i));
            }
        }
        result
    })
}
