//! Products in tiles: attention multiplies small blocks whose operands it packs once per head, and skips masked tiles.
//!
//! A tile of C is at most `rows` by two vectors of `lanes`. B is packed in panels as wide as a tile. A is read in place
//! in [`Precision::F32`]; in the others it is rounded first, once a head or once a product. A packed or rounded operand
//! consists of words: one term, or two in `bf16` where the CPU multiplies pairs. On x86-64 `f32` tiles are those of
//! [`gemm`](super::super::gemm): an element is one chain of fused multiply-adds over its terms in order, from zero,
//! which is then added to C or replaces it; the same bits with AVX-512 and with AVX2. Elsewhere, and in `f64`, a plain
//! loop sums in the same order, not fused. A product of two `bf16`, or of two numbers of TF32, is exact in `f32`, so
//! all kinds give the same bits for rounded operands, except for subnormal numbers.
//!
//! More than 400 lines: the calls of every kind of tile are read together with the asserts that they rely on.

use super::super::Float;
use super::super::gemm::{Bf16, Format, Path, Tf32};
#[cfg(target_arch = "x86_64")]
use super::super::gemm::{
    Elements, Grid, Micro, Rounded, Strip, Tile,
    avx2::Avx2,
    avx512::{Avx512, Avx512Bf16},
    pack_panels,
};
use super::super::matmul::{Strides, Update};
use super::ahead::Ahead;
use super::heads::RowsMut;
use super::rows::{Rows, dots};
#[cfg(target_arch = "x86_64")]
use super::rows::{dots_avx2, dots_avx512};
use super::stored::StoredAs;
use super::{blocks, panels};
use meshwork_core::simd::wide;
use meshwork_tensor::Precision;
use std::ops::Range;

/// Columns of the widest tile of any CPU.
pub(super) const MAX_WIDTH: usize = 32;

/// Computes a product tile by tile: `[rows, columns, words]`, A, B as a part of [`Panels`] with the distance of its
/// rows and of its panels, C; prefetches a line per word of each tile. The caller guarantees that this CPU has the
/// instructions.
type TimesFn<T> = unsafe fn([usize; 3], (&[T], Strides), (&[T], Strides), RowsMut<'_, T>, Update, &mut Ahead<'_, T>);

/// Packs `[terms, columns]` of B, or of A where its rows are contiguous, in panels of the given width, a multiple of
/// the vector length. Row l of a panel holds word l of each of its columns, and zeros beyond the last column and the
/// last term. The caller guarantees that this CPU has the instructions.
type PackFn<T> = unsafe fn([usize; 2], (&[T], Strides), (&mut [T], usize));

/// The dot products of the rows of two matrices, in the order of `reduce.rs`. Rows have the given length, at most 1024.
/// The caller guarantees that this CPU has the instructions.
type DotsFn<T> = unsafe fn(usize, [Rows<&[T]>; 2], &mut [T]);

/// Rounds `[rows, terms]` of A to words, rows to rows, if A is not read in place. The caller guarantees that this CPU
/// has the instructions.
type RoundFn<T> = unsafe fn([usize; 2], Rows<&[T]>, Rows<&mut [T]>);

/// The functions with which this CPU multiplies tiles of `T`.
#[derive(Clone, Copy)]
pub struct Tiles<T> {
    /// Rows of the highest tile.
    pub(super) rows: usize,
    /// Elements of a vector; the widest tile has two.
    pub(super) lanes: usize,
    /// Terms of a packed word.
    terms: usize,
    /// Whether A is read in place.
    in_place: bool,
    times: TimesFn<T>,
    pack: PackFn<T>,
    round: RoundFn<T>,
    dots: DotsFn<T>,
}

impl Tiles<f32> {
    /// All kinds of tiles that this CPU has for a precision: the fastest first, plain loops last.
    pub fn all(precision: Precision) -> Vec<Tiles<f32>> {
        let paths = Path::all(precision).iter().copied().filter(|path| path.runs_here());
        paths.map(vectors).chain([plain(precision)]).collect()
    }
}

