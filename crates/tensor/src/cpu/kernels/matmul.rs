//! Matrix products: our own for `f32` where the CPU has AVX-512 or AVX2, `matrixmultiply` elsewhere.
//!
//! `C[m, n] = A[m, k] · B[k, n]`, each operand a slice with a row and a column stride, so that transposes and slices
//! of larger matrices need no copy. Both implementations cut `k` into blocks of 256, sum each block in order and add
//! the blocks to `C` in order, whatever `m`, `n` and the strides: an element of `C` has the same bits in every product
//! that holds it (tested below). From one implementation to the other they may differ. `matrixmultiply` allocates
//! its packing buffer per call, ours once per thread.

use super::Float;
#[cfg(target_arch = "x86_64")]
use super::gemm::{Path, product};

/// Whether an output is replaced or added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// The old contents do not matter and are not read.
    Overwrite,
    /// The result is added to the old contents.
    Accumulate,
}

/// Distance in elements from one row to the next, and from one column to the next.
pub type Strides = (usize, usize);

/// `C = A · B` or `C += A · B` for `[m, n, k]`, `A` being m by k and `B` k by n.
///
/// Panics if an operand is shorter than its dims and strides need, or if the strides of `C` do not keep its elements
/// apart or leave gaps along both its rows and its columns. With `k = 0` the product is zero.
pub fn gemm<T: Float>(
    [m, n, k]: [usize; 3],
    a: (&[T], Strides),
    b: (&[T], Strides),
    c: (&mut [T], Strides),
    update: Update,
) {
    assert_inside("A", m, k, a.1, a.0.len());
    assert_inside("B", k, n, b.1, b.0.len());
    assert_inside("C", m, n, c.1, c.0.len());
    assert_apart(m, n, c.1);
    let (a, b, c) = ((a.0.as_ptr(), a.1), (b.0.as_ptr(), b.1), (c.0.as_mut_ptr(), c.1));
    // SAFETY: `assert_inside` held each operand's farthest element against its slice, so every access is in bounds,
    // and strides fit isize. `assert_apart`: no two elements of C share memory, and they are contiguous along a dim.
    // C is borrowed mutably, so it overlaps neither A nor B.
    unsafe { T::product([m, n, k], a, b, c, update) }
}

/// Whether a `rows` by `columns` matrix lies inside a slice of `len` elements, and its strides inside `isize`.
fn assert_inside(name: &str, rows: usize, columns: usize, strides: Strides, len: usize) {
    assert!(
        isize::try_from(strides.0).is_ok() && isize::try_from(strides.1).is_ok(),
        "{name}: strides {strides:?} are too large"
    );
    if rows == 0 || columns == 0 {
        return;
    }
    let last_row = (rows - 1).checked_mul(strides.0);
    let last_column = (columns - 1).checked_mul(strides.1);
    let last = last_row.zip(last_column).and_then(|(row, column)| row.checked_add(column));
    assert!(
        last.is_some_and(|last| last < len),
        "{name}: {rows} by {columns} with strides {strides:?} does not fit in {len} elements"
    );
}

/// Whether the elements of a matrix lie at distinct places (the far stride steps over all that the near one covers),
/// contiguous along its rows or its columns.
fn assert_apart(rows: usize, columns: usize, strides: Strides) {
    if rows == 0 || columns == 0 {
        return;
    }
    let (row, column) = ((strides.0, rows), (strides.1, columns));
    let (near, far) = if strides.0 < strides.1 { (row, column) } else { (column, row) };
    let covered = near.1.saturating_sub(1).saturating_mul(near.0);
    assert!(
        (near.1 <= 1 || near.0 > 0) && (far.1 <= 1 || far.0 > covered),
        "C: the elements of {rows} by {columns} overlap with strides {strides:?}"
    );
    assert!(
        near.0 == 1 || rows == 1 || columns == 1,
        "C: {rows} by {columns} with strides {strides:?} is contiguous along no dim"
    );
}

/// The unchecked product under [`gemm`], one per element type.
pub trait Product: Sized {
    /// `C = A · B` or `C += A · B` for `[m, n, k]`; C is only read to be added to.
    ///
    /// # Safety
    /// Each pointer with its (row, column) strides must be valid for the whole matrix, C for writing, and the strides
    /// fit isize; no two elements of C may share memory, nor C with A or B; one stride of C must be 1, save along a
    /// dim of 1.
    unsafe fn product(
        dims: [usize; 3],
        a: (*const Self, Strides),
        b: (*const Self, Strides),
        c: (*mut Self, Strides),
        update: Update,
    );
}

