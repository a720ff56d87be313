//! The product's kernels for `avx512f`: tiles of up to 14 by 32, two vectors of 16 a row.
//!
//! For `avx512bf16`, the same with two terms of `bf16` in a word, the first in the upper half.
//!
//! 28 sums, two vectors of B and one element of A in all lanes fill 31 of the 32 registers. A function is only inlined
//! into one with the same target features. Closures do not have these features, so none are used here.
//!
//! More than 400 lines: one instruction set, with its packing and the tiles that read the packed words.

use super::avx2::{first_lanes as half_lanes, load_lanes};
use super::{COPIED_ROWS, CopyFn, Elements, Line, Micro, Place, Strides, Strip, Tile, quads};
use half::bf16;
use std::arch::x86_64::*;

/// Floats of a vector.
const LANES: usize = 16;

/// Below this number of words, a prefetch of C does not help.
const PREFETCH: usize = 128;

/// The implementation for `f32`.
pub(in super::super) struct Avx512;

impl Micro for Avx512 {
    const LANES: usize = LANES;
    const ROWS: usize = 14;

    unsafe fn tile(tile: &Tile) {
        // SAFETY: the caller's promise; each width is the tile's.
        unsafe { if tile.columns > LANES { tile_of_width::<2>(tile) } else { tile_of_width::<1>(tile) } }
    }

    const NARROW_ROWS: usize = 14;

    unsafe fn narrow(tile: &Tile) {
        // SAFETY: the caller's promise, passed on; each width is the tile's.
        unsafe { if tile.columns > LANES / 2 { narrow(tile) } else { narrow_half(tile) } }
    }

    const COPY: Option<CopyFn> = Some(copy);

    unsafe fn pack(strip: Strip, to: *mut f32, step: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            match strip.from {
                Elements::Full(_) => pack(strip, to, step),
                Elements::Rounded(from) => widen(strip, from, to, step),
            }
        }
    }
}

/// The implementation for `bf16`.
pub(in super::super) struct Avx512Bf16;

impl Micro for Avx512Bf16 {
    const LANES: usize = LANES;
    const ROWS: usize = 14;
    const TERMS: usize = 2;
    const IN_PLACE: bool = false;

    unsafe fn tile(tile: &Tile) {
        // SAFETY: the caller's promise; each width is the tile's.
        unsafe { if tile.columns > LANES { bf16_tile_of_width::<2>(tile) } else { bf16_tile_of_width::<1>(tile) } }
    }

    unsafe fn pack(strip: Strip, to: *mut f32, step: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { pack_bf16(strip, to, step) }
    }

    unsafe fn pack_rows(strip: Strip, to: *mut f32) -> Strides {
        // SAFETY: the caller's promise, passed on.
        unsafe { pack_rows_bf16(strip, to) }
    }
}

