//! Products of `f32` matrices on x86-64, with AVX-512 or with AVX2 and FMA.
//!
//! # The bits
//!
//! Element (i, j) of `C` is, with `fma` rounding once and `K` = [`K_BLOCK`]:
//!
//! ```text
//! s_0 = fma(a[i, K-1], b[K-1, j], .. fma(a[i, 1], b[1, j], fma(a[i, 0], b[0, j], 0)) ..)
//! s_1 = the same over l = K .. 2K, and so on
//! c[i, j] = ((s_0 + s_1) + s_2) + ..        or, accumulating,        ((c[i, j] + s_0) + s_1) + ..
//! ```
//!
//! So they depend on its row of `A`, its column of `B` and its old value alone: never on `m`, `n`, strides, the
//! element's place or how the work was cut; and they are the same on both paths. (Which NaN a NaN is, is not defined.)
//! Everything below may be tuned but for that order: [`K_BLOCK`], one chain of `fma` per element and block. The tests
//! hold every path against this formula, element by element.
//!
//! # The work
//!
//! ```text
//! for each block of N_BLOCK columns
//!   for each block of K_BLOCK terms
//!     pack that block of B: panels as wide as a tile, stays in L2         (unless B is read once, as it lies)
//!     for each panel of A, as high as a tile
//!       pack the panel, stays in L1                                       (unless A lies well, as it lies)
//!       for each panel of B: one tile of C, its sums in registers
//! ```
//!
//! What differs between CPUs is [`Micro`]: the tile and the packing of a strip. A tile takes both operands by pointer
//! and strides, so that packed and unpacked ones go through the same instructions.
//!
//! Rows are spread evenly over the panels, so that no panel is so flat that it waits for its own sums; columns at the
//! right edge are masked. Since any block of C can be computed alone with the bits it has in the whole, threads can
//! share a product by calling this on blocks of C.
//!
//! Packed operands live in a buffer of the calling thread that grows to its largest product and stays (at most 16 KiB
//! and 768 KiB). A buffer passed by the caller would have to pass through every kernel that multiplies, and its size
//! depends on what the CPU can do.

pub(super) mod avx2;
pub(super) mod avx512;
#[cfg(test)]
mod tests;

use super::matmul::{Strides, Update};
use avx2::Avx2;
use avx512::Avx512;
use std::cell::RefCell;

/// Terms summed in registers before they are added to C. Part of the definition of the bits.
const K_BLOCK: usize = 256;

/// Columns of B packed at a time: with [`K_BLOCK`] rows, three quarters of a megabyte.
const N_BLOCK: usize = 768;

/// Rows of B copied at a time where its rows are contiguous: few streams, each long enough to be prefetched.
const COPIED_ROWS: usize = 16;

/// Up to this many columns, packing A costs more than its layout may.
const A_IN_PLACE: usize = 512;

/// Distances that are multiples of 4 KiB map a column of A to one set of the L1 cache: packed in any case.
const ALIASED: usize = 1024;

/// An implementation of the product: the instructions it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Path {
    /// `avx512f`: tiles of 14 by 32.
    Avx512,
    /// `avx2` and `fma`: tiles of 6 by 16.
    Avx2,
}

impl Path {
    /// The fastest that this CPU runs, if any. Cheap: std asks the CPU once.
    pub(super) fn best() -> Option<Path> {
        [Path::Avx512, Path::Avx2].into_iter().find(|path| path.runs_here())
    }

    /// Whether this CPU has the instructions.
    pub(super) fn runs_here(self) -> bool {
        match self {
            Path::Avx512 => is_x86_feature_detected!("avx512f"),
            Path::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
        }
    }
}

/// `C = A · B` or `C += A · B` for `[m, n, k]`. With `k = 0` the product is zero.
///
/// # Safety
/// The CPU runs `path`. Each pointer with its (row, column) strides is valid for the whole matrix, C for writing and
/// with one of its strides 1, save along a dim of 1; no two elements of C share memory, nor C with A or B.
pub(super) unsafe fn product(
    path: Path,
    [m, n, k]: [usize; 3],
    a: (*const f32, Strides),
    b: (*const f32, Strides),
    (c, (c_row, c_column)): (*mut f32, Strides),
    update: Update,
) {
    let (a, b) = (Matrix::new(a), Matrix::new(b));
    // Of a C stored by columns, compute the transpose: the products are the same, commuted.
    let by_rows = c_column == 1 || n == 1;
    debug_assert!(by_rows || c_row == 1 || m == 1, "C has a contiguous dim");
    let product = if by_rows {
        Product { m, n, k, a, b, c, c_row, update }
    } else {
        Product { m: n, n: m, k, a: b.transposed(), b: a.transposed(), c, c_row: c_column, update }
    };
    // SAFETY: the caller's promise; `product` holds the same matrices.
    unsafe {
        match path {
            Path::Avx512 => product.run::<Avx512>(),
            Path::Avx2 => product.run::<Avx2>(),
        }
    }
}

