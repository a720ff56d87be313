//! Products of `f32` matrices on x86-64, with AVX-512 or with AVX2 and FMA; in `f32`, or of operands rounded to `bf16`
//! or TF32.
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
//! So the bits depend only on the element's row of `A`, its column of `B` and its old value, never on `m`, `n`,
//! strides, the element's place or the cut of the work; and they are the same on both paths. (The payload of a NaN is
//! not defined.) Everything below may be tuned except this order: [`K_BLOCK`], one chain of `fma` per element and
//! block. The tests compare every path with this formula, element by element.
//!
//! In [`Precision::Bf16`] the formula is the same for operands rounded by [`rounded`]; sums stay `f32`. `vdpbf16ps`
//! adds two products to a sum as `fma(x_0, y_0, fma(x_1, y_1, s))`, each step rounded to nearest, so a packed pair
//! holds its first term in the upper half. It treats subnormal sums as zero and produces none: a partial sum below
//! 2^-126 becomes zero, while paths without that instruction keep it. In all other cases the paths agree bit for bit.
//!
//! In [`Precision::Tf32`] it is the same for operands rounded by [`tf32`], on all paths.
//!
//! # The work
//!
//! ```text
//! for each block of columns, as many as the L2 cache holds
//!   for each block of K_BLOCK terms
//!     pack that block of B: panels as wide as a tile, stays in L2         (unless B is read once, in place)
//!     for each panel of A, as high as a tile
//!       pack the panel, stays in L1                                       (unless A is suited to reads in place)
//!       for each panel of B: one tile of C, its sums in registers, while the next panel of A is fetched
//! ```
//!
//! The panels of a transposed A are a few columns of a wide matrix, so [`GROUP`] panels are packed and prefetched
//! together.
//!
//! [`Micro`] has the CPU-specific parts: the tile and the packing of a strip. A tile takes both operands by pointer and
//! strides, so that packed and unpacked operands use the same instructions. A packed operand consists of words of 32
//! bits: one `f32`, or two terms in `bf16`.
//!
//! An operand may also be stored in `bf16` ([`Elements`]). In `f32` packing widens it, which is exact, and it is never
//! read in place; in `bf16` packing copies instead of converting. In
//! memory, the first of two neighbours is in the lower half of a word, so rows of A are copied with swapped halves and
//! stay rows; if terms are in rows, two rows are interleaved.
//!
//! All of B can be packed beforehand, in the same blocks ([`pieces`]), for all threads at once.
//!
//! Where C has few columns, as beside an adapter, tiles are one vector wide and higher than others (`narrow`). Where it
//! has few rows, up to two panels of A read B in place, a tile's width at a time.
//!
//! Rows are spread evenly over the panels, so that no panel is too flat to hide the latency of its sums; columns at the
//! right edge are masked. Any block of C can be computed alone with the same bits, so threads can share a product by
//! calling this on blocks of C.
//!
//! Packed operands are in a buffer of the calling thread that grows to its largest product and is kept (at most 128 KiB
//! and 768 KiB). A buffer from the caller would have to pass through every kernel that multiplies, and its size depends
//! on the CPU.
//!
//! More than 400 lines: the cutting and packing of operands must match, pointer by pointer, the reads of the tiles.