/// An element type that attention computes in.
pub trait Tiled: Float + StoredAs<Self> {
    /// The fastest tiles that this CPU has for a precision.
    fn tiles(precision: Precision) -> Tiles<Self>;
}

impl Tiled for f32 {
    fn tiles(precision: Precision) -> Tiles<f32> {
        Path::best(precision).map_or_else(|| plain(precision), vectors)
    }
}

impl Tiled for f64 {
    fn tiles(_: Precision) -> Tiles<f64> {
        loops()
    }
}

/// A packed B of `words` rows: for each panel of columns, its rows one after the other.
#[derive(Clone, Copy)]
pub(super) struct Panels<'a, T> {
    packed: &'a [T],
    words: usize,
    /// Its terms.
    pub(super) terms: usize,
}

impl<T: Float> Tiles<T> {
    /// Columns of the widest tile.
    pub(super) fn width(&self) -> usize {
        2 * self.lanes
    }

    /// Elements of a packed B.
    pub(super) fn packed_len(&self, [terms, columns]: [usize; 2]) -> usize {
        terms.div_ceil(self.terms) * columns.next_multiple_of(self.width())
    }

    /// Number of elements for the words of an A, `[rows, terms]`.
    pub(super) fn left_len(&self, [rows, terms]: [usize; 2]) -> usize {
        if self.in_place { 0 } else { rows.next_multiple_of(self.lanes) * terms.div_ceil(self.terms) }
    }

    /// A, `[rows, terms]`, one of them contiguous, in the form that tiles read. `to` has [`left_len`](Self::left_len)
    /// elements.
    pub(super) fn left<'a>(
        &self,
        [rows, terms]: [usize; 2],
        (from, (row, step)): (&'a [T], Strides),
        to: &'a mut [T],
    ) -> Left<'a, T> {
        if self.in_place {
            return Left { a: from, strides: (row, step), terms: 1 };
        }
        // Words are as contiguous as terms or rows were.
        let strides = if step == 1 {
            let words = terms.div_ceil(self.terms);
            // SAFETY: a table contains only functions that this CPU can run.
            unsafe { (self.round)([rows, terms], (from, row), (&mut *to, words)) };
            (words, 1)
        } else {
            let lanes = rows.next_multiple_of(self.lanes);
            // SAFETY: as above.
            unsafe { (self.pack)([terms, rows], (from, (step, row)), (&mut *to, lanes)) };
            (1, lanes)
        };
        Left { a: to, strides, terms: self.terms }
    }

    /// The sums of the products of the rows of two matrices, as many as there are sums: see [`DotsFn`].
    pub(super) fn dots(&self, len: usize, rows: [Rows<&[T]>; 2], sums: &mut [T]) {
        // SAFETY: a table contains only functions that this CPU can run.
        unsafe { (self.dots)(len, rows, sums) }
    }

    /// Packs B, `[terms, columns]`.
    pub(super) fn pack<'a>(
        &self,
        dims @ [terms, _]: [usize; 2],
        from: (&[T], Strides),
        to: &'a mut [T],
    ) -> Panels<'a, T> {
        // SAFETY: a table contains only functions that this CPU can run.
        unsafe { (self.pack)(dims, from, (&mut *to, self.width())) };
        Panels { packed: to, words: terms.div_ceil(self.terms), terms }
    }

    /// `C = A B` or `C += A B`, over some terms and columns of B; the terms begin at an even index, the columns at a
    /// whole vector of a panel, and do not extend beyond the panel unless they begin with one. A and C begin at the
    /// first of their rows, terms and columns. Meanwhile, one line of `ahead` is prefetched per word of each tile.
    pub(super) fn times(
        &self,
        rows: usize,
        a: Left<'_, T>,
        (b, terms, columns): (Panels<'_, T>, Range<usize>, Range<usize>),
        c: RowsMut<'_, T>,
        update: Update,
        ahead: &mut Ahead<'_, T>,
    ) {
        let width = self.width();
        debug_assert_eq!(terms.start % 2, 0, "terms from the start of a word");
        let skipped = columns.start % width;
        debug_assert!(skipped == 0 || skipped == self.lanes && columns.len() <= self.lanes, "columns {columns:?}");
        let dims = [rows, columns.len(), terms.len().div_ceil(self.terms)];
        if rows == 0 || columns.is_empty() {
            return;
        }
        let at = (columns.start - skipped) * b.words + terms.start / self.terms * width + skipped;
        // SAFETY: a table contains only functions that this CPU can run.
        unsafe { (self.times)(dims, (a.a, a.strides), (&b.packed[at..], (width, width * b.words)), c, update, ahead) };
    }
}

