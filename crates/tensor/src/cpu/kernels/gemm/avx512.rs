//! The AVX-512 micro-kernel: tiles of up to 14 by 32, two vectors of 16 a row.
//!
//! 28 accumulators, two vectors of B and one broadcast of A fill 31 of the 32 registers. Functions with a target
//! feature are only inlined into functions that have it too, so nothing here passes through a closure.

use super::{Micro, Tile};
use std::arch::x86_64::*;

/// Floats of a vector.
const LANES: usize = 16;

/// The kernel of CPUs with `avx512f`.
pub(super) struct Avx512;

impl Micro for Avx512 {
    const LANES: usize = LANES;
    const ROWS: usize = 14;

    #[inline(always)]
    unsafe fn tile(tile: &Tile) {
        // SAFETY: the caller's promise, passed on; each height is at most `ROWS`.
        unsafe {
            if tile.columns > LANES { tile_of_width::<2>(tile) } else { tile_of_width::<1>(tile) }
        }
    }

    #[inline(always)]
    unsafe fn pack(source: super::Strip, to: *mut f32, step: usize) {
        // SAFETY: the caller's promise, passed on.
        unsafe { pack(source, to, step) }
    }
}

/// [`tile_of`] for the tile's number of rows.
#[target_feature(enable = "avx512f")]
unsafe fn tile_of_width<const V: usize>(tile: &Tile) {
    macro_rules! by_height {
        ($($rows:literal)*) => {
            match tile.rows {
                // SAFETY: the caller's promise, passed on; the arm's height is the tile's.
                $($rows => unsafe { tile_of::<$rows, V>(tile) },)*
                rows => unreachable!("a tile of {rows} rows"),
            }
        };
    }
    by_height!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
}

/// Multiplies and adds along k, one after the other from zero, then stores or adds the sums.
#[target_feature(enable = "avx512f")]
unsafe fn tile_of<const R: usize, const V: usize>(tile: &Tile) {
    let (last, mut a, mut b) = (mask(tile.columns - (V - 1) * LANES), tile.a, tile.b);
    for i in 0..R {
        for v in 0..V {
            _mm_prefetch::<_MM_HINT_T0>(tile.c.wrapping_add(i * tile.c_row + v * LANES).cast());
        }
    }
    let mut sums = [[_mm512_setzero_ps(); V]; R];
    for _ in 0..tile.k {
        let mut vectors = [_mm512_setzero_ps(); V];
        // SAFETY: the caller keeps row k of B, `columns` wide, readable; the last vector is masked to its width.
        unsafe {
            for v in 0..V - 1 {
                vectors[v] = _mm512_loadu_ps(b.add(v * LANES));
            }
            vectors[V - 1] = _mm512_maskz_loadu_ps(last, b.add((V - 1) * LANES));
        }
        for i in 0..R {
            // SAFETY: the caller keeps column k of A, R high, readable.
            let x = _mm512_set1_ps(unsafe { *a.add(i * tile.a_row) });
            for v in 0..V {
                sums[i][v] = _mm512_fmadd_ps(x, vectors[v], sums[i][v]);
            }
        }
        a = a.wrapping_add(tile.a_step);
        b = b.wrapping_add(tile.b_step);
    }
    for i in 0..R {
        for v in 0..V {
            let mask = if v + 1 == V { last } else { !0 };
            // SAFETY: the caller keeps C, R by `columns`, readable and writable; the mask ends at its width.
            unsafe {
                let at = tile.c.add(i * tile.c_row + v * LANES);
                let mut sum = sums[i][v];
                if tile.add {
                    sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), sum);
                }
                _mm512_mask_storeu_ps(at, mask, sum);
            }
        }
    }
}

/// The first `lanes` lanes, all of them if there are more.
fn mask(lanes: usize) -> __mmask16 {
    if lanes >= LANES { !0 } else { (1 << lanes) - 1 }
}