/// [`Micro::pack`] of `f32` by a copy of at most `LANES` floats, and of at most `$step` terms by a `transpose`; and
/// [`Micro::COPY`] by a load and a store. Both prefetch: a copy the terms that are copied next, a transpose the lanes
/// of the next strip, into the L2 cache, because rows of a distance that is a power of two share sets of the L1 cache.
/// Rows that come from memory are too short for the CPU to prefetch in time.
#[cfg(target_arch = "x86_64")]
macro_rules! packed {
    (
        $feature:literal, $step:expr; ($from:ident, $to:ident, $lanes:ident, $mask:ident) => $copy:expr;
        $load:ident, $store:ident
    ) => {
        /// [`Micro::COPY`].
        ///
        /// # Safety
        /// As there.
        #[target_feature(enable = $feature)]
        unsafe fn copy(places: &[Place], (from, along): (*const f32, usize), k: usize, (to, step): (*mut f32, usize)) {
            for l in 0..k {
                for place in places {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add((l + COPIED_ROWS) * along + place.from).cast());
                    // SAFETY: the vectors of a term of a place and of its word.
                    unsafe { $store(to.add(l * step + place.to), $load(from.add(l * along + place.from))) };
                }
            }
        }

        /// [`Micro::pack`].
        ///
        /// # Safety
        /// As there.
        #[target_feature(enable = $feature)]
        unsafe fn pack(strip: Strip, to: *mut f32, step: usize) {
            let Strip { from, lanes: $lanes, k, apart, along } = strip;
            match from {
                Elements::Full(from) if apart == 1 => {
                    let $mask = first_lanes($lanes);
                    for l in 0..k {
                        // SAFETY: `lanes` floats of the strip, and a vector of its packed form.
                        unsafe {
                            let ($from, $to) = (from.add(l * along), to.add(l * step));
                            $copy;
                        }
                    }
                }
                Elements::Full(from) if along == 1 => {
                    for l in (0..k).step_by($step) {
                        if l % Line::WORDS == 0 {
                            for lane in LANES..2 * LANES {
                                _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(l + lane * apart).cast());
                            }
                        }
                        // SAFETY: a part of the strip, at most `$step` long.
                        unsafe {
                            transpose([$lanes, (k - l).min($step)], (from.add(l), apart), to.add(l * step), step)
                        };
                    }
                }
                // SAFETY: the caller's promise, passed on.
                _ => unsafe { strip.gather::<LANES>(to, step) },
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
#[macro_use]
mod narrow;

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
mod cache;
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;

use super::update::{Strides, Update};
use cache::block_columns;
use half::bf16;
use meshwork_core::simd::wide;
#[cfg(target_arch = "x86_64")]
use meshwork_core::simd::{Level, level};
use meshwork_tensor::Precision;
use meshwork_tensor::kernel::tf32;
use std::cell::RefCell;
use std::marker::PhantomData;
#[cfg(target_arch = "x86_64")]
use {
    avx2::Avx2,
    avx512::{Avx512, Avx512Bf16},
    std::arch::asm,
};

/// Terms summed in registers before they are added to C. Part of the definition of the bits.
pub(super) const K_BLOCK: usize = 256;

/// Most columns of B packed at a time: with [`K_BLOCK`] rows, three quarters of a megabyte. A multiple of every tile's
/// width. [`block_columns`] says how many this CPU packs.
pub(super) const N_BLOCK: usize = 768;

/// Up to this many rows of A, the cost of a product is reading B. A tile's width of B is packed for all terms, so that
/// its rows are read from end to end and the packed part stays in the L1 cache.
pub const FEW_ROWS: usize = 16;

/// Columns of a piece of a packed B: with [`K_BLOCK`] rows, some 10 µs of packing. A multiple of every tile's width.
const PIECE: usize = 192;

/// Number of rows of B copied at a time if they are contiguous: few streams, each long. Rows of B, and terms of a
/// transposed A, are prefetched as many before they are copied.
const COPIED_ROWS: usize = 16;

/// Panels of a transposed A, or strips of a B, that one call packs. Panels of A have up to 112 columns together, so
/// whole cache lines are read in order. These panels and as much prefetched data fit into the L2 cache.
const GROUP: usize = 8;

/// Up to this many columns, packing A costs more than an unfavourable layout.
const A_IN_PLACE: usize = 512;

/// Up to this many rows of A are read in place, whatever cache sets they map to.
const UNPACKED_ROWS: usize = 4;

/// If the distance between rows of A is a multiple of this many floats (4 KiB), A is packed: otherwise all rows of a
/// panel would map to the same sets of the L1 cache.
const ALIASED_ROWS: usize = 1024;

/// If the distance between terms of a transposed A is a multiple of this many floats (two cache lines), A is packed. A
/// panel reads one line of each term. Unpacked, these lines would map to at most half of the sets of the L1 cache, and
/// B takes half of the cache already.
const ALIASED_TERMS: usize = 32;

/// An implementation of the product: the instructions it needs, and the precision. Exists only on x86-64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// `avx512f`: tiles of 14 by 32.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// `avx2` and `fma`: tiles of 6 by 16.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// `avx512bf16`: the tiles of `avx512f`, two terms at a time.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// `avx512f` on rounded operands.
    #[cfg(target_arch = "x86_64")]
    Avx512Rounded,
    /// `avx2` and `fma` on rounded operands.
    #[cfg(target_arch = "x86_64")]
    Avx2Rounded,
    /// `avx512f` on operands rounded to TF32.
    #[cfg(target_arch = "x86_64")]
    Avx512Tf32,
    /// `avx2` and `fma` on operands rounded to TF32.
    #[cfg(target_arch = "x86_64")]
    Avx2Tf32,
}

/// Runs `$body` with `$M` standing for the [`Micro`] of `$path`.
macro_rules! for_micro {
    ($path:expr, $M:ident => $body:expr) => {
        match $path {
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 => {
                type $M = Avx512;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 => {
                type $M = Avx2;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx512Bf16 => {
                type $M = Avx512Bf16;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx512Rounded => {
                type $M = Rounded<Avx512, Bf16>;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx2Rounded => {
                type $M = Rounded<Avx2, Bf16>;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx512Tf32 => {
                type $M = Rounded<Avx512, Tf32>;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Path::Avx2Tf32 => {
                type $M = Rounded<Avx2, Tf32>;
                $body
            }
        }
    };
}

impl Path {
    /// All paths of a precision, the fastest first.
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn all(_: Precision) -> &'static [Path] {
        &[]
    }

    /// All paths of a precision, the fastest first.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn all(precision: Precision) -> &'static [Path] {
        match precision {
            Precision::F32 => &[Path::Avx512, Path::Avx2],
            Precision::Tf32 => &[Path::Avx512Tf32, Path::Avx2Tf32],
            Precision::Bf16 => &[Path::Avx512Bf16, Path::Avx512Rounded, Path::Avx2Rounded],
        }
    }

    /// The fastest path that this CPU runs, if any. This is cheap, because the CPU is detected once.
    pub(super) fn best(precision: Precision) -> Option<Path> {
        Path::all(precision).iter().copied().find(|path| path.runs_here())
    }

    /// Whether this CPU has the instructions, and they may be used.
    pub(super) fn runs_here(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Path::Avx512 | Path::Avx512Rounded | Path::Avx512Tf32 => level() >= Level::Avx512,
            #[cfg(target_arch = "x86_64")]
            Path::Avx2 | Path::Avx2Rounded | Path::Avx2Tf32 => level() >= Level::Avx2,
            #[cfg(target_arch = "x86_64")]
            Path::Avx512Bf16 => level() >= Level::Avx512 && is_x86_feature_detected!("avx512bf16"),
        }
    }

    /// Words of a packed `[k, n]`: a whole number of cache lines.
    pub(super) fn words(self, [k, n]: [usize; 2]) -> usize {
        for_micro!(self, M => M::columns(n) * M::words(k))
    }
}

/// The start of an operand's elements.
#[derive(Clone, Copy, Debug)]
pub(super) enum Elements {
    Full(*const f32),
    /// Stored in `bf16`.
    Rounded(*const bf16),
}

impl Elements {
    /// The elements from index `at` on.
    fn from(self, at: usize) -> Elements {
        match self {
            Elements::Full(start) => Elements::Full(start.wrapping_add(at)),
            Elements::Rounded(start) => Elements::Rounded(start.wrapping_add(at)),
        }
    }

    /// As words for the tiles of `M`, if these can read in place.
    fn in_place<M: Micro>(self) -> Option<*const f32> {
        match self {
            Elements::Full(start) if M::IN_PLACE => Some(start),
            _ => None,
        }
    }

    /// The first byte, and the size of an element.
    fn bytes(self) -> (*const u8, usize) {
        match self {
            Elements::Full(start) => (start.cast(), size_of::<f32>()),
            Elements::Rounded(start) => (start.cast(), size_of::<bf16>()),
        }
    }

    /// The first element.
    ///
    /// # Safety
    /// It is readable.
    unsafe fn first(self) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Elements::Full(start) => *start,
                Elements::Rounded(start) => (*start).to_f32(),
            }
        }
    }
}

/// The right operand of a product.
#[derive(Clone, Copy)]
pub(super) enum Right {
    /// Not packed.
    Strided(Elements, Strides),
    /// Packed whole, as `[k, n]`, by [`pack`] with the product's path: at least as wide and as long as the product
    /// needs, and no longer if the product's k is odd.
    Packed(*const f32, [usize; 2]),
}

/// `C = A · B` or `C += A · B` for `[m, n, k]`, then `finish`. With `k = 0` the product is zero.
///
/// # Safety
/// The CPU runs `path`. Each pointer with its (row, column) strides is
/// valid for the whole matrix, C for writing and with one of its strides 1, except along a dim of 1; elements of C do
/// not overlap each other, A, B or the memory of `finish`. With a packed B or a `finish`, the rows of C are contiguous.
/// A packed B is as described at [`Right`].
pub(super) unsafe fn product<F: Finish<f32>>(
    path: Path,
    [m, n, k]: [usize; 3],
    a: (Elements, Strides),
    b: Right,
    (c, (c_row, c_column)): (*mut f32, Strides),
    update: Update,
    finish: F,
) {
    let a = Matrix::new(a);
    // If C is stored by columns, the transpose is computed; its products are the same, commuted.
    let by_rows = c_column == 1 || n == 1;
    debug_assert!(by_rows || c_row == 1 || m == 1, "C has a contiguous dim");
    let product = match b {
        Right::Strided(start, strides) if by_rows => {
            let b = Operand::Strided(Matrix::new((start, strides)));
            Product { m, n, k, a, b, c, c_row, update, finish }
        }
        Right::Strided(start, strides) => {
            let b = Matrix::new((start, strides)).transposed();
            Product { m: n, n: m, k, a: b, b: Operand::Strided(a.transposed()), c, c_row: c_column, update, finish }
        }
        Right::Packed(start, dims) => {
            debug_assert!(by_rows, "the rows of C are contiguous");
            Product { m, n, k, a, b: Operand::Packed(start, dims), c, c_row, update, finish }
        }
    };
    // SAFETY: the caller's promise; `product` holds the same matrices.
    unsafe { for_micro!(path, M => product.run::<M>()) }
}

/// A part of a packed B: terms l .. l + k of columns j .. j + columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedPart {
    pub(super) l: usize,
    pub(super) k: usize,
    pub(super) j: usize,
    pub(super) columns: usize,
}