/// Calls a function with the number of rows as its first constant.
macro_rules! by_height {
    ($rows:expr, $of:ident::<$V:ident>($tile:expr)) => {
        by_height!($rows, $of, $V, $tile, 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    };
    ($rows:expr, $of:ident, $V:ident, $tile:expr, $($height:literal)*) => {
        match $rows {
            $($height => $of::<$height, $V>($tile),)*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}

/// The tiles for one instruction: the sums of the words of A, each in all lanes, times the words of B.
macro_rules! tiles {
    ($of_width:ident, $of:ident, $feature:literal, $step:ident) => {
        /// [`Micro::tile`] for tiles of V vectors.
        ///
        /// # Safety
        /// As there, and there are more than V - 1 and at most V vectors of columns.
        #[target_feature(enable = $feature)]
        unsafe fn $of_width<const V: usize>(tile: &Tile) {
            // SAFETY: the caller's promise; the height is the tile's.
            unsafe { by_height!(tile.rows, $of::<V>(tile)) }
        }

        /// [`Micro::tile`] for tiles of R rows and V vectors.
        ///
        /// # Safety
        /// As there, the tile being that large.
        #[target_feature(enable = $feature)]
        unsafe fn $of<const R: usize, const V: usize>(tile: &Tile) {
            let last = first_lanes(tile.columns - (V - 1) * LANES);
            if tile.words >= PREFETCH {
                for i in 0..R {
                    for v in 0..V {
                        _mm_prefetch::<_MM_HINT_T0>(tile.c.wrapping_add(i * tile.c_row + v * LANES).cast());
                    }
                }
            }
            let (mut a, mut b, mut ahead) = (quads::<R>(tile), tile.b, tile.ahead.0);
            let mut sums = [[_mm512_setzero_ps(); V]; R];
            for _ in 0..tile.words {
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                let mut row = [_mm512_setzero_ps(); V];
                for (v, vector) in row.iter_mut().enumerate() {
                    // SAFETY: this row of B, masked to its last column.
                    *vector = unsafe { _mm512_maskz_loadu_ps(if v + 1 == V { last } else { !0 }, b.add(v * LANES)) };
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: this column of A.
                    let x = _mm512_set1_ps(unsafe { *a[i / 4].wrapping_add(i % 4 * tile.a_row) });
                    for (sum, vector) in sums.iter_mut().zip(row) {
                        *sum = $step(x, vector, *sum);
                    }
                }
                for quad in &mut a {
                    *quad = quad.wrapping_add(tile.a_step);
                }
                b = b.wrapping_add(tile.b_step);
                ahead = ahead.wrapping_add(tile.ahead.1);
            }
            for (i, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    let mask = if v + 1 == V { last } else { !0 };
                    // SAFETY: row i of C, masked to its last column.
                    unsafe {
                        let to = tile.c.add(i * tile.c_row + v * LANES);
                        let sum = if tile.add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), sum) } else { sum };
                        _mm512_mask_storeu_ps(to, mask, sum);
                    }
                }
            }
        }
    };
}
tiles!(tile_of_width, tile_of, "avx512f", _mm512_fmadd_ps);
tiles!(bf16_tile_of_width, bf16_tile_of, "avx512f,avx512bw,avx512bf16", add_pairs);

narrow! {
    narrow, narrow_of_height, "avx512f", 4 words [4], [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    _mm512_setzero_ps, _mm512_set1_ps, _mm512_loadu_ps, _mm512_add_ps, _mm512_fmadd_ps, first_lanes, _mm512_maskz_loadu_ps,
    _mm512_mask_storeu_ps
}
// Vectors of 256 bits, for up to eight columns.
narrow! {
    narrow_half, narrow_half_of_height, "avx512f,avx512vl,avx2,fma", 4 words [4], [1 2 3 4 5 6 7 8 9 10 11 12 13 14],
    _mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_add_ps, _mm256_fmadd_ps, half_lanes, load_lanes, _mm256_maskstore_ps
}

/// Adds the products of both pairs of terms to the sums, the pair in the upper halves first.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn add_pairs(x: __m512, y: __m512, sum: __m512) -> __m512 {
    _mm512_dpbf16_ps(sum, halves(x), halves(y))
}

/// Words as pairs.
fn halves(x: __m512) -> __m512bh {
    // SAFETY: both are 64 bytes of which all values are valid.
    unsafe { std::mem::transmute(x) }
}

/// Pairs as words.
fn words(x: __m512bh) -> __m512 {
    // SAFETY: both are 64 bytes of which all values are valid.
    unsafe { std::mem::transmute(x) }
}

/// A mask of the first `lanes` lanes, at most all.
fn first_lanes(lanes: usize) -> __mmask16 {
    if lanes >= LANES { !0 } else { (1 << lanes) - 1 }
}

packed! {
    "avx512f", LANES; (from, to, lanes, mask) => _mm512_storeu_ps(to, _mm512_maskz_loadu_ps(mask, from));
    _mm512_loadu_ps, _mm512_storeu_ps
}

