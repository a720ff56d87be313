//! Products in tiles: attention multiplies small blocks whose operands it packs once per head, and skips what the mask
//! hides to within a tile.
//!
//! A tile of C is at most `rows` by two vectors of `lanes`. B is packed in panels as wide as a tile, A is read as it
//! lies. On x86-64 `f32` tiles are those of [`gemm`](super::super::gemm): an element is one chain of fused
//! multiply-adds over its terms in order, from zero, which is then added to C or replaces it; the same bits with
//! AVX-512 and with AVX2. Elsewhere, and in `f64`, a plain loop sums in the same order, not fused.

use super::super::Float;
#[cfg(target_arch = "x86_64")]
use super::super::gemm::{Micro, Path, Strip, Tile, avx2::Avx2, avx512::Avx512};
#[cfg(target_arch = "x86_64")]
use super::super::matmul::Precision;
use super::super::matmul::{Strides, Update};
use super::rows::Reductions;
use std::ops::Range;

/// Rows of B copied at a time where its rows are contiguous: few streams, each as long as a row.
const COPIED_ROWS: usize = 16;

/// Rows of the highest tile of any CPU.
pub(super) const MAX_ROWS: usize = 16;

/// A slice of elements and the distance between its rows, which are contiguous.
type Rows<S> = (S, usize);

/// Computes one tile: `[rows, columns, terms]`, A, B, C. The caller knows that this CPU can.
type TileFn<T> = unsafe fn([usize; 3], (&[T], Strides), Rows<&[T]>, Rows<&mut [T]>, Update);

/// Packs `[terms, columns]` of B, at most `lanes` columns: row l at `l step`, zero beyond the last column.
/// The caller knows that this CPU can.
type PackFn<T> = unsafe fn([usize; 2], (&[T], Strides), Rows<&mut [T]>);

/// How this CPU multiplies tiles of `T`.
#[derive(Clone, Copy)]
pub(super) struct Tiles<T> {
    /// Rows of the highest tile.
    pub(super) rows: usize,
    /// Elements of a vector; the widest tile has two.
    lanes: usize,
    tile: TileFn<T>,
    pack: PackFn<T>,
    /// How it reduces rows.
    pub(super) reductions: Reductions<T>,
}

/// An element type that attention computes in.
pub trait Tiled: Float + bytemuck::Pod + Send + Sync {
    #[doc(hidden)]
    #[expect(private_interfaces, reason = "for attention alone")]
    fn tiles() -> Tiles<Self>;
}

impl Tiled for f32 {
    #[expect(private_interfaces, reason = "for attention alone")]
    fn tiles() -> Tiles<f32> {
        #[cfg(target_arch = "x86_64")]
        match Path::best(Precision::F32) {
            Some(Path::Avx512) => return avx512(),
            Some(Path::Avx2) => return vectors::<Avx2>(Reductions::loops()),
            _ => {}
        }
        loops()
    }
}

impl Tiled for f64 {
    #[expect(private_interfaces, reason = "for attention alone")]
    fn tiles() -> Tiles<f64> {
        loops()
    }
}

/// A packed B of `terms` rows: for each panel of columns, its rows one after the other.
#[derive(Clone, Copy)]
pub(super) struct Panels<'a, T> {
    packed: &'a [T],
    terms: usize,
}

impl<T: Float> Tiles<T> {
    /// Columns of the widest tile.
    fn width(&self) -> usize {
        2 * self.lanes
    }

    /// Elements of a packed B.
    pub(super) fn packed_len(&self, [terms, columns]: [usize; 2]) -> usize {
        terms * columns.next_multiple_of(self.width())
    }

    /// Packs B, `[terms, columns]`.
    pub(super) fn pack<'a>(
        &self,
        [terms, columns]: [usize; 2],
        (from, (along, apart)): (&[T], Strides),
        to: &'a mut [T],
    ) -> Panels<'a, T> {
        let width = self.width();
        let slice = if apart == 1 { COPIED_ROWS } else { terms };
        for first in (0..terms).step_by(slice.max(1)) {
            let rows = slice.min(terms - first);
            for column in (0..columns).step_by(self.lanes) {
                let start = (column / width * terms + first) * width + column % width;
                let from = (&from[first * along + column * apart..], (along, apart));
                let strip = [rows, self.lanes.min(columns - column)];
                // SAFETY: a table is only made of functions that this CPU runs.
                unsafe { (self.pack)(strip, from, (&mut to[start..], width)) };
            }
        }
        Panels { packed: to, terms }
    }

    /// `C = A B` or `C += A B` of at most [`rows`](Self::rows) rows, over some terms and columns of B; these begin at a
    /// multiple of 32. A and C begin at the first of their terms and columns.
    pub(super) fn times(
        &self,
        rows: usize,
        a: (&[T], Strides),
        (b, terms, columns): (Panels<'_, T>, Range<usize>, Range<usize>),
        (c, c_row): Rows<&mut [T]>,
        update: Update,
    ) {
        let width = self.width();
        debug_assert_eq!(columns.start % width, 0, "columns from the start of a panel");
        for column in columns.clone().step_by(width) {
            let b = (&b.packed[column * b.terms + terms.start * width..], width);
            let dims = [rows, width.min(columns.end - column), terms.len()];
            // SAFETY: a table is only made of functions that this CPU runs.
            unsafe { (self.tile)(dims, a, b, (&mut c[column - columns.start..], c_row), update) };
        }
    }
}