/// The pieces of a packed `[k, n]` and their lengths in words, in memory order.
///
/// Blocks of [`block_columns`] contain blocks of `K_BLOCK` terms, which contain panels as wide as a tile.
pub(super) fn pieces(path: Path, [k, n]: [usize; 2]) -> impl Iterator<Item = (PackedPart, usize)> {
    let at_once = block_columns();
    let blocks = move |block: usize| (0..k).step_by(K_BLOCK).map(move |l| (block, l));
    let piece = move |(block, l): (usize, usize)| {
        let end = n.min(block + at_once);
        (block..end).step_by(PIECE).map(move |j| PackedPart {
            l,
            k: K_BLOCK.min(k - l),
            j,
            columns: PIECE.min(end - j),
        })
    };
    let all = (0..n).step_by(at_once).flat_map(blocks).flat_map(piece);
    all.map(move |piece| (piece, path.words([piece.k, piece.columns])))
}

/// Packs a piece of B.
///
/// # Safety
/// The CPU runs `path`; `b` with its strides is valid for the piece, and `to` for
/// writing its words.
pub(super) unsafe fn pack(path: Path, b: (Elements, Strides), piece: PackedPart, to: *mut f32) {
    let PackedPart { l, k, j, columns } = piece;
    // SAFETY: the caller's promise.
    unsafe { for_micro!(path, M => Matrix::new(b).pack::<M>((l, k), (j, columns), to)) }
}

/// The nearest `bf16`, ties to even, as an `f32`: like `vcvtneps2bf16`. Subnormals become zeros of their sign, and a
/// NaN keeps its upper bits and becomes quiet.
#[inline(always)]
pub(super) fn rounded(x: f32) -> f32 {
    let bits = x.to_bits();
    // Without branches, so that the compiler makes few vector instructions of it.
    let half = if x.is_nan() { 0 } else { 0x7fff + (bits >> 16 & 1) };
    let quiet = if x.is_nan() { 0x0040_0000 } else { 0 };
    let normal = if bits & 0x7f80_0000 == 0 { 0x8000_0000 } else { !0 };
    f32::from_bits((bits.wrapping_add(half) & 0xffff_0000 | quiet) & normal)
}

