//! The product's kernels for `avx2` and `fma`: tiles of up to 6 by 16, two vectors of 8 a row.
//!
//! 12 sums, two vectors of B and one element of A in all lanes fill 15 of the 16 registers: no register is left for a
//! mask, so tiles at the right edge, whose last vector is masked, are separate functions.
//!
//! Many CPUs with AVX2 start four instructions a cycle, two of them multiplications. A word needs 20 instructions (two
//! loads of B, 6 elements of A, 12 multiplications), so few others may be added. Constant strides need no instructions,
//! and a loop over pairs of words counts and jumps half as often. A word takes 23.5 instructions if B is packed, and A
//! too or its rows are read in place, and 26.5 otherwise.
//!
//! More than 400 lines: one instruction set, with its packing and the tiles that read the packed words.

use super::{Bf16, COPIED_ROWS, CopyFn, Elements, Grid, Line, Micro, Place, Strip, Tile, pack_as, quads};
use half::bf16;
use std::arch::x86_64::*;

/// Floats of a vector.
const LANES: usize = 8;

/// Words of a row of a packed B.
const PANEL: usize = 2 * LANES;

/// The implementation.
pub(in super::super) struct Avx2;

impl Micro for Avx2 {
    const LANES: usize = LANES;
    const ROWS: usize = 6;

    unsafe fn tile(tile: &Tile) {
        // SAFETY: the caller's promise.
        unsafe { Self::tiles(tile, Grid { down: 1, right: 1, panel: 0, ahead: &mut || tile.ahead }) }
    }

    unsafe fn tiles(first: &Tile, grid: Grid<'_>) {
        // SAFETY: the caller's promise; the strides are the tiles'.
        unsafe {
            match (first.a_row, first.a_step, first.b_step) {
                (1, _, PANEL) => tiles_of_strides::<PackedA>(first, grid),
                (_, 1, PANEL) => tiles_of_strides::<RowsOfA>(first, grid),
                _ => tiles_of_strides::<AnyStrides>(first, grid),
            }
        }
    }

    const NARROW_ROWS: usize = 12;