/// [`Micro::pack`] for lanes of at most `LANES` contiguous elements, `apart` from each other: a transpose of 16 by 16
/// in registers.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f")]
unsafe fn transpose([lanes, k]: [usize; 2], (from, apart): (*const f32, usize), to: *mut f32, step: usize) {
    let mask = first_lanes(k);
    let mut x = [_mm512_setzero_ps(); LANES];
    for (lane, x) in x.iter_mut().enumerate() {
        if lane < lanes {
            // SAFETY: the `k` floats of this lane.
            *x = unsafe { _mm512_maskz_loadu_ps(mask, from.add(lane * apart)) };
        }
    }
    // SAFETY: the packed form of these lanes.
    unsafe { store_columns(x, k, to, step) }
}

/// Stores the first `k` columns of a matrix of 16 by 16, `step` words apart.
///
/// # Safety
/// `to` is writable for them.
#[target_feature(enable = "avx512f")]
unsafe fn store_columns(x: [__m512; LANES], k: usize, to: *mut f32, step: usize) {
    for (l, x) in transposed(x).iter().enumerate() {
        if l < k {
            // SAFETY: vector l of the packed form.
            unsafe { _mm512_storeu_ps(to.add(l * step), *x) };
        }
    }
}

/// [`Micro::pack`] of elements stored in `bf16`, which begin at `from`, as `f32`.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f")]
unsafe fn widen(strip: Strip, from: *const bf16, to: *mut f32, step: usize) {
    let Strip { lanes, k, apart, along, .. } = strip;
    if apart == 1 {
        for l in 0..k {
            // SAFETY: `lanes` elements of the strip, and a vector of its packed form.
            unsafe { _mm512_storeu_ps(to.add(l * step), widened(from.add(l * along), lanes)) };
        }
    } else if along == 1 {
        for l in (0..k).step_by(LANES) {
            let terms = (k - l).min(LANES);
            let mut x = [_mm512_setzero_ps(); LANES];
            for (lane, x) in x.iter_mut().enumerate() {
                if lane < lanes {
                    // SAFETY: terms of this lane.
                    *x = unsafe { widened(from.add(l + lane * apart), terms) };
                }
            }
            // SAFETY: the packed form of these terms.
            unsafe { store_columns(x, terms, to.add(l * step), step) };
        }
    } else {
        // SAFETY: the caller's promise, passed on.
        unsafe { strip.gather::<LANES>(to, step) }
    }
}

/// `len` elements of 16 bits as `f32`, at least one and at most 16, then zeros.
///
/// # Safety
/// They are readable.
#[target_feature(enable = "avx512f")]
unsafe fn widened(from: *const bf16, len: usize) -> __m512 {
    // SAFETY: the caller's promise. Beside vectors of bytes and halves (`avx512bw`), only whole vectors of halves load
    // without a copy.
    let halves = unsafe {
        if len >= LANES {
            _mm256_loadu_si256(from.cast())
        } else {
            let mut some = [bf16::ZERO; LANES];
            std::ptr::copy_nonoverlapping(from, some.as_mut_ptr(), len);
            _mm256_loadu_si256(some.as_ptr().cast())
        }
    };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

/// Transposes rows to columns.
#[target_feature(enable = "avx512f")]
fn transposed(mut x: [__m512; LANES]) -> [__m512; LANES] {
    let mut y = x;
    // In the 128-bit parts: y[4q + p] holds, in part s, element 4s + p of lanes 4q .. 4q + 4.
    for q in 0..4 {
        let [x0, x1, x2, x3] = [x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3]];
        let (low, high) = (_mm512_unpacklo_ps(x0, x1), _mm512_unpackhi_ps(x0, x1));
        let (low2, high2) = (_mm512_unpacklo_ps(x2, x3), _mm512_unpackhi_ps(x2, x3));
        y[4 * q] = even_pairs(low, low2);
        y[4 * q + 1] = odd_pairs(low, low2);
        y[4 * q + 2] = even_pairs(high, high2);
        y[4 * q + 3] = odd_pairs(high, high2);
    }
    // The parts: element 4s + p of all lanes is part s of y[p], y[4 + p], y[8 + p] and y[12 + p].
    for p in 0..4 {
        let [a, b, c, d] = [y[p], y[4 + p], y[8 + p], y[12 + p]];
        let (low, low2) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0x44>(c, d));
        let (high, high2) = (_mm512_shuffle_f32x4::<0xee>(a, b), _mm512_shuffle_f32x4::<0xee>(c, d));
        x[p] = _mm512_shuffle_f32x4::<0x88>(low, low2);
        x[4 + p] = _mm512_shuffle_f32x4::<0xdd>(low, low2);
        x[8 + p] = _mm512_shuffle_f32x4::<0x88>(high, high2);
        x[12 + p] = _mm512_shuffle_f32x4::<0xdd>(high, high2);
    }
    x
}