/// [`rounded`], for each element.
pub(super) fn round(from: &[f32], to: &mut [bf16]) {
    #[cfg(target_arch = "x86_64")]
    if Path::Avx512Bf16.runs_here() {
        // SAFETY: the CPU has the instructions.
        return unsafe { avx512::round(from, to) };
    }
    round_plainly(from, to);
}

/// [`round`] without the instruction for it.
fn round_plainly(from: &[f32], to: &mut [bf16]) {
    assert_eq!(from.len(), to.len(), "elements to round against their places");
    wide!(for (to, &x) in to.iter_mut().zip(from) {
        *to = bf16::from_bits((rounded(x).to_bits() >> 16) as u16);
    });
}

/// An operation on the elements of C as soon as they are complete, while they are in the cache.
pub(super) trait Finish<T>: Copy {
    /// Finishes the rectangle of these (first, number of) rows and columns of a C, given with its row stride.
    ///
    /// # Safety
    /// The rectangle lies inside C and inside the memory of `self`, and nobody else uses it.
    unsafe fn rows(self, c: (*mut T, usize), rows: (usize, usize), columns: (usize, usize));
}

/// The operations that depend on the CPU.
///
/// # Safety of the functions
/// The CPU has the instructions of the implementation.
pub(super) trait Micro: Sized {
    /// Words of a vector: lanes of a packed strip. A tile is two vectors wide.
    const LANES: usize;
    /// Rows of the highest tile, at most `LANES`.
    const ROWS: usize;
    /// Terms of a word.
    const TERMS: usize = 1;
    /// Whether tiles can read operands that are not packed.
    const IN_PLACE: bool = true;

    /// Computes one tile.
    ///
    /// # Safety
    /// `1 <= rows <= ROWS` and `1 <= columns <= 2 LANES`; the pointers with their strides are valid for `rows` by
    /// `words`, `words` by `columns`, and (for writing) `rows` by `columns`.
    unsafe fn tile(tile: &Tile);

    /// Computes the tiles of a [`Grid`] that begins with `first`.
    ///
    /// # Safety
    /// As for [`tile`](Self::tile), for each of them.
    unsafe fn tiles(first: &Tile, grid: Grid<'_>) {
        for down in 0..grid.down {
            for right in 0..grid.right {
                let tile = first.at_row(down * first.rows).at_panel(right, 2 * Self::LANES, grid.panel);
                // SAFETY: the caller's promise, passed on.
                unsafe { Self::tile(&Tile { ahead: (grid.ahead)(), ..tile }) };
            }
        }
    }

    /// Rows of the highest [narrow](Self::narrow) tile.
    const NARROW_ROWS: usize = Self::ROWS;

    /// Computes a tile of at most `LANES` columns and `NARROW_ROWS` rows, whose rows of A are contiguous and whose B is
    /// packed.
    ///
    /// # Safety
    /// As for [`tile`](Self::tile), with these extents; each row of B is readable for `LANES` words.
    unsafe fn narrow(tile: &Tile) {
        // SAFETY: the caller's promise, passed on.
        unsafe { Self::tile(tile) }
    }

    /// Writes a vector of `LANES` words for every `TERMS` of the strip's k terms, `step` words apart: vector l is word
    /// l of every lane. Zero beyond the last lane and the last term.
    ///
    /// # Safety
    /// `strip` is readable, `1 <= lanes <= LANES`, and `to` writable for those vectors.
    unsafe fn pack(strip: Strip, to: *mut f32, step: usize);

    /// [`pack`](Self::pack) of whole vectors of `f32`, where it is a copy.
    const COPY: Option<CopyFn> = None;

    /// [`pack`](Self::pack), each element [`rounded`].
    ///
    /// # Safety
    /// As there.
    unsafe fn pack_bf16(strip: Strip, to: *mut f32, step: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { pack_as::<Self, Bf16>(strip, to, step) }
    }

    /// Packs a panel of A whose rows are contiguous. Returns the (row, step) strides of its words.
    ///
    /// # Safety
    /// `strip` is readable and contiguous along its lanes, `1 <= lanes <= LANES`, and `to` writable for a vector of
    /// `LANES` words for every `TERMS` of its terms.
    unsafe fn pack_rows(strip: Strip, to: *mut f32) -> Strides {
        // SAFETY: the caller's promise.
        unsafe { Self::pack(strip, to, Self::LANES) };
        (1, Self::LANES)
    }

    /// Number of words for `k` terms.
    fn words(k: usize) -> usize {
        k.div_ceil(Self::TERMS)
    }

    /// Number of columns of the panels that hold `n` columns.
    fn columns(n: usize) -> usize {
        n.next_multiple_of(2 * Self::LANES)
    }
}

/// What operands are rounded to as they are packed: numbers of `f32` that have fewer bits.
pub(super) trait Format {
    /// The nearest such number.
    fn rounded(x: f32) -> f32;

    /// [`Micro::pack`] of rounded elements.
    ///
    /// # Safety
    /// As there.
    unsafe fn pack<M: Micro>(strip: Strip, to: *mut f32, step: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { pack_as::<M, Self>(strip, to, step) }
    }
}

/// [`rounded`], for CPUs that do not multiply pairs of `bf16`.
pub(super) struct Bf16;

impl Format for Bf16 {
    #[inline(always)]
    fn rounded(x: f32) -> f32 {
        rounded(x)
    }

