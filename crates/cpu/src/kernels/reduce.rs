//! Sums and maxima along one row, in a fixed order.
//!
//! The row is cut into blocks of 1024 elements. Within a block, element `i` is added to lane `i % 16`, and the lanes
//! are added as a balanced tree (`l` with `l + 8`, then `l + 4`, `l + 2`, `l + 1`); the blocks are added one after
//! another in f64, and the total is rounded once. The order depends only on the row's length, the loop vectorises, and
//! the error stays below 68 rounding errors of the element type, however long the row.

use super::prelude::*;

const BLOCK: usize = 1024;
const LANES: usize = 16;

/// Computes `sum_i f(x[i])`.
#[inline(always)]
pub fn sum<T: Float>(x: &[T], f: impl Fn(T) -> T) -> T {
    let [sum] = inlined!(sums, (x, x, x), |x, _, _| [f(x)]);
    sum
}

/// `K` sums in one pass, `sum_i f(x[i], y[i], z[i])`, for rows of one length.
#[inline(always)]
pub fn sums<T: Float, const K: usize>(x: &[T], y: &[T], z: &[T], f: impl Fn(T, T, T) -> [T; K]) -> [T; K] {
    assert!(x.len() == y.len() && x.len() == z.len(), "rows of one length");
    let blocks = x.chunks(BLOCK).zip(y.chunks(BLOCK)).zip(z.chunks(BLOCK));
    let mut totals = [0.0; K];
    for ((x, y), z) in blocks {
        let lanes = block_lanes(x, y, z, &f);
        for (total, lanes) in totals.iter_mut().zip(lanes) {
            *total += inlined!(fold_lanes, (lanes), |a, b| a + b).to_f64();
        }
    }
    totals.map(T::from_f64)
}

#[inline(always)]
fn block_lanes<T: Float, const K: usize>(x: &[T], y: &[T], z: &[T], f: impl Fn(T, T, T) -> [T; K]) -> [[T; LANES]; K] {
    let mut lanes = [[T::ZERO; LANES]; K];
    let ((x_whole, x_rest), (y_whole, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    let (z_whole, z_rest) = z.as_chunks::<LANES>();
    for ((x, y), z) in x_whole.iter().zip(y_whole).zip(z_whole) {
        for l in 0..LANES {
            let terms = f(x[l], y[l], z[l]);
            for k in 0..K {
                lanes[k][l] += terms[k];
            }
        }
    }
    if x_rest.is_empty() { lanes } else { add_rest(lanes, [x_rest, y_rest, z_rest], f) }
}

/// Adds the last terms, fewer than a vector. A separate function, so that whole vectors stay in registers.
#[inline(never)]
fn add_rest<T: Float, const K: usize>(
    mut lanes: [[T; LANES]; K],
    [x, y, z]: [&[T]; 3],
    f: impl Fn(T, T, T) -> [T; K],
) -> [[T; LANES]; K] {
    for (l, ((&x, &y), &z)) in x.iter().zip(y).zip(z).enumerate() {
        for (lanes, term) in lanes.iter_mut().zip(f(x, y, z)) {
            lanes[l] += term;
        }
    }
    lanes
}

/// The largest element, minus infinity for an empty row. A NaN may be missed here; the following sums notice it.
#[inline(always)]
pub fn max<T: Float>(x: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for x in whole {
        for l in 0..LANES {
            lanes[l] = x[l].larger(lanes[l]);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = x.larger(*lane);
    }
    fold_lanes(lanes, T::larger)
}

/// Each step of the tree has its own code, because the compiler would turn a loop over widths into scalars in memory.
#[inline(always)]
fn fold_lanes<T: Copy>(lanes: [T; LANES], f: impl Fn(T, T) -> T) -> T {
    let by_8: [T; 8] = inlined!(std::array::from_fn, (), |l| f(lanes[l], lanes[l + 8]));
    let by_4: [T; 4] = inlined!(std::array::from_fn, (), |l| f(by_8[l], by_8[l + 4]));
    f(f(by_4[0], by_4[2]), f(by_4[1], by_4[3]))
}

/// Lanes of a sum of squares.
const SQUARES: usize = 32;

/// `Σ x²` of a piece in f64: element `i` is added to lane `i % 32`, then the lanes one after another.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    wide!({
        let mut lanes = [0_f64; SQUARES];
        let (whole, rest) = x.as_chunks::<SQUARES>();
        for x in whole {
            for l in 0..SQUARES {
                lanes[l] += f64::from(x[l]) * f64::from(x[l]);
            }
        }
        for (lane, &x) in lanes.iter_mut().zip(rest) {
            *lane += f64::from(x) * f64::from(x);
        }
        lanes.iter().sum()
    })
}