/// [`Micro::pack`].
#[target_feature(enable = "avx512f")]
unsafe fn pack(source: super::Strip, mut to: *mut f32, step: usize) {
    let super::Strip { mut from, lanes, k, lane, step: along } = source;
    if lane == 1 {
        let mask = mask(lanes);
        for _ in 0..k {
            // SAFETY: `lanes` floats are readable here, and `LANES` writable there, by the caller's promise.
            unsafe { _mm512_storeu_ps(to, _mm512_maskz_loadu_ps(mask, from)) };
            from = from.wrapping_add(along);
            to = to.wrapping_add(step);
        }
    } else if along == 1 {
        for done in (0..k).step_by(LANES) {
            // SAFETY: a part of the caller's strip, at most `LANES` long.
            unsafe { transpose(from.add(done), lanes, lane, (k - done).min(LANES), to.add(done * step), step) };
        }
    } else {
        // SAFETY: the caller's promise, passed on.
        unsafe { source.copy::<LANES>(to, step) };
    }
}

/// Writes `k` vectors, `step` apart: vector l holds element l of each of the `lanes` rows, then zeros.
#[target_feature(enable = "avx512f")]
unsafe fn transpose(from: *const f32, lanes: usize, row: usize, k: usize, to: *mut f32, step: usize) {
    let mask = mask(k);
    let mut x = [_mm512_setzero_ps(); LANES];
    for (i, x) in x.iter_mut().enumerate() {
        if i < lanes {
            // SAFETY: row i has `k` readable floats.
            *x = unsafe { _mm512_maskz_loadu_ps(mask, from.add(i * row)) };
        }
    }
    let mut y = x;
    // Lanes of 32 bits of neighbouring rows, then of 64 bits: y[4q + p] holds column p of each 128-bit part of
    // rows 4q .. 4q + 4.
    for q in 0..4 {
        let r = 4 * q;
        let (low, high) = (_mm512_unpacklo_ps(x[r], x[r + 1]), _mm512_unpackhi_ps(x[r], x[r + 1]));
        let (low2, high2) = (_mm512_unpacklo_ps(x[r + 2], x[r + 3]), _mm512_unpackhi_ps(x[r + 2], x[r + 3]));
        y[r] = pairs::<false>(low, low2);
        y[r + 1] = pairs::<true>(low, low2);
        y[r + 2] = pairs::<false>(high, high2);
        y[r + 3] = pairs::<true>(high, high2);
    }
    // The 128-bit parts: column 4s + p is part s of y[p], y[4 + p], y[8 + p] and y[12 + p].
    for p in 0..4 {
        let (a, b, c, d) = (y[p], y[4 + p], y[8 + p], y[12 + p]);
        let (ab, cd) = (_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0x44>(c, d));
        x[p] = _mm512_shuffle_f32x4::<0x88>(ab, cd);
        x[4 + p] = _mm512_shuffle_f32x4::<0xdd>(ab, cd);
        let (ab, cd) = (_mm512_shuffle_f32x4::<0xee>(a, b), _mm512_shuffle_f32x4::<0xee>(c, d));
        x[8 + p] = _mm512_shuffle_f32x4::<0x88>(ab, cd);
        x[12 + p] = _mm512_shuffle_f32x4::<0xdd>(ab, cd);
    }
    for (l, x) in x.iter().enumerate() {
        if l < k {
            // SAFETY: vector l is writable by the caller's promise.
            unsafe { _mm512_storeu_ps(to.add(l * step), *x) };
        }
    }
}

/// The even (or odd) pairs of floats of `a` and `b`, in turn.
#[target_feature(enable = "avx512f")]
fn pairs<const ODD: bool>(a: __m512, b: __m512) -> __m512 {
    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
    _mm512_castpd_ps(if ODD { _mm512_unpackhi_pd(a, b) } else { _mm512_unpacklo_pd(a, b) })
}