    unsafe fn pack<M: Micro>(strip: Strip, to: *mut f32, step: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { M::pack_bf16(strip, to, step) }
    }
}

/// [`tf32`].
pub(super) struct Tf32;

impl Format for Tf32 {
    #[inline(always)]
    fn rounded(x: f32) -> f32 {
        tf32(x)
    }
}

/// Operands rounded to a format as they are packed, and multiplied in `f32`.
pub(super) struct Rounded<M, F>(PhantomData<(M, F)>);

impl<M: Micro, F: Format> Micro for Rounded<M, F> {
    const LANES: usize = M::LANES;
    const ROWS: usize = M::ROWS;
    const IN_PLACE: bool = false;

    unsafe fn tile(tile: &Tile) {
        // SAFETY: the caller's promise.
        unsafe { M::tile(tile) }
    }

    unsafe fn tiles(first: &Tile, grid: Grid<'_>) {
        // SAFETY: the caller's promise.
        unsafe { M::tiles(first, grid) }
    }

    unsafe fn pack(strip: Strip, to: *mut f32, step: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { F::pack::<M>(strip, to, step) }
    }

    unsafe fn pack_rows(strip: Strip, to: *mut f32) -> Strides {
        let Strip { from, lanes, k, apart, .. } = strip;
        // Rows stay rows, because a transpose would cost more than the rounding.
        for lane in 0..lanes {
            // SAFETY: the place of this row: `lanes` rows of k words are fewer than k vectors.
            let to = unsafe { std::slice::from_raw_parts_mut(to.add(lane * k), k) };
            // SAFETY: the contiguous elements of a lane, in both kinds.
            unsafe {
                match from.from(lane * apart) {
                    Elements::Full(from) => round_row::<F, _>(std::slice::from_raw_parts(from, k), to, |x| *x),
                    Elements::Rounded(from) => round_row::<F, _>(std::slice::from_raw_parts(from, k), to, |x| {
                        f32::from_bits(u32::from(x.to_bits()) << 16)
                    }),
                }
            }
        }
        (k, 1)
    }
}

/// [`Micro::pack`] of elements that are rounded to a format once they are packed. Elements that were stored rounded
/// need it too, because they may be subnormal.
///
/// # Safety
/// As there.
unsafe fn pack_as<M: Micro, F: Format + ?Sized>(strip: Strip, to: *mut f32, step: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe { M::pack(strip, to, step) };
    wide!(for l in 0..strip.k {
        // SAFETY: vector l of the strip, just packed, and nothing else reads or writes it.
        let vector = unsafe { std::slice::from_raw_parts_mut(to.add(l * step), M::LANES) };
        vector.iter_mut().for_each(|x| *x = F::rounded(*x));
    });
}

/// Writes the elements of a row, widened by `f`, rounded to a format.
fn round_row<F: Format, T>(from: &[T], to: &mut [f32], f: impl Fn(&T) -> f32) {
    wide!(to.iter_mut().zip(from).for_each(|(to, x)| *to = F::rounded(f(x))));
}

/// One tile of C: `rows` by `columns`, the sum of the products of `words` words added to it or replacing it.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) words: usize,
    /// Word (i, l) at `i a_row + l a_step`.
    pub(super) a: *const f32,
    pub(super) a_row: usize,
    pub(super) a_step: usize,
    /// Row l at `l b_step`, its columns contiguous.
    pub(super) b: *const f32,
    pub(super) b_step: usize,
    /// Row i at `i c_row`, its columns contiguous.
    pub(super) c: *mut f32,
    pub(super) c_row: usize,
    /// Whether to add to C instead of replacing it.
    pub(super) add: bool,
    /// Memory that may be prefetched into the L2 cache meanwhile, one line per word: the first line, and the distance
    /// to the next in bytes. It need not be readable.
    pub(super) ahead: (*const u8, usize),
}

impl Tile {
    /// The tile that begins this many rows further down.
    #[inline(always)]
    pub(super) fn at_row(self, row: usize) -> Tile {
        let (a, c) = (self.a.wrapping_add(row * self.a_row), self.c.wrapping_add(row * self.c_row));
        Tile { a, c, ..self }
    }

    /// The tile that begins this many panels of `width` columns, each of `panel` words of B, further to the right.
    #[inline(always)]
    pub(super) fn at_panel(self, at: usize, width: usize, panel: usize) -> Tile {
        let (b, c) = (self.b.wrapping_add(at * panel), self.c.wrapping_add(at * width));
        Tile { b, c, ..self }
    }
}

/// Tiles of the same extents below and beside each other, row by row; if there are several in a row, they are two
/// vectors wide. Their function is found and called once: for short products this takes a part of the time of a tile.
pub(super) struct Grid<'a> {
    pub(super) down: usize,
    pub(super) right: usize,
    /// Words of B from one tile to the next one in its row.
    pub(super) panel: usize,
    /// What each tile prefetches, see [`Tile::ahead`].
    pub(super) ahead: &'a mut dyn FnMut() -> (*const u8, usize),
}

/// Pointers to every fourth row of a tile's A; to the first row in place of rows that the tile lacks.
///
/// The compiler does not see how far they are apart. From a single pointer it computes the address of each row from the
/// row before, and this chain of additions takes as long as the multiplications of a whole tile, and longer than those
/// of a narrow one.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[expect(clippy::pointers_in_nomem_asm_block, reason = "it is no instruction, and reads nothing")]
fn quads<const R: usize>(tile: &Tile) -> [*const f32; 4] {
    let mut quads = [tile.a; 4];
    for (at, quad) in quads.iter_mut().enumerate().skip(1).take(R.div_ceil(4) - 1) {
        let mut row = tile.a.wrapping_add(4 * at * tile.a_row);
        // SAFETY: only a place where the compiler forgets where the pointer came from.
        unsafe { asm!("/* {0} */", inout(reg) row, options(pure, nomem, nostack, preserves_flags)) };
        *quad = row;
    }
    quads
}