impl Product for f32 {
    unsafe fn product(
        dims: [usize; 3],
        a: (*const Self, Strides),
        b: (*const Self, Strides),
        c: (*mut Self, Strides),
        update: Update,
    ) {
        #[cfg(target_arch = "x86_64")]
        if let Some(path) = Path::best() {
            // SAFETY: this CPU runs the path; the rest is the caller's promise, word for word.
            return unsafe { product(path, dims, a, b, c, update) };
        }
        // SAFETY: the caller's promise.
        unsafe { portable_f32(dims, a, b, c, update) }
    }
}

impl Product for f64 {
    unsafe fn product(
        dims: [usize; 3],
        a: (*const Self, Strides),
        b: (*const Self, Strides),
        c: (*mut Self, Strides),
        update: Update,
    ) {
        // SAFETY: the caller's promise.
        unsafe { portable_f64(dims, a, b, c, update) }
    }
}

macro_rules! portable {
    ($name:ident, $t:ty, $routine:path) => {
        /// [`Product::product`] over `matrixmultiply`.
        ///
        /// # Safety
        /// As there.
        unsafe fn $name(
            [m, n, k]: [usize; 3],
            (a, a_strides): (*const $t, Strides),
            (b, b_strides): (*const $t, Strides),
            (c, c_strides): (*mut $t, Strides),
            update: Update,
        ) {
            let beta = if update == Update::Accumulate { 1.0 } else { 0.0 };
            let [a_row, a_column, b_row, b_column, c_row, c_column] =
                [a_strides.0, a_strides.1, b_strides.0, b_strides.1, c_strides.0, c_strides.1].map(|s| s as isize);
            // SAFETY: the caller's promise is the routine's precondition; with a beta of zero it does not read C.
            unsafe {
                $routine(m, k, n, 1.0, a, a_row, a_column, b, b_row, b_column, beta, c, c_row, c_column);
            }
        }
    };
}
portable!(portable_f32, f32, matrixmultiply::sgemm);
portable!(portable_f64, f64, matrixmultiply::dgemm);

#[cfg(test)]
mod tests {
    use super::super::oracle::{assert_close, check_gradient, dot, values, widen};
    use super::*;
    use proptest::prelude::*;

    /// `Y[m, n] = X[m, k] · W[n, k]ᵀ`, the linear layer forward. Overwrites `y`.
    fn linear<T: Float>([m, n, k]: [usize; 3], x: &[T], w: &[T], y: &mut [T]) {
        gemm([m, n, k], (x, (k, 1)), (w, (1, k)), (y, (n, 1)), Update::Overwrite);
    }

    /// `dX[m, k] = dY[m, n] · W[n, k]`, the linear layer's gradient of its input. Overwrites `dx`.
    fn linear_dx<T: Float>([m, n, k]: [usize; 3], dy: &[T], w: &[T], dx: &mut [T]) {
        gemm([m, k, n], (dy, (n, 1)), (w, (k, 1)), (dx, (k, 1)), Update::Overwrite);
    }

    /// `dW[n, k] = dY[m, n]ᵀ · X[m, k]`, the linear layer's gradient of its weight, added to `dw` or replacing it.
    fn linear_dw<T: Float>([m, n, k]: [usize; 3], dy: &[T], x: &[T], dw: &mut [T], update: Update) {
        gemm([n, k, m], (dy, (1, n)), (x, (k, 1)), (dw, (k, 1)), update);
    }

    /// Three loops over flat operands with strides.
    fn naive([m, n, k]: [usize; 3], a: (&[f64], Strides), b: (&[f64], Strides)) -> Vec<f64> {
        let at = |x: (&[f64], Strides), i: usize, j: usize| x.0[i * x.1.0 + j * x.1.1];
        let element = |i, j| (0..k).map(|l| at(a, i, l) * at(b, l, j)).sum();
        (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| element(i, j)).collect()
    }