/// A left operand: word (i, l) at `i row + l step`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a, T> {
    a: &'a [T],
    strides: Strides,
    /// Terms of a word.
    terms: usize,
}

impl<T> Left<'_, T> {
    /// The operand from this row and this term (an even one) on.
    pub(super) fn from(self, row: usize, term: usize) -> Self {
        Left { a: &self.a[row * self.strides.0 + term / self.terms * self.strides.1..], ..self }
    }
}

/// Checks a product in tiles of this width against its slices.
fn check<T>(
    [rows, columns, words]: [usize; 3],
    (a, (a_row, a_step)): (&[T], Strides),
    (b, (b_step, panel)): (&[T], Strides),
    width: usize,
) {
    assert!(rows > 0 && columns > 0 && words > 0, "a product of {rows} by {columns}, {words} words");
    // Strides are extents of slices in memory, far from overflow.
    let a_last = (rows - 1) * a_row + (words - 1) * a_step;
    let last = (columns - 1) / width;
    // The last panel, and whole ones before it.
    let last_end = last * panel + (words - 1) * b_step + columns - last * width;
    let whole_end = if last > 0 { (last - 1) * panel + (words - 1) * b_step + width } else { 0 };
    assert!(a_last < a.len() && last_end.max(whole_end) <= b.len(), "operands of a product");
}

/// There is no path on other architectures.
#[cfg(not(target_arch = "x86_64"))]
fn vectors(path: Path) -> Tiles<f32> {
    match path {}
}

/// The tiles of a path; the caller guarantees that this CPU runs it.
#[cfg(target_arch = "x86_64")]
fn vectors(path: Path) -> Tiles<f32> {
    match path {
        Path::Avx512 => of_micro::<Avx512>(as_it_lies, dots_avx512),
        Path::Avx512Bf16 => of_micro::<Avx512Bf16>(round_pairs, dots_avx512),
        Path::Avx512Rounded => of_micro::<Rounded<Avx512, Bf16>>(round_loop::<Bf16>, dots_avx512),
        Path::Avx512Tf32 => of_micro::<Rounded<Avx512, Tf32>>(round_loop::<Tf32>, dots_avx512),
        Path::Avx2 => of_micro::<Avx2>(as_it_lies, dots_avx2),
        Path::Avx2Rounded => of_micro::<Rounded<Avx2, Bf16>>(round_loop::<Bf16>, dots_avx2),
        Path::Avx2Tf32 => of_micro::<Rounded<Avx2, Tf32>>(round_loop::<Tf32>, dots_avx2),
    }
}

/// The tiles of vector instructions; the caller guarantees that this CPU has them.
#[cfg(target_arch = "x86_64")]
fn of_micro<M: Micro>(round: RoundFn<f32>, dots: DotsFn<f32>) -> Tiles<f32> {
    let (times, pack) = (vector_times::<M>, vector_pack::<M>);
    Tiles { rows: M::ROWS, lanes: M::LANES, terms: M::TERMS, in_place: M::IN_PLACE, times, pack, round, dots }
}