/// Rows of A or columns of B, `lanes` of them and `k` long: element l of a lane at `lane · apart + l · along`.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    pub(super) from: Elements,
    pub(super) lanes: usize,
    pub(super) k: usize,
    pub(super) apart: usize,
    pub(super) along: usize,
}

impl Strip {
    /// [`Micro::pack`] in `f32` for any elements and strides, one element at a time.
    ///
    /// # Safety
    /// As there.
    unsafe fn gather<const LANES: usize>(self, to: *mut f32, step: usize) {
        for l in 0..self.k {
            for lane in 0..LANES {
                // SAFETY: elements of the strip and of its packed form, by the caller's promise.
                unsafe {
                    let from = self.from.from(lane * self.apart + l * self.along);
                    *to.add(l * step + lane) = if lane < self.lanes { from.first() } else { 0.0 };
                }
            }
        }
    }
}

/// One of several strips beside each other: where its lanes begin in a term and its words in the packed form of a term.
#[derive(Clone, Copy, Default)]
pub(super) struct Place {
    pub(super) from: usize,
    pub(super) lanes: usize,
    pub(super) to: usize,
}

/// Copies a vector of each place, for each of k terms: `from` and the distance of its terms, `to` and that of its
/// words.
///
/// # Safety
/// The CPU has the instructions of the implementation; whole vectors of all places are readable in all terms, and
/// writable in all words.
type CopyFn = unsafe fn(&[Place], (*const f32, usize), usize, (*mut f32, usize));

/// [`Micro::pack`] for each of some places, those with all lanes first: [`COPIED_ROWS`] terms of all of them at a time.
///
/// # Safety
/// As there, for each place.
unsafe fn pack_beside<M: Micro>(
    places: &[Place],
    (from, (along, apart)): (Elements, Strides),
    k: usize,
    (to, step): (*mut f32, usize),
) {
    let whole = places.iter().take_while(|place| place.lanes == M::LANES).count();
    let rest = match (M::COPY, from) {
        (Some(copy), Elements::Full(from)) if apart == 1 => {
            // SAFETY: the caller's promise; these places have all lanes, which are contiguous.
            unsafe { copy(&places[..whole], (from, along), k, (to, step)) };
            &places[whole..]
        }
        _ => places,
    };
    for first in (0..k).step_by(COPIED_ROWS) {
        for &Place { from: lane, lanes, to: word } in rest {
            let from = from.from(first * along + lane);
            let strip = Strip { from, lanes, k: COPIED_ROWS.min(k - first), apart, along };
            // SAFETY: a part of a place, whose words begin at the first of these terms.
            unsafe { M::pack(strip, to.add(first / M::TERMS * step + word), step) };
        }
    }
}

/// Packs `[k, columns]` of an operand whose element (l, j) is at `l along + j apart`: in consecutive panels of `width`
/// columns, a multiple of `LANES`.
///
/// # Safety
/// The CPU runs M; the elements are readable, and `to` is writable for the words of whole panels.
pub(super) unsafe fn pack_panels<M: Micro>(
    [k, columns]: [usize; 2],
    (from, (along, apart)): (Elements, Strides),
    (to, width): (*mut f32, usize),
) {
    let words = M::words(k);
    let lanes = |strip: usize| M::LANES.min(columns - strip);
    let start = |strip: usize| strip / width * width * words + strip % width;
    if apart != 1 {
        for strip in (0..columns).step_by(M::LANES) {
            let part = Strip { from: from.from(strip * apart), lanes: lanes(strip), k, apart, along };
            // SAFETY: columns and terms of the operand; this panel, its words and lanes are inside the whole panels.
            unsafe { M::pack(part, to.add(start(strip)), width) };
        }
        return;
    }
    for first in (0..k).step_by(COPIED_ROWS) {
        for group in (0..columns).step_by(GROUP * M::LANES) {
            let mut places = [Place::default(); GROUP];
            let strips = (group..columns).step_by(M::LANES).zip(&mut places);
            let count = strips.map(|(at, place)| *place = Place { from: at, lanes: lanes(at), to: start(at) }).count();
            // SAFETY: as above, for some of the terms.
            unsafe {
                let to = to.add(first / M::TERMS * width);
                let from = (from.from(first * along), (along, 1));
                pack_beside::<M>(&places[..count], from, COPIED_ROWS.min(k - first), (to, width));
            }
        }
    }
}

/// An operand.
#[derive(Clone, Copy)]
struct Matrix {
    start: Elements,
    row: usize,
    column: usize,
}

impl Matrix {
    fn new((start, (row, column)): (Elements, Strides)) -> Matrix {
        Matrix { start, row, column }
    }

    fn transposed(self) -> Matrix {
        Matrix { row: self.column, column: self.row, ..self }
    }

    fn at(&self, i: usize, j: usize) -> Elements {
        self.start.from(i * self.row + j * self.column)
    }
}

/// The right operand of a [`Product`].
enum Operand {
    Strided(Matrix),
    /// See [`Right::Packed`].
    Packed(*const f32, [usize; 2]),
}

/// A product with the rows of C contiguous.
struct Product<F> {
    m: usize,
    n: usize,
    k: usize,
    a: Matrix,
    b: Operand,
    c: *mut f32,
    c_row: usize,
    update: Update,
    finish: F,
}