/// What a CPU does its own way.
///
/// # Safety of the functions
/// The CPU has the instructions of the implementation.
pub(super) trait Micro {
    /// Floats of a vector: lanes of a packed strip. A tile is two vectors wide.
    const LANES: usize;
    /// Rows of the highest tile, at most `LANES`.
    const ROWS: usize;

    /// Computes one tile.
    ///
    /// # Safety
    /// `1 <= rows <= ROWS` and `1 <= columns <= 2 LANES`; the pointers with their strides are valid for `rows` by `k`,
    /// `k` by `columns`, and (for writing) `rows` by `columns`.
    unsafe fn tile(tile: &Tile);

    /// Writes `k` vectors of `LANES` floats, `step` apart: vector l is element l of every lane, zero beyond the last.
    ///
    /// # Safety
    /// `strip` is readable, `1 <= lanes <= LANES`, and `to` writable for those vectors.
    unsafe fn pack(strip: Strip, to: *mut f32, step: usize);
}

/// One tile of C: `rows` by `columns`, the sum of `k` products added to it or replacing it.
pub(super) struct Tile {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) k: usize,
    /// Element (i, l) at `i a_row + l a_step`.
    pub(super) a: *const f32,
    pub(super) a_row: usize,
    pub(super) a_step: usize,
    /// Row l at `l b_step`, its columns contiguous.
    pub(super) b: *const f32,
    pub(super) b_step: usize,
    /// Row i at `i c_row`, its columns contiguous.
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// Add to C instead of replacing it.
    pub(super) add: bool,
}

/// Rows of A or columns of B, `lanes` of them and `k` long: element l of a lane at `lane · apart + l · along`.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub(super) from: *const f32,
    pub(super) lanes: usize,
    pub(super) k: usize,
    pub(super) apart: usize,
    pub(super) along: usize,
}

impl Strip {
    /// [`Micro::pack`] for any strides, one element at a time.
    ///
    /// # Safety
    /// As there.
    unsafe fn gather<const LANES: usize>(self, to: *mut f32, step: usize) {
        for l in 0..self.k {
            for lane in 0..LANES {
                // SAFETY: elements of the strip and of its packed form, by the caller's promise.
                unsafe {
                    let from = self.from.wrapping_add(lane * self.apart + l * self.along);
                    *to.add(l * step + lane) = if lane < self.lanes { *from } else { 0.0 };
                }
            }
        }
    }
}

/// An operand.
#[derive(Clone, Copy)]
struct Matrix {
    start: *const f32,
    row: usize,
    column: usize,
}

impl Matrix {
    fn new((start, (row, column)): (*const f32, Strides)) -> Matrix {
        Matrix { start, row, column }
    }

    fn transposed(self) -> Matrix {
        Matrix { row: self.column, column: self.row, ..self }
    }

    fn at(&self, i: usize, j: usize) -> *const f32 {
        self.start.wrapping_add(i * self.row + j * self.column)
    }
}

/// A product with the rows of C contiguous.
struct Product {
    m: usize,
    n: usize,
    k: usize,
    a: Matrix,
    b: Matrix,
    c: *mut f32,
    c_row: usize,
    update: Update,
}

/// A cache line, for the alignment of the packed operands.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read and written through pointers")] [f32; Line::FLOATS]);

impl Line {
    const FLOATS: usize = 16;
    const ZERO: Line = Line([0.0; Line::FLOATS]);
}

