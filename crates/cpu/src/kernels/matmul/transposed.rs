//! Products of some rows with a large factor stored transposed, as the logits of a few tokens: `Cᵀ = Bᵀ · Aᵀ`.
//!
//! Packing B would transpose all of it, and multiply each element a few times. In the transposed product it is the left
//! factor, whose rows tiles read as they lie, and A alone is packed. Parts of C are transposed instead, in the cache.
//! The products are the same, commuted, and so are the bits.

use super::{BLOCK, Epilogue, Factors, MEMORY, Packed, SHARED, Update, assert_inside, pack, serial};
use crate::kernels::Float;
use crate::kernels::round::with_room;
use meshwork_core::{pool, simd::wide};

/// Most rows of C: a block of the packed A, as long as a block of terms, takes half of the L2 cache.
const ROWS: usize = 512;

/// Elements of a part of C, which stays in the L2 cache.
const PART: usize = 1 << 15;

/// Columns of a part are a multiple of this: of whole cache lines, and of the rows of whole tiles.
const COLUMNS: usize = 96;

/// Rows and columns of C that are transposed at once.
const SIDE: usize = 8;

/// Whether the product is such: C has fewer elements to transpose than B.
pub(super) fn pays<T: Float>(factors: Factors<'_, T>, update: Update, epilogue: &Epilogue<'_, T>) -> bool {
    let ([m, n, k], (row, column)) = (factors.dims, factors.b.strides());
    let overwrites = update == Update::Overwrite && matches!(epilogue, Epilogue::Nothing);
    let large = n >= 4 * m && k >= m && m.saturating_mul(n).saturating_mul(k) >= SHARED;
    T::path(factors.precision).is_some() && row == 1 && column != 1 && overwrites && (1..=ROWS).contains(&m) && large
}

/// [`gemm_shared`](super::gemm_shared) of such factors.
pub(super) fn product<T: Float>(factors: Factors<'_, T>, c: &mut [T]) {
    factors.check();
    let Factors { precision, dims: [m, n, k], a, b } = factors;
    assert_inside("C", m, n, (n, 1), c.len());
    let (left, right) = (b.transposed(), a.transposed());
    let mut packed = Packed { dims: [k, m], memory: MEMORY.take() };
    let packed_for = T::path(precision).map(|path| {
        pool::for_each(packed.parts(path), |part| pack(path, right, part));
        &packed
    });
    let columns = (PART / m).min(BLOCK / (m * k)).next_multiple_of(COLUMNS).max(COLUMNS);
    let mut rows: Vec<_> = c[..m * n].chunks_mut(n).map(|row| row.chunks_mut(columns)).collect();
    let parts = (0..n).step_by(columns).map(|first| (first, rows.iter_mut().filter_map(Iterator::next).collect()));
    pool::for_each(parts, |(first, mut rows): (usize, Vec<&mut [T]>)| {
        let columns = rows[0].len();
        with_room(m * columns, |part: &mut [T]| {
            let factors = Factors { precision, dims: [columns, m, k], a: left.from(first, 0), b: right };
            serial(factors, packed_for, (part, (m, 1)), Update::Overwrite, Epilogue::Nothing);
            transpose(part, &mut rows);
        });
    });
    MEMORY.set(packed.memory);
}

/// Writes the transpose of a matrix that has a column for each of these rows.
fn transpose<T: Float>(from: &[T], to: &mut [&mut [T]]) {
    let width = to.len();
    wide!(for (block, to) in to.chunks_mut(SIDE).enumerate() {
        for (at, from) in from.chunks(SIDE * width).enumerate() {
            let (i, j) = (block * SIDE, at * SIDE);
            if to.len() < SIDE || from.len() < SIDE * width {
                for (row, to) in to.iter_mut().enumerate() {
                    to[j..].iter_mut().zip(from[i + row..].iter().step_by(width)).for_each(|(to, from)| *to = *from);
                }
                continue;
            }
            let mut square = [[T::ZERO; SIDE]; SIDE];
            for (line, from) in square.iter_mut().zip(from.chunks_exact(width)) {
                line.copy_from_slice(&from[i..i + SIDE]);
            }
            for (row, to) in to.iter_mut().enumerate() {
                let to = &mut to[j..j + SIDE];
                for (to, line) in to.iter_mut().zip(&square) {
                    *to = line[row];
                }
            }
        }
    });
}