/// A cache line, for the alignment of the packed operands.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Line(#[expect(dead_code, reason = "read and written through pointers")] [f32; Line::WORDS]);

impl Line {
    pub(super) const WORDS: usize = 16;
    pub(super) const ZERO: Line = Line([0.0; Line::WORDS]);
}

thread_local! {
    /// The packed panel of A and the packed block of B.
    static PACKED: RefCell<[Vec<Line>; 2]> = const { RefCell::new([Vec::new(), Vec::new()]) };
}

/// The buffer, grown to at least `words` words.
fn room(buffer: &mut Vec<Line>, words: usize) -> *mut f32 {
    let lines = words.div_ceil(Line::WORDS);
    if buffer.len() < lines {
        buffer.resize(lines, Line::ZERO);
    }
    buffer.as_mut_ptr().cast()
}

impl Matrix {
    /// Packs terms l.. and columns j.. of a right operand: in consecutive panels as wide as a tile.
    ///
    /// # Safety
    /// The CPU runs M; the block lies inside the matrix, has at most `K_BLOCK` terms, and fits in `to`.
    unsafe fn pack<M: Micro>(&self, (l, k): (usize, usize), (j, columns): (usize, usize), to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { pack_panels::<M>([k, columns], (self.at(l, j), (self.row, self.column)), (to, 2 * M::LANES)) };
    }
}

impl<F: Finish<f32>> Product<F> {
    /// Computes the whole product.
    ///
    /// # Safety
    /// As [`product`].
    unsafe fn run<M: Micro>(&self) {
        if self.m == 0 || self.n == 0 {
            return;
        }
        if self.k == 0 {
            for i in 0..self.m {
                if self.update == Update::Overwrite {
                    // SAFETY: row i of C.
                    unsafe { self.c.add(i * self.c_row).write_bytes(0, self.n) };
                }
                // SAFETY: the same row.
                unsafe { self.finish.rows((self.c, self.c_row), (i, 1), (0, self.n)) };
            }
        }
        PACKED.with_borrow_mut(|[packed_a, packed_b]| {
            let at_once = match self.b {
                Operand::Strided(b) if self.m <= FEW_ROWS && b.row == 1 => 2 * M::LANES,
                // Two panels of A share what the first one brings into the cache.
                Operand::Strided(b) if self.m > M::ROWS && self.reads_in_place::<M>(b) => 2 * M::LANES,
                _ => block_columns(),
            };
            for j in (0..self.n).step_by(at_once) {
                let columns = (self.n - j).min(at_once);
                for l in (0..self.k).step_by(K_BLOCK) {
                    let k = (self.k - l).min(K_BLOCK);
                    // SAFETY: a block of columns and terms of a product that the caller guarantees.
                    unsafe {
                        let b = self.block_of_b::<M>((l, k), (j, columns), packed_b);
                        self.columns::<M>((l, k), (j, columns), b, packed_a);
                    }
                }
            }
        });
    }

    /// Whether tiles read a B that is not packed where it lies: it needs no transpose, and is read at most twice.
    fn reads_in_place<M: Micro>(&self, b: Matrix) -> bool {
        b.column == 1 && b.start.in_place::<M>().is_some() && self.m <= FEW_ROWS.min(2 * M::ROWS)
    }

    /// Terms l.. and columns j.. of B for tiles: packed in consecutive panels of k rows, or in place.
    ///
    /// # Safety
    /// As [`product`]; the block lies inside it, and there are at most `K_BLOCK` terms.
    unsafe fn block_of_b<M: Micro>(
        &self,
        (l, k): (usize, usize),
        (j, columns): (usize, usize),
        buffer: &mut Vec<Line>,
    ) -> Panels {
        let step = 2 * M::LANES;
        match self.b {
            Operand::Packed(start, [all_k, all_n]) => {
                let block = M::columns((all_n - j).min(block_columns()));
                let words = M::words((all_k - l).min(K_BLOCK));
                let start = start.wrapping_add(j * M::words(all_k) + block * (l / M::TERMS));
                Panels { start, step, panel: step * words }
            }
            Operand::Strided(b) => {
                if let Some(start) = b.at(l, j).in_place::<M>().filter(|_| self.reads_in_place::<M>(b)) {
                    return Panels { start, step: b.row, panel: step };
                }
                let to = room(buffer, M::columns(columns) * M::words(k));
                // SAFETY: the block lies inside B, and there is room.
                unsafe { b.pack::<M>((l, k), (j, columns), to) };
                Panels { start: to, step, panel: step * M::words(k) }
            }
        }
    }