thread_local! {
    /// The packed panel of A and the packed block of B.
    static PACKED: RefCell<[Vec<Line>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// The buffer, grown to at least `floats`.
fn room(buffer: &mut Vec<Line>, floats: usize) -> *mut f32 {
    let lines = floats.div_ceil(Line::FLOATS);
    if buffer.len() < lines {
        buffer.resize(lines, Line::ZERO);
    }
    buffer.as_mut_ptr().cast()
}

impl Product {
    /// Computes it all.
    ///
    /// # Safety
    /// That of [`product`].
    unsafe fn run<M: Micro>(&self) {
        if self.m == 0 || self.n == 0 {
            return;
        }
        if self.k == 0 && self.update == Update::Overwrite {
            for i in 0..self.m {
                // SAFETY: row i of C.
                unsafe { self.c.add(i * self.c_row).write_bytes(0, self.n) };
            }
        }
        PACKED.with_borrow_mut(|[packed_a, packed_b]| {
            for j in (0..self.n).step_by(N_BLOCK) {
                let columns = (self.n - j).min(N_BLOCK);
                for l in (0..self.k).step_by(K_BLOCK) {
                    let k = (self.k - l).min(K_BLOCK);
                    // SAFETY: a block of columns and terms of a product that the caller vouches for.
                    unsafe {
                        let b = self.block_of_b::<M>((l, k), (j, columns), packed_b);
                        self.columns::<M>((l, k), (j, columns), b, packed_a);
                    }
                }
            }
        });
    }

    /// Terms l.. and columns j.. of B as tiles read them: a panel of k rows after the other, or in place where it is
    /// read once and needs no transpose.
    ///
    /// # Safety
    /// That of [`product`]; the block lies inside it, and there are at most `K_BLOCK` terms.
    unsafe fn block_of_b<M: Micro>(
        &self,
        (l, k): (usize, usize),
        (j, columns): (usize, usize),
        buffer: &mut Vec<Line>,
    ) -> Panels {
        let Matrix { row: along, column: apart, .. } = self.b;
        let width = 2 * M::LANES;
        if apart == 1 && self.m <= M::ROWS {
            return Panels { start: self.b.at(l, j), step: along, panel: width };
        }
        let to = room(buffer, columns.next_multiple_of(width) * k);
        let slice = if apart == 1 { COPIED_ROWS } else { k };
        for first in (0..k).step_by(slice) {
            for strip in (0..columns).step_by(M::LANES) {
                let (from, lanes) = (self.b.at(l + first, j + strip), (columns - strip).min(M::LANES));
                let rows = (k - first).min(slice);
                // SAFETY: columns and terms inside B; the panels before this one, the rows of this one before these
                // and the lanes before these end before `columns` rounded up times `k`.
                unsafe {
                    let to = to.add(strip / width * width * k + first * width + strip % width);
                    M::pack(Strip { from, lanes, k: rows, apart, along }, to, width);
                }
            }
        }
        Panels { start: to, step: width, panel: width * k }
    }

    /// Terms l.. of columns j.. of C.
    ///
    /// # Safety
    /// That of [`product`]; the block lies inside it, there are at most `K_BLOCK` terms, and `b` is that block of B.
    unsafe fn columns<M: Micro>(
        &self,
        (l, k): (usize, usize),
        (j, columns): (usize, usize),
        b: Panels,
        buffer: &mut Vec<Line>,
    ) {
        let Matrix { row: apart, column: along, .. } = self.a;
        let far = if along == 1 { apart } else { along };
        let in_place = (along == 1 || apart == 1) && self.n <= A_IN_PLACE && far % ALIASED != 0;
        let packed = room(buffer, if in_place { 0 } else { k * M::LANES });
        let add = l > 0 || self.update == Update::Accumulate;
        let width = 2 * M::LANES;
        let panels = self.m.div_ceil(M::ROWS);
        for panel in 0..panels {
            let i = panel * self.m / panels;
            let rows = (panel + 1) * self.m / panels - i;
            let (mut a, mut a_row, mut a_step) = (self.a.at(i, l), apart, along);
            if !in_place {
                // SAFETY: at most `ROWS`, so at most `LANES`, rows of A; `packed` has room for k vectors.
                unsafe { M::pack(Strip { from: a, lanes: rows, k, apart, along }, packed, M::LANES) };
                (a, a_row, a_step) = (packed, 1, M::LANES);
            }
            for first in (0..columns).step_by(width) {
                let columns = (columns - first).min(width);
                // SAFETY: at most `ROWS` rows, at most `width` columns and k terms, all inside the product.
                unsafe {
                    let c = self.c.add(i * self.c_row + j + first);
                    let b_start = b.start.wrapping_add(first / width * b.panel);
                    let (b, b_step, c_row) = (b_start, b.step, self.c_row);
                    M::tile(&Tile { rows, columns, k, a, a_row, a_step, b, b_step, c, c_row, add });
                }
            }
        }
    }
}

/// A block of B in panels as wide as a tile: `panel` floats from one to the next, `step` from row to row.
#[derive(Clone, Copy)]
struct Panels {
    start: *const f32,
    step: usize,
    panel: usize,
}
