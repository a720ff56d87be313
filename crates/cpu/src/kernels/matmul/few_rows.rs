//! Products of few rows, as in decoding: B is read once, and reading it is their main cost.
//!
//! Packing B for all threads would write and read it once more. So threads share the columns of C instead of its rows,
//! and each packs a tile's width of B that stays in its L1 cache until it is multiplied (see [`gemm::FEW_ROWS`]). The
//! order of sums, and hence the bits, are as in every other product.

use super::{Epilogue, Factors, Update, assert_inside, serial};
use crate::kernels::Float;
use crate::kernels::gemm;
use meshwork_core::pool;

/// Elements of B in the columns that a thread takes at a time, some 20 µs of reading; smaller products are not shared.
const PART: usize = 1 << 16;

/// Columns at a time: whole tiles on every path.
const TILES: usize = 64;

/// Whether a product of `m` rows is computed here.
pub(super) fn few(m: usize) -> bool {
    (1..=gemm::FEW_ROWS).contains(&m)
}

/// [`gemm_shared`](super::gemm_shared) for few rows of C.
pub(super) fn product<T: Float>(factors: Factors<'_, T>, c: &mut [T], update: Update, epilogue: Epilogue<'_, T>) {
    factors.check();
    let [m, n, k] = factors.dims;
    assert_inside("C", m, n, (n, 1), c.len());
    by_columns([m, n, k], c, update, |first, columns, c| {
        let part = Factors { dims: [m, columns, k], b: factors.b.from(0, first), ..factors };
        serial(part, None, (c, (columns, 1)), update, Epilogue::Nothing);
    });
    // Adds no terms, only applies the epilogue.
    let none = Factors { dims: [m, n, 0], ..factors };
    serial(none, None, (c, (n, 1)), Update::Accumulate, epilogue);
}

/// Whether a product has few columns, and its left factor is stored by columns, as in the gradient of a matrix of few
/// columns: reading that factor is the main cost, and its rows lie apart.
pub(super) fn are_columns<T: Float>(factors: Factors<'_, T>) -> bool {
    let ([m, n, _], (row, column)) = (factors.dims, factors.a.strides());
    (1..=gemm::FEW_ROWS).contains(&n) && m > gemm::FEW_ROWS && row == 1 && column != 1
}

/// [`gemm_shared`](super::gemm_shared) of such factors: `Cᵀ = Bᵀ · Aᵀ`, whose right factor is read in the order in
/// which it is stored. The products are the same, commuted.
pub(super) fn transposed<T: Float>(factors: Factors<'_, T>, c: &mut [T], update: Update) {
    let [m, n, k] = factors.dims;
    assert_inside("C", m, n, (n, 1), c.len());
    let mut turned = vec![T::ZERO; m * n];
    if update == Update::Accumulate {
        turn([m, n], &c[..m * n], &mut turned);
    }
    let [a, b] = [factors.b, factors.a].map(|factor| factor.transposed());
    product(Factors { dims: [n, m, k], a, b, ..factors }, &mut turned, update, Epilogue::Nothing);
    turn([n, m], &turned, &mut c[..m * n]);
}

/// Writes the transpose of a matrix.
fn turn<T: Float>([rows, columns]: [usize; 2], from: &[T], to: &mut [T]) {
    for (i, row) in from.chunks_exact(columns).enumerate() {
        row.iter().zip(to[i..].iter_mut().step_by(rows)).for_each(|(from, to)| *to = *from);
    }
}

/// Lets the free threads compute a row-major C, some columns at a time: `part` gets the first column, the number of
/// columns, and their rows without gaps, which contain the old values of C if `update` adds to it.
pub(super) fn by_columns<T: Float>(
    [m, n, k]: [usize; 3],
    c: &mut [T],
    update: Update,
    part: impl Fn(usize, usize, &mut [T]) + Sync,
) {
    let c = &mut c[..m * n];
    let columns = (PART / k.max(1)).next_multiple_of(TILES).max(TILES);
    if pool::threads() == 1 || columns >= n {
        return part(0, n, c);
    }
    let mut rows: Vec<_> = c.chunks_mut(n).map(|row| row.chunks_mut(columns)).collect();
    let parts = (0..n).step_by(columns).map(|first| (first, rows.iter_mut().filter_map(Iterator::next).collect()));
    pool::for_each(parts, |(first, mut rows): (usize, Vec<&mut [T]>)| {
        if let [row] = &mut rows[..] {
            return part(first, row.len(), row);
        }
        let columns = rows[0].len();
        let mut held = match update {
            Update::Accumulate => rows.concat(),
            Update::Overwrite => vec![T::ZERO; m * columns],
        };
        part(first, columns, &mut held);
        rows.iter_mut().zip(held.chunks(columns)).for_each(|(row, held)| row.copy_from_slice(held));
    });
}