    /// Terms l.. of columns j.. of C, finished if they are the last.
    ///
    /// # Safety
    /// As [`product`]; the block lies inside it, there are at most `K_BLOCK` terms, and `b` is that block of B.
    unsafe fn columns<M: Micro>(
        &self,
        (l, k): (usize, usize),
        (j, columns): (usize, usize),
        b: Panels,
        buffer: &mut Vec<Line>,
    ) {
        let Matrix { row: apart, column: along, .. } = self.a;
        let (far, aliased) = if along == 1 { (apart, ALIASED_ROWS) } else { (along, ALIASED_TERMS) };
        let lies_well =
            (along == 1 || apart == 1) && (self.m <= UNPACKED_ROWS || self.n <= A_IN_PLACE && far % aliased != 0);
        let in_place = self.a.at(0, l).in_place::<M>().filter(|_| lies_well);
        let group = if along == 1 { 1 } else { GROUP };
        let words = M::words(k);
        let packed = room(buffer, if in_place.is_some() { 0 } else { GROUP * words * M::LANES });
        let add = l > 0 || self.update == Update::Accumulate;
        let width = 2 * M::LANES;
        let is_packed = matches!(self.b, Operand::Packed(..)) || self.m > FEW_ROWS;
        let narrow = in_place.is_some() && along == 1 && columns <= M::LANES && is_packed;
        let height = if narrow { M::NARROW_ROWS } else { M::ROWS };
        let panels = self.m.div_ceil(height);
        for first in (0..panels).step_by(group) {
            let end = panels.min(first + group);
            let (a_row, a_step) = match in_place {
                Some(_) => (apart, along),
                // SAFETY: terms and panels of A, and `packed` has room for the vectors of a group.
                None => unsafe { self.pack_a::<M>((l, k), (first, end), packed) },
            };
            let next = match (end < panels, l + k < self.k) {
                (true, _) => Some(self.a.at(self.panel(end, height).0, l)),
                (false, true) => Some(self.a.at(0, l + k)),
                (false, false) => None,
            };
            let mut tiles = (end - first) * columns.div_ceil(width);
            for panel in first..end {
                let (i, rows) = self.panel(panel, height);
                let a = match in_place {
                    Some(start) => start.wrapping_add(i * apart),
                    None => packed.wrapping_add((panel - first) * words * M::LANES).cast_const(),
                };
                for first in (0..columns).step_by(width) {
                    let columns = (columns - first).min(width);
                    tiles -= 1;
                    let b_start = b.start.wrapping_add(first / width * b.panel);
                    let ahead = match next.and_then(|next| self.ahead::<M>(next, tiles)) {
                        // Few rows read B once or twice: its next columns, far apart if it is read in place.
                        _ if self.m <= FEW_ROWS => (b_start.wrapping_add(b.panel).cast(), b.step * size_of::<f32>()),
                        of_a => of_a.unwrap_or((a.cast(), 0)),
                    };
                    // SAFETY: at most `ROWS` rows, at most `width` columns and k terms, all inside the product.
                    unsafe {
                        let c = self.c.add(i * self.c_row + j + first);
                        let (b, b_step, c_row) = (b_start, b.step, self.c_row);
                        let tile = Tile { rows, columns, words, a, a_row, a_step, b, b_step, c, c_row, add, ahead };
                        if narrow { M::narrow(&tile) } else { M::tile(&tile) }
                    }
                }
                if l + k == self.k {
                    // SAFETY: inside C, and written.
                    unsafe { self.finish.rows((self.c, self.c_row), (i, rows), (j, columns)) };
                }
            }
        }
    }

    /// First row and rows of a panel of A, each of at most `height` rows.
    fn panel(&self, panel: usize, height: usize) -> (usize, usize) {
        let panels = self.m.div_ceil(height);
        let [first, end] = [panel, panel + 1].map(|panel| panel * self.m / panels);
        (first, end - first)
    }

    /// Packs terms l.. of some consecutive panels of A; only one panel if A is row-major. Returns the (row, step)
    /// strides of their words.
    ///
    /// # Safety
    /// The CPU runs M; the terms and panels lie inside A, and their vectors fit in `to`.
    unsafe fn pack_a<M: Micro>(&self, (l, k): (usize, usize), (first, end): (usize, usize), to: *mut f32) -> Strides {
        let Matrix { row: apart, column: along, .. } = self.a;
        if along == 1 {
            let (i, lanes) = self.panel(first, M::ROWS);
            // SAFETY: at most `ROWS`, so at most `LANES`, rows of A.
            return unsafe { M::pack_rows(Strip { from: self.a.at(i, l), lanes, k, apart, along }, to) };
        }
        let mut places = [Place::default(); GROUP];
        let begin = self.panel(first, M::ROWS).0;
        for (place, panel) in places.iter_mut().zip(first..end) {
            let (i, rows) = self.panel(panel, M::ROWS);
            // A whole vector where A has it: no tile reads the words behind the panel's rows.
            let lanes = if i + M::LANES <= self.m { M::LANES } else { rows };
            *place = Place { from: (i - begin) * apart, lanes, to: (panel - first) * M::words(k) * M::LANES };
        }
        // SAFETY: rows of A, at most `LANES` of each panel, and the vectors of its words.
        unsafe { pack_beside::<M>(&places[..end - first], (self.a.at(begin, l), (along, apart)), k, (to, M::LANES)) };
        (1, M::LANES)
    }

    /// The part of the next panels of A, which begin at `next`, that a tile prefetches when `tiles` more tiles come
    /// before those panels: a row of one panel or, for a transposed A, one line of every `TERMS` terms of a group.
    fn ahead<M: Micro>(&self, next: Elements, tiles: usize) -> Option<(*const u8, usize)> {
        let Matrix { row: apart, column: along, .. } = self.a;
        let (_, size) = next.bytes();
        if along == 1 {
            return (tiles < M::ROWS).then(|| (next.from(tiles * apart).bytes().0, M::TERMS * size));
        }
        let (line, term) = (tiles / M::TERMS, tiles % M::TERMS);
        let length = size_of::<Line>() / size;
        let lines = (GROUP * M::ROWS).div_ceil(length) + 1;
        (line < lines).then(|| (next.from(line * length + term * along).bytes().0, M::TERMS * along * size))
    }
}

/// A block of B in panels as wide as a tile: `panel` words from one to the next, `step` from row to row.
#[derive(Clone, Copy)]
struct Panels {
    start: *const f32,
    step: usize,
    panel: usize,
}