    unsafe fn narrow(tile: &Tile) {
        // SAFETY: the caller's promise, passed on.
        unsafe { narrow(tile) }
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

    unsafe fn pack_bf16(strip: Strip, to: *mut f32, step: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe {
            if strip.apart == 1 { round_columns(strip, to, step) } else { pack_as::<Self, Bf16>(strip, to, step) }
        }
    }
}

/// The strides of a tile's operands that are known when its function is compiled.
trait Strides {
    const A_ROW: Option<usize> = None;
    const A_STEP: Option<usize> = None;
    const B_STEP: Option<usize> = None;
}

/// Both operands are packed.
struct PackedA;

impl Strides for PackedA {
    const A_ROW: Option<usize> = Some(1);
    const B_STEP: Option<usize> = Some(PANEL);
}

/// Rows of A are read in place; B is packed.
struct RowsOfA;

impl Strides for RowsOfA {
    const A_STEP: Option<usize> = Some(1);
    const B_STEP: Option<usize> = Some(PANEL);
}

/// No stride is known.
struct AnyStrides;

impl Strides for AnyStrides {}

/// [`Micro::tiles`] of operands with these strides.
///
/// # Safety
/// As there, with those strides.
unsafe fn tiles_of_strides<S: Strides>(first: &Tile, grid: Grid<'_>) {
    // SAFETY: the caller's promise; each width is the tiles'.
    unsafe {
        match first.columns {
            16 => tiles_of_width::<2, false, S>(first, grid),
            9.. => tiles_of_width::<2, true, S>(first, grid),
            8 => tiles_of_width::<1, false, S>(first, grid),
            _ => tiles_of_width::<1, true, S>(first, grid),
        }
    }
}

/// [`tiles_of_strides`] for tiles of V vectors, the last of them masked or full.
///
/// # Safety
/// As there, and there are more than V - 1 and at most V vectors of columns; V whole ones, unless `MASKED`.
#[target_feature(enable = "avx2,fma")]
unsafe fn tiles_of_width<const V: usize, const MASKED: bool, S: Strides>(first: &Tile, grid: Grid<'_>) {
    macro_rules! by_height {
        ($($rows:literal)*) => {
            match first.rows {
                // SAFETY: the caller's promise; the height is the tiles'.
                $($rows => unsafe { tiles_of::<$rows, V, MASKED, S>(first, grid) },)*
                rows => unreachable!("a tile of {rows} rows"),
            }
        };
    }
    by_height!(1 2 3 4 5 6);
}

/// [`tiles_of_width`] for tiles of R rows.
///
/// # Safety
/// As there, the tiles having that many.
#[target_feature(enable = "avx2,fma")]
unsafe fn tiles_of<const R: usize, const V: usize, const MASKED: bool, S: Strides>(first: &Tile, grid: Grid<'_>) {
    for down in 0..grid.down {
        for right in 0..grid.right {
            let tile = first.at_row(down * R).at_panel(right, PANEL, grid.panel);
            // SAFETY: the caller's promise.
            unsafe { tile_of::<R, V, MASKED, S>(&Tile { ahead: (grid.ahead)(), ..tile }) };
        }
    }
}

/// A tile of [`tiles_of`].
///
/// # Safety
/// As there.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile_of<const R: usize, const V: usize, const MASKED: bool, S: Strides>(tile: &Tile) {
    let last = first_lanes(tile.columns - (V - 1) * LANES);
    for i in 0..R {
        _mm_prefetch::<_MM_HINT_T0>(tile.c.wrapping_add(i * tile.c_row).cast());
    }
    let (a_row, a_step) = (S::A_ROW.unwrap_or(tile.a_row), S::A_STEP.unwrap_or(tile.a_step));
    let b_step = S::B_STEP.unwrap_or(tile.b_step);
    // Rows that follow each other need one pointer.
    let mut a = if a_row == 1 { [0, 4, 8, 12].map(|i| tile.a.wrapping_add(i)) } else { quads::<R>(tile) };
    let (mut b, mut ahead) = (tile.b, tile.ahead.0);
    let mut sums = [[_mm256_setzero_ps(); V]; R];
    // A macro, because a function might not be inlined, and the sums would be in memory.
    macro_rules! word {
        ($at:literal) => {
            _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add($at * tile.ahead.1).cast());
            let mut row = [_mm256_setzero_ps(); V];
            for (v, vector) in row.iter_mut().enumerate() {
                let from = b.wrapping_add($at * b_step + v * LANES);
                // SAFETY: this row of B, whose last vector is masked unless it is full.
                *vector = unsafe { load(MASKED && v + 1 == V, last, from) };
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: this column of A.
                let x = _mm256_set1_ps(unsafe { *a[i / 4].wrapping_add(i % 4 * a_row + $at * a_step) });
                for (sum, vector) in sums.iter_mut().zip(row) {
                    *sum = _mm256_fmadd_ps(x, vector, *sum);
                }
            }
        };
    }
    for _ in 0..tile.words / 2 {
        word!(0);
        word!(1);
        for quad in &mut a {
            *quad = quad.wrapping_add(2 * a_step);
        }
        b = b.wrapping_add(2 * b_step);
        ahead = ahead.wrapping_add(2 * tile.ahead.1);
    }
    if tile.words % 2 == 1 {
        word!(0);
    }
    for (i, sums) in sums.into_iter().enumerate() {
        for (v, sum) in sums.into_iter().enumerate() {
            let masked = MASKED && v + 1 == V;
            // SAFETY: row i of C, whose last vector is masked unless it is full.
            unsafe {
                let to = tile.c.add(i * tile.c_row + v * LANES);
                let sum = if tile.add { _mm256_add_ps(load(masked, last, to), sum) } else { sum };
                if masked { _mm256_maskstore_ps(to, last, sum) } else { _mm256_storeu_ps(to, sum) }
            }
        }
    }
}