    proptest! {
        #[test]
        fn products_match_three_loops(m in 0..40_usize, n in 0..40_usize, k in 0..300_usize, pad in 0..3_usize) {
            let (lda, ldb, ldc) = (k + pad, k + pad, n + pad);
            let a: Vec<f32> = values("a", m * lda);
            let b: Vec<f32> = values("b", n * ldb);
            let old: Vec<f32> = values("c", m * ldc);
            let want = naive([m, n, k], (&widen(&a), (lda, 1)), (&widen(&b), (1, ldb)));
            for update in [Update::Overwrite, Update::Accumulate] {
                let mut c = old.clone();
                gemm([m, n, k], (&a, (lda, 1)), (&b, (1, ldb)), (&mut c, (ldc, 1)), update);
                for i in 0..m {
                    let base = |j: usize| if update == Update::Accumulate { old[i * ldc + j].to_f64() } else { 0.0 };
                    let row: Vec<f64> = (0..n).map(|j| base(j) + want[i * n + j]).collect();
                    assert_close(&c[i * ldc..][..n], &row, 2e-5);
                    prop_assert_eq!(&c[i * ldc + n..][..pad], &old[i * ldc + n..][..pad]);
                }
            }
        }

        /// Any block of C alone has the bits it has in the whole, for every K.
        #[test]
        fn blocks_of_c_have_the_bits_of_the_whole(
            m in 1..70_usize, n in 1..70_usize, k in 1..700_usize, cut in prop::array::uniform4(0.0..1.0),
        ) {
            let span = |from: f64, to: f64, len: usize| {
                let at = ((from * len as f64) as usize).min(len - 1);
                (at, 1 + (to * (len - at) as f64) as usize)
            };
            let (i, rows) = span(cut[0], cut[1], m);
            let (j, columns) = span(cut[2], cut[3], n);
            let (rows, columns) = (rows.min(m - i), columns.min(n - j));
            split_case::<f32>([m, n, k], (i, rows), (j, columns));
            split_case::<f64>([m, n, k], (i, rows), (j, columns));
        }
    }

    #[track_caller]
    fn split_case<T: Float>([m, n, k]: [usize; 3], (i, rows): (usize, usize), (j, columns): (usize, usize)) {
        let (x, w): (Vec<T>, Vec<T>) = (values("x", m * k), values("w", n * k));
        let mut whole = vec![T::ZERO; m * n];
        linear([m, n, k], &x, &w, &mut whole);
        let mut part = vec![T::ZERO; rows * columns];
        linear([rows, columns, k], &x[i * k..][..rows * k], &w[j * k..][..columns * k], &mut part);
        for r in 0..rows {
            let want = &whole[(i + r) * n + j..][..columns];
            assert_eq!(&part[r * columns..][..columns], want, "{m}x{n}x{k}, rows {i}+{rows}, columns {j}+{columns}");
        }
    }

    /// The splits that break other libraries: one row or column, all but one, halves, blocks' edges.
    #[test]
    fn adversarial_splits_have_the_bits_of_the_whole() {
        for k in [1, 16, 63, 255, 256, 257, 511, 513, 1024, 2048] {
            for [m, n] in [[33, 65], [2, 96], [64, 7], [129, 34]] {
                let parts = |len: usize| [(0, 1), (len - 1, 1), (0, len - 1), (1, len - 1), (len / 2, len - len / 2)];
                for rows in parts(m) {
                    split_case::<f32>([m, n, k], rows, (0, n));
                }
                for columns in parts(n) {
                    split_case::<f32>([m, n, k], (0, m), columns);
                }
            }
        }
    }

    /// `matrixmultiply` in `f32`, which [`gemm`] only takes on CPUs without a path of our own: rectangles of C with a
    /// transposed B against the whole, and that against three loops.
    #[test]
    fn portable_products_have_the_bits_of_the_whole() {
        let portable = |[m, n, k]: [usize; 3], a: (&[f32], Strides), b: (&[f32], Strides), update| {
            let mut c = vec![1.0; m * n];
            assert_inside("A", m, k, a.1, a.0.len());
            assert_inside("B", k, n, b.1, b.0.len());
            // SAFETY: A and B were checked; C is dense.
            unsafe {
                let (a, b) = ((a.0.as_ptr(), a.1), (b.0.as_ptr(), b.1));
                portable_f32([m, n, k], a, b, (c.as_mut_ptr(), (n, 1)), update);
            }
            c
        };
        for [m, n, k] in [[33, 65, 1], [2, 96, 300], [64, 7, 256], [29, 34, 513]] {
            let (a, b): (Vec<f32>, Vec<f32>) = (values("a", m * k), values("b", k * n));
            let transposed: Vec<f32> = (0..k * n).map(|at| b[at % k * n + at / k]).collect();
            let want = naive([m, n, k], (&widen(&a), (k, 1)), (&widen(&b), (n, 1)));
            for (update, old) in [(Update::Overwrite, 0.0), (Update::Accumulate, 1.0)] {
                let whole = portable([m, n, k], (&a, (k, 1)), (&b, (n, 1)), update);
                assert_close(&whole, &want.iter().map(|x| x + old).collect::<Vec<f64>>(), 2e-5);
                for (i, j, rows, columns) in [(0, 0, 1, n), (1, 2, m - 1, 1), (m / 2, 3, m - m / 2, n - 3)] {
                    let (a, b) = ((&a[i * k..], (k, 1)), (&transposed[j * k..], (1, k)));
                    let part = portable([rows, columns, k], a, b, update);
                    for (r, part) in part.chunks(columns).enumerate() {
                        assert_eq!(part, &whole[(i + r) * n + j..][..columns], "[{m}, {n}, {k}], row {i} + {r}");
                    }
                }
            }
        }
    }