/// Holds a tile against its slices.
fn check<T>(
    [rows, columns, terms]: [usize; 3],
    (a, (a_row, a_step)): (&[T], Strides),
    (b, b_step): Rows<&[T]>,
    (c, c_row): Rows<&mut [T]>,
) {
    assert!(rows > 0 && columns > 0 && terms > 0, "a tile of {rows} by {columns}, {terms} terms");
    // Strides are extents of slices in memory, far from overflow.
    let a_last = (rows - 1) * a_row + (terms - 1) * a_step;
    assert!(a_last < a.len() && (terms - 1) * b_step + columns <= b.len(), "operands of a tile");
    assert!(columns <= c_row && (rows - 1) * c_row + columns <= c.len(), "rows of a tile of C");
}

/// For a CPU that has `avx512f`, as the caller knows.
#[cfg(target_arch = "x86_64")]
fn avx512() -> Tiles<f32> {
    // SAFETY: the caller asked the CPU.
    vectors::<Avx512>(unsafe { Reductions::avx512() })
}

/// The tiles of vector instructions that this CPU has, as the caller knows.
#[cfg(target_arch = "x86_64")]
fn vectors<M: Micro>(reductions: Reductions<f32>) -> Tiles<f32> {
    Tiles { rows: M::ROWS, lanes: M::LANES, tile: vector_tile::<M>, pack: vector_pack::<M>, reductions }
}

/// A [`TileFn`].
///
/// # Safety
/// The CPU has the instructions of `M`.
#[cfg(target_arch = "x86_64")]
unsafe fn vector_tile<M: Micro>(
    dims: [usize; 3],
    (a, (a_row, a_step)): (&[f32], Strides),
    (b, b_step): Rows<&[f32]>,
    (c, c_row): Rows<&mut [f32]>,
    update: Update,
) {
    check(dims, (a, (a_row, a_step)), (b, b_step), (c, c_row));
    let [rows, columns, words] = dims;
    assert!(rows <= M::ROWS && columns <= 2 * M::LANES, "a tile of {rows} by {columns}");
    let (a, b, c, add) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr(), update == Update::Accumulate);
    // SAFETY: the caller's promise; `check` held the farthest element of each operand against its slice.
    unsafe { M::tile(&Tile { rows, columns, words, a, a_row, a_step, b, b_step, c, c_row, add }) }
}

/// A [`PackFn`].
///
/// # Safety
/// The CPU has the instructions of `M`.
#[cfg(target_arch = "x86_64")]
unsafe fn vector_pack<M: Micro>(
    [k, lanes]: [usize; 2],
    (from, (along, apart)): (&[f32], Strides),
    (to, step): Rows<&mut [f32]>,
) {
    assert!(k > 0 && (1..=M::LANES).contains(&lanes), "a strip of {lanes} by {k}");
    assert!((k - 1) * along + (lanes - 1) * apart < from.len(), "a strip of B");
    assert!((k - 1) * step + M::LANES <= to.len(), "a packed strip");
    // SAFETY: the caller's promise; the asserts held the farthest elements against the slices.
    unsafe { M::pack(Strip { from: from.as_ptr(), lanes, k, apart, along }, to.as_mut_ptr(), step) }
}

/// Tiles of plain loops.
fn loops<T: Float>() -> Tiles<T> {
    Tiles { rows: LOOP_ROWS, lanes: LOOP_LANES, tile: loop_tile, pack: loop_pack, reductions: Reductions::loops() }
}

const LOOP_ROWS: usize = 4;
const LOOP_LANES: usize = 8;

/// A [`TileFn`].
fn loop_tile<T: Float>(
    dims: [usize; 3],
    (a, (a_row, a_step)): (&[T], Strides),
    (b, b_step): Rows<&[T]>,
    (c, c_row): Rows<&mut [T]>,
    update: Update,
) {
    check(dims, (a, (a_row, a_step)), (b, b_step), (c, c_row));
    let [rows, columns, terms] = dims;
    let mut sums = [[T::ZERO; 2 * LOOP_LANES]; LOOP_ROWS];
    for l in 0..terms {
        let b = &b[l * b_step..][..columns];
        for (i, sums) in sums[..rows].iter_mut().enumerate() {
            let x = a[i * a_row + l * a_step];
            sums.iter_mut().zip(b).for_each(|(sum, &b)| *sum += x * b);
        }
    }
    for (c, sums) in c.chunks_mut(c_row).zip(&sums[..rows]) {
        for (c, &sum) in c[..columns].iter_mut().zip(sums) {
            *c = if update == Update::Accumulate { *c + sum } else { sum };
        }
    }
}

/// A [`PackFn`].
fn loop_pack<T: Float>(
    [terms, columns]: [usize; 2],
    (from, (along, apart)): (&[T], Strides),
    (to, step): Rows<&mut [T]>,
) {
    for (l, to) in to.chunks_mut(step).take(terms).enumerate() {
        for (j, to) in to[..LOOP_LANES].iter_mut().enumerate() {
            *to = if j < columns { from[l * along + j * apart] } else { T::ZERO };
        }
    }
}

#[cfg(test)]
impl Tiles<f32> {
    /// Every kind that this CPU runs, the best first.
    pub(super) fn all() -> Vec<Tiles<f32>> {
        let mut all = vec![loops()];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(Path::Avx2.runs_here().then(|| vectors::<Avx2>(Reductions::loops())));
            all.extend(Path::Avx512.runs_here().then(avx512));
        }
        all.reverse();
        all
    }
}