narrow! {
    narrow, narrow_of_height, "avx2,fma", 2 words [1 1], [1 2 3 4 5 6 7 8 9 10 11 12],
    _mm256_setzero_ps, _mm256_set1_ps, _mm256_loadu_ps, _mm256_add_ps, _mm256_fmadd_ps, first_lanes, load_lanes, _mm256_maskstore_ps
}

/// Loads the lanes of the mask.
///
/// # Safety
/// They are readable.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn load_lanes(mask: __m256i, from: *const f32) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_maskload_ps(from, mask) }
}

/// Loads a vector; if `masked`, only the lanes of the mask.
///
/// # Safety
/// Those lanes are readable.
#[target_feature(enable = "avx2,fma")]
unsafe fn load(masked: bool, mask: __m256i, from: *const f32) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { if masked { load_lanes(mask, from) } else { _mm256_loadu_ps(from) } }
}

/// A mask of the first `lanes` lanes, at most all.
#[target_feature(enable = "avx2,fma")]
pub(super) fn first_lanes(lanes: usize) -> __m256i {
    let lanes = _mm256_set1_epi32(lanes.min(LANES) as i32);
    _mm256_cmpgt_epi32(lanes, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

packed! {
    "avx2,fma", 4; (from, to, lanes, mask) => _mm256_storeu_ps(to, load(lanes < LANES, mask, from));
    _mm256_loadu_ps, _mm256_storeu_ps
}

/// [`Micro::pack`] for lanes of at most four contiguous elements, `apart` from each other: two transposes of 4 by 4
/// side by side.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx2,fma")]
unsafe fn transpose([lanes, k]: [usize; 2], (from, apart): (*const f32, usize), to: *mut f32, step: usize) {
    let mut x = [_mm_setzero_ps(); LANES];
    // Whole blocks, without the tests and masks of others, which take longer than the transpose.
    if [lanes, k] == [LANES, 4] {
        for (lane, x) in x.iter_mut().enumerate() {
            // SAFETY: the four floats of this lane.
            *x = unsafe { _mm_loadu_ps(from.add(lane * apart)) };
        }
    } else {
        let mask = _mm256_castsi256_si128(first_lanes(k));
        for (lane, x) in x.iter_mut().enumerate().take(lanes) {
            // SAFETY: the `k` floats of this lane.
            *x = unsafe { _mm_maskload_ps(from.add(lane * apart), mask) };
        }
    }
    // SAFETY: the packed form of these lanes.
    unsafe { store_columns(x, k, to, step) }
}

/// Stores the first `k` columns of a matrix of 8 by 4, `step` words apart.
///
/// # Safety
/// `to` is writable for them.
#[target_feature(enable = "avx2,fma")]
unsafe fn store_columns(x: [__m128; LANES], k: usize, to: *mut f32, step: usize) {
    let mut y = [_mm256_setzero_ps(); 4];
    for (p, y) in y.iter_mut().enumerate() {
        *y = _mm256_set_m128(x[4 + p], x[p]);
    }
    let (low, high) = (_mm256_unpacklo_ps(y[0], y[1]), _mm256_unpackhi_ps(y[0], y[1]));
    let (low2, high2) = (_mm256_unpacklo_ps(y[2], y[3]), _mm256_unpackhi_ps(y[2], y[3]));
    let vectors = [
        _mm256_shuffle_ps::<0x44>(low, low2),
        _mm256_shuffle_ps::<0xee>(low, low2),
        _mm256_shuffle_ps::<0x44>(high, high2),
        _mm256_shuffle_ps::<0xee>(high, high2),
    ];
    for (l, vector) in vectors.iter().enumerate() {
        if l < k {
            // SAFETY: vector l of the packed form.
            unsafe { _mm256_storeu_ps(to.add(l * step), *vector) };
        }
    }
}

/// [`Micro::pack`] of elements stored in `bf16`, which begin at `from`, as `f32`.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx2,fma")]
unsafe fn widen(strip: Strip, from: *const bf16, to: *mut f32, step: usize) {
    let Strip { lanes, k, apart, along, .. } = strip;
    if apart == 1 {
        for l in 0..k {
            // SAFETY: `lanes` elements of the strip, and a vector of its packed form.
            unsafe { _mm256_storeu_ps(to.add(l * step), widened(from.add(l * along), lanes)) };
        }
    } else if along == 1 {
        for l in (0..k).step_by(4) {
            let terms = (k - l).min(4);
            let mut x = [_mm_setzero_ps(); LANES];
            for (lane, x) in x.iter_mut().enumerate() {
                if lane < lanes {
                    // SAFETY: terms of this lane.
                    let wide = _mm_cvtepu16_epi32(unsafe { first_halves(from.add(l + lane * apart), terms) });
                    *x = _mm_castsi128_ps(_mm_slli_epi32::<16>(wide));
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

/// [`Micro::pack_bf16`] for contiguous lanes.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx2,fma")]
unsafe fn round_columns(strip: Strip, to: *mut f32, step: usize) {
    let Strip { from, lanes, k, along, .. } = strip;
    let mask = first_lanes(lanes);
    // SAFETY: `lanes` elements of the strip, and a vector of its packed form.
    unsafe {
        match from {
            Elements::Full(from) => {
                for l in 0..k {
                    _mm256_storeu_ps(to.add(l * step), rounded(load(lanes < LANES, mask, from.add(l * along))));
                }
            }
            Elements::Rounded(from) => {
                for l in 0..k {
                    _mm256_storeu_ps(to.add(l * step), rounded(widened(from.add(l * along), lanes)));
                }
            }
        }
    }
}

/// [`rounded`](super::rounded) of each element.
#[target_feature(enable = "avx2,fma")]
fn rounded(x: __m256) -> __m256 {
    let (bits, all) = (_mm256_castps_si256(x), _mm256_set1_epi32);
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), all(1));
    let half = _mm256_andnot_si256(nan, _mm256_add_epi32(odd, all(0x7fff)));
    let upper = _mm256_and_si256(_mm256_add_epi32(bits, half), all(!0xffff));
    let quiet = _mm256_or_si256(upper, _mm256_and_si256(nan, all(0x0040_0000)));
    let small = _mm256_cmpeq_epi32(_mm256_and_si256(bits, all(0x7f80_0000)), _mm256_setzero_si256());
    // All bits but the sign.
    let hidden = _mm256_srli_epi32::<1>(small);
    _mm256_castsi256_ps(_mm256_andnot_si256(hidden, quiet))
}

/// `len` elements of 16 bits as `f32`, at least one and at most 8, then zeros.
///
/// # Safety
/// They are readable.
#[target_feature(enable = "avx2,fma")]
unsafe fn widened(from: *const bf16, len: usize) -> __m256 {
    // SAFETY: the caller's promise.
    let wide = _mm256_cvtepu16_epi32(unsafe { first_halves(from, len) });
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
}

/// `len` elements of 16 bits, at least one and at most 8, then zeros.
///
/// # Safety
/// They are readable.
#[target_feature(enable = "avx2,fma")]
unsafe fn first_halves(from: *const bf16, len: usize) -> __m128i {
    // SAFETY: loads of 8, of 4, and of single elements, which end with the last one.
    unsafe {
        match len {
            LANES.. => _mm_loadu_si128(from.cast()),
            4.. => {
                // The last four, without those that are among the first four.
                let last = _mm_loadl_epi64(from.add(len - 4).cast());
                let rest = _mm_srl_epi64(last, _mm_cvtsi64_si128(16 * (LANES - len) as i64));
                _mm_unpacklo_epi64(_mm_loadl_epi64(from.cast()), rest)
            }
            _ => {
                let word = (0..len).fold(0, |word, at| word | i64::from((*from.add(at)).to_bits()) << (16 * at));
                _mm_cvtsi64_si128(word)
            }
        }
    }
}