/// Floats 0 and 1 of every four of `a`, then of `b`.
#[target_feature(enable = "avx512f")]
fn even_pairs(a: __m512, b: __m512) -> __m512 {
    _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
}

/// Floats 2 and 3 of every four of `a`, then of `b`.
#[target_feature(enable = "avx512f")]
fn odd_pairs(a: __m512, b: __m512) -> __m512 {
    _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
}

/// [`Micro::pack`] to `bf16`.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack_bf16(strip: Strip, to: *mut f32, step: usize) {
    let Strip { from, lanes, k, apart, along } = strip;
    if apart == 1 {
        for l in (0..k).step_by(2) {
            let second = if l + 1 < k { lanes } else { 0 };
            // SAFETY: `lanes` terms of the strip, twice if there is a second row, and a vector of its packed form.
            unsafe {
                let pairs = interleaved(from.from(l * along), along, [lanes, second]);
                _mm512_storeu_ps(to.add(l / 2 * step), pairs);
            }
        }
    } else if along == 1 {
        for l in (0..k).step_by(2 * LANES) {
            let k = (k - l).min(2 * LANES);
            // SAFETY: a part of the strip, at most `2 LANES` long.
            unsafe { transpose_bf16(Strip { from: from.from(l), k, ..strip }, to.add(l / 2 * step), step) };
        }
    } else {
        for l in (0..k).step_by(2) {
            let mut pair = [0.0_f32; 2 * LANES];
            // SAFETY: one or two terms of the strip, as dense rows and then as a separate strip.
            unsafe {
                let two = Strip { from: from.from(l * along), k: (k - l).min(2), ..strip };
                two.gather::<LANES>(pair.as_mut_ptr(), LANES);
                let from = Elements::Full(pair.as_ptr());
                pack_bf16(Strip { from, lanes: LANES, k: 2, apart: 1, along: LANES }, to.add(l / 2 * step), step);
            }
        }
    }
}

/// [`Micro::pack`] to `bf16` for at most `2 LANES` elements, contiguous along each lane.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn transpose_bf16(strip: Strip, to: *mut f32, step: usize) {
    let mut x = [_mm512_setzero_ps(); LANES];
    for (lane, x) in x.iter_mut().enumerate() {
        if lane < strip.lanes {
            // SAFETY: the `k` terms of this lane.
            *x = unsafe { pairs(strip.from.from(lane * strip.apart), strip.k) };
        }
    }
    for (l, x) in transposed(x).iter().enumerate() {
        if 2 * l < strip.k {
            // SAFETY: vector l of the packed form.
            unsafe { _mm512_storeu_ps(to.add(l * step), *x) };
        }
    }
}

/// [`Micro::pack_rows`] to `bf16`: rows stay rows. Whole vectors use no masks, because computing masks takes as long as
/// everything else (4% of a product of 128 columns).
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pack_rows_bf16(strip: Strip, to: *mut f32) -> Strides {
    let (words, whole) = (strip.k.div_ceil(2), strip.k / (2 * LANES));
    for lane in 0..strip.lanes {
        let (from, to) = (strip.from.from(lane * strip.apart), to.wrapping_add(lane * words));
        for vector in 0..whole {
            // SAFETY: as many terms of this lane, and their words.
            unsafe { _mm512_storeu_ps(to.add(vector * LANES), pairs(from.from(vector * 2 * LANES), 2 * LANES)) };
        }
        let first = whole * LANES;
        // SAFETY: the last terms of this lane and their words.
        unsafe {
            let pairs = pairs(from.from(2 * first), strip.k - 2 * first);
            _mm512_mask_storeu_ps(to.wrapping_add(first), first_lanes(words - first), pairs);
        }
    }
    (words, 1)
}