/// A [`TimesFn`].
///
/// # Safety
/// The CPU has the instructions of `M`.
#[cfg(target_arch = "x86_64")]
unsafe fn vector_times<M: Micro>(
    dims @ [rows, columns, words]: [usize; 3],
    (a, (a_row, a_step)): (&[f32], Strides),
    (b, (b_step, panel)): (&[f32], Strides),
    mut c: RowsMut<'_, f32>,
    update: Update,
    ahead: &mut Ahead<'_, f32>,
) {
    let width = 2 * M::LANES;
    check(dims, (a, (a_row, a_step)), (b, (b_step, panel)), width);
    let (c, c_row) = c.block([rows, columns]);
    let (a, b, add) = (a.as_ptr(), b.as_ptr(), update == Update::Accumulate);
    let nothing = (a.cast(), 0);
    let mut ahead = || ahead.take(words).map_or(nothing, |(line, step)| (line.cast(), step * size_of::<f32>()));
    let tile = Tile { rows, columns, words, a, a_row, a_step, b, b_step, c, c_row, add, ahead: nothing };
    // As few tiles below each other as possible, all of about the same height: the first ones are one row higher.
    let down = rows.div_ceil(M::ROWS);
    let (each, longer) = (rows / down, rows % down);
    for (first, rows, down) in [(0, each + 1, longer), (longer * (each + 1), each, down - longer)] {
        for (at, columns, right) in [(0, width, columns / width), (columns / width, columns % width, 1)] {
            if down > 0 && columns > 0 {
                let first = Tile { rows, columns, ..tile.at_row(first).at_panel(at, width, panel) };
                // SAFETY: the caller's promise; `check` compared the farthest element of each operand with its slice,
                // and `block` did so for C.
                unsafe { M::tiles(&first, Grid { down, right, panel, ahead: &mut ahead }) }
            }
        }
    }
}

/// A [`PackFn`].
///
/// # Safety
/// The CPU has the instructions of `M`.
#[cfg(target_arch = "x86_64")]
unsafe fn vector_pack<M: Micro>(
    [terms, columns]: [usize; 2],
    (from, (along, apart)): (&[f32], Strides),
    (to, width): (&mut [f32], usize),
) {
    if terms == 0 || columns == 0 {
        return;
    }
    assert!(width > 0 && width.is_multiple_of(M::LANES), "a panel of {width} columns");
    assert!((terms - 1) * along + (columns - 1) * apart < from.len(), "an operand");
    assert!(M::words(terms) * columns.next_multiple_of(width) <= to.len(), "a packed operand");
    let from = (Elements::Full(from.as_ptr()), (along, apart));
    // SAFETY: the caller's promise; the asserts compared the farthest element and all words with the slices.
    unsafe { pack_panels::<M>([terms, columns], from, (to.as_mut_ptr(), width)) }
}

/// A [`RoundFn`] to pairs, as in the row packing of products: one row after the other.
///
/// # Safety
/// The CPU has the instructions of `Avx512Bf16`.
#[cfg(target_arch = "x86_64")]
unsafe fn round_pairs([rows, terms]: [usize; 2], (from, row): Rows<&[f32]>, (to, to_row): Rows<&mut [f32]>) {
    const LANES: usize = Avx512Bf16::LANES;
    let words = Avx512Bf16::words(terms);
    assert!(rows == 0 || (rows - 1) * row + terms <= from.len(), "rows of an operand");
    assert!(to_row == words && rows.next_multiple_of(LANES) * words <= to.len(), "rows of words");
    for i in (0..rows).step_by(LANES) {
        let (from, lanes) = (Elements::Full(from[i * row..].as_ptr()), LANES.min(rows - i));
        // SAFETY: the caller's promise; the asserts compared these rows, and the words of all lanes, with the slices.
        unsafe {
            Avx512Bf16::pack_rows(Strip { from, lanes, k: terms, apart: row, along: 1 }, to[i * words..].as_mut_ptr())
        };
    }
}