    /// Layouts and accumulation do not change the order either: a product in two transposed layouts, and one added
    /// to zero.
    #[test]
    fn layout_and_update_keep_the_bits() {
        for dims in [[5, 7, 300], [64, 33, 600], [1, 9, 257]] {
            let [m, n, k] = dims;
            let (a, b): (Vec<f32>, Vec<f32>) = (values("a", m * k), values("b", k * n));
            let transpose = |x: &[f32], rows: usize, columns: usize| -> Vec<f32> {
                (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
            };
            let mut plain = vec![f32::NAN; m * n];
            gemm(dims, (&a, (k, 1)), (&b, (n, 1)), (&mut plain, (n, 1)), Update::Overwrite);
            let (at, bt) = (transpose(&a, m, k), transpose(&b, k, n));
            let mut other = vec![0.0; m * n];
            gemm(dims, (&at, (1, m)), (&bt, (1, k)), (&mut other, (1, m)), Update::Accumulate);
            assert_eq!(transpose(&plain, m, n), other);
        }
    }

    #[test]
    fn linear_gradients_match_finite_differences() {
        let [m, n, k] = [3, 4, 5];
        let (x, w, dy): (Vec<f64>, Vec<f64>, Vec<f64>) = (values("x", m * k), values("w", n * k), values("dy", m * n));
        let loss = |x: &[f64], w: &[f64]| {
            let mut y = vec![0.0; m * n];
            linear([m, n, k], x, w, &mut y);
            dot(&y, &dy)
        };
        let (mut dx, mut dw) = (vec![9.0; m * k], vec![9.0; n * k]);
        linear_dx([m, n, k], &dy, &w, &mut dx);
        linear_dw([m, n, k], &dy, &x, &mut dw, Update::Overwrite);
        check_gradient(&x, &dx, |x| loss(x, &w));
        check_gradient(&w, &dw, |w| loss(&x, w));
        let twice: Vec<f64> = dw.iter().map(|g| 2.0 * g).collect();
        linear_dw([m, n, k], &dy, &x, &mut dw, Update::Accumulate);
        assert_close(&dw, &twice, 1e-15);
    }

    #[test]
    #[should_panic(expected = "B: 3 by 2 with strides (2, 1) does not fit in 5 elements")]
    fn short_operands_are_refused() {
        let c = &mut [0.0_f32; 4];
        gemm([2, 2, 3], (&[0.0; 6], (3, 1)), (&[0.0; 5], (2, 1)), (c, (2, 1)), Update::Overwrite);
    }

    #[test]
    #[should_panic(expected = "C: 2 by 3 with strides (6, 2) is contiguous along no dim")]
    fn outputs_with_gaps_both_ways_are_refused() {
        let c = &mut [0.0_f32; 12];
        gemm([2, 3, 1], (&[0.0; 2], (1, 1)), (&[0.0; 3], (3, 1)), (c, (6, 2)), Update::Overwrite);
    }

    #[test]
    #[should_panic(expected = "C: the elements of 2 by 3 overlap with strides (2, 1)")]
    fn overlapping_outputs_are_refused() {
        let c = &mut [0.0_f32; 9];
        gemm([2, 3, 1], (&[0.0; 2], (1, 1)), (&[0.0; 3], (3, 1)), (c, (2, 1)), Update::Overwrite);
    }
}