/// A vector of pairs of `terms` consecutive terms; zero beyond them.
///
/// # Safety
/// They are readable.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn pairs(from: Elements, terms: usize) -> __m512 {
    let pairs = match from {
        Elements::Full(from) => {
            let (low, high) = (first_lanes(terms), first_lanes(terms.saturating_sub(LANES)));
            // SAFETY: masked to the terms.
            let (low, high) =
                unsafe { (_mm512_maskz_loadu_ps(low, from), _mm512_maskz_loadu_ps(high, from.wrapping_add(LANES))) };
            _mm512_castps_si512(words(_mm512_cvtne2ps_pbh(high, low)))
        }
        // SAFETY: masked to the terms.
        Elements::Rounded(from) => unsafe { _mm512_maskz_loadu_epi16(first_halves(terms), from.cast()) },
    };
    _mm512_castsi512_ps(_mm512_rol_epi32::<16>(pairs))
}

/// A vector of pairs of terms from two rows at this distance, at most one vector from each; zero beyond the terms.
///
/// # Safety
/// They are readable.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn interleaved(from: Elements, along: usize, [first, second]: [usize; 2]) -> __m512 {
    // SAFETY: each row masked to its terms.
    let rows = unsafe {
        match from {
            Elements::Full(from) => {
                let low = _mm512_maskz_loadu_ps(first_lanes(first), from);
                let high = _mm512_maskz_loadu_ps(first_lanes(second), from.wrapping_add(along));
                _mm512_castps_si512(words(_mm512_cvtne2ps_pbh(high, low)))
            }
            Elements::Rounded(from) => {
                let low = _mm512_maskz_loadu_epi16(first_halves(first), from.cast());
                let high = _mm512_maskz_loadu_epi16(first_halves(second), from.wrapping_add(along).cast());
                _mm512_inserti64x4::<1>(low, _mm512_castsi512_si256(high))
            }
        }
    };
    // Half 2i of the result is half 16 + i of both rows, half 2i + 1 is half i.
    let lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    let order = _mm512_or_si512(_mm512_slli_epi32::<16>(lane), _mm512_add_epi32(lane, _mm512_set1_epi32(16)));
    _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, rows))
}

/// A mask of the first `halves` halves, at most all.
fn first_halves(halves: usize) -> __mmask32 {
    if halves >= 2 * LANES { !0 } else { (1 << halves) - 1 }
}

/// Rounds each to the nearest `bf16`, as [`rounded`](super::rounded).
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
pub(in super::super) fn round(from: &[f32], to: &mut [bf16]) {
    assert_eq!(from.len(), to.len(), "elements to round against their places");
    let ((from, from_rest), (to, to_rest)) = (from.as_chunks::<{ 2 * LANES }>(), to.as_chunks_mut::<{ 2 * LANES }>());
    for (from, to) in from.iter().zip(to) {
        // SAFETY: both have the elements of two vectors.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), halves_of(from.as_ptr(), [!0; 2])) };
    }
    let masks = [first_lanes(from_rest.len()), first_lanes(from_rest.len().saturating_sub(LANES))];
    // SAFETY: masked to the elements that are left.
    unsafe {
        let halves = halves_of(from_rest.as_ptr(), masks);
        _mm512_mask_storeu_epi16(to_rest.as_mut_ptr().cast(), first_halves(to_rest.len()), halves);
    }
}

/// Rounds two masked vectors of floats.
///
/// # Safety
/// The floats of the masks are readable.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
unsafe fn halves_of(from: *const f32, masks: [__mmask16; 2]) -> __m512i {
    // SAFETY: the caller's promise.
    let (low, high) =
        unsafe { (_mm512_maskz_loadu_ps(masks[0], from), _mm512_maskz_loadu_ps(masks[1], from.wrapping_add(LANES))) };
    _mm512_castps_si512(words(_mm512_cvtne2ps_pbh(high, low)))
}