/// Tiles of plain loops for `f32`.
fn plain(precision: Precision) -> Tiles<f32> {
    match precision {
        Precision::F32 => loops(),
        Precision::Tf32 => rounded_loops::<Tf32>(),
        Precision::Bf16 => rounded_loops::<Bf16>(),
    }
}

/// The same for operands that are rounded to a format.
fn rounded_loops<F: Format>() -> Tiles<f32> {
    Tiles { in_place: false, pack: rounded_loop_pack::<F>, round: round_loop::<F>, ..loops() }
}

/// Tiles of plain loops.
fn loops<T: Float>() -> Tiles<T> {
    let (times, pack, round) = (loop_times, loop_pack, as_it_lies);
    Tiles { rows: LOOP_ROWS, lanes: LOOP_LANES, terms: 1, in_place: true, times, pack, round, dots }
}

const LOOP_ROWS: usize = 4;
const LOOP_LANES: usize = 8;

/// A [`TimesFn`].
fn loop_times<T: Float>(
    dims @ [rows, columns, terms]: [usize; 3],
    (a, (a_row, a_step)): (&[T], Strides),
    (b, (b_step, panel)): (&[T], Strides),
    mut c: RowsMut<'_, T>,
    update: Update,
    _: &mut Ahead<'_, T>,
) {
    let width = 2 * LOOP_LANES;
    check(dims, (a, (a_row, a_step)), (b, (b_step, panel)), width);
    for rows in panels(0..rows, LOOP_ROWS) {
        for (at, columns) in blocks(0..columns, width).enumerate() {
            let mut sums = [[T::ZERO; 2 * LOOP_LANES]; LOOP_ROWS];
            for l in 0..terms {
                let b = &b[at * panel + l * b_step..][..columns.len()];
                for (i, sums) in rows.clone().zip(&mut sums) {
                    let x = a[i * a_row + l * a_step];
                    sums.iter_mut().zip(b).for_each(|(sum, &b)| *sum += x * b);
                }
            }
            for (i, sums) in rows.clone().zip(&sums) {
                for (c, &sum) in c.row(i)[columns.clone()].iter_mut().zip(sums) {
                    *c = if update == Update::Accumulate { *c + sum } else { sum };
                }
            }
        }
    }
}

/// A [`PackFn`].
fn loop_pack<T: Float>(
    [terms, columns]: [usize; 2],
    (from, (along, apart)): (&[T], Strides),
    (to, width): (&mut [T], usize),
) {
    for (columns, to) in blocks(0..columns, width).zip(to.chunks_mut((terms * width).max(1))) {
        for (l, to) in to.chunks_mut(width).enumerate().take(terms) {
            to.fill(T::ZERO);
            to.iter_mut().zip(columns.clone()).for_each(|(to, j)| *to = from[l * along + j * apart]);
        }
    }
}

/// A [`PackFn`] that rounds to a format.
fn rounded_loop_pack<F: Format>(
    dims @ [terms, columns]: [usize; 2],
    from: (&[f32], Strides),
    (to, width): (&mut [f32], usize),
) {
    let to = &mut to[..terms * columns.next_multiple_of(width)];
    loop_pack(dims, from, (&mut *to, width));
    to.iter_mut().for_each(|x| *x = F::rounded(*x));
}

/// A [`RoundFn`] if A is read in place.
fn as_it_lies<T>(_: [usize; 2], _: Rows<&[T]>, _: Rows<&mut [T]>) {
    unreachable!("words of an operand that needs none");
}

/// A [`RoundFn`] to a format, one term a word.
fn round_loop<F: Format>([rows, terms]: [usize; 2], (from, row): Rows<&[f32]>, (to, to_row): Rows<&mut [f32]>) {
    for i in 0..rows {
        let (from, to) = (&from[i * row..][..terms], &mut to[i * to_row..][..terms]);
        wide!(to.iter_mut().zip(from).for_each(|(to, &x)| *to = F::rounded(x)));
    }
}

#[cfg(test)]
mod tests;
